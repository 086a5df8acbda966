"""Several processes train as one: what they compute together, what they keep apart, how they end."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import ppg_procgen
import ppo_procgen
from training import (
    PPG_SIZES,
    ROLLOUT,
    SIZES,
    assert_same_end,
    both_scripts,
    exit_code,
    flags,
    load,
    rows,
    send_stderr_to,
    start,
)

pytestmark = pytest.mark.usefixtures("forkserver", "small_agent_in_an_empty_directory")


def as_one_of_two(rank, port, prepare, script):
    """Let a process be what torchrun would make it."""
    send_stderr_to(f"stderr{rank}.txt")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    script.RANK = script.LOCAL_RANK = rank
    script.WORLD_SIZE = script.LOCAL_WORLD_SIZE = 2
    if prepare:
        prepare(script)


def start_two(script, prepare=None, **options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(script, functools.partial(as_one_of_two, rank, port, prepare), **options) for rank in (0, 1)]


def exit_codes(processes):
    return [exit_code(process) for process in processes]


# What they compute


def both_halves(script):
    """The environments of two processes in one."""

    OneHalf = script.ProcgenVecEnv

    class BothHalves(OneHalf):
        def __init__(self, env_id, num_envs, seed, *levels):
            half = num_envs // 2
            seeds = [(seed + 1_000_003 * rank) % 2**31 for rank in (0, 1)]
            self.halves = [OneHalf(env_id, half, seed, *levels) for seed in seeds]
            super().__init__(env_id, num_envs, seed, *levels)
            self.observations, self.starts = self.join("observations"), self.join("starts")

        def join(self, name):
            return np.concatenate([vars(half)[name] for half in self.halves])

        def step(self, actions):
            results = [half.step(part) for half, part in zip(self.halves, np.split(actions, 2))]
            self.observations, self.starts = self.join("observations"), self.join("starts")
            self.num_episodes = sum(half.num_episodes for half in self.halves)
            self.last_episodes = [episode for half in self.halves for episode in half.last_episodes]
            return *(np.concatenate(parts) for parts in list(zip(*results))[:4]), {}

    return BothHalves


def same_actions_and_plain_steps(script):
    """Actions that depend on step and environment alone, and SGD: Adam would blow rounding errors up."""
    calls = []

    class Scripted(script.Categorical):
        def sample(self):
            calls.append(1)
            return (torch.arange(len(self.logits)) * 7 + 32 * 7 * script.RANK + len(calls)) % 15

    script.Categorical = Scripted
    torch.optim.Adam = lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=100 * lr)


def whole_of_two_halves(script):
    same_actions_and_plain_steps(script)
    script.ProcgenVecEnv = both_halves(script)


@both_scripts
def test_two_processes_with_32_environments_train_as_one_with_64(script):
    # Two iterations, and with PPG an auxiliary phase; minibatches of all steps, so that none is a random choice.
    options = dict(env_id="fruitbot", num_minibatches=1, num_steps=16, total_timesteps=2 * 64 * 16)
    options |= dict(checkpoint_interval=2, seed=2**31 - 1)  # of the largest seed, too, each has its own
    segments = {}
    if script is ppg_procgen:
        options |= dict(n_pi=2, e_aux=2)
        segments = dict(aux_minibatch_segments=64)
    two = start_two(script, same_actions_and_plain_steps, run_name="two", num_envs=32, **segments, **options)
    segments = {name: 2 * number for name, number in segments.items()}
    one = start(script, whole_of_two_halves, run_name="one", num_envs=64, **segments, **options)
    assert [*exit_codes(two), exit_code(one)] == [0, 0, 0]

    close = dict(check_exact=False, rtol=1e-4, atol=1e-6)
    pd.testing.assert_frame_equal(rows("runs/two"), rows("runs/one"), **close)
    assert rows("runs/two").episodes.iloc[-1] > 0
    if script is ppg_procgen:
        pd.testing.assert_frame_equal(rows("runs/two", "auxiliary"), rows("runs/one", "auxiliary"), **close)
        assert list(rows("runs/two", "auxiliary").epoch) == [1, 2]
    torch.manual_seed(options["seed"])
    initial = script.Agent(15, channels=(4, 4, 4), bfloat16=False).state_dict()
    two, one = load("runs/two"), load("runs/one")
    for name, parameter in one["agent"].items():
        difference, way = (two["agent"][name] - parameter).norm(), (parameter - initial[name]).norm()
        assert difference <= 1e-3 * way and way > 0, (name, difference, way)
    for name, value in one["normalizer"].items():
        assert torch.allclose(two["normalizer"][name], value, rtol=1e-12), name
    assert one["normalizer"]["returns"].count_nonzero() > 8, "each process has had rewards"


@both_scripts
def test_each_process_has_environments_and_samples_of_its_own(script):
    """And rows count the steps and the episodes of all."""
    options = dict(num_steps=64, total_timesteps=300)
    assert exit_codes(start_two(script, run_name="run", **options)) == [0, 0]
    first, second = processes = load("runs/run")["processes"]
    assert not torch.equal(first["envs"]["observations"], second["envs"]["observations"])
    assert not torch.equal(first["rng"][0], second["rng"][0])

    # 2 processes × 2 environments × 64 steps; the total is rounded up to two rollouts.
    table = rows("runs/run")
    assert list(table.global_step) == [256, 512]
    assert table.episodes.iloc[-1] == sum(process["envs"]["num_episodes"] for process in processes)
    episodes = [process["envs"]["last_episodes"] for process in processes]
    assert min(map(len, episodes)) > 0
    means = torch.cat(episodes).mean(0).tolist()
    assert [table.episodic_return.iloc[-1], table.episodic_length.iloc[-1]] == pytest.approx(means)


def with_bfloat16(ranks, script):
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": script.RANK in ranks}


@pytest.mark.parametrize("ranks, precision", [([0], "float32"), ([1], "float32"), ([0, 1], "bfloat16")])
@both_scripts
def test_processes_on_unlike_machines_agree_on_the_least_precision(script, ranks, precision):
    prepare = functools.partial(with_bfloat16, ranks)
    options = dict(run_name="run", total_timesteps=2 * ROLLOUT, precision="auto")
    assert exit_codes(start_two(script, prepare, **options)) == [0, 0]
    assert json.loads(Path("runs/run/config.json").read_text())["precision"] == precision


# How they end, and go on


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes that was never stopped, to compare with."""

    @functools.cache
    def whole(script):
        path = tmp_path_factory.mktemp("whole")
        two = start_two(script, run_dir=path, run_name="whole", total_timesteps=2 * 7 * ROLLOUT)
        assert exit_codes(two) == [0, 0]
        return path / "whole"

    return whole


