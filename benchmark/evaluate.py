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
from scipy.stats import ttest_1samp, ttest_ind
from tqdm import tqdm

from common import ROOT, fail, load_script

NUM_LEVELS = 2**31 - 1  # Procgen draws levels below
CODECS = {".mp4": ("libx264", "yuv420p"), ".gif": ("gif", "rgb8")}


@dataclass
class Args:
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run, with its config.json and checkpoint.pt, or a file with weights and config"""
    episodes: int = 100  # to play, each in an environment of its own
    num_levels: int | None = None  # number of distinct levels; 0 means all (None: as the run was trained)
    start_level: int | None = None  # the first level (None: as the run was trained)
    distribution_mode: Literal["easy", "hard"] | None = None  # difficulty of the levels (None: as the run was trained)
    greedy: bool = False  # take the most probable action; otherwise actions are sampled, as in training
    seed: int = 0  # of the levels and of the sampling
    gap: bool = False  # play on the training levels and, as often, on levels outside them; report the difference
    video: Path | None = None  # .mp4 or .gif to write: the first episode (with --gap, the first on the training levels)
    grid: bool = False  # let the video show the first 16 episodes, side by side
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU when there is one
    script: Path | None = None  # script with the run's network (None: the one config.json names, beside benchmark/)


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
    """Refuse flags that cannot work, whatever the run, and a result that could not be saved; leaves nothing there."""
    for name, lowest in (("episodes", 1), ("num_levels", 0), ("start_level", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not lowest <= value < 2**31:
            fail(f"--{name.replace('_', '-')} {value}: expected {lowest} to {2**31 - 1}")
    for name in ("num_levels", "start_level", "distribution_mode"):
        value = getattr(args, name)
        if args.gap and value is not None:
            fail(f"--{name.replace('_', '-')} {value}: expected no choice of levels beside --gap, which makes its own")
    if args.grid and args.video is None:
        fail("--grid: expected --video too, the file to write")
    if args.grid and args.episodes < 16:
        fail(f"--episodes {args.episodes}: expected 16 or more, for the tiles of --grid")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: expected a GPU, and there is none")
    if args.video and (args.video.suffix.lower() not in CODECS or args.video.is_dir()):
        fail(f"--video {args.video}: expected the name of a file that ends in {' or '.join(CODECS)}")
    result_directory = args.run_dir if args.run_dir.is_dir() else args.run_dir.parent
    outputs = [(f"RUN_DIR {args.run_dir}", result_directory)]
    outputs += [(f"--video {args.video}", args.video.parent)] if args.video else []
    for flag, directory in outputs:
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            fail(f"{flag}: expected a directory that can be written to, {directory} ({error.strerror})")


def read_run(path):
    """What config.json says of the run, the network's state_dict, and the environment steps that trained it.

    `path` is the run's directory, or a file with these three. Only tensors and plain containers are read: a file from a
    stranger runs no code. It is mapped into memory, so the buffers of the training stay on the disk.
    """
    try:
        weights = path if path.is_file() else path / "checkpoint.pt"
        checkpoint = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
        config = checkpoint["config"] if path.is_file() else json.loads((path / "config.json").read_text())
        args, global_step = config["args"], checkpoint["global_step"]
        numbers = [args["seed"], args["num_levels"], args["start_level"], global_step]
        known = args["env_id"] in ENV_NAMES and args["distribution_mode"] in ("easy", "hard")
        known &= config["precision"] in ("float32", "bfloat16") and isinstance(config["script"], str)
        if not known or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("its config is not that of a training script")
        return config, checkpoint["agent"], global_step
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        fail(f"RUN_DIR {path}: expected a run, with config.json and checkpoint.pt, or its weights ({reason})")


def script_path(args, config):
    """The training script: --script, or the one beside benchmark/ that the run names. A run from a stranger picks no
    file elsewhere."""
    if args.script is not None:
        return args.script
    name = config["script"]
    if Path(name).name != name or not (ROOT / name).is_file():
        fail(f"RUN_DIR {args.run_dir}: expected --script too, the {name} that trained it: there is none in {ROOT}")
    return ROOT / name


def choose_levels(args, run_args):
    """The levels to play, as trained unless the flags say otherwise. With --gap there are two sets: those of the
    training, and every level after them. (Cobbe et al. 2019 test on all levels, the training levels included.)"""
    names = ("distribution_mode", "num_levels", "start_level")
    chosen = {name: run_args[name] if getattr(args, name) is None else getattr(args, name) for name in names}
    levels = Levels(**chosen)
    if levels.num_levels == 0:
        if args.gap:
            fail("--gap: expected a run with --num-levels 1 or more; this one trained on all levels, none is unseen")
        if args.start_level:
            fail(f"--start-level {args.start_level}: expected --num-levels too; with 0 Procgen plays all levels")
        return [Levels(levels.distribution_mode, 0, 0)]
    end = levels.start_level + levels.num_levels
    if end + args.gap > NUM_LEVELS:
        flags = "--gap" if args.gap else f"--start-level {levels.start_level} --num-levels {levels.num_levels}"
        fail(f"{flags}: expected levels up to {NUM_LEVELS - 1 - args.gap}; Procgen has none after {NUM_LEVELS - 1}")
    return [levels, *([Levels(levels.distribution_mode, NUM_LEVELS - end, end)] if args.gap else [])]


def load_agent(config, state_dict, script, device):
    """The run's network. Its options are the arguments of the run that are parameters of `Agent` or of `Encoder`."""
    classes = [script.Agent, *([script.Encoder] if hasattr(script, "Encoder") else [])]
    parameters = {name for network in classes for name in inspect.signature(network).parameters}
    options = {name: value for name, value in config["args"].items() if name in parameters}
    try:
        agent = script.Agent(15, **options | {"bfloat16": config["precision"] == "bfloat16"})  # Procgen has 15 actions
        agent.load_state_dict(state_dict)
    except Exception:
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
            # Procgen wants an action where the episode is over, too: the next one has begun there.
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


