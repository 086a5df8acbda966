"""Nothing is lost: kills, signals, crashes, foreign checkpoints, numbers that are not finite, two writers."""

import contextlib
import functools
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from wandb.proto.wandb_internal_pb2 import Record

import ppg_procgen
import ppo_procgen
from training import ROLLOUT, assert_same_end, both_scripts, exit_code, load, rows, start, train

pytestmark = pytest.mark.usefixtures("forkserver", "small_agent_in_an_empty_directory")

# PPG's phases have three iterations, and three auxiliary epochs of two minibatches: seven iterations are two and a bit.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, to compare with."""

    @functools.cache
    def whole(script, iterations=7):
        path = tmp_path_factory.mktemp("whole")
        return train(script, run_dir=path, run_name="whole", total_timesteps=iterations * ROLLOUT)

    return whole


def at_call(script, name, call, act):
    """The function of the script, but before its n-th call: `act`."""
    function, calls = getattr(script, name), []

    def acting(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            act()
        return function(*args, **kwargs)

    return acting


def send(*signums):
    for signum in signums:
        os.kill(os.getpid(), signum)


def sending_at_call(script, name, call, *signums):
    return at_call(script, name, call, functools.partial(send, *signums))


def events(run_path, tag):
    return [event.step for event in EventAccumulator(str(run_path)).Reload().Scalars(tag)]


# Resuming


@both_scripts
@pytest.mark.parametrize("iterations", [2, 3, 4])
def test_a_resumed_run_is_the_run_that_never_stopped(whole, script, iterations):
    """In the middle of a policy phase, after an auxiliary phase, and at the beginning of the next phase."""
    path = train(script, run_name="run", total_timesteps=iterations * ROLLOUT)
    assert len(rows(path)) == iterations
    assert train(script, resume=path, total_timesteps=7 * ROLLOUT) == path
    assert rows(path).episodes.iloc[-1] > rows(path).episodes.iloc[iterations - 1] >= (iterations > 2)
    assert_same_end(path, whole(script))


def test_a_fresh_process_goes_on_with_one_environment():
    options = dict(num_envs=1, num_steps=32, n_pi=2, e_aux=1, distribution_mode="easy", env_id="coinrun")
    train(ppg_procgen, run_name="whole", total_timesteps=32 * 5, **options)
    train(ppg_procgen, run_name="halted", total_timesteps=32 * 3, **options)
    assert exit_code(start(ppg_procgen, resume="runs/halted", total_timesteps=32 * 5)) == 0
    assert_same_end("runs/halted", "runs/whole")


@both_scripts
def test_config_json_lists_the_parts_and_keeps_what_the_first_one_said(monkeypatch, script):
    monkeypatch.setattr(torch, "__version__", "2.13.0+first")
    path = train(script, run_name="run", total_timesteps=2 * ROLLOUT)
    first = json.loads((path / "config.json").read_text())
    monkeypatch.setattr(torch, "__version__", "2.14.0+second")
    train(script, resume=path, total_timesteps=3 * ROLLOUT)

    config = json.loads((path / "config.json").read_text())
    one, other = config["parts"]
    assert (one["global_step"], other["global_step"]) == (0, 2 * ROLLOUT)
    assert (one["versions"]["torch"], other["versions"]["torch"]) == ("2.13.0+first", "2.14.0+second")
    assert {"device", "precision", "git_commit"} < one.keys() == other.keys()
    assert config["args"].pop("total_timesteps") == 3 * ROLLOUT and first["args"].pop("total_timesteps") == 2 * ROLLOUT
    assert {name: x for name, x in config.items() if name != "parts"} == {
        name: x for name, x in first.items() if name != "parts"
    }


def test_no_memory_map_of_the_checkpoint_outlives_the_loading(monkeypatch):
    """A map of a file that is replaced and deleted would keep it on the disk, and a pruned one would end in SIGBUS."""
    path, maps = train(ppg_procgen, run_name="run", total_timesteps=2 * ROLLOUT), []
    read_maps = lambda: maps.append(Path("/proc/self/maps").read_text())  # noqa: E731
    monkeypatch.setattr(ppg_procgen, "play", at_call(ppg_procgen, "play", 1, read_maps))
    train(ppg_procgen, resume=path, total_timesteps=3 * ROLLOUT)
    assert len(maps) == 1 and "checkpoint.pt" not in maps[0]


@pytest.mark.parametrize("interval, iterations", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (None, [0, 3, 5])])
def test_checkpoints_come_at_the_start_at_their_interval_and_at_the_end(monkeypatch, interval, iterations):
    """By default after each phase."""
    saved, save = [], torch.save
    monkeypatch.setattr(
        torch, "save", lambda what, file: (saved.append(what["global_step"] // ROLLOUT), save(what, file))
    )
    train(ppg_procgen, total_timesteps=5 * ROLLOUT, checkpoint_interval=interval)
    assert saved == iterations


# Kills


@both_scripts
def test_kills_at_random_moments_change_nothing(script):
    steps = ROLLOUT * 20
    began = time.time()
    assert exit_code(start(script, run_name="whole", total_timesteps=steps)) == 0
    duration = time.time() - began

    process = start(script, run_name="killed", total_timesteps=steps)
    while not Path("runs/killed/checkpoint.pt").exists():
        time.sleep(0.001)
    moments = random.Random(script.__name__)
    for _ in range(3):
        time.sleep(moments.uniform(0, duration / 8))
        assert process.is_alive(), "the run ended before it was killed three times"
        process.kill()
        process.join()
        process = start(script, resume="runs/killed")
    assert exit_code(process) == 0
    assert_same_end("runs/killed", "runs/whole")


def kill_while_writing(script):
    """SIGKILL when half of the third iteration's checkpoint is in its temporary file."""
    save, saved = torch.save, []

    def save_half(checkpoint, file):
        saved.append(checkpoint)
        save(checkpoint, file)
        if saved[-1]["global_step"] == 3 * ROLLOUT:
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half


def kill_before_renaming(script):
    """SIGKILL when the third iteration's checkpoint is written, and not yet in its place."""
    replace, replaced = os.replace, []

    def replace_or_die(source, target):
        replaced.append(target.name)
        if replaced.count("checkpoint.pt") == 1 + 3:  # the first is of the start
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die


def kill_in_auxiliary_phase(script):
    """SIGKILL in its third epoch: the rows of two epochs are in the table, and not in the checkpoint."""
    script.auxiliary_loss = sending_at_call(script, "auxiliary_loss", 5, signal.SIGKILL)


def kill_in_update(script):
    """SIGKILL after the third iteration's rollout."""
    script.gae = sending_at_call(script, "gae", 3, signal.SIGKILL)


@pytest.mark.parametrize(
    "script, prepare",
    [
        (ppg_procgen, kill_while_writing),
        (ppo_procgen, kill_before_renaming),
        (ppg_procgen, kill_before_renaming),
        (ppg_procgen, kill_in_auxiliary_phase),
        (ppo_procgen, kill_in_update),
    ],
)
def test_a_kill_at_the_worst_moment_changes_nothing(whole, script, prepare):
    assert exit_code(start(script, prepare, run_name="killed", total_timesteps=ROLLOUT * 7)) == -signal.SIGKILL
    assert load("runs/killed")["global_step"] == 2 * ROLLOUT
    train(script, resume="runs/killed")
    assert_same_end("runs/killed", whole(script))


def kill_with_the_fifth_row(script):
    """SIGKILL as soon as it is logged, with a disk that takes its time over TensorBoard's events."""
    log_iteration, write = script.Run.log_iteration, RecordWriter.write

    def log_and_die(run, *args):
        log_iteration(run, *args)
        if run.iteration == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_slowly(writer, data):
        time.sleep(0.01)
        write(writer, data)

    script.Run.log_iteration, RecordWriter.write = log_and_die, write_slowly


def copy_the_tables_at_the_start(script):
    def copy_them():
        for path in Path("runs/run").glob("*.csv"):
            shutil.copy(path, f"at_start_{path.name}")

    script.play = at_call(script, "play", 1, copy_them)


@both_scripts
def test_what_came_after_the_checkpoint_goes_when_the_run_that_crashed_is_resumed(whole, script):
    """Rows and points in TensorBoard are there up to the crash, and once after the run has gone on."""
    options = dict(total_timesteps=ROLLOUT * 7, checkpoint_interval=2)
    process = start(script, kill_with_the_fifth_row, run_name="run", **options)
    assert exit_code(process) == -signal.SIGKILL
    assert load("runs/run")["global_step"] == 4 * ROLLOUT
    steps = [ROLLOUT * i for i in range(1, 8)]
    assert list(rows("runs/run").global_step) == events("runs/run", "losses/policy_loss") == steps[:5]

    assert exit_code(start(script, copy_the_tables_at_the_start, resume="runs/run")) == 0
    _, *lines = Path("at_start_progress.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines] == steps[:4]
    assert_same_end("runs/run", whole(script))
    for tag in ("losses/policy_loss", "charts/episodes", "charts/SPS"):
        assert events("runs/run", tag) == steps
    if script is ppg_procgen:
        assert events("runs/run", "auxiliary/aux_kl") == [step for step in (steps[2], steps[5]) for _ in range(3)]


def test_auxiliary_rows_of_a_phase_that_is_to_be_repeated_are_gone_before_it_is():
    """Killed in the first auxiliary phase: the checkpoint before it has no row of any."""
    assert exit_code(start(ppg_procgen, kill_in_auxiliary_phase, run_name="run", total_timesteps=ROLLOUT * 7)) == -9
    assert len(rows("runs/run", "auxiliary")) == 2
    assert exit_code(start(ppg_procgen, copy_the_tables_at_the_start, resume="runs/run")) == 0
    assert Path("at_start_auxiliary.csv").read_text() == ""


@both_scripts
def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_one_before(monkeypatch, script):
    """Or a machine that loses power could leave an empty file under the name of a whole one."""
    calls, fsync, replace = [], os.fsync, os.replace

    def note_fsync(file):
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        calls.append(("fsync", path, os.path.getsize(path)))
        fsync(file)

    def note_replace(source, target):
        calls.append(("replace", os.path.abspath(source), os.path.getsize(source)))
        assert Path(source).parent == Path(target).parent
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    train(script, run_name="run", total_timesteps=ROLLOUT)
    replaced = [call[1:] for call in calls if call[0] == "replace"]
    assert {Path(path).stem for path, _ in replaced} == {"config", "progress", "checkpoint"}
    for before, after in zip(calls[::2], calls[1::2], strict=True):
        assert (before[0], after[0]) == ("fsync", "replace") and before[1:] == after[1:]
        assert after[2] > 0


class Intruder:
    """What unpickling it would do."""

    def __reduce__(self):
        return Path.touch, (Path("intruder"),)


@both_scripts
def test_a_checkpoint_from_a_stranger_runs_no_code(capsys, script):
    path = train(script, run_name="run", total_timesteps=ROLLOUT)
    torch.save(load(path) | {"normalizer": Intruder()}, path / "checkpoint.pt")
    with pytest.raises(SystemExit) as stop:
        train(script, resume=path, total_timesteps=2 * ROLLOUT)
    assert stop.value.code == 2 and "--resume" in capsys.readouterr().err
    assert not Path("intruder").exists()


# Signals


# The fifth iteration's advantages; the third one's, before an auxiliary phase; its first and second epoch.
MOMENTS = [
    (signal.SIGTERM, "gae", 5, 5, 0),
    (signal.SIGINT, "gae", 3, 3, 0),
    (signal.SIGTERM, "auxiliary_loss", 1, 3, 1),
    (signal.SIGINT, "auxiliary_loss", 3, 3, 2),
    (signal.SIGTERM, "auxiliary_loss", 6, 3, 0),
]


@pytest.mark.parametrize("signum, function, call, iterations, aux_epochs", MOMENTS)
def test_a_signal_stops_at_the_next_boundary(monkeypatch, capfd, whole, signum, function, call, iterations, aux_epochs):
    handler = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        patch.setattr(ppg_procgen, function, sending_at_call(ppg_procgen, function, call, signum))
        with pytest.raises(SystemExit) as stop:
            train(ppg_procgen, run_name="stopped", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    assert stop.value.code == 128 + signum
    assert signal.getsignal(signum) is handler, "the handlers are put back"
    checkpoint = load("runs/stopped")
    (own,) = checkpoint["processes"]
    assert (checkpoint["global_step"], own["buffer"]["aux_epochs"]) == (iterations * ROLLOUT, aux_epochs)
    epochs = {5: 3, 3: aux_epochs or (3 if call == 6 else 0)}[iterations]
    assert checkpoint["tables"]["auxiliary"].count("\n") == (1 + epochs if epochs else 0)

    # The command it prints is the one that goes on.
    out, err = capfd.readouterr()
    assert "stopping at the next boundary" in err
    command = shlex.split(out.split("to go on: ")[1])
    assert command[0] == "python" and Path(command[1]).resolve() == Path(ppg_procgen.__file__)
    monkeypatch.setattr(sys, "argv", [*command[1:], "--device", "cpu"])
    ppg_procgen.main(ppg_procgen.parse_args())
    assert_same_end("runs/stopped", whole(ppg_procgen))


def test_a_phase_that_was_resumed_in_its_auxiliary_epochs_is_saved_at_its_end(monkeypatch):
    first_minibatch = sending_at_call(ppg_procgen, "auxiliary_loss", 1, signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(ppg_procgen, "auxiliary_loss", first_minibatch)
        train(ppg_procgen, run_name="run", total_timesteps=ROLLOUT * 7)
    (process,) = load("runs/run")["processes"]
    assert len(process["buffer"]["rollouts"]) == 3 and process["buffer"]["aux_epochs"] == 1

    def crash():
        raise KeyboardInterrupt

    monkeypatch.setattr(ppg_procgen, "gae", at_call(ppg_procgen, "gae", 1, crash))
    with pytest.raises(KeyboardInterrupt):
        train(ppg_procgen, resume="runs/run")
    (process,) = load("runs/run")["processes"]
    assert process["buffer"] == {"rollouts": [], "aux_epochs": 0}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ppo_stops_at_the_next_boundary_too(monkeypatch, whole, signum):
    with monkeypatch.context() as patch:
        patch.setattr(ppo_procgen, "gae", sending_at_call(ppo_procgen, "gae", 2, signum))
        with pytest.raises(SystemExit) as stop:
            train(ppo_procgen, run_name="stopped", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    assert stop.value.code == 128 + signum and load("runs/stopped")["global_step"] == 2 * ROLLOUT
    train(ppo_procgen, resume="runs/stopped")
    assert_same_end("runs/stopped", whole(ppo_procgen))


@both_scripts
def test_a_signal_in_the_last_iteration_leaves_a_finished_run(monkeypatch, script, capfd):
    monkeypatch.setattr(script, "gae", sending_at_call(script, "gae", 2, signal.SIGTERM))
    path = train(script, run_name="run", total_timesteps=ROLLOUT * 2)
    assert load(path)["global_step"] == 2 * ROLLOUT
    assert f"{path} has {ROLLOUT * 2} steps" in capfd.readouterr().out


def two_signals(script, seconds_apart):
    clock = itertools.count(step=seconds_apart)
    script.time = SimpleNamespace(time=time.time, monotonic=lambda: next(clock))
    script.gae = sending_at_call(script, "gae", 3, signal.SIGTERM, signal.SIGINT)


@both_scripts
def test_a_second_signal_stops_at_once_and_leaves_the_last_checkpoint_whole(script):
    prepare = functools.partial(two_signals, seconds_apart=3)
    process = start(script, prepare, run_name="run", total_timesteps=ROLLOUT * 7)
    assert exit_code(process) == 128 + signal.SIGINT
    assert load("runs/run")["global_step"] == 2 * ROLLOUT and len(rows("runs/run")) == 2


@both_scripts
def test_signals_within_two_seconds_are_one_request_to_stop(script):
    prepare = functools.partial(two_signals, seconds_apart=1)
    process = start(script, prepare, run_name="run", total_timesteps=ROLLOUT * 7)
    assert exit_code(process) == 128 + signal.SIGTERM
    assert load("runs/run")["global_step"] == 3 * ROLLOUT and len(rows("runs/run")) == 3


@both_scripts
def test_a_closed_terminal_stops_a_run_with_a_checkpoint_unless_nohup_ignores_it(monkeypatch, script):
    monkeypatch.setattr(script, "gae", sending_at_call(script, "gae", 2, signal.SIGHUP))
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stop:
            train(script, run_name="stopped", total_timesteps=ROLLOUT * 7)
        assert stop.value.code == 128 + signal.SIGHUP and load("runs/stopped")["global_step"] == 2 * ROLLOUT

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        monkeypatch.setattr(script, "gae", sending_at_call(script, "gae", 2, signal.SIGHUP))
        assert load(train(script, run_name="ignored", total_timesteps=ROLLOUT * 7))["global_step"] == 7 * ROLLOUT
    finally:
        signal.signal(signal.SIGHUP, handler)


def with_nobody_there(streams, signum, script):
    """No one reads what the process writes; in the third iteration it sends itself a signal."""
    reading, writing = os.pipe()
    os.close(reading)
    for stream in streams:
        os.dup2(writing, stream)
    if signum:
        script.gae = sending_at_call(script, "gae", 3, signum)


@both_scripts
def test_a_run_trains_to_its_end_with_nobody_there(whole, script):
    nobody = functools.partial(with_nobody_there, [1, 2], None)
    assert exit_code(start(script, nobody, run_name="run", total_timesteps=ROLLOUT * 7)) == 0
    assert_same_end("runs/run", whole(script))


@pytest.mark.parametrize("streams", [[2], [1, 2]])
@both_scripts
def test_a_signal_stops_a_run_with_a_checkpoint_also_with_nobody_there(script, streams):
    nobody = functools.partial(with_nobody_there, streams, signal.SIGTERM)
    process = start(script, nobody, run_name="run", total_timesteps=ROLLOUT * 7, checkpoint_interval=100)
    assert exit_code(process) == 128 + signal.SIGTERM
    assert load("runs/run")["global_step"] == 3 * ROLLOUT and len(rows("runs/run")) == 3


def tell_when_listening(script):
    register = signal.signal

    def register_and_tell(signum, handler):
        previous = register(signum, handler)
        if signum == signal.SIGTERM and handler != signal.SIG_DFL:
            Path("listening").touch()
        return previous

    signal.signal = register_and_tell


def test_signals_at_random_moments_change_nothing():
    options = dict(total_timesteps=ROLLOUT * 20, checkpoint_interval=100)
    began = time.time()
    assert exit_code(start(ppg_procgen, run_name="whole", **options)) == 0
    duration = time.time() - began

    moments = random.Random(2)
    process = start(ppg_procgen, tell_when_listening, run_name="run", **options)
    for _ in range(3):
        while not Path("listening").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, duration / 8))
        Path("listening").unlink()
        process.terminate()
        assert exit_code(process) == 128 + signal.SIGTERM
        process = start(ppg_procgen, tell_when_listening, resume="runs/run")
    assert exit_code(process) == 0
    assert_same_end("runs/run", "runs/whole")


# Two writers


def hold(script):
    """In the third iteration the process tells that it is there, and waits."""

    def wait():
        Path("holding").touch()
        signal.pause()

    script.gae = at_call(script, "gae", 3, wait)


@both_scripts
def test_a_directory_has_one_writer_and_a_killed_one_leaves_no_lock(whole, capsys, script):
    process = start(script, hold, run_name="run", total_timesteps=ROLLOUT * 7)
    try:
        while not Path("holding").exists():
            time.sleep(0.01)
        before = {path: path.read_bytes() for path in Path("runs/run").iterdir()}
        complaint = refused(capsys, script, resume="runs/run")
    finally:
        process.kill()
        process.join()
    assert "--resume runs/run: " in complaint and "no process writes to" in complaint
    assert {path: path.read_bytes() for path in Path("runs/run").iterdir()} == before
    train(script, resume="runs/run")
    assert_same_end("runs/run", whole(script))


# Files that are no checkpoint


def refused(capsys, script, **options):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train(script, **options)
    complaint = capsys.readouterr().err
    assert stop.value.code == 2 and complaint.count("\n") == 1, complaint
    return complaint


class Evil:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("kind", ["truncated", "empty", "foreign", "of another network", "evil", "missing"])
@both_scripts
def test_a_file_that_is_no_checkpoint_gets_one_clear_line(whole, script, kind, capsys):
    shutil.copytree(whole(script), "run")
    path = Path("run/checkpoint.pt")
    checkpoint = load("run")
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        torch.save({"state_dict": checkpoint["agent"]}, path)
    elif kind == "of another network":
        checkpoint["agent"]["policy_head.weight"] = torch.zeros(15, 17)
        torch.save(checkpoint, path)
    elif kind == "evil":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        path.unlink()
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    complaint = refused(capsys, script, resume="run", total_timesteps=ROLLOUT * 8)
    assert "--resume run: expected a whole checkpoint.pt of this script there (" in complaint
    assert not Path("hacked").exists()
    assert {path: path.read_bytes() for path in Path("run").iterdir()} == before


# Numbers that are not finite


def spoil(name, call, make, script):
    """Let the n-th call of a loss function return what `make` makes of its result; write a line for every step."""
    function, calls, step = getattr(script, name), [], torch.optim.Adam.step

    def spoiling(*args):
        calls.append(args)
        result = function(*args)
        return make(result) if len(calls) == call else result

    def step_and_tell(optimizer):
        with open("steps.txt", "a") as file:
            print(file=file)
        step(optimizer)

    setattr(script, name, spoiling)
    torch.optim.Adam.step = step_and_tell


def not_a_number(loss):
    return loss * math.nan


def infinite_gradient(loss):
    """A finite loss, 0 · ∞ away from a finite gradient: √x has slope ∞ at 0."""
    return loss + (loss - loss).sqrt()


def joint_loss_not_a_number(losses):
    return losses[0] * math.nan, *losses[1:]


POLICY_CALL = {ppo_procgen: 8, ppg_procgen: 4}  # in the second iteration: E epochs of two minibatches in each


@pytest.mark.parametrize("make", [not_a_number, infinite_gradient])
@both_scripts
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_optimizer_steps_on_it(whole, script, make):
    spoiled = functools.partial(spoil, "policy_loss", POLICY_CALL[script], make)
    assert exit_code(start(script, spoiled, run_name="run", total_timesteps=ROLLOUT * 7)) == 1
    assert "RuntimeError" in Path("stderr.txt").read_text() and "non-finite" in Path("stderr.txt").read_text()
    assert len(Path("steps.txt").read_text()) == POLICY_CALL[script] - 1
    assert load("runs/run")["global_step"] == 1 * ROLLOUT
    assert list(rows("runs/run").global_step) == events("runs/run", "losses/policy_loss") == [ROLLOUT]
    train(script, resume="runs/run")
    assert_same_end("runs/run", whole(script))


def test_an_auxiliary_gradient_that_is_not_finite_stops_the_run_too(whole):
    spoiled = functools.partial(spoil, "auxiliary_loss", 4, joint_loss_not_a_number)
    assert exit_code(start(ppg_procgen, spoiled, run_name="run", total_timesteps=ROLLOUT * 7)) == 1
    assert "non-finite" in Path("stderr.txt").read_text()
    assert len(Path("steps.txt").read_text()) == 3 * 2 + 3
    assert load("runs/run")["global_step"] == 2 * ROLLOUT
    assert list(rows("runs/run").global_step) == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
    assert list(rows("runs/run", "auxiliary").epoch) == [1]
    assert events("runs/run", "auxiliary/aux_kl") == [3 * ROLLOUT]
    train(ppg_procgen, resume="runs/run")
    assert_same_end("runs/run", whole(ppg_procgen))


# Weights & Biases


@both_scripts
def test_a_tracked_run_keeps_its_id_and_has_global_step_as_its_x_axis(monkeypatch, script):
    calls = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(script.wandb, "init", lambda **options: calls.append(options) or contextlib.nullcontext())
    monkeypatch.setattr(script.wandb, "define_metric", lambda *names, **options: calls.append((names, options)))
    path = train(script, run_name="run", total_timesteps=ROLLOUT, track=True, wandb_project_name="mine")
    train(script, resume=path, total_timesteps=2 * ROLLOUT)
    config = json.loads((path / "config.json").read_text())
    for begun, x_axis in (calls[:2], calls[2:]):
        assert (begun["id"], begun["resume"], begun["project"]) == (config["wandb_id"], "allow", "mine")
        assert x_axis == (("*",), {"step_metric": "global_step"})


def without_login(mode, script):
    """A home directory that knows of no account."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        del os.environ[name]
    home = Path(tempfile.mkdtemp())
    os.environ |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)}
    if mode:
        os.environ["WANDB_MODE"] = mode


@both_scripts
def test_track_without_a_login_is_refused_in_one_line_and_nothing_is_written(script):
    without = functools.partial(without_login, None)
    assert exit_code(start(script, without, run_name="run", total_timesteps=ROLLOUT * 2, track=True)) == 2
    complaint = Path("stderr.txt").read_text()
    assert re.fullmatch(
        rf"{script.__name__}\.py: error: --track: expected a login [^\n]*WANDB_MODE=offline[^\n]*\n", complaint
    )
    assert [path.name for path in Path().iterdir()] == ["stderr.txt"]


def test_resuming_with_track_and_without_a_login_leaves_the_run_as_it_was():
    path = train(ppg_procgen, run_name="run", total_timesteps=ROLLOUT * 2)
    before = {path: path.read_bytes() for path in path.iterdir()}
    without = functools.partial(without_login, None)
    process = start(ppg_procgen, without, resume="runs/run", total_timesteps=ROLLOUT * 3, track=True)
    assert exit_code(process) == 2
    assert "error: --track: expected a login" in Path("stderr.txt").read_text()
    assert {path: path.read_bytes() for path in path.iterdir()} == before
    assert {path.name for path in Path().iterdir()} == {"runs", "stderr.txt"}


def test_track_in_wandbs_disabled_mode_needs_no_login_and_writes_nothing_for_it():
    without = functools.partial(without_login, "disabled")
    assert exit_code(start(ppo_procgen, without, run_name="run", total_timesteps=ROLLOUT * 2, track=True)) == 0
    assert len(rows("runs/run")) == 2 and not Path("wandb").exists()


def track_offline_and_send(signum, script):
    without_login("offline", script)
    os.environ["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.1"  # by default 15 s

    def wait_and_send():
        while len(tracked_iterations()) < 5:
            time.sleep(0.05)
        send(signum)

    script.gae = at_call(script, "gae", 6, wait_and_send if signum else int)


def read_records(path):
    """A .wandb file is a LevelDB log: after 7 bytes of header, blocks of 32 KiB hold parts of records, each behind a
    checksum, its length and its kind (1 and 4: a record ends here)."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 < len(data):
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + 7 + length > len(data):
            return
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def read_offline_runs():
    """The ids, configurations and rows of all the offline runs in the working directory."""
    ids, configs, history = [], [], []
    for path in sorted(Path("wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in read_records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            if record.HasField("history"):
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return ids, configs, history


def tracked_iterations():
    return [row["global_step"] / ROLLOUT for row in read_offline_runs()[2] if "losses/policy_loss" in row]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_weights_and_biases_has_one_run_and_every_step_of_it_after_a_stop(signum):
    """The signal comes in the sixth iteration of seven, after a checkpoint at the fourth; a kill repeats the fifth."""
    options = dict(total_timesteps=ROLLOUT * 7, checkpoint_interval=2, track=True)
    process = start(ppg_procgen, functools.partial(track_offline_and_send, signum), run_name="run", **options)
    assert exit_code(process) == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert exit_code(start(ppg_procgen, functools.partial(track_offline_and_send, None), resume="runs/run")) == 0

    assert len(list(Path("wandb").glob("offline-run-*"))) == 2
    ids, configs, history = read_offline_runs()
    config = json.loads(Path("runs/run/config.json").read_text())
    assert set(ids) == {config["wandb_id"]} and len(ids) >= 2
    assert {"args", "git_commit", "versions"} <= configs[0].keys() and configs[0]["args"]["n_pi"] == 3

    assert tracked_iterations() == [1, 2, 3, 4, 5, *([5] if signum == signal.SIGKILL else []), 6, 7]
    epochs = [(row["auxiliary/phase"], row["auxiliary/epoch"]) for row in history if "auxiliary/phase" in row]
    assert epochs == [(phase, epoch) for phase in (1, 2) for epoch in (1, 2, 3)]
    assert not re.search(r"step.*(less|monoton|increas|ignor)|warn", Path("stderr.txt").read_text(), re.IGNORECASE)