@both_scripts
def test_two_processes_resume_bit_for_bit(whole, script):
    # Two iterations of three: PPG's buffer, half full, is in the checkpoint.
    assert exit_codes(start_two(script, run_name="halted", total_timesteps=2 * 2 * ROLLOUT)) == [0, 0]
    assert exit_codes(start_two(script, resume="runs/halted", total_timesteps=2 * 7 * ROLLOUT)) == [0, 0]
    assert_same_end("runs/halted", whole(script))


def terminate_itself(rank, function, call, script):
    """The process of this rank sends itself a signal at the n-th call of the function."""
    original, calls = getattr(script, function), []

    def signalling(*args):
        calls.append(args)
        if rank == script.RANK and len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    setattr(script, function, signalling)


@pytest.mark.parametrize(
    "script, rank, function, call, iterations, aux_epochs",
    [(ppo_procgen, 1, "gae", 5, 5, 0), (ppg_procgen, 0, "gae", 5, 5, 0), (ppg_procgen, 1, "auxiliary_loss", 3, 3, 2)],
)
def test_a_signal_to_one_process_stops_all_at_one_boundary_with_a_checkpoint(
    whole, script, rank, function, call, iterations, aux_epochs
):
    options = dict(total_timesteps=2 * 7 * ROLLOUT, checkpoint_interval=100)
    terminate = functools.partial(terminate_itself, rank, function, call)
    assert exit_codes(start_two(script, terminate, run_name="stopped", **options)) == [128 + signal.SIGTERM] * 2
    checkpoint = load("runs/stopped")
    assert checkpoint["global_step"] == rows("runs/stopped").global_step.iloc[-1] == 2 * iterations * ROLLOUT
    if script is ppg_procgen:
        assert [process["buffer"]["aux_epochs"] for process in checkpoint["processes"]] == [aux_epochs] * 2

    assert exit_codes(start_two(script, resume="runs/stopped")) == [0, 0]
    assert_same_end("runs/stopped", whole(script))


