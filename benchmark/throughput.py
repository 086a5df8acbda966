"""How fast the scripts train on this machine, and how near that is to the limit: the network's own arithmetic.

    python benchmark/throughput.py
    python benchmark/throughput.py --num-steps 256   # on a GPU

Each configuration (script, precision, compiled or not) is measured in a process of its own:

- the script trains two phases at its defaults, shortened: rollouts are `num_steps` long and a phase of PPG is one
  iteration, while samples per minibatch, epochs and the work per environment step stay as they are. The first phase
  warms up, the second one counts: environment steps per second and the share of time in each part;
- the same network alone, on random observations: forward at `num_envs` (inference), forward and backward at the
  fastest microbatch (training).

The limit is the time in which the network alone would do the passes of one environment step: for PPO one of
inference and `update_epochs` of training, for PPG one of inference and `e_pi + e_aux` of training (π_old's pass, of one
encoder, is left out). Efficiency is this limit over the time that the script takes; above 1 means that the machine's
speed varied in between. Memory is the peak of the run, plus what full rollouts and a full buffer
would take. The table is printed, and saved as OUT.md and OUT.csv after each line.
"""

import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from procgen.env import ENV_NAMES
from tqdm import tqdm

from common import fail, load_script

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("Args", "Agent", "Encoder", "ProcgenVecEnv", "Run", "start_process", "main")


@dataclass
class Args:
    scripts: tuple[str, ...] = (str(ROOT / "ppo_procgen.py"), str(ROOT / "ppg_procgen.py"))
    """training scripts to measure"""
    env_id: Literal[tuple(ENV_NAMES)] = "starpilot"
    """the Procgen game"""
    num_envs: int = 64
    """environments that step side by side"""
    num_steps: int = 64
    """length of the shortened rollouts, a divisor of 256; 256 is the scripts' default"""
    precisions: tuple[Literal["float32", "bfloat16"], ...] = ()
    """precisions to measure (none named: float32, and bfloat16 where the hardware has it)"""
    compile: Literal["off", "on", "both"] = "both"
    """whether the scripts train with --compile"""
    microbatch_sizes: tuple[int, ...] = ()
    """samples per pass to try for the network alone (none named: 32 to 256 on a CPU, 256 to 2048 on a GPU)"""
    microbatch_size: int | None = None
    """samples per pass of the scripts (None: their default)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU when there is one"""
    out: str = "throughput"
    """the table's files, without their endings"""


class PhaseClock:
    """Adds up the time in each part of the training, from where a script's `Run` shows it to the next part or to the
    point where a checkpoint may be due. The first phase warms up and does not count."""

    def __init__(self):
        self.seconds = Counter()  # by part: rollout, update, auxiliary
        self.rollouts = 0  # begun so far
        self.started = None  # the part under way, and since when

    def start(self, description):
        part = next(part for part in ("rollout", "update", "auxiliary") if part in description)
        self.stop()
        self.rollouts += part == "rollout"
        if self.rollouts > 1:
            self.started = part, time.perf_counter()

    def stop(self):
        if self.started:
            part, since = self.started
            self.seconds[part] += time.perf_counter() - since
            self.started = None

    def timed(self, run_class):
        """A script's `Run` with this clock."""
        clock = self

        class TimedRun(run_class):
            def show(self, phase):
                clock.start(phase)
                super().show(phase)

            def checkpoint(self, *args, **kwargs):
                clock.stop()
                return super().checkpoint(*args, **kwargs)

        return TimedRun


def rate(compute, samples, device, seconds=2.0):
    """Samples per second of `compute`, which handles `samples` at once: the median over repetitions."""
    durations = []
    compute()
    while sum(durations) < seconds or len(durations) < 3:
        start = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return samples / statistics.median(durations)


def environment_rate(args):
    """Steps per second of the environment alone, with random actions."""
    script = load_script(Path(args.scripts[0]), "--scripts", NEEDED)
    envs = script.ProcgenVecEnv(args.env_id, args.num_envs)
    envs.reset()
    actions = np.random.default_rng(0).integers(15, size=args.num_envs)
    steps_per_second = rate(lambda: envs.step(actions), args.num_envs, torch.device("cpu"))
    envs.close()
    return steps_per_second


def network_rates(script, args, precision, compiled, device, microbatch_sizes):
    """Samples per second of the script's network alone: (inference, training, the fastest microbatch)."""
    torch.compiler.reset()  # what the script compiled counts toward a limit
    agent = script.Agent(15, bfloat16=precision == "bfloat16").to(device)
    if compiled:  # as the scripts do
        agent.apply(lambda module: isinstance(module, script.Encoder) and module.compile(dynamic=False))

    def observations(number):
        return torch.randint(0, 256, (number, 64, 64, 3), dtype=torch.uint8, device=device)

    def train(microbatch):
        logits, values = agent(microbatch)
        (logits.sum() + values.sum()).backward()

    to_play = observations(args.num_envs)
    with torch.no_grad():
        inference = rate(lambda: agent(to_play), args.num_envs, device)
    training = {}
    for size in microbatch_sizes:
        with contextlib.suppress(torch.OutOfMemoryError):
            training[size] = rate(partial(train, observations(size)), size, device)
    best = max(training, key=training.get)
    return inference, training[best], best


