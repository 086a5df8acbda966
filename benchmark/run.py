"""Train scripts × games × seeds, on this machine or on a Ray cluster.

    python benchmark/run.py --scripts ppo_procgen.py ppg_procgen.py --env-ids starpilot fruitbot --seeds 1 2 3 \\
        --ppg-args "--n-pi 8" -- --total-timesteps 1_000_000

What follows `--` goes to every script. The same command again completes the grid: it skips the runs that are
finished and resumes those that were interrupted. A run's directory is <out>/<script>/<game>/<seed>, its output
goes to <seed>.log beside that. On a cluster, all nodes must see the scripts and --out under the same path.
"""

import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pandas as pd
import ray
import tyro
from filelock import FileLock, Timeout
from procgen.env import ENV_NAMES
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table

from common import ROOT, fail, load_script

# Arguments in which the runs of a script may differ: what run.py sets for each, and what a script lets a resumed run
# change. total_timesteps may grow, see `check_stored`.
FREE = {"env_id", "seed", "run_dir", "run_name", "resume"}
FREE |= {"total_timesteps", "device", "buffer_device", "checkpoint_interval", "track", "wandb_project_name"}


@dataclass
class Args:
    scripts: tuple[Path, ...] = (ROOT / "ppo_procgen.py", ROOT / "ppg_procgen.py")  # the training scripts
    env_ids: tuple[Literal[("all", *ENV_NAMES)], ...] = ("starpilot",)  # Procgen games; all stands for the 16 games
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of each script on each game
    ppo_args: str = ""  # arguments, in quotes, for the scripts with ppo in their names
    ppg_args: str = ""  # arguments, in quotes, for the scripts with ppg in their names
    out: Path = Path("runs/benchmark")  # directory of the grid
    address: str | None = None  # of a Ray cluster; auto: the one this machine belongs to; None: start Ray here
    cpus_per_run: float = 1  # CPU cores of a run, and torch's threads; decides how many runs train side by side
    gpus_per_run: float = 0  # GPUs of a run; a fraction shares one GPU between runs, 0 trains on CPUs
    memory_per_run: float = 0  # GB of memory of a run; Ray starts no more runs than fit (0: do not count)
    retries: int = 3  # how often a run that fails is resumed before it is given up; progress resets the count
    dry_run: bool = False  # print the commands of the runs that are not finished, one a line, and train nothing


@dataclass
class Run:
    """One script on one game with one seed."""

    script: Path
    env_id: str
    seed: int
    arguments: list[str]  # of the script, the same for all of its runs
    total_timesteps: int
    path: Path
    row: dict = field(default_factory=dict)  # the latest of progress.csv
    state: str = "waiting"
    failures: int = 0  # in a row, without progress
    step_at_failure: int = 0

    @property
    def log(self):
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def global_step(self):
        return int(self.row.get("global_step", 0))


def parse_args(words):
    """Split the command line into run.py's own arguments and those after `--`, which are the scripts'."""
    split = words.index("--") if "--" in words else len(words)
    own = list(words[:split])
    for flag in ("--ppo-args", "--ppg-args"):
        if flag in own[:-1]:  # joined, or tyro would take "--n-pi 8" for a flag of its own
            i = own.index(flag)
            own[i : i + 2] = [f"{flag}={own[i + 1]}"]
    args, unknown = tyro.cli(Args, args=own, description=__doc__.split("\n")[0], return_unknown_args=True)
    if unknown:
        fail(f"{shlex.join(unknown)}: expected flags of run.py; those of the scripts come after --, at the end")
    return args, list(words[split + 1 :])