def stop_and_write_slowly(script):
    terminate_itself(1, "gae", 2, script)
    replace = script.replace

    def replace_slowly(path, save):
        time.sleep(2 * (path.name == "checkpoint.pt"))
        replace(path, save)

    class SlowWriter(script.SummaryWriter):
        def close(self):
            time.sleep(2)
            super().close()
            Path("closed").touch()

    script.replace, script.SummaryWriter = replace_slowly, SlowWriter


def test_no_process_leaves_before_the_first_has_written_the_checkpoint_and_closed_its_writers():
    """For torchrun ends the others when one has ended."""
    options = dict(run_name="stopped", total_timesteps=2 * 8 * ROLLOUT, checkpoint_interval=100)
    first, second = start_two(ppg_procgen, stop_and_write_slowly, **options)
    assert exit_code(second) == 128 + signal.SIGTERM
    assert Path("runs/stopped/checkpoint.pt").exists() and Path("closed").exists()
    assert exit_code(first) == 128 + signal.SIGTERM


def signal_the_first_and_then_the_second(script):
    """The second process gets its signal late, when all have agreed to stop because of the first one's."""
    terminate_itself(0, "gae", 5, script)
    gather, checkpoints = script.gather, []

    def gather_and_signal(x, everywhere=True):
        if script.RANK == 1 and not everywhere:
            checkpoints.append(x)
            if len(checkpoints) == 2:  # after that of the start
                os.kill(os.getpid(), signal.SIGTERM)
        return gather(x, everywhere)

    script.gather = gather_and_signal


def test_processes_that_are_signalled_one_after_the_other_still_write_their_checkpoint():
    options = dict(run_name="stopped", total_timesteps=2 * 8 * ROLLOUT, checkpoint_interval=100)
    processes = start_two(ppg_procgen, signal_the_first_and_then_the_second, **options)
    assert exit_codes(processes) == [128 + signal.SIGTERM] * 2
    assert load("runs/stopped")["global_step"] == 2 * 5 * ROLLOUT


def test_bad_input_is_one_line_for_the_machine():
    assert exit_codes(start_two(ppg_procgen, num_envs=3, num_minibatches=5)) == [2, 2]
    assert Path("stderr0.txt").read_text().count("\n") == 1
    assert "--num-minibatches 5" in Path("stderr0.txt").read_text()
    assert Path("stderr1.txt").read_text() == ""

    assert exit_codes(start_two(ppg_procgen, env_id="starpilto")) == [2, 2]
    assert "starpilto" in Path("stderr0.txt").read_text()
    assert Path("stderr1.txt").read_text() == ""
    assert not Path("runs").exists()


REAL_ENCODER = ppg_procgen.Encoder


def with_the_real_encoder(script):
    script.Encoder = REAL_ENCODER


def test_torchrun_ends_when_a_process_is_killed_and_the_run_resumes_with_equal_rows():
    options = dict(channels=(4, 4, 4), total_timesteps=2 * 9 * ROLLOUT)
    whole = start_two(ppg_procgen, with_the_real_encoder, run_name="whole", **options)

    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ppg_procgen.__file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = SIZES | PPG_SIZES | options | dict(run_name="killed")
    killed = subprocess.Popen([*launcher, *flags(**options)], env=environment, stderr=subprocess.DEVNULL)
    while not Path("runs/killed/progress.csv").exists():
        time.sleep(0.01)
        assert killed.poll() is None
    workers = [p for p in psutil.Process(killed.pid).children() if ppg_procgen.__file__ in p.cmdline()]
    assert len(workers) == 2
    workers[1].kill()
    assert killed.wait(60) != 0
    assert not any(worker.is_running() for worker in workers)
    assert len(rows("runs/killed")) < 9

    resume = [*launcher, *flags(resume="runs/killed", device="cpu")]
    resumed = subprocess.run(resume, env=environment, capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    # What several processes print is what one prints: the lines of the first.
    assert resumed.stdout.count(f"runs/killed has {2 * 9 * ROLLOUT} steps") == 1
    assert exit_codes(whole) == [0, 0]
    assert_same_end("runs/killed", "runs/whole")
