"""The two scripts as commands: what they accept, what they refuse, what they print, what a run leaves behind."""

import ast
import csv
import dataclasses
import fcntl
import functools
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen

SCRIPTS = [ppo_procgen, ppg_procgen]
GAMES = ["starpilot", "coinrun", "fruitbot"]
both_scripts = pytest.mark.parametrize("script", SCRIPTS, ids=["ppo", "ppg"])

# A rollout of 64 steps; three of them, so that PPG finishes a phase and begins another.
TINY = dict(num_envs=4, num_steps=16, num_minibatches=2, device="cpu")
THREE_ROLLOUTS = TINY | dict(total_timesteps="1_92")
PHASE = {ppo_procgen: {}, ppg_procgen: dict(n_pi=2, e_aux=1)}

COLUMNS = ["global_step", "episodic_return", "episodic_length", "episodes"]
COLUMNS += ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
AUX_LOSSES = ["aux_value_loss", "aux_kl", "aux_true_value_loss"]
AUX_COLUMNS = [f"{loss}_{epoch}" for epoch in ("first", "last") for loss in AUX_LOSSES] + ["aux_epochs"]


def flags(**options):
    """num_envs=4 → --num-envs 4; True stands for a flag that takes no value."""
    words = []
    for name, value in options.items():
        words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return words


def environment(**variables):
    return os.environ | dict(OMP_NUM_THREADS="1") | variables


def run(command, cwd, **variables):
    # Bytes: as text, carriage returns would read as line ends.
    return subprocess.run(command, cwd=cwd, capture_output=True, env=environment(**variables), timeout=300)


def command(script, **options):
    return [sys.executable, script.__file__, *flags(**options)]


