"""Nothing is lost: kills, signals, full disks, foreign checkpoints, numbers that are not finite."""

import errno
import math
import os
import pickle
import random
import resource
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from procgen.env import ENV_NAMES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen
from training import ROLLOUT, assert_same_end, both_scripts, exit_code, load, rows, start, train

pytestmark = pytest.mark.usefixtures("forkserver", "small_agent_in_an_empty_directory")

# Kills


@both_scripts
def test_twenty_kills_at_random_moments_change_nothing(script):
    steps = ROLLOUT * 45
    began = time.time()
    assert exit_code(start(script, run_name="whole", total_timesteps=steps)) == 0
    duration = time.time() - began

    process = start(script, run_name="killed", total_timesteps=steps)
    while not Path("runs/killed/checkpoint.pt").exists():
        time.sleep(0.001)
    moments = random.Random(script.__name__)
    for _ in range(20):
        time.sleep(moments.uniform(0, duration / 40))
        assert process.is_alive(), "the run ended before it was killed twenty times"
        process.kill()
        process.join()
        process = start(script, resume="runs/killed")
    assert exit_code(process) == 0
    assert_same_end("runs/killed", "runs/whole")


def kill_while_writing(script):
    """SIGKILL when half of the third checkpoint is in its temporary file."""
    save, saved = torch.save, []

    def save_half(checkpoint, file):
        saved.append(checkpoint)
        save(checkpoint, file)
        if len(saved) == 3:
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half


def kill_before_renaming(script):
    """SIGKILL when the third checkpoint is written, and not yet in its place."""
    replace, replaced = os.replace, []

    def replace_or_die(source, target):
        replaced.append(target.name)
        if replaced.count("checkpoint.pt") == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die


def kill_in_auxiliary_phase(script):
    auxiliary, calls = script.auxiliary_objective, []

    def auxiliary_or_die(*args):
        calls.append(args)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return auxiliary(*args)

    script.auxiliary_objective = auxiliary_or_die


@pytest.mark.parametrize("prepare", [kill_while_writing, kill_before_renaming, kill_in_auxiliary_phase])
def test_a_kill_at_the_worst_moment_changes_nothing(prepare):
    train(ppg_procgen, run_name="whole", total_timesteps=ROLLOUT * 7)
    assert exit_code(start(ppg_procgen, prepare, run_name="killed", total_timesteps=ROLLOUT * 7)) == -signal.SIGKILL
    assert load("runs/killed")["iteration"] == 2
    train(ppg_procgen, resume="runs/killed")
    assert_same_end("runs/killed", "runs/whole")


@pytest.mark.parametrize("env_id", ENV_NAMES)
def test_every_game_goes_on_in_a_fresh_process_with_one_environment(env_id):
    options = dict(env_id=env_id, num_envs=1, num_minibatches=1, num_steps=32, n_pi=2, e_aux=1)
    whole = start(ppg_procgen, run_name="whole", total_timesteps=32 * 6, **options)
    assert exit_code(start(ppg_procgen, run_name="halted", total_timesteps=32 * 3, **options)) == 0
    assert exit_code(start(ppg_procgen, resume="runs/halted", total_timesteps=32 * 6)) == 0
    assert exit_code(whole) == 0
    assert_same_end("runs/halted", "runs/whole")


def test_resumed_points_are_not_in_tensorboard_twice():
    train(ppg_procgen, run_name="run", total_timesteps=ROLLOUT * 5, checkpoint_interval=3)
    # The last checkpoint lost: the run goes on from the one after three iterations, and repeats two.
    train(ppg_procgen, run_name="short", total_timesteps=ROLLOUT * 3, checkpoint_interval=3)
    os.replace("runs/short/checkpoint.pt", "runs/run/checkpoint.pt")
    train(ppg_procgen, resume="runs/run")
    events = EventAccumulator("runs/run").Reload()
    steps = [event.step for event in events.Scalars("charts/episodes")]
    assert steps == [ROLLOUT * i for i in (1, 2, 3, 4, 5)]
    assert list(rows("runs/run")["global_step"]) == steps


# Signals


