"""Play a checkpoint: its episodic returns without bias, its generalization gap, a video.

    python benchmark/evaluate.py RUN_DIR
    python benchmark/evaluate.py RUN_DIR --num-levels 0 --episodes 1000
    python benchmark/evaluate.py RUN_DIR --gap
    python benchmark/evaluate.py RUN_DIR --video agent.mp4 --grid

The mean over the episodes that end first, which is what a training logs, favours short episodes. Here every
environment plays one episode to its end, however long that takes, and each counts once. The statistics are printed,
and saved with every return and length as RUN_DIR/evaluation__<conditions>.json. `levels-0-200` in that name means
levels 0 to 199. In place of RUN_DIR a file WEIGHTS.pt will do, with nothing but {"agent": the network's state_dict,
"global_step": environment steps, "config": what config.json has}; the result then lies beside it.
"""

import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import imageio.v3 as imageio
import numpy as np
import torch
import tyro
from procgen.env import ENV_NAMES
from scipy.stats import bootstrap
from tqdm import tqdm

from common import fail, load_script

ROOT = Path(__file__).resolve().parent.parent
LAST_LEVEL = 2**31 - 2  # Procgen draws levels below 2³¹ − 1
CODECS = {".mp4": ("libx264", "yuv420p"), ".gif": ("gif", "rgb8")}


@dataclass
class Args:
    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run, with its config.json and checkpoint.pt, or a file with weights and config"""
    episodes: int = 100
    """episodes to play, each in an environment of its own"""
    num_levels: int | None = None
    """number of distinct levels; 0 means all (None: as the run was trained)"""
    start_level: int | None = None
    """the first level (None: as the run was trained)"""
    distribution_mode: Literal["easy", "hard"] | None = None
    """difficulty of the levels (None: as the run was trained)"""
    greedy: bool = False
    """take the most probable action; otherwise actions are sampled, as in training"""
    seed: int = 0
    """seed of the levels and of the sampling"""
    gap: bool = False
    """play on the training levels and, as often, on levels outside them; report the difference"""
    video: str | None = None
    """.mp4 or .gif to write: the first episode (with --gap, the first on the training levels)"""
    grid: bool = False
    """let the video show the first 16 episodes, side by side"""
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda, cuda:1, ..."""
    script: str | None = None
    """training script with the run's network (None: the one that config.json names, beside benchmark/)"""


@dataclass
class Levels:
    """What the environments play. num_levels 0 stands for all levels, from 0 on."""

    distribution_mode: str
    num_levels: int
    start_level: int

    def __str__(self):
        if self.num_levels == 0:
            return "all levels"
        return f"levels {self.start_level} to {self.start_level + self.num_levels - 1}"


