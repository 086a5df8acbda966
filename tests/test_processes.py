"""Several processes train as one: what they compute together, what they keep apart, how they end."""

import functools
import os
import re
import shlex
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
from training import ROLLOUT, assert_same_end, both_scripts, exit_code, load, rows, start, train

pytestmark = pytest.mark.usefixtures("forkserver", "small_agent_in_an_empty_directory")


def as_one_of_two(rank, port, prepare, script):
    """Let a process be what torchrun would make it."""
    sys.stderr = open(f"stderr{rank}.txt", "w", buffering=1)
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
            super().__init__(env_id, num_envs, seed, *levels)
            half = num_envs // 2
            self.halves = [OneHalf(env_id, half, seed + 1_000_003 * rank, *levels) for rank in (0, 1)]

        def reset(self, **options):
            return np.concatenate([half.reset(**options)[0] for half in self.halves]), {}

        def step(self, actions):
            results = [half.step(part) for half, part in zip(self.halves, np.split(actions, 2))]
            return *(np.concatenate(parts) for parts in list(zip(*results))[:4]), {}

        def get_state(self):
            return [state for half in self.halves for state in half.get_state()]

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
def test_two_processes_with_32_segments_train_as_one_with_64(script):
    # Two iterations, and with PPG an auxiliary phase; minibatches of all segments, so that none is a random choice.
    options = dict(env_id="bigfish", num_minibatches=1, num_steps=16, total_timesteps=2 * 64 * 16)
    segments = {}
    if script is ppg_procgen:
        options |= dict(n_pi=2, e_aux=2)
        segments = dict(aux_minibatch_segments=64)
    two = start_two(script, same_actions_and_plain_steps, run_name="two", num_envs=32, **segments, **options)
    segments = {name: 2 * number for name, number in segments.items()}
    one = start(script, whole_of_two_halves, run_name="one", num_envs=64, **segments, **options)
    assert [*exit_codes(two), exit_code(one)] == [0, 0, 0]

    pd.testing.assert_frame_equal(rows("runs/two"), rows("runs/one"), check_exact=False, rtol=1e-4, atol=1e-6)
    assert rows("runs/two").episodes.iloc[-1] > 0
    torch.manual_seed(1)
    initial = script.Agent(15).state_dict()
    two, one = load("runs/two"), load("runs/one")
    for name, parameter in one["agent"].items():
        difference, way = (two["agent"][name] - parameter).norm(), (parameter - initial[name]).norm()
        assert difference <= 1e-3 * way and way > 0, (name, difference, way)
    for name, value in one["reward_stats"].items():
        assert torch.allclose(two["reward_stats"][name], value, rtol=1e-12), name


@both_scripts
def test_each_process_has_environments_and_samples_of_its_own(script):
    assert exit_codes(start_two(script, run_name="run", total_timesteps=4 * ROLLOUT)) == [0, 0]
    first, second = load("runs/run")["processes"]
    assert not torch.equal(first["next_obs"], second["next_obs"])
    assert not torch.equal(first["rng"], second["rng"])


def test_rows_count_the_steps_and_the_episodes_of_all_processes():
    options = dict(env_id="bigfish", num_steps=128, total_timesteps=1000)
    assert exit_codes(start_two(ppo_procgen, run_name="run", **options)) == [0, 0]
    # 2 processes × 2 environments × 128 steps; the total is rounded up to two rollouts.
    assert list(rows("runs/run").global_step) == [512, 1024]
    processes = load("runs/run")["processes"]
    assert rows("runs/run").episodes.iloc[-1] == sum(process["episode_count"] for process in processes)
    returns = [episodic_return for process in processes for episodic_return in process["return_queue"]]
    assert rows("runs/run").episodic_return.iloc[-1] == pytest.approx(np.mean(returns))
    assert min(len(process["return_queue"]) for process in processes) > 0


# How they end, and go on


