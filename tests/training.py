"""What tests of whole runs share: small networks, and processes that start in a moment."""

import functools
import multiprocessing
import multiprocessing.forkserver
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import ppg_procgen
import ppo_procgen

SCRIPTS = [ppo_procgen, ppg_procgen]
both_scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

SIZES = dict(num_envs=2, num_steps=8, num_minibatches=2, checkpoint_interval=1, device="cpu", precision="float32")
PPG_SIZES = dict(n_pi=3, e_aux=3, aux_minibatch_segments=4)
ROLLOUT = 2 * 8  # steps

# Processes fork from one that has imported torch and loaded Procgen's images: each starts in a moment.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["preload"])


def small_agent(script):
    return functools.partial(script.Agent, channels=(4, 4, 4), features=16)


def train(script, **options):
    """Train in this process: a new run, or with `resume` from the command line, as a user would go on."""
    if "resume" in options:
        sys.argv = [script.__file__, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
        return script.main(script.parse_args())
    return script.main(script.Args(**SIZES | (PPG_SIZES if script is ppg_procgen else {}) | options))


def train_alone(name, prepare, options):
    """What a process of its own does: `prepare` sets the scene, then it trains."""
    script = sys.modules[name]
    sys.stderr = open("stderr.txt", "w", buffering=1)
    script.Agent = small_agent(script)
    if prepare:
        prepare(script)
    train(script, **options)


def start(script, prepare=None, **options):
    process = FORKSERVER.Process(target=train_alone, args=(script.__name__, prepare, options))
    process.start()
    return process


def exit_code(process):
    process.join(300)
    assert process.exitcode is not None, "still running after five minutes"
    return process.exitcode


def load(run_path):
    return torch.load(Path(run_path) / "checkpoint.pt", weights_only=True)


def rows(run_path):
    return pd.read_csv(Path(run_path) / "progress.csv").drop(columns="SPS")


def assert_same_end(run_path, other_path):
    """Every row of progress.csv, its time column aside, and every parameter is the same."""
    pd.testing.assert_frame_equal(rows(run_path), rows(other_path), check_exact=True)
    agent, other_agent = load(run_path)["agent"], load(other_path)["agent"]
    assert agent.keys() == other_agent.keys()
    assert all(torch.equal(agent[name], other_agent[name]) for name in agent)