def plan(args, script_args):
    """The runs of the grid, seed by seed, so that an unfinished grid has whole seeds.

    The arguments are parsed and checked by each script, and compared with those of all runs that the output
    directory holds: two configurations of a script in one directory would look like seeds of one.
    """
    lowest = dict(seeds=0, retries=0, cpus_per_run=1e-4, gpus_per_run=0, memory_per_run=0)  # 1e-4: as Ray counts
    for name, low in lowest.items():
        for number in args.seeds if name == "seeds" else [getattr(args, name)]:
            if not low <= number < 2**31:
                fail(f"--{name.replace('_', '-')} {number}: expected {low} to {2**31 - 1}")
    if args.gpus_per_run > 1 and args.gpus_per_run % 1:
        fail(f"--gpus-per-run {args.gpus_per_run}: expected a whole number, or a fraction of one GPU")
    of_kind = {"ppo": args.ppo_args, "ppg": args.ppg_args}
    for kind, words in of_kind.items():
        if words and not any(kind in script.stem for script in args.scripts):
            fail(f"--{kind}-args {words}: expected among --scripts one with {kind} in its name, to take them")
        try:
            of_kind[kind] = shlex.split(words)
        except ValueError as error:
            fail(f"--{kind}-args {words}: expected words, quoted as in a shell ({error})")
    out = args.out.resolve()
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        fail(f"--out {args.out}: expected a directory that can be written to, and {nearest} is none")

    env_ids, runs = ENV_NAMES if "all" in args.env_ids else args.env_ids, {}
    for script in args.scripts:
        module = load_script(script, "--scripts", ("Agent", "parse_args"))
        arguments = list(script_args)
        for kind, words in of_kind.items():
            arguments += words if kind in script.stem else []
        for word in arguments:
            if word.split("=")[0].replace("_", "-") in ("--env-id", "--seed", "--run-dir", "--run-name", "--resume"):
                fail(f"{word}: run.py sets this flag itself; expected --env-ids, --seeds or --out")
        with patch.object(sys, "argv", [script.name, *arguments]):
            parsed = module.parse_args()  # the script refuses bad flags in its own words
        if parsed.device == "cuda" and args.gpus_per_run == 0:
            fail("--device cuda: expected --gpus-per-run beside it, without which the runs see no GPU")
        for env_id, seed in product(env_ids, args.seeds):
            path = out / script.stem / env_id / str(seed)
            runs[path] = Run(script.resolve(), env_id, seed, arguments, parsed.total_timesteps, path)
        check_stored(out / script.stem, json.loads(json.dumps(vars(parsed))), runs, args.out)
    if not runs or len(runs) < len(args.scripts) * len(env_ids) * len(args.seeds):
        fail("--scripts, --env-ids, --seeds: expected at least one of each, each once, and scripts of different names")
    return sorted(runs.values(), key=lambda run: (args.seeds.index(run.seed), env_ids.index(run.env_id)))


def check_stored(directory, wanted, runs, out):
    """Refuse the arguments `wanted` of a script where a run in its directory of the grid was run with others.

    total_timesteps may be more than before, for all of a grid at once. What is left of runs that ended before their
    first checkpoint does not count.
    """
    for config in sorted(directory.glob("*/*/config.json")):
        if ".incomplete-" in config.parent.name:
            continue
        try:
            stored = dict(json.loads(config.read_text())["args"])
            steps = stored["total_timesteps"]
            grows = steps < wanted["total_timesteps"] and config.parent in runs
        except (OSError, ValueError, KeyError, TypeError):
            fail(f"--out {out}: expected runs there, and {config} is not the config.json of one")
        different = [name for name in wanted if name not in FREE and stored.get(name) != wanted[name]]
        if steps != wanted["total_timesteps"] and not grows:
            different.append("total_timesteps")
        for name in different:
            flag = f"--{name.replace('_', '-')} {wanted[name]}"
            fail(f"{flag}: expected {stored.get(name)}, as in {config.parent}, or another --out")


def last_row(run):
    """The last row of the run's progress.csv, or nothing if there is none: the checkpoint holds the rows too."""
    try:
        return pd.read_csv(run.path / "progress.csv").iloc[-1].astype(float).to_dict()
    except (OSError, IndexError, ValueError):
        return {}


def mark_finished(run, global_step):
    """Note in the run's directory that it is finished, for when its checkpoint is deleted to save space."""
    with contextlib.suppress(OSError):  # on a full disk the checkpoint still says so
        (run.path / ".finished").write_text(str(global_step))