def read_progress(run_path):
    with open(run_path / "progress.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_speed(run_path):
    return [{name: value for name, value in row.items() if name != "SPS"} for row in read_progress(run_path)]


def read_events(run_path):
    """tag → [(step, value)], as TensorBoard shows them."""
    accumulator = EventAccumulator(str(run_path)).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


# What a run prints and leaves behind


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Runs a script on a game, in a directory of its own; if it has run there before, the run is the one from then."""

    @functools.cache
    def run_once(script, game, again=False):
        cwd = tmp_path_factory.mktemp("cwd")
        done = run(command(script, env_id=game, **THREE_ROLLOUTS, **PHASE[script]), cwd)
        assert done.returncode == 0, done.stderr.decode()
        (path,) = (cwd / "runs").iterdir()
        return SimpleNamespace(script=script, game=game, path=path, cwd=cwd, out=done.stdout, err=done.stderr)

    return run_once


# Of the module, so that the tests of one run come one after the other, in one process.
@pytest.fixture(
    scope="module",
    params=[(script, game) for script in SCRIPTS for game in GAMES],
    ids=lambda p: f"{p[0].__name__}-{p[1]}",
)
def finished(request, run_once):
    return run_once(*request.param)


def test_a_run_leaves_its_four_files_and_nothing_else(finished):
    assert re.fullmatch(rf"{finished.game}__{finished.script.__name__}__1__\d{{10}}", finished.path.name)
    names = sorted(path.name for path in finished.path.iterdir())
    assert names[0] == "checkpoint.pt" and names[1] == "config.json" and names[3] == "progress.csv" and len(names) == 4
    assert names[2].startswith("events.out.tfevents.")
    assert [path.name for path in finished.cwd.iterdir()] == ["runs"]


def test_config_json_holds_every_argument(finished):
    config = json.loads((finished.path / "config.json").read_text())
    expected = finished.script.Args(env_id=finished.game, **TINY | PHASE[finished.script], total_timesteps=192)
    assert config["args"] == dataclasses.asdict(expected)
    assert config["script"] == Path(finished.script.__file__).name
    assert config["device"] and "git_commit" in config
    assert config["versions"]["python"] == sys.version.split()[0]
    assert config["versions"]["torch"] == torch.__version__ and "gymnasium" in config["versions"]


def test_progress_csv_has_its_columns_and_a_row_an_iteration(finished):
    rows = read_progress(finished.path)
    assert list(rows[0]) == COLUMNS + (AUX_COLUMNS if finished.script is ppg_procgen else []) + ["SPS"]
    assert [row["global_step"] for row in rows] == ["64", "128", "192"]
    assert all(float(row["SPS"]) > 0 and math.isfinite(float(row["policy_loss"])) for row in rows)
    if finished.script is ppg_procgen:
        assert [row["aux_epochs"] for row in rows] == ["0", "1", "0"]


def test_tensorboard_shows_what_progress_csv_holds(finished):
    events, rows = read_events(finished.path), read_progress(finished.path)
    assert {"charts/SPS", "losses/policy_loss"} <= set(events)
    for name in set(rows[0]) - {"global_step"}:
        tags = [tag for tag in events if tag.split("/")[1] == name]
        shown = [point for tag in tags for point in events[tag]]
        held = [(int(row["global_step"]), float(row[name])) for row in rows if row[name] != "nan"]
        assert [step for step, _ in shown] == [step for step, _ in held]
        assert [value for _, value in shown] == pytest.approx([value for _, value in held], rel=1e-5)
    assert len(events) == sum(any(row[name] != "nan" for row in rows) for name in set(rows[0]) - {"global_step"})


def test_the_checkpoint_needs_no_trust_and_holds_the_agent(finished):
    checkpoint = torch.load(finished.path / "checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == 3 and checkpoint["global_step"] == 192
    finished.script.Agent(15).load_state_dict(checkpoint["agent"])


def test_output_that_is_no_terminal_is_a_few_plain_lines_and_standard_error_stays_silent(finished):
    assert finished.err == b""
    assert b"\r" not in finished.out and b"gym" not in finished.out.lower()
    lines = finished.out.decode().splitlines()
    assert len(lines) < 10 and any("192/192" in line and "return" in line for line in lines)


@both_scripts
def test_the_same_command_gives_the_same_numbers(run_once, script):
    one, other = run_once(script, "starpilot").path, run_once(script, "starpilot", again=True).path
    assert without_speed(one) == without_speed(other)


def test_track_leaves_an_offline_run_of_weights_and_biases(tmp_path):
    done = run(command(ppg_procgen, **THREE_ROLLOUTS, track=True), tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr.decode()
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"charts/episodic_return" in content
    assert b"total_timesteps" in content and b"git_commit" in content, "all of config.json"


def test_importing_a_script_trains_nothing_and_leaves_nothing(tmp_path):
    path = str(Path(ppg_procgen.__file__).parent)
    done = run([sys.executable, "-c", "import ppo_procgen, ppg_procgen"], tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not list(tmp_path.iterdir())


def watch_terminal(words, cwd, columns, until, seconds=120):
    """What a command draws on a terminal of so many columns, until that matches the pattern `until`."""
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process = subprocess.Popen(words, cwd=cwd, stdout=other_end, stderr=other_end, env=environment())
    os.close(other_end)
    drawn, deadline = b"", time.monotonic() + seconds
    try:
        while not re.search(until, drawn.decode(errors="replace")):
            assert time.monotonic() < deadline and process.poll() is None, drawn.decode(errors="replace")
            if select.select([terminal], [], [], 1)[0]:
                drawn += os.read(terminal, 65536)
    finally:
        process.terminate()
        process.wait()
        os.close(terminal)
    return drawn.decode(errors="replace")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_one_live_line_with_phase_steps_speed_return_and_time_left(tmp_path, columns):
    """At the default length and phases: 80 columns have to be enough for a line as wide as that."""
    options = TINY | dict(total_timesteps=25_000_000)
    third_or_later = r"policy phase ([3-9]|\d\d)/32, (rollout|update):"
    drawn = watch_terminal(command(ppg_procgen, **options), tmp_path, columns, until=third_or_later + r"[^\r]*\r")
    assert "\n" not in drawn and drawn.startswith("\r")
    lines = [line.rstrip() for line in drawn.split("\r")[:-1] if re.match(third_or_later, line)]
    assert lines
    for line in lines:
        assert len(line) <= columns
        assert re.search(r"\d/25\.0M", line) and re.search(r"\d+(\.\d+)?step/s", line)
        assert re.search(r"\d+:\d\d:\d\d left", line), "time left"
        assert re.search(r"return (nan|-?\d+\.\d\d)", line), "return"


@both_scripts
def test_a_machine_without_git_trains_all_the_same(train, monkeypatch, script):
    monkeypatch.setenv("PATH", "")
    run_path = train(script, **small_run(script, total_timesteps=64))
    assert json.loads((run_path / "config.json").read_text())["git_commit"] is None


# What the flags mean


def parse(monkeypatch, script, **options):
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags(**options)])
    return script.parse_args()


@both_scripts
def test_help_lists_every_flag(monkeypatch, capsys, script):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, script, help=True)
    assert stop.value.code == 0
    listed = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert {"--" + field.name.replace("_", "-") for field in dataclasses.fields(script.Args)} <= listed


@both_scripts
def test_numbers_may_hold_underscores(monkeypatch, script):
    args = parse(monkeypatch, script, total_timesteps="100_000_000", num_levels="1_000")
    assert (args.total_timesteps, args.num_levels) == (100_000_000, 1000)


def test_no_epochs_in_the_auxiliary_phase_is_a_valid_wish(monkeypatch):
    args = parse(monkeypatch, ppg_procgen, e_aux=0)
    ppg_procgen.check_args(args)
    assert args.e_aux == 0


@both_scripts
def test_the_defaults_are_valid(monkeypatch, script):
    script.check_args(parse(monkeypatch, script))


# Bad input


def listing(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*"))


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Runs a script in an empty directory on flags it must refuse; returns its one line of complaint."""
    monkeypatch.chdir(tmp_path)

    def refuse(script, **options):
        before = listing(tmp_path)
        with pytest.raises(SystemExit) as stop:
            script.main(parse(monkeypatch, script, **options))
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == ""
        assert re.fullmatch(rf"{script.__name__}\.py: error: [^\n]+\n", err)
        assert listing(tmp_path) == before
        return err

    return refuse


def bad_numbers(script):
    """(flag, value) for every limit on a number, just outside of it."""
    counts = ["total_timesteps", "num_envs", "num_steps", "num_minibatches", "microbatch_size", "checkpoint_interval"]
    coefficients = ["learning_rate", "clip_coef", "ent_coef", "vf_coef", "kl_coef"]
    if script is ppo_procgen:
        counts += ["update_epochs"]
    else:
        counts += ["n_pi", "e_pi", "e_v", "aux_minibatch_segments"]
        coefficients += ["beta_clone", "aux_learning_rate", "aux_kl_limit"]
        yield "e_aux", "-1"
    yield from ((name, value) for name in counts for value in ("0", "-3"))
    yield from ((name, value) for name in coefficients for value in ("-0.1", "nan", "inf"))
    yield from ((name, value) for name in ("gamma", "gae_lambda") for value in ("-0.1", "1.01", "nan", "inf"))
    yield from ((name, value) for name in ("seed", "num_levels", "start_level") for value in ("-1", str(2**31)))


@pytest.mark.parametrize("script, name, value", [(script, *pair) for script in SCRIPTS for pair in bad_numbers(script)])
def test_a_number_out_of_range_is_refused(refuse, script, name, value):
    message = refuse(script, **TINY | dict(total_timesteps=64) | {name: value})
    assert f"--{name.replace('_', '-')} {value}: expected " in message


@both_scripts
@pytest.mark.parametrize(
    "options, parts",
    [
        (dict(env_id="starpilto"), ["--env-id starpilto:", "did you mean starpilot?"]),
        (dict(env_id="coin_run"), ["--env-id coin_run:", "did you mean coinrun?"]),
        (dict(env_id="bigfish", distribution_mode="extreme"), ["--distribution-mode extreme: bigfish", "starpilot"]),
        (dict(env_id="starpilot", distribution_mode="memory"), ["--distribution-mode memory: starpilot", "heist"]),
        (dict(env_id="fruitbot", distribution_mode="exploration"), ["--distribution-mode exploration: fruitbot"]),
        (dict(env_id="maze", distribution_mode="exploration", num_levels=5), ["--num-levels 5", "exploration"]),
        (dict(num_envs=5, total_timesteps=80), ["--num-envs 5:", "--num-minibatches 2"]),
        (dict(total_timesteps=63), ["--total-timesteps 63:", "64"]),
        (dict(device="cuda:99"), ["--device cuda:99:"]),
        (dict(device="toaster"), ["--device toaster:"]),
        (dict(device="meta"), ["--device meta:"]),
        (dict(run_name=""), ["--run-name ''"]),
        (dict(run_name="../elsewhere"), ["--run-name '../elsewhere'"]),
        (dict(run_dir="/proc/no/such"), ["--run-dir /proc/no/such:"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(refuse, script, options, parts):
    message = refuse(script, **TINY | dict(total_timesteps=64) | options)
    assert all(part in message for part in parts), message


def test_compiling_without_a_compiler_is_refused_before_anything_is_written(tmp_path):
    caches = tmp_path / "caches"
    process = run(
        command(ppg_procgen, **TINY, total_timesteps=64, compile=True),
        tmp_path,
        CXX="missing",
        TORCHINDUCTOR_CACHE_DIR=str(caches),
    )
    assert process.returncode == 2 and process.stdout == b""
    message = process.stderr.decode()
    assert re.fullmatch(r"ppg_procgen\.py: error: --compile: expected a C\+\+ compiler [^\n]*missing[^\n]*\n", message)
    assert {path.name for path in tmp_path.iterdir()} <= {caches.name}


@both_scripts
def test_a_run_never_overwrites_another(refuse, tmp_path, script):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "--run-name mine:" in refuse(script, **TINY, total_timesteps=64, run_name="mine")


@both_scripts
def test_resume_needs_a_run_with_a_checkpoint(refuse, tmp_path, script):
    assert "--resume nowhere:" in refuse(script, resume="nowhere")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    assert "--resume begun:" in refuse(script, resume="begun")


@both_scripts
@pytest.mark.parametrize(
    "name, old, new", [("gamma", "0.999", "0.9"), ("num_envs", "4", "8"), ("microbatch_size", "None", "32")]
)
def test_resume_refuses_a_changed_flag_and_names_both_values(refuse, run_once, script, name, old, new):
    path = run_once(script, "starpilot").path
    before = listing(path)
    message = refuse(script, resume=path, **{name: new})
    assert f"--{name.replace('_', '-')} {new}:" in message and old in message.split(new, 1)[1]
    assert listing(path) == before


@both_scripts
def test_resume_refuses_fewer_steps_and_the_run_of_the_other_script(refuse, run_once, script):
    message = refuse(script, resume=run_once(script, "starpilot").path, total_timesteps=128)
    assert "--total-timesteps 128:" in message and "192" in message
    other = SCRIPTS[1 - SCRIPTS.index(script)]
    assert f"{other.__name__}.py" in refuse(script, resume=run_once(other, "starpilot").path)


def test_a_refusal_is_all_that_the_shell_sees(tmp_path):
    done = run(command(ppg_procgen, env_id="starpilto"), tmp_path)
    assert done.returncode == 2 and done.stdout == b""
    assert re.fullmatch(rb"ppg_procgen\.py: error: --env-id starpilto: [^\n]+\n", done.stderr)
    assert not list(tmp_path.iterdir())


@both_scripts
@pytest.mark.parametrize("version", [(3, 9, 0), (3, 13, 0)])
def test_an_unsupported_python_is_told_which_ones_work(tmp_path, script, version):
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({script.__file__!r}, run_name='__main__')"
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode not in (0, 2) and b"Traceback" not in done.stderr
    assert all(works in done.stderr for works in (b"3.10", b"3.11", b"3.12"))


@both_scripts
def test_older_pythons_can_read_the_script_as_far_as_that_message(script):
    ast.parse(Path(script.__file__).read_text(), feature_version=(3, 8))


# Seeds and resuming, in this process and on a small network


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A short run through the command line's own path; returns its directory."""
    for script in SCRIPTS:
        monkeypatch.setattr(script, "Agent", functools.partial(script.Agent, channels=(4, 4, 4), features=16))
    monkeypatch.chdir(tmp_path)

    def train(script, **options):
        return script.main(parse(monkeypatch, script, **options))

    return train


def small_run(script, **options):
    game = dict(env_id="fruitbot", distribution_mode="hard")
    phase = {ppo_procgen: {}, ppg_procgen: dict(n_pi=3, e_aux=2)}
    return TINY | game | dict(precision="float32") | phase[script] | options


def identical(one, other):
    """Equality to the bit of what a checkpoint is made of."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


def assert_same_outcome(one, other):
    assert without_speed(one) == without_speed(other)
    checkpoints = [torch.load(path / "checkpoint.pt", weights_only=True) for path in (one, other)]
    for checkpoint in checkpoints:
        del checkpoint["rows"]  # progress.csv, compared above, with its time column
        checkpoint.pop("metrics", None)  # of the last row
    assert identical(*checkpoints)


@both_scripts
def test_another_seed_gives_other_numbers(train, script):
    options = small_run(script, total_timesteps=64)
    one, other = (train(script, **options, seed=seed) for seed in (1, 2))
    for name in ("policy_loss", "value_loss"):
        assert read_progress(one)[0][name] != read_progress(other)[0][name]


@both_scripts
@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_resumed_run_is_the_run_that_never_stopped(train, script, stop_after):
    """PPG's phases have three iterations: the run stops in the midst of one, or at its end."""
    whole = train(script, **small_run(script, run_name="whole", total_timesteps=4 * 64))
    parts = train(script, **small_run(script, run_name="parts", total_timesteps=stop_after * 64))
    assert len(read_progress(parts)) == stop_after
    assert train(script, resume=parts, total_timesteps=4 * 64) == parts
    assert len(read_progress(parts)) == 4
    assert_same_outcome(whole, parts)


@both_scripts
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(train, script, monkeypatch):
    """Killed in the fourth iteration, with a checkpoint at the second: the third is done again."""
    options = small_run(script, total_timesteps=5 * 64, checkpoint_interval=2)
    whole = train(script, **options, run_name="whole")

    rollouts, writers = [], []
    with monkeypatch.context() as patch:

        def gae(*arguments, original=script.gae):
            rollouts.append(arguments)
            if len(rollouts) == 4:
                raise KeyboardInterrupt
            return original(*arguments)

        patch.setattr(script, "gae", gae)

        def open_writer(*arguments, original=script.SummaryWriter, **options):
            writers.append(original(*arguments, **options))
            return writers[-1]

        patch.setattr(script, "SummaryWriter", open_writer)
        with pytest.raises(KeyboardInterrupt):
            train(script, **options, run_name="killed")
    writers[0].close()  # the third iteration's events are on the disk, as they would be in a longer run
    killed = Path("runs/killed")
    assert len(read_progress(killed)) == 3

    train(script, resume=killed)
    assert_same_outcome(whole, killed)
    assert [step for step, _ in read_events(killed)["losses/policy_loss"]] == [64, 128, 192, 256, 320]


@pytest.mark.parametrize("interval, iterations", [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (None, [3, 5])])
def test_checkpoints_come_at_their_interval_and_at_the_end(train, monkeypatch, interval, iterations):
    """By default after each phase."""
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda what, file: (saved.append(what["iteration"]), save(what, file)))
    train(
        ppg_procgen,
        **small_run(ppg_procgen, total_timesteps=5 * 64),
        **({} if interval is None else dict(checkpoint_interval=interval)),
    )
    assert saved == iterations