@both_scripts
def test_two_processes_resume_bit_for_bit(script):
    # Two iterations of three: PPG's buffer, half full, is in the checkpoint.
    assert exit_codes(start_two(script, run_name="whole", total_timesteps=2 * 7 * ROLLOUT)) == [0, 0]
    assert exit_codes(start_two(script, run_name="halted", total_timesteps=2 * 2 * ROLLOUT)) == [0, 0]
    assert exit_codes(start_two(script, resume="runs/halted", total_timesteps=2 * 7 * ROLLOUT)) == [0, 0]
    assert_same_end("runs/halted", "runs/whole")


def signal_itself(signum, rank, script):
    """The process of this rank sends itself a signal in the fifth iteration."""
    advantages, calls = script.gae, []

    def signalling(*args):
        calls.append(args)
        if rank == script.RANK and len(calls) == 5:
            os.kill(os.getpid(), signum)
        return advantages(*args)

    script.gae = signalling


@both_scripts
def test_a_killed_process_ends_the_others_within_seconds(script):
    steps = 2 * 8 * ROLLOUT
    assert exit_codes(start_two(script, run_name="whole", total_timesteps=steps)) == [0, 0]
    kill = functools.partial(signal_itself, signal.SIGKILL, 1)
    first, second = start_two(script, kill, run_name="killed", total_timesteps=steps)
    assert exit_code(second) == -signal.SIGKILL
    first.join(20)
    assert first.exitcode == 1
    assert "process 0: lost the other processes, the last checkpoint counts" in Path("stderr0.txt").read_text()

    assert load("runs/killed")["iteration"] == len(rows("runs/killed")) == 4
    assert exit_codes(start_two(script, resume="runs/killed")) == [0, 0]
    assert_same_end("runs/killed", "runs/whole")


@both_scripts
def test_a_signal_to_one_process_stops_all_at_one_boundary_with_a_checkpoint(script):
    options = dict(total_timesteps=2 * 8 * ROLLOUT, checkpoint_interval=100)
    assert exit_codes(start_two(script, run_name="whole", **options)) == [0, 0]
    terminate = functools.partial(signal_itself, signal.SIGTERM, 1)
    assert exit_codes(start_two(script, terminate, run_name="stopped", **options)) == [128 + signal.SIGTERM] * 2
    assert load("runs/stopped")["iteration"] == 5

    assert exit_codes(start_two(script, resume="runs/stopped")) == [0, 0]
    assert_same_end("runs/stopped", "runs/whole")


def signal_the_first_and_then_the_second(script):
    """The second process gets its signal late, when all have agreed to stop because of the first one's."""
    signal_itself(signal.SIGTERM, 0, script)
    gather = script.gather

    def gather_and_signal(x, everywhere=True):
        if script.RANK == 1 and not everywhere:
            os.kill(os.getpid(), signal.SIGTERM)
            script.gather = gather
        return gather(x, everywhere)

    script.gather = gather_and_signal


def test_two_machines_meet_as_the_readme_says_and_are_told_how_to_go_on():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"

    def both_machines(flags, script_and_flags):
        words = [sys.executable, "-m", "torch.distributed.run", *flags, *script_and_flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return [
            subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2)
        ]

    readme = (Path(ppo_procgen.__file__).parent / "README.md").read_text()
    flags = re.search(r"`torchrun (--nnodes 2 .*?) \.\.\.`", readme, re.DOTALL)[1].replace("HOST:29500", place).split()
    flags[flags.index("--nproc-per-node") + 1] = "1"
    script = [ppo_procgen.__file__, "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2", "--device", "cpu"]
    machines = both_machines(flags, [*script, "--total-timesteps", "1_000_000", "--run-name", "run"])
    while not Path("runs/run/progress.csv").exists():
        time.sleep(0.05)
        assert machines[0].poll() is None and machines[1].poll() is None
    worker = next(p for p in psutil.Process(machines[0].pid).children() if ppo_procgen.__file__ in p.cmdline())
    worker.send_signal(signal.SIGTERM)
    output = "".join(machine.communicate(timeout=60)[0] for machine in machines)

    command = shlex.split(output.split("to go on: ")[1].splitlines()[0].replace("HOST:29500", place))
    start = command.index(os.path.relpath(ppo_procgen.__file__))
    assert command[0] == "torchrun"
    steps = load("runs/run")["global_step"]
    machines = both_machines(command[1:start], command[start:])
    while len(rows("runs/run")) <= steps // 32:
        time.sleep(0.05)
        assert machines[0].poll() is None and machines[1].poll() is None
    for machine in machines:
        machine.terminate()
        machine.communicate(timeout=60)