def shortened(default, args):
    """Arguments for two phases of shorter rollouts, with as many samples a minibatch and epochs as `default`."""
    factor = default.num_steps // args.num_steps
    changes = dict(num_minibatches=max(1, default.num_minibatches // factor))
    if hasattr(default, "n_pi"):
        changes |= dict(n_pi=1, aux_minibatch_segments=min(args.num_envs, default.aux_minibatch_segments * factor))
    return dataclasses.replace(
        default,
        env_id=args.env_id,
        num_envs=args.num_envs,
        num_steps=args.num_steps,
        total_timesteps=2 * args.num_envs * args.num_steps,
        checkpoint_interval=2,
        device=args.device,
        microbatch_size=args.microbatch_size,
        **changes,
    )


def measure(args, path, precision, compiled):
    """One line of the table: train with the script, then run its network alone. Runs in a process of its own."""
    script = load_script(Path(path), "--scripts", NEEDED)
    default, clock = script.Args(), PhaseClock()
    script.Run = clock.timed(script.Run)
    train_args = dataclasses.replace(shortened(default, args), precision=precision, compile=compiled)
    device, _ = script.start_process(train_args, num_rollouts=2)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        script.main(dataclasses.replace(train_args, run_dir=directory))
    rollout = args.num_envs * args.num_steps
    seconds = {part: clock.seconds[part] / rollout for part in ("rollout", "update", "auxiliary")}

    # In place of the observations that this run held, those of full rollouts and a full buffer. There are two rollouts
    # at least: the one that is played, and the one before it.
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    is_ppg = hasattr(default, "n_pi")
    rollouts = default.n_pi if is_ppg else 2
    peak += (rollouts * args.num_envs * default.num_steps - 2 * rollout) * 64 * 64 * 3

    microbatch_sizes = args.microbatch_sizes or ((32, 64, 128, 256) if device.type == "cpu" else (256, 512, 1024, 2048))
    inference, training, best = network_rates(script, args, precision, compiled, device, microbatch_sizes)
    passes = default.e_pi + default.e_aux if is_ppg else default.update_epochs
    limit = 1 / inference + passes / training
    return {
        "script": Path(path).stem,
        "precision": precision,
        "compiled": "yes" if compiled else "no",
        "steps/s": 1 / sum(seconds.values()),
        **{f"{part} %": 100 * spent / sum(seconds.values()) for part, spent in seconds.items()},
        "limit, steps/s": 1 / limit,
        "efficiency": limit / sum(seconds.values()),
        "memory, GB": peak / 1e9,
        "inference, samples/s": inference,
        "training, samples/s": training,
        "best microbatch": best,
    }


def processor():
    """The processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown(table):
    """The table in Markdown."""

    def cell(name, value):
        if isinstance(value, str):
            return value
        if name.endswith("%"):
            return f"{value:.0f}"
        return f"{value:.2f}" if value < 10 else f"{value:,.0f}"

    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[cell(name, row[name]) for name in table.columns] for row in table.to_dict("records")]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def send_result(connection, function, arguments):
    """Call the function and send what it returns."""
    os.setsid()  # Ctrl-C at the terminal is not for the script, which would stop with a checkpoint
    connection.send(function(*arguments))


def alone(function, *arguments):
    """Call the function in a fresh process: memory is counted from zero, and nothing is compiled yet.

    It is killed when the wait for it ends, be that by a signal.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:  # it failed, and has said why
        process.join()
        sys.exit(process.exitcode)
    finally:
        process.kill()
        process.join()


def main(args):
    """Measure what `args` name, print the table and save it; returns it."""
    if args.num_steps < 1 or 256 % args.num_steps:
        fail(f"--num-steps {args.num_steps}: expected a divisor of 256")
    if args.num_envs < 8 or args.num_envs % 8:
        fail(f"--num-envs {args.num_envs}: expected a multiple of the scripts' 8 minibatches")
    if args.microbatch_sizes and min(args.microbatch_sizes) < 1:
        fail(f"--microbatch-sizes {min(args.microbatch_sizes)}: expected 1 or more")
    out = Path(args.out)
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        fail(f"--out {args.out}: expected a name in a directory that can be written to")
    scripts = [load_script(Path(path), "--scripts", NEEDED) for path in args.scripts]
    if not scripts:
        fail("--scripts: expected at least one training script, and none is named")
    try:
        short = shortened(scripts[0].Args(), args)
    except ValueError as error:
        fail(error)
    device, bfloat16 = scripts[0].start_process(short, num_rollouts=2)
    precisions = args.precisions or ("float32", *["bfloat16"] * bfloat16)
    compiled = {"off": (False,), "on": (True,), "both": (False, True)}[args.compile]
    configurations = list(itertools.product(args.scripts, precisions, compiled))

    machine = f"{processor()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    environment = alone(environment_rate, args)
    head = (
        f"{machine}; torch {torch.__version__}; {args.env_id}, {args.num_envs} environments\n\n"
        f"The environment alone, with random actions: {environment:,.0f} steps/s.\n\n"
    )
    lines = []
    for configuration in tqdm(configurations):
        lines.append(alone(measure, args, *configuration))
        table = pd.DataFrame(lines)
        Path(f"{out}.md").write_text(head + markdown(table))
        table.to_csv(f"{out}.csv", index=False)
    print(head + markdown(table), end="")
    return table


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