def check_args(args):
    """Refuse flags that cannot work, whatever the run."""
    if args.episodes < 1:
        fail(f"--episodes {args.episodes}: expected 1 or more")
    for name in ("num_levels", "start_level", "seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 2**31:
            fail(f"--{name.replace('_', '-')} {value}: expected 0 to {2**31 - 1}")
    for name in ("num_levels", "start_level", "distribution_mode"):
        value = getattr(args, name)
        if args.gap and value is not None:
            fail(f"--{name.replace('_', '-')} {value}: expected no choice of levels beside --gap, which makes its own")
    if args.grid and args.video is None:
        fail("--grid: expected --video too, the file to write")
    if args.grid and args.episodes < 16:
        fail(f"--episodes {args.episodes}: expected 16 or more, for the tiles of --grid")
    try:
        torch.zeros(1, device="cpu" if args.device == "auto" else args.device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(f"--device {args.device}: expected auto, cpu or a device that is present ({str(error).splitlines()[0]})")


def check_writable(directory, flag):
    """Refuse a directory that is missing or cannot be written to; leaves nothing there."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        fail(f"{flag}: expected a directory that can be written to, {directory} ({error.strerror})")


def check_outputs(args):
    """Refuse, before anything is played, what could not be saved."""
    run_path = Path(args.run_dir)
    check_writable(run_path if run_path.is_dir() else run_path.parent, f"RUN_DIR {run_path}")
    if args.video is not None:
        path = Path(args.video)
        if path.suffix.lower() not in CODECS or path.is_dir():
            fail(f"--video {args.video}: expected the name of a file that ends in {' or '.join(CODECS)}")
        check_writable(path.parent, f"--video {args.video}")


def read_run(path):
    """What config.json says of the run, the network's state_dict, and the environment steps that trained it.

    `path` is the run's directory, or a file with these three. Only tensors and plain containers are read: a file from a
    stranger runs no code. It is mapped into memory, so the buffers of the training stay on the disk.
    """
    try:
        config = None if path.is_file() else json.loads((path / "config.json").read_text())
        weights = path if path.is_file() else path / "checkpoint.pt"
        checkpoint = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
        config = config or checkpoint["config"]
        config["precision"], config["args"]["distribution_mode"]
        numbers = [config["args"][name] for name in ("seed", "num_levels", "start_level")]
        if config["args"]["env_id"] not in ENV_NAMES or not all(isinstance(number, int) for number in numbers):
            raise ValueError("config.json is not one of a training script")
        if "global_step" in checkpoint:
            return config, checkpoint["agent"], checkpoint["global_step"]
        rows = checkpoint["tables"]["progress"]
        return config, checkpoint["agent"], rows[-1]["global_step"] if rows else 0
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        fail(f"RUN_DIR {path}: expected a run, with config.json and checkpoint.pt, or its weights ({reason})")


def script_path(args, config):
    """The training script: --script, or the one beside benchmark/ that the run names. A run from a stranger picks no
    file elsewhere."""
    if args.script is not None:
        return Path(args.script)
    name = str(config.get("script"))
    if Path(name).name != name or not (ROOT / name).is_file():
        fail(f"RUN_DIR {args.run_dir}: expected --script too, the {name} that trained it: there is none in {ROOT}")
    return ROOT / name


def choose_levels(args, run_args):
    """The levels to play, as trained unless the flags say otherwise; with --gap, those of the training."""
    mode = args.distribution_mode or run_args["distribution_mode"]
    num_levels = run_args["num_levels"] if args.num_levels is None else args.num_levels
    start_level = run_args["start_level"] if args.start_level is None else args.start_level
    if num_levels == 0:
        if args.gap:
            fail("--gap: expected a run with --num-levels 1 or more; this one trained on all levels, none is unseen")
        if args.start_level:
            fail(f"--start-level {start_level}: expected --num-levels too; with 0 Procgen plays all levels, from 0 on")
        return Levels(mode, 0, 0)
    if start_level + num_levels - 1 > LAST_LEVEL:
        flags = f"--start-level {start_level} --num-levels {num_levels}"
        fail(f"{flags}: expected levels up to {LAST_LEVEL}, the last that Procgen has")
    if args.gap and start_level + num_levels > LAST_LEVEL:
        fail(f"--gap: expected levels beyond those of the training; it went up to the last one, {LAST_LEVEL}")
    return Levels(mode, num_levels, start_level)


def unseen_levels(levels):
    """Every level after the training levels. (Cobbe et al. 2019 test on all levels, the training levels included.)"""
    first = levels.start_level + levels.num_levels
    return Levels(levels.distribution_mode, LAST_LEVEL - first + 1, first)


def load_agent(config, state_dict, script, device):
    """The run's network. Its options are the arguments of the run that are parameters of `Agent` or of `Encoder`."""
    classes = [script.Agent, *([script.Encoder] if hasattr(script, "Encoder") else [])]
    parameters = {name for network in classes for name in inspect.signature(network).parameters}
    options = {name: value for name, value in config["args"].items() if name in parameters}
    try:
        agent = script.Agent(15, **options | {"bfloat16": config["precision"] == "bfloat16"})  # Procgen has 15 actions
        agent.load_state_dict(state_dict)
    except (RuntimeError, TypeError):
        fail(f"--script {script.__file__}: expected the script that trained the run, its network has other layers")
    return agent.to(device).eval()


@torch.no_grad()
def play(agent, envs, greedy, seed):
    """Play the first episode of every environment to its end.

    Args:
        agent: uint8 observations [batch, 64, 64, 3] → (logits [batch, num_actions], ...)
        envs: a new ProcgenVecEnv
        greedy: take the most probable action; otherwise sample, on the CPU, with a generator seeded with `seed`
    Returns:
        episodic returns [num_envs] float64, episodic lengths [num_envs] in steps, and the actions that were
        taken, uint8 [longest episode, num_envs], zero where the episode was over
    """
    device = next(agent.parameters()).device
    generator = torch.Generator().manual_seed(seed)

    returns, lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=np.int64)
    running = np.ones(envs.num_envs, dtype=bool)
    history = []
    observations, _ = envs.reset()
    with tqdm(total=envs.num_envs, unit="episode", leave=False, disable=None) as progress:
        while running.any():
            chunks = torch.from_numpy(observations[running]).split(256)
            logits = torch.cat([agent(chunk.to(device))[0].float().cpu() for chunk in chunks])
            sampled = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
            # Procgen has to be given some action where the episode is over: the next one has begun there.
            actions = np.zeros(envs.num_envs, dtype=np.uint8)
            actions[running] = (logits.argmax(1) if greedy else sampled).numpy()
            history.append(actions)

            observations, rewards, terminations, truncations, _ = envs.step(actions)
            returns[running] += rewards[running]
            lengths[running] += 1
            ended = running & (terminations | truncations)
            running &= ~ended
            progress.update(ended.sum())
    return returns, lengths, np.stack(history)


def bootstrap_interval(statistic, *samples):
    """95 % interval of a statistic of independent samples, by the percentile method, or None if a sample has
    fewer than two values. The same samples give the same interval.

    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    if min(map(len, samples)) < 2:
        return None
    interval = bootstrap(
        samples,
        statistic,
        n_resamples=10_000,
        batch=1_000,  # bounds the memory, and leaves the result as it is
        confidence_level=0.95,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(interval.low), float(interval.high)]


def mean_interval(returns):
    """[low, high], a 95 % interval of the mean of `returns` [episodes]; None for a single episode."""
    return bootstrap_interval(np.mean, returns)


def difference_interval(returns, other_returns):
    """[low, high], a 95 % interval of mean(returns) − mean(other_returns); None for a single episode."""
    return bootstrap_interval(lambda x, y, axis: x.mean(axis) - y.mean(axis), returns, other_returns)


def statistics(returns, lengths):
    """What is reported of the episodic returns and lengths [episodes]; the standard deviation is of these episodes,
    not an estimate beyond them."""
    return {
        "episodes": len(returns),
        "mean": float(np.mean(returns)),
        "mean_95_interval": mean_interval(returns),
        "median": float(np.median(returns)),
        "min": float(np.min(returns)),
        "max": float(np.max(returns)),
        "standard_deviation": float(np.std(returns)),
        "mean_episodic_length": float(np.mean(lengths)),
    }


def evaluate(agent, script, env_id, levels, args):
    """Play `args.episodes` episodes on `levels`.

    Returns what is saved about them, episode by episode in the order of the environments, and `play`'s actions.
    """
    envs = script.ProcgenVecEnv(env_id, args.episodes, args.seed, **vars(levels))
    level_seeds = [int(info["level_seed"]) for info in envs.procgen.get_info()]
    returns, lengths, actions = play(agent, envs, args.greedy, args.seed)
    envs.close()
    result = {"num_levels": levels.num_levels, "start_level": levels.start_level}
    result |= {"statistics": statistics(returns, lengths), "episodic_returns": returns.tolist()}
    result |= {"episodic_lengths": lengths.tolist(), "level_seeds": level_seeds}
    return result, actions


def interval_text(interval):
    """An interval, or that there is none, in words."""
    return "one episode has no interval" if interval is None else "95 % interval {:.2f} to {:.2f}".format(*interval)


def report(levels, result):
    """Print the statistics of one evaluation."""
    stats = result["statistics"]
    print(f"{stats['episodes']} episodes on {levels}, {levels.distribution_mode}")
    print(f"  episodic return: mean {stats['mean']:.2f} ({interval_text(stats['mean_95_interval'])}),", end=" ")
    print(f"median {stats['median']:.2f}, min {stats['min']:.2f}, max {stats['max']:.2f},", end=" ")
    print(f"standard deviation {stats['standard_deviation']:.2f}")
    print(f"  episodic length: mean {stats['mean_episodic_length']:.1f} steps", flush=True)


def frames(envs, actions, lengths):
    """Play `actions` [steps, at least num_envs] again and yield what is seen, a picture a step.

    Args:
        envs: a new ProcgenVecEnv with render_mode="rgb_array": of 1 environment or of a square number of them
        lengths: steps of each environment's episode
    Yields:
        uint8 [512, 512, 3], or the tiles of all environments, [side · 256, side · 256, 3]. Where an episode is over
        its tile stays as it was, dimmed. The picture after an episode's last step is not shown: there Procgen is
        in the next episode already.
    """
    side = int(envs.num_envs**0.5)
    size = 512 if side == 1 else 256
    tiles = np.zeros((side, side, size, size, 3), dtype=np.uint8)
    envs.reset()
    for t in range(max(lengths)):
        for i, info in enumerate(envs.procgen.get_info()):
            if t < lengths[i]:
                tiles[divmod(i, side)] = info["rgb"].reshape(size, 512 // size, size, 512 // size, 3).mean((1, 3))
            elif t == lengths[i]:
                tiles[divmod(i, side)] //= 3
        yield tiles.swapaxes(1, 2).reshape(side * size, side * size, 3)
        envs.step(actions[t, : envs.num_envs])


@contextlib.contextmanager
def replacing(path):
    """The name of a file to write, which takes the place of `path` when it is complete and vanishes otherwise."""
    temporary = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_video(path, pictures, num_pictures):
    """Write `pictures` (uint8 [height, width, 3]) one by one, at 15 a second."""
    codec, pixel_format = CODECS[path.suffix.lower()]
    with replacing(path) as temporary, imageio.imopen(temporary, "w", plugin="pyav") as video:
        video.init_video_stream(codec, fps=15, pixel_format=pixel_format)
        for picture in tqdm(pictures, total=num_pictures, unit="frame", leave=False, disable=None):
            video.write_frame(picture)


def main(args):
    """Evaluate as `args` say; returns the path of the result."""
    check_args(args)
    run_path = Path(args.run_dir)
    config, state_dict, global_step = read_run(run_path)
    run_args = config["args"]
    script = load_script(script_path(args, config), "--script", ("Agent", "ProcgenVecEnv"))
    levels = choose_levels(args, run_args)
    check_outputs(args)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    agent = load_agent(config, state_dict, script, device)
    # The arithmetic of the training, where float32 is TF32 on a GPU.
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    env_id, sampling = run_args["env_id"], "greedy" if args.greedy else "sampled"
    run = f"{config['script']} on {env_id} with seed {run_args['seed']}, after {global_step:,} steps"
    print(f"{run}; actions {sampling}, evaluation seed {args.seed}", flush=True)
    result = {
        "script": config["script"],
        "env_id": env_id,
        "run_seed": run_args["seed"],
        "global_step": global_step,
        "settings": {
            "episodes": args.episodes,
            "distribution_mode": levels.distribution_mode,
            "num_levels": levels.num_levels,
            "start_level": levels.start_level,
            "greedy": args.greedy,
            "seed": args.seed,
            "gap": args.gap,
            "device": str(device),
            "precision": config["precision"],
        },
    }
    played, actions = evaluate(agent, script, env_id, levels, args)
    report(levels, played)
    if args.gap:
        unseen, _ = evaluate(agent, script, env_id, unseen_levels(levels), args)
        report(unseen_levels(levels), unseen)
        returns, unseen_returns = np.array(played["episodic_returns"]), np.array(unseen["episodic_returns"])
        gap = float(returns.mean() - unseen_returns.mean())
        interval = difference_interval(returns, unseen_returns)
        print(f"generalization gap (training levels − unseen levels): {gap:.2f} ({interval_text(interval)})")
        result |= {
            "training_levels": played,
            "unseen_levels": unseen,
            "gap": {"mean": gap, "mean_95_interval": interval},
        }
    else:
        result |= {"evaluation": played}

    end = levels.start_level + levels.num_levels
    played_on = f"levels-{levels.start_level}-{end}" if levels.num_levels else "levels-all"
    conditions = ["evaluation", f"{global_step}-steps", levels.distribution_mode, played_on, *["gap"] * args.gap]
    name = "__".join([*conditions, f"{args.episodes}-episodes", sampling, f"seed-{args.seed}"])
    path = run_path / f"{name}.json" if run_path.is_dir() else run_path.with_name(f"{run_path.stem}__{name}.json")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(f"saved {path}", flush=True)

    if args.video is not None:
        # Rendering is slow, so only the episodes that are shown are played again, with the actions that they had.
        num_envs = 16 if args.grid else 1
        envs = script.ProcgenVecEnv(env_id, num_envs, args.seed, **vars(levels), render_mode="rgb_array")
        lengths = played["episodic_lengths"][:num_envs]
        write_video(Path(args.video), frames(envs, actions, lengths), max(lengths))
        envs.close()
        print(f"saved {args.video}", flush=True)
    return path


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        main(tyro.cli(Args, description=__doc__.split("\n")[0]))
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: stopped; what was not complete was not saved", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