@both_scripts
def test_processes_that_are_signalled_one_after_the_other_still_write_their_checkpoint(script):
    options = dict(run_name="stopped", total_timesteps=2 * 8 * ROLLOUT, checkpoint_interval=100)
    processes = start_two(script, signal_the_first_and_then_the_second, **options)
    assert exit_codes(processes) == [128 + signal.SIGTERM] * 2
    assert load("runs/stopped")["iteration"] == 5


@both_scripts
def test_another_number_of_processes_is_refused_in_one_line(script, capsys):
    assert exit_codes(start_two(script, run_name="run", total_timesteps=2 * ROLLOUT)) == [0, 0]
    with pytest.raises(SystemExit) as stop:
        train(script, resume="runs/run")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--resume runs/run: this run has 2 processes; expected as many, there are 1 now" in error


def drift_apart(script):
    """The second process changes a parameter by itself, by little, in the second iteration."""
    check, calls = script.stop_unless_finite, []

    def check_and_change(agent, iteration, losses):
        calls.append(iteration)
        if script.RANK == 1 and calls == [1, 1, 2]:
            with torch.no_grad():
                agent.policy_head.bias[0] += 1e-4
        check(agent, iteration, losses)

    script.stop_unless_finite = check_and_change


def test_processes_that_have_come_apart_write_no_checkpoint():
    options = dict(total_timesteps=2 * 4 * ROLLOUT, update_epochs=1)
    assert exit_codes(start_two(ppo_procgen, drift_apart, run_name="run", **options)) == [1, 1]
    assert "iteration 2: the processes' parameters differ" in Path("stderr0.txt").read_text()
    assert load("runs/run")["iteration"] == 1


def test_bad_input_is_one_line_for_the_machine():
    assert exit_codes(start_two(ppg_procgen, num_envs=3)) == [2, 2]
    assert Path("stderr0.txt").read_text().count("\n") == 1 and "--num-envs 3" in Path("stderr0.txt").read_text()
    assert Path("stderr1.txt").read_text() == ""
    assert not Path("runs").exists()


def test_torchrun_ends_when_a_process_is_killed_and_resumes_with_equal_rows():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ppg_procgen.__file__]
    command = [*launcher, "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2", "--device", "cpu"]
    command += ["--n-pi", "2", "--e-aux", "1", "--checkpoint-interval", "1", "--total-timesteps", "320"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(words):
        result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    # What several processes print is what one prints: the lines of the first.
    assert run([*command, "--run-name", "whole"]).count("runs/whole has 320 steps") == 1
    killed = subprocess.Popen([*command, "--run-name", "killed"], env=environment, stderr=subprocess.DEVNULL)
    while not Path("runs/killed/checkpoint.pt").exists():
        time.sleep(0.05)
    workers = [p for p in psutil.Process(killed.pid).children() if ppg_procgen.__file__ in p.cmdline()]
    assert len(workers) == 2
    workers[1].kill()
    assert killed.wait(30) != 0
    assert not any(worker.is_running() for worker in workers)
    run([*launcher, "--resume", "runs/killed"])
    assert_same_end("runs/killed", "runs/whole")