def signal_at(monkeypatch, script, name, call, *signums):
    """Send this process `signums` at the n-th call of a function of the script."""
    function, calls = getattr(script, name), []

    def signalling(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            for signum in signums:
                os.kill(os.getpid(), signum)
        return function(*args, **kwargs)

    monkeypatch.setattr(script, name, signalling)


# The fifth iteration's advantages; the auxiliary phase's first and second epoch, of two minibatches each.
MOMENTS = [("gae", 5, 5, 0), ("gae", 3, 2, 0), ("auxiliary_objective", 1, 2, 1), ("auxiliary_objective", 3, 2, 2)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("function, call, iterations, aux_epochs", MOMENTS)
def test_a_signal_stops_at_the_next_boundary(monkeypatch, capfd, signum, function, call, iterations, aux_epochs):
    train(ppg_procgen, run_name="whole", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    handler = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        signal_at(patch, ppg_procgen, function, call, signum)
        with pytest.raises(SystemExit) as stop:
            train(ppg_procgen, run_name="stopped", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    assert stop.value.code == 128 + signum
    checkpoint = load("runs/stopped")
    assert (checkpoint["iteration"], len(checkpoint["aux_means"])) == (iterations, aux_epochs)
    assert signal.getsignal(signum) is handler, "the handlers are put back"

    # The command it prints is the one that goes on.
    command = shlex.split(capfd.readouterr().out.split("to go on: ")[1])
    assert command[0] == "python" and Path(command[1]).resolve() == Path(ppg_procgen.__file__)
    monkeypatch.setattr(sys, "argv", command[1:])
    ppg_procgen.main(ppg_procgen.parse_args())
    assert_same_end("runs/stopped", "runs/whole")


def test_a_signal_while_old_logits_are_recorded_stops_after_the_rollout_under_way(monkeypatch):
    train(ppg_procgen, run_name="whole", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    agent_class, calls = ppg_procgen.Agent.func, []  # a partial, with small encoders
    forward = agent_class.forward

    def signalling(agent, observations, policy=True, value=True):
        if not value:  # as in no other part of a run with E_π = E_V
            calls.append(len(observations))
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return forward(agent, observations, policy, value)

    with monkeypatch.context() as patch:
        patch.setattr(agent_class, "forward", signalling)
        with pytest.raises(SystemExit):
            train(ppg_procgen, run_name="stopped", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    checkpoint = load("runs/stopped")
    assert checkpoint["in_auxiliary_phase"] and checkpoint["iteration"] == 2 and checkpoint["aux_means"] == []
    assert sum(calls) == ROLLOUT and len(checkpoint["processes"][0]["aux_old_logits"]) == 1

    train(ppg_procgen, resume="runs/stopped")
    assert_same_end("runs/stopped", "runs/whole")


def test_ppo_stops_at_the_next_boundary_too(monkeypatch):
    train(ppo_procgen, run_name="whole", total_timesteps=ROLLOUT * 4, checkpoint_interval=100)
    with monkeypatch.context() as patch:
        signal_at(patch, ppo_procgen, "gae", 2, signal.SIGTERM)
        with pytest.raises(SystemExit) as stop:
            train(ppo_procgen, run_name="stopped", total_timesteps=ROLLOUT * 4, checkpoint_interval=100)
    assert stop.value.code == 128 + signal.SIGTERM and load("runs/stopped")["iteration"] == 2
    train(ppo_procgen, resume="runs/stopped")
    assert_same_end("runs/stopped", "runs/whole")


@both_scripts
def test_a_signal_in_the_last_iteration_leaves_a_finished_run(monkeypatch, script, capfd):
    signal_at(monkeypatch, script, "gae", 2, signal.SIGTERM)
    path = train(script, run_name="run", total_timesteps=ROLLOUT * 2)
    assert load(path)["iteration"] == 2
    assert f"{path} has {ROLLOUT * 2} steps" in capfd.readouterr().out


def two_signals(script):
    advantages, calls = script.gae, []

    def signalling(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return advantages(*args)

    script.gae = signalling


@both_scripts
def test_a_second_signal_stops_at_once_and_leaves_the_last_checkpoint_whole(script):
    process = start(script, two_signals, run_name="run", total_timesteps=ROLLOUT * 7)
    assert exit_code(process) == 128 + signal.SIGINT
    assert load("runs/run")["iteration"] == 2 and len(rows("runs/run")) == 2


def tell_when_listening(script):
    register = signal.signal

    def register_and_tell(signum, handler):
        previous = register(signum, handler)
        if signum == signal.SIGTERM and handler != signal.SIG_DFL:
            Path("listening").touch()
        return previous

    signal.signal = register_and_tell


def test_twenty_signals_at_random_moments_change_nothing():
    options = dict(total_timesteps=ROLLOUT * 45, checkpoint_interval=100)
    began = time.time()
    assert exit_code(start(ppg_procgen, run_name="whole", **options)) == 0
    duration = time.time() - began

    moments = random.Random(2)
    process = start(ppg_procgen, tell_when_listening, run_name="run", **options)
    for _ in range(20):
        while not Path("listening").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, duration / 40))
        Path("listening").unlink()
        process.terminate()
        assert exit_code(process) == 128 + signal.SIGTERM
        process = start(ppg_procgen, tell_when_listening, resume="runs/run")
    assert exit_code(process) == 0
    assert_same_end("runs/run", "runs/whole")


# Full disks


def files_of_20_kilobytes_at_most(script):
    """Larger writes fail with an error, as on a full disk; a checkpoint is larger, progress.csv is not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def full_after_two_checkpoints(script):
    save, saved = torch.save, []

    def save_or_fill(checkpoint, file):
        saved.append(checkpoint)
        if len(saved) == 3:
            files_of_20_kilobytes_at_most(script)
        save(checkpoint, file)

    torch.save = save_or_fill


@both_scripts
def test_a_full_disk_is_reported_and_training_goes_on(script):
    process = start(script, full_after_two_checkpoints, run_name="run", total_timesteps=ROLLOUT * 5)
    assert exit_code(process) == 1, "the last checkpoint could not be written"
    reports = [line for line in Path("stderr.txt").read_text().splitlines() if "could not be written" in line]
    assert len(reports) == 3 and "File too large" in reports[0]
    assert len(rows("runs/run")) == 5
    assert load("runs/run")["iteration"] == 2
    assert not list(Path("runs/run").glob("*.tmp")), "half a checkpoint would fill the disk further"

    train(script, resume="runs/run")
    train(script, run_name="whole", total_timesteps=ROLLOUT * 5)
    assert_same_end("runs/run", "runs/whole")


def fill_disk_at_the_third_row(monkeypatch, script):
    replacing, names = script.replacing, []

    def full_at_the_third_row(path, *mode):
        names.append(path.name)
        if names.count("progress.csv") == 3 and path.name == "progress.csv":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path, *mode)

    monkeypatch.setattr(script, "replacing", full_at_the_third_row)


@both_scripts
def test_no_row_is_lost_to_a_disk_that_was_full_for_a_while(monkeypatch, script, capfd):
    fill_disk_at_the_third_row(monkeypatch, script)
    train(script, run_name="run", total_timesteps=ROLLOUT * 5)
    assert "metrics could not be written" in capfd.readouterr().err
    assert list(rows("runs/run")["global_step"]) == [ROLLOUT * i for i in (1, 2, 3, 4, 5)]
    events = EventAccumulator("runs/run").Reload()
    assert [event.step for event in events.Scalars("charts/episodes")] == [ROLLOUT * i for i in (1, 2, 4, 5)]


@both_scripts
def test_a_last_row_that_could_not_be_written_is_an_error_and_resuming_brings_it_back(monkeypatch, script):
    fill_disk_at_the_third_row(monkeypatch, script)
    with pytest.raises(SystemExit) as stop:
        train(script, run_name="run", total_timesteps=ROLLOUT * 3)
    assert stop.value.code == 1 and len(rows("runs/run")) == 2

    train(script, resume="runs/run")
    assert list(rows("runs/run")["global_step"]) == [ROLLOUT * i for i in (1, 2, 3)]


@both_scripts
def test_rows_after_the_checkpoint_go_when_the_run_that_crashed_is_resumed(script):
    train(script, run_name="run", total_timesteps=ROLLOUT * 2)
    path = Path("runs/run/progress.csv")
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1].replace(str(ROLLOUT * 2), str(ROLLOUT * 3), 1) + "\n")
    assert len(rows("runs/run")) == 3

    train(script, resume="runs/run")
    assert path.read_text() == whole


# Files that are no checkpoint


def refused(capsys, script, **options):
    with pytest.raises(SystemExit) as stop:
        train(script, **options)
    complaint = capsys.readouterr().err
    assert stop.value.code == 2 and complaint.count("\n") == 1, complaint
    return complaint


class Evil:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("kind", ["truncated", "empty", "foreign", "wrong format", "evil", "missing"])
@both_scripts
def test_a_file_that_is_no_checkpoint_gets_one_clear_line(script, kind, capsys):
    train(script, run_name="run", total_timesteps=ROLLOUT)
    path = Path("runs/run/checkpoint.pt")
    checkpoint = load("runs/run")
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        torch.save({"state_dict": checkpoint["agent"]}, path)
    elif kind == "wrong format":
        torch.save(checkpoint | {"format": f"{script.__name__}.py 0"}, path)
    elif kind == "evil":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        path.unlink()
    capsys.readouterr()
    before = Path("runs/run/progress.csv").read_bytes()
    complaint = refused(capsys, script, resume="runs/run", total_timesteps=ROLLOUT * 2)
    assert "--resume runs/run" in complaint and f"{script.__name__}.py 4" in complaint
    assert not Path("hacked").exists()
    assert Path("runs/run/progress.csv").read_bytes() == before


# Numbers that are not finite


def spoil(monkeypatch, script, name, call, make):
    """Let the n-th call of a loss function return what `make` makes of its result."""
    function, calls = getattr(script, name), []

    def spoiling(*args):
        calls.append(args)
        result = function(*args)
        return make(result) if len(calls) == call else result

    monkeypatch.setattr(script, name, spoiling)


def infinite_gradient(loss):
    """A finite loss, 0 · ∞ away from a finite gradient: √x has slope ∞ at 0."""
    return loss + (loss - loss).sqrt()


POLICY_CALL = {ppo_procgen: 8, ppg_procgen: 4}  # in the second iteration: E epochs of two minibatches in each


@pytest.mark.parametrize(
    "make, culprit", [(lambda loss: loss * math.nan, "policy_loss"), (infinite_gradient, "the gradient of policy_loss")]
)
@both_scripts
def test_what_is_not_finite_stops_the_run_before_the_optimizer_steps_on_it(monkeypatch, script, make, culprit):
    train(script, run_name="whole", total_timesteps=ROLLOUT * 3)
    with monkeypatch.context() as patch:
        spoil(patch, script, "policy_objective", POLICY_CALL[script], make)
        steps, step = [], torch.optim.Adam.step
        patch.setattr(torch.optim.Adam, "step", lambda self: (steps.append(1), step(self)))
        with pytest.raises(SystemExit) as stop:
            train(script, run_name="run", total_timesteps=ROLLOUT * 3)
    assert stop.value.code.startswith(f"iteration 2: {culprit}") and "not finite" in stop.value.code
    assert len(steps) == POLICY_CALL[script] - 1
    train(script, resume="runs/run")
    assert_same_end("runs/run", "runs/whole")


@pytest.mark.parametrize("update_epochs, where", [(1, "the policy's logits"), (2, "policy_loss")])
def test_weights_that_blew_up_end_in_one_line_wherever_they_are_met_first(update_epochs, where):
    options = dict(num_minibatches=1, update_epochs=update_epochs, learning_rate=1e30)
    with pytest.raises(SystemExit) as stop:
        train(ppo_procgen, total_timesteps=ROLLOUT * 3, **options)
    assert where in stop.value.code and "not finite" in stop.value.code


def test_an_auxiliary_loss_that_is_not_finite_is_named(monkeypatch):
    spoil(monkeypatch, ppg_procgen, "auxiliary_objective", 2, lambda losses: (losses[0] * math.nan, *losses[1:]))
    with pytest.raises(SystemExit, match="iteration 3: the gradient of aux_value_loss"):
        train(ppg_procgen, run_name="run", total_timesteps=ROLLOUT * 3)
    assert load("runs/run")["iteration"] == 2


# Memory


@both_scripts
def test_too_little_memory_is_told_before_anything_is_written(monkeypatch, capsys, script):
    monkeypatch.setattr(script, "available_memory", lambda device: 100_000)
    complaint = refused(capsys, script, total_timesteps=ROLLOUT * 3)
    needed = ROLLOUT * 64 * 64 * 3 * (1 + 3 if script is ppg_procgen else 1)
    assert f"{needed / 1e9:.3g} GB" in complaint and "0.0001 GB" in complaint and "--num-envs" in complaint
    assert not Path("runs").exists()


def test_buffer_and_rollout_at_the_defaults_need_6_4_and_0_2_gigabytes(monkeypatch, capsys):
    monkeypatch.setattr(ppg_procgen, "available_memory", lambda device: 6_600_000_000)
    with pytest.raises(SystemExit):
        ppg_procgen.main(ppg_procgen.Args(device="cpu"))
    assert "need 6.64 GB" in capsys.readouterr().err


VERSION_2 = {
    "/proc/self/cgroup": "0::/job/step\n",
    "/sys/fs/cgroup/job/step/memory.max": "max\n",
    "/sys/fs/cgroup/job/step/memory.current": "300000\n",
    "/sys/fs/cgroup/job/memory.max": "1000000\n",
    "/sys/fs/cgroup/job/memory.current": "400000\n",
    "/sys/fs/cgroup/job/memory.stat": "anon 250000\ninactive_file 100000\nactive_file 50000\n",
}
VERSION_1 = {
    "/proc/self/cgroup": "9:cpu:/\n5:hugetlb,memory:/job\n",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000\n",
    "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400000\n",
    "/sys/fs/cgroup/memory/job/memory.stat": "cache 150000\ninactive_file 0\ntotal_inactive_file 100000\n",
}
NO_LIMIT = {"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/memory.max": "max\n"}


@pytest.mark.parametrize("files, container", [(VERSION_2, 700_000), (VERSION_1, 700_000), (NO_LIMIT, math.inf)])
def test_a_containers_limit_counts_and_files_in_its_cache_do_not(monkeypatch, files, container):
    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(ppg_procgen.psutil, "virtual_memory", lambda: SimpleNamespace(available=5_000_000))
    assert ppg_procgen.available_memory(torch.device("cpu")) == min(container, 5_000_000)
