"""What tests of whole runs share: a tiny encoder, and processes that start in a moment."""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn as nn

import ppg_procgen
import ppo_procgen

SCRIPTS = [ppo_procgen, ppg_procgen]
both_scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

# In fruitbot, hard, random play earns and loses a reward now and then, and dies within some 30 steps. With this seed
# rewards come in the first and the seventh iteration, and episodes end in the third and the fifth.
SIZES = dict(env_id="fruitbot", distribution_mode="hard", seed=28, num_envs=2, num_steps=8, num_minibatches=2)
SIZES |= dict(checkpoint_interval=1, device="cpu", precision="float32")
PPG_SIZES = dict(n_pi=3, e_aux=3, aux_minibatch_segments=4)
ROLLOUT = 2 * 8  # steps

# Processes fork from one that has imported torch and loaded Procgen's images: each starts in a moment.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["preload"])


class TinyEncoder(nn.Module):
    """One layer on one pixel in 64, in place of a network that has no part in what is tested."""

    def __init__(self, channels, bfloat16):
        super().__init__()
        self.dense = nn.Linear(8 * 8 * 3, 16)

    def forward(self, observations):
        return self.dense(observations[:, ::8, ::8].flatten(1) / 255).relu()


def flags(**options):
    """num_envs=4 → --num-envs 4; True stands for a flag that takes no value, a tuple for one that takes several."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


def train(script, **options):
    """Train in this process: a new run, or one to go on with (`resume`), as from the command line."""
    defaults = SIZES | (PPG_SIZES if script is ppg_procgen else {})
    options = ({} if "resume" in options else defaults) | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *flags(**options)])
        return script.main(script.parse_args())


def train_alone(name, prepare, options):
    """What a process of its own does: `prepare` sets the scene, then it trains."""
    script = sys.modules[name]
    script.Encoder = TinyEncoder
    send_stderr_to("stderr.txt")
    if prepare:
        prepare(script)
    train(script, **options)


def send_stderr_to(path):
    with open(path, "a") as file:
        os.dup2(file.fileno(), 2)


def start(script, prepare=None, **options):
    process = FORKSERVER.Process(target=train_alone, args=(script.__name__, prepare, options))
    process.start()
    return process


def exit_code(process):
    process.join(120)
    code = process.exitcode
    process.kill()  # or else pytest would wait for it in the end
    assert code is not None, "still running after two minutes"
    return code


def load(run_path):
    return torch.load(Path(run_path) / "checkpoint.pt", weights_only=True)


def rows(run_path, table="progress"):
    """A table without its time column."""
    return pd.read_csv(Path(run_path) / f"{table}.csv").drop(columns="SPS", errors="ignore")


def identical(one, other):
    """Equality to the bit of what a checkpoint is made of."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


def assert_same_end(run_path, other_path):
    """Every row of the tables, their time column aside, and everything in the checkpoint is the same."""
    one, other = load(run_path), load(other_path)
    for table in one.pop("tables"):
        if other["tables"][table]:
            pd.testing.assert_frame_equal(rows(run_path, table), rows(other_path, table), check_exact=True)
    del other["tables"]
    assert one.keys() == other.keys()
    assert [name for name in one if not identical(one[name], other[name])] == []