def mean_interval(*samples):
    """A 95 % interval [low, high] of the mean of a sample of returns [episodes], by Student's t-test, or of how far the
    mean of one sample is above that of another, by Welch's. None if all returns of a sample are the same, or if it has
    just one: they do not say how much others would differ.

    Source: Student 1908, The probable error of a mean; Welch 1947, The generalization of 'Student's' problem.
    """
    if any(np.ptp(sample) == 0 for sample in samples):
        return None
    test = ttest_ind(*samples, equal_var=False) if len(samples) == 2 else ttest_1samp(*samples, popmean=0)
    return [float(end) for end in test.confidence_interval(0.95)]


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
    """Play `args.episodes` episodes on `levels`, and print their statistics.

    Returns what is saved about them, episode by episode in the order of the environments, and `play`'s actions.
    """
    envs = script.ProcgenVecEnv(env_id, args.episodes, args.seed, **vars(levels))
    level_seeds = [int(info["level_seed"]) for info in envs.procgen.get_info()]
    returns, lengths, actions = play(agent, envs, args.greedy, args.seed)
    envs.close()
    stats = statistics(returns, lengths)
    print(f"{args.episodes} episodes on {levels}, {levels.distribution_mode}")
    print(f"  episodic return: mean {stats['mean']:.2f} ({interval_text(stats['mean_95_interval'])}),", end=" ")
    print(
        "median {median:.2f}, min {min:.2f}, max {max:.2f}, standard deviation {standard_deviation:.2f}".format(**stats)
    )
    print(f"  episodic length: mean {stats['mean_episodic_length']:.1f} steps", flush=True)
    episodes = {"episodic_returns": returns.tolist(), "episodic_lengths": lengths.tolist(), "level_seeds": level_seeds}
    return vars(levels) | {"statistics": stats} | episodes, actions


def interval_text(interval):
    """An interval, or that there is none, in words."""
    return "95 % interval {:.2f} to {:.2f}".format(*interval) if interval else "no interval, as returns do not differ"


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
    config, state_dict, global_step = read_run(args.run_dir)
    script = load_script(script_path(args, config), "--script", ("Agent", "ProcgenVecEnv"))
    levels, *unseen_levels = choose_levels(args, config["args"])
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    agent = load_agent(config, state_dict, script, device)
    # The arithmetic of the training, where float32 is TF32 on a GPU.
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    env_id, run_seed = config["args"]["env_id"], config["args"]["seed"]
    sampling = "greedy" if args.greedy else "sampled"
    run = f"{config['script']} on {env_id} with seed {run_seed}, after {global_step:,} steps"
    print(f"{run}; actions {sampling}, evaluation seed {args.seed}", flush=True)
    settings = {name: getattr(args, name) for name in ("episodes", "greedy", "seed", "gap")} | vars(levels)
    settings |= {"device": str(device), "precision": config["precision"]}
    result = {"script": config["script"], "env_id": env_id, "run_seed": run_seed, "global_step": global_step}
    result |= {"settings": settings}

    played, actions = evaluate(agent, script, env_id, levels, args)
    result["training_levels" if args.gap else "evaluation"] = played
    for others in unseen_levels:
        unseen, _ = evaluate(agent, script, env_id, others, args)
        interval = mean_interval(played["episodic_returns"], unseen["episodic_returns"])
        gap = played["statistics"]["mean"] - unseen["statistics"]["mean"]
        print(f"generalization gap (training levels − unseen levels): {gap:.2f} ({interval_text(interval)})")
        result |= {"unseen_levels": unseen, "gap": {"mean": gap, "mean_95_interval": interval}}

    end = levels.start_level + levels.num_levels
    played_on = f"levels-{levels.start_level}-{end}" if levels.num_levels else "levels-all"
    conditions = ["evaluation", f"{global_step}-steps", levels.distribution_mode, played_on, *["gap"] * args.gap]
    name = "__".join([*conditions, f"{args.episodes}-episodes", sampling, f"seed-{args.seed}.json"])
    path = args.run_dir / name if args.run_dir.is_dir() else args.run_dir.with_name(f"{args.run_dir.stem}__{name}")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(f"saved {path}", flush=True)

    if args.video:
        # Rendering is slow, so only the episodes that are shown are played again, with the actions that they had.
        num_envs = 16 if args.grid else 1
        envs = script.ProcgenVecEnv(env_id, num_envs, args.seed, **vars(levels), render_mode="rgb_array")
        lengths = played["episodic_lengths"][:num_envs]
        write_video(args.video, frames(envs, actions, lengths), max(lengths))
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