def is_finished(run):
    """Whether the run has all its steps: it was seen to be finished before, or its checkpoint is of the end.

    The last row does not say so: an auxiliary phase or the checkpoint may have failed after it. Times of files do not
    either: copies have others. A checkpoint in the middle of an auxiliary phase is the only one that holds π_old.
    """
    with contextlib.suppress(OSError, ValueError):
        if int((run.path / ".finished").read_text()) >= run.total_timesteps:
            return True
    if last_row(run).get("global_step", 0) < run.total_timesteps:
        return False
    import torch  # not before: few calls come here, and it takes a second and memory in each of Ray's processes

    try:  # mapped: a buffer stays on the disk
        checkpoint = torch.load(run.path / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
        buffer = checkpoint["processes"][0].get("buffer", {"rollouts": []})
        in_phase = any("old_logits" in rollout for rollout in buffer["rollouts"])
        finished = checkpoint["global_step"] >= run.total_timesteps and not in_phase
    except Exception:  # there is none, or resuming reports what is wrong with it
        return False
    if finished:
        mark_finished(run, checkpoint["global_step"])
    return finished


def is_busy(run):
    """Whether a process trains in the run's directory, whoever started it: the scripts hold a lock there."""
    if not run.path.exists():
        return False
    try:
        with FileLock(run.path / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def environment(args):
    """Environment variables of the runs, beside those of this process: threads, and no GPU unless runs get some."""
    variables = {"OMP_NUM_THREADS": str(max(1, int(args.cpus_per_run)))}
    return variables | ({} if args.gpus_per_run else {"CUDA_VISIBLE_DEVICES": ""})


def command(run):
    """The words of the command that starts the run, or resumes it if it has a checkpoint."""
    if (run.path / "checkpoint.pt").exists():
        place = ["--resume", str(run.path)]
    else:
        place = ["--env-id", run.env_id, "--seed", str(run.seed)]
        place += ["--run-dir", str(run.path.parent), "--run-name", run.path.name]
    return [sys.executable, str(run.script), *place, *run.arguments]


def incomplete_path(run):
    """Where the remains of a run go that ended before its first checkpoint, or None if there are none."""
    if run.path.exists() and not (run.path / "checkpoint.pt").exists():
        return run.path.with_name(f"{run.path.name}.incomplete-{datetime.now():%Y%m%d-%H%M%S}")
    return None


def train(run, variables):
    """Train one run to its end, on the node and in the process where Ray calls this, with the environment `variables`;
    yields its newest row, over and over. Closing or interrupting the generator stops the run with a checkpoint.

    Raises: RuntimeError if the script fails, with its exit code and its last error, or else the last line it wrote.
    """
    while is_busy(run):  # a script outlives its launcher where there is no setpriv, or was started by other means
        yield last_row(run)
        time.sleep(1)
    if is_finished(run):
        return
    if incomplete := incomplete_path(run):
        run.path.rename(incomplete)

    words = command(run)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "a") as log:
        where = f"{datetime.now():%Y-%m-%d %H:%M:%S} {socket.gethostname()}"
        print(f"=== {where}: {shlex.join(words)}", file=log, flush=True)
        start = log.tell()
        if shutil.which("setpriv"):
            words = ["setpriv", "--pdeathsig", "KILL", *words]  # if this process is killed, so is the script
        # In a session of its own the script does not hear the terminal's Ctrl-C: the launcher stops it, once.
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=os.environ | variables)
    try:
        while process.poll() is None:
            yield last_row(run)
            time.sleep(1)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        output = run.log.read_bytes()[start:].decode(errors="replace").strip()
        errors = re.findall(r"^\S* ?[Ee]rror: .*", output, re.MULTILINE)  # before a last line that shows the progress
        raise RuntimeError(f"exit code {process.returncode}: {(errors or output.splitlines() or [''])[-1]}")
    mark_finished(run, int(last_row(run).get("global_step", 0)))


def summary(runs):
    """One line on the whole grid: how many runs are in which state and, once the pace of a script is known, the time
    left, for the steps left at the pace of each script, spread over the runs side by side."""
    rows = [(run.script, run.state, run.total_timesteps - run.global_step, run.row.get("SPS")) for run in runs]
    table = pd.DataFrame(rows, columns=["script", "state", "steps", "pace"]).astype({"pace": float})
    paces = table[table.state.isin(["running", "done"])].groupby("script").pace.mean()
    unfinished = table[table.state.isin(["running", "waiting"])]
    seconds = unfinished.steps.clip(0) / unfinished.script.map(paces).fillna(paces.min())

    counts = {state: (table.state == state).sum() for state in ("done", "running", "waiting", "failed")}
    line = ", ".join(f"{count} {state}" for state, count in counts.items())
    left = max(seconds.max(), seconds.sum() / max(1, counts["running"]))
    return f"{line}, {timedelta(seconds=round(left))} left" if left < math.inf else line


