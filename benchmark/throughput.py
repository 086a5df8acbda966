"""How fast the scripts train on this machine, where the time goes, and how much memory it takes.

    python benchmark/throughput.py
    python benchmark/throughput.py --num-steps 256 --compile   # on a GPU

Each script trains two phases at its defaults, shortened: rollouts are `num_steps` long and a phase of PPG is one
iteration, while samples per minibatch, epochs and the work per environment step stay as they are. The first phase
warms up, the second one counts. Time is shared out among the environment, the rest of the rollout (in which the
network acts), the update and the auxiliary phase. Memory is the peak of the process, which is the configuration's
own, plus what full rollouts and a full buffer would take. The table is printed, and saved after each line.
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
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
import tyro
from procgen.env import ENV_NAMES
from tqdm import tqdm

from common import ROOT, fail, load_script

NEEDED = ("Args", "Agent", "ProcgenVecEnv", "play", "targets", "update", "start_process", "main")
PARTS = ("environment", "acting", "update", "auxiliary")  # of the training


@dataclass
class Args:
    scripts: tuple[Path, ...] = (ROOT / "ppo_procgen.py", ROOT / "ppg_procgen.py")  # training scripts to measure
    env_id: Literal[tuple(ENV_NAMES)] = "starpilot"  # the Procgen game
    num_envs: int = 64  # environments that step side by side
    num_steps: Literal[32, 64, 128, 256] = 64  # length of the shortened rollouts; the scripts' default is 256
    precisions: tuple[Literal["float32", "bfloat16"], ...] = ()
    """precisions to measure (none named: float32, and bfloat16 where the hardware has it)"""
    compile: bool = False  # measure the scripts' --compile, too
    microbatch_size: int | None = None  # samples per training pass (None: the scripts' default)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU when there is one
    out: Path = Path("throughput.txt")  # file for what is printed


class Clock:
    """Adds up the seconds in each part of the training, of the last phase: a rollout that begins clears them. Of a call
    within a call, such as an environment's step in a rollout, the time counts for the inner one."""

    def __init__(self):
        self.seconds, self.under_way, self.since = Counter(), [], 0.0

    def switch(self):
        now = time.perf_counter()
        if self.under_way:
            self.seconds[self.under_way[-1]] += now - self.since
        self.since = now

    def time(self, owner, name, part):
        """Have the calls of a function, or of a class's method, counted for a part."""
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            if part == "acting":
                self.seconds.clear()
            self.switch()
            self.under_way.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.under_way.pop()

        setattr(owner, name, timed)

    def watch(self, script):
        """Count the steps of a script's algorithm."""
        self.time(script, "play", "acting")
        self.time(script.ProcgenVecEnv, "step", "environment")
        self.time(script, "targets", "update")
        self.time(script, "update", "update")
        if hasattr(script, "Buffer"):
            self.time(script.Buffer, "record_old_policy", "auxiliary")
            self.time(script, "auxiliary_epoch", "auxiliary")


def shortened(default, args, **changes):
    """Arguments for two phases of shorter rollouts, with as many samples a minibatch and epochs as `default`."""
    factor = default.num_steps // args.num_steps
    changes |= {name: getattr(args, name) for name in ("env_id", "num_envs", "num_steps", "device", "microbatch_size")}
    if hasattr(default, "n_pi"):
        changes |= dict(n_pi=1, aux_minibatch_segments=min(args.num_envs, default.aux_minibatch_segments * factor))
    return dataclasses.replace(
        default,
        num_minibatches=max(1, default.num_minibatches // factor),
        total_timesteps=2 * args.num_envs * args.num_steps,
        checkpoint_interval=2,
        **changes,
    )


def measure(args, path, precision, compiled):
    """One line of the table, in a process of its own, whose memory it tells."""
    script, clock = load_script(path, "--scripts", NEEDED), Clock()
    clock.watch(script)
    default = script.Args()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        script.main(shortened(default, args, precision=precision, compile=compiled, run_dir=directory))
    rollout = args.num_envs * args.num_steps
    seconds = {part: clock.seconds[part] for part in PARTS}

    # In place of the observations that this run held, those of full rollouts and a full buffer. There are two rollouts
    # at least: the one that is played, and the one before it.
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_reserved()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    rollouts = getattr(default, "n_pi", 2)
    peak += (rollouts * args.num_envs * default.num_steps - 2 * rollout) * 64 * 64 * 3
    return {
        "script": path.stem,
        "precision": precision,
        "compiled": "yes" if compiled else "no",
        "steps/s": rollout / sum(seconds.values()),
        **{f"{part} %": 100 * spent / sum(seconds.values()) for part, spent in seconds.items()},
        "memory, GB": peak / 1e9,
    }


def processor():
    """The processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
        result = receiver.recv()
        process.join()
        return result
    except EOFError:  # it failed, and has said why
        process.join()
        sys.exit(process.exitcode)
    finally:
        process.kill()
        process.join()


def main(args):
    """Measure what `args` name, print the table and save it; returns it."""
    if args.num_envs < 1:
        fail(f"--num-envs {args.num_envs}: expected 1 or more")
    if not args.out.parent.is_dir() or args.out.is_dir() or not os.access(args.out.parent, os.W_OK):
        fail(f"--out {args.out}: expected the name of a file, in a directory that can be written to")
    scripts = [load_script(path, "--scripts", NEEDED) for path in args.scripts]
    if not scripts:
        fail("--scripts: expected at least one training script, and none is named")
    try:
        short = [shortened(script.Args(), args) for script in scripts]
    except ValueError as error:
        fail(error)
    device, bfloat16 = scripts[0].start_process(short[0], num_rollouts=2)
    precisions = args.precisions or ("float32", *["bfloat16"] * bfloat16)
    configurations = list(itertools.product(args.scripts, precisions, (False, True)[: 1 + args.compile]))

    machine = f"{processor()}, {torch.get_num_threads()} threads; torch {torch.__version__}"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    lines = []
    for configuration in tqdm(configurations):
        lines.append(alone(measure, args, *configuration))
        table = pd.DataFrame(lines)
        text = table.to_string(index=False, float_format=lambda x: f"{x:,.0f}" if x >= 10 else f"{x:.2f}")
        text = f"{machine}; {args.env_id}, {args.num_envs} environments\n\n{text}\n"
        args.out.write_text(text)
    print(text, end="")
    return table


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