def overview(runs, note):
    """The whole grid in one line, a table of the runs that are under way or failed, and a note."""
    numbers = (Column(name, justify="right") for name in ("seed", "steps", "of", "steps/s", "return"))
    table = Table("script", "game", "state", *numbers, box=box.SIMPLE_HEAD)
    for run in runs:
        if run.state in ("running", "failed"):
            state = run.state + (f" (failures: {run.failures})" if run.failures else "")
            cells = (str(run.seed), f"{run.global_step:,}", f"{run.total_timesteps:,}")
            pace, episodic_return = (run.row.get(name, math.nan) for name in ("SPS", "episodic_return"))
            table.add_row(run.script.stem, run.env_id, state, *cells, f"{pace:.0f}", f"{episodic_return:.2f}")
    return Group(summary(runs), *([table] if table.row_count else []), note)


def start_ray(args):
    """Start Ray here, or join the cluster; returns `train` as a task that takes the resources of a run."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = {"include_dashboard": False} if args.address is None else {}
    try:
        if place := re.fullmatch(r"([^/]+):(\d+)", args.address or ""):  # Ray itself would try for minutes
            socket.create_connection((place[1], int(place[2])), timeout=10).close()
        ray.init(args.address or "local", log_to_driver=False, logging_level=logging.ERROR, **here)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        fail(f"--address {args.address}: expected the host:port of a Ray cluster, or auto ({reason})")
    for name, resource, unit in (("cpus", "CPU", 1), ("gpus", "GPU", 1), ("memory", "memory", 1e9)):
        amount, present = getattr(args, f"{name}_per_run"), ray.cluster_resources().get(resource, 0) / unit
        if here and amount > present:  # a cluster may yet grow
            fail(f"--{name}-per-run {amount:g}: expected at most what this machine has, {present:.3g}")
    resources = dict(num_cpus=args.cpus_per_run, num_gpus=args.gpus_per_run, memory=args.memory_per_run * 1e9 or None)
    return ray.remote(train).options(**resources, max_retries=0)  # `main` counts failures


def main():
    args, script_args = parse_args(sys.argv[1:])
    runs, variables = plan(args, script_args), environment(args)
    for run in runs:
        run.row = last_row(run)
        run.state = "running" if is_busy(run) else "done" if is_finished(run) else "waiting"
    if args.dry_run:
        for run in runs:
            if run.state == "waiting":
                incomplete = incomplete_path(run)
                aside = f"{shlex.join(['mv', str(run.path), str(incomplete)])} && " if incomplete else ""
                print(aside + " ".join(map("=".join, variables.items())), shlex.join(command(run)))
    if args.dry_run or all(run.state == "done" for run in runs):
        print(summary(runs), file=sys.stderr if args.dry_run else sys.stdout)
        return

    # The first SIGINT or SIGTERM stops every run with a checkpoint, the second one at once.
    remote_train, stop_signals, note = start_ray(args), [], ""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: stop_signals.append(signum))
    console, next_line = Console(), 0.0
    generators = {remote_train.remote(run, variables): run for run in runs if run.state != "done"}
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while generators and len(stop_signals) < 2:
            ready, _ = ray.wait(list(generators), num_returns=len(generators), timeout=1)
            for generator in ready:
                run = generators.pop(generator)
                try:
                    run.row, run.state = ray.get(next(generator)), "running"
                    generators[generator] = run
                except StopIteration:
                    run.row, run.state = last_row(run), "done"
                except ray.exceptions.RayError as error:
                    run.state = "waiting"
                    if stop_signals:
                        continue
                    run.failures = 1 if run.global_step > run.step_at_failure else run.failures + 1
                    run.step_at_failure = max(run.step_at_failure, run.global_step)
                    where = f"failure {run.failures} at {run.global_step} steps"
                    print(f"{run.log}: {where}: {str(error).strip().splitlines()[-1]}", flush=True)
                    if run.failures > args.retries:
                        run.state = "failed"
                    else:
                        generators[remote_train.remote(run, variables)] = run

            if stop_signals and not note:
                note = "stopping, each run with a checkpoint; once more: at once"
                for generator in generators:
                    ray.cancel(generator)
            if live:
                live.update(overview(runs, note), refresh=True)
            elif time.monotonic() >= next_line:
                next_line = time.monotonic() + 60
                print(note or summary(runs), flush=True)

    for generator in generators:
        ray.cancel(generator, force=True)
    ray.shutdown()
    print(summary(runs))
    if stop_signals:
        print("to complete the grid, run the same command again")
        sys.exit(128 + stop_signals[0])
    sys.exit(any(run.state != "done" for run in runs))


if __name__ == "__main__":
    main()
