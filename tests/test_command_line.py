"""The two scripts as commands: what they accept, what they refuse, what they print, what a run leaves behind."""

import csv
import dataclasses
import fcntl
import functools
import io
import json
import math
import os
import pty
import re
import select
import signal
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
from training import SCRIPTS, both_scripts, flags

# A rollout of 64 steps; three of them, so that PPG finishes a phase and begins another. In fruitbot, hard, random play
# earns and loses a reward now and then, and dies within some 30 steps.
TINY = dict(num_envs=4, num_steps=16, channels=(4, 4, 4), num_minibatches=2, device="cpu", precision="float32")
THREE_ROLLOUTS = TINY | dict(env_id="fruitbot", distribution_mode="hard", total_timesteps=192)
PHASE = {ppo_procgen: {}, ppg_procgen: dict(n_pi=2, e_aux=2)}

COLUMNS = ["global_step", "episodic_return", "episodic_length", "episodes"]
COLUMNS += ["policy_loss", "entropy", "approx_kl", "clipfrac", "value_loss", "grad_norm", "explained_variance", "SPS"]
AUXILIARY_COLUMNS = ["global_step", "phase", "epoch", "aux_value_loss", "aux_kl", "true_value_loss"]


def environment(**variables):
    return os.environ | dict(OMP_NUM_THREADS="1") | variables


def run(command, cwd, **variables):
    # Bytes: as text, carriage returns would read as line ends.
    return subprocess.run(command, cwd=cwd, capture_output=True, env=environment(**variables), timeout=120)


def command(script, **options):
    return [sys.executable, script.__file__, *flags(**options)]


def read_table(run_path, table="progress"):
    with open(run_path / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_speed(run_path):
    return [{name: value for name, value in row.items() if name != "SPS"} for row in read_table(run_path)]


# What a run prints and leaves behind


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Runs a script as a shell would, in a directory of its own; the second time, returns what the first time left."""

    @functools.cache
    def run_once(script):
        cwd = tmp_path_factory.mktemp("cwd")
        done = run(command(script, **THREE_ROLLOUTS, **PHASE[script]), cwd)
        assert done.returncode == 0, done.stderr.decode()
        (path,) = (cwd / "runs").iterdir()
        return SimpleNamespace(script=script, path=path, cwd=cwd, out=done.stdout.decode(), err=done.stderr.decode())

    return run_once


# Of the module, so that the tests of one run come one after the other, in one process.
@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def finished(request, run_once):
    return run_once(request.param)


def test_a_run_leaves_its_files_and_nothing_else(finished):
    assert re.fullmatch(rf"fruitbot__{finished.script.__name__}__1__\d{{10}}", finished.path.name)
    names = {re.sub(r"(tfevents)\..*", r"\1", path.name) for path in finished.path.iterdir()}
    expected = {".lock", "checkpoint.pt", "config.json", "events.out.tfevents", "progress.csv"}
    assert names == expected | ({"auxiliary.csv"} if finished.script is ppg_procgen else set())
    assert [path.name for path in finished.cwd.iterdir()] == ["runs"]


def test_config_json_holds_every_argument_and_what_the_run_ran_on(finished):
    config = json.loads((finished.path / "config.json").read_text())
    expected = dataclasses.asdict(finished.script.Args(**THREE_ROLLOUTS, **PHASE[finished.script]))
    assert config["args"] == expected | {"channels": [4, 4, 4]}
    assert (config["script"], config["processes"]) == (Path(finished.script.__file__).name, 1)
    assert re.fullmatch(r"\w{8}", config["wandb_id"])

    (part,) = config["parts"]
    assert part["global_step"] == 0 and part["device"] == "cpu" and part["precision"] in ("bfloat16", "float32")
    assert part["versions"]["python"] == sys.version.split()[0]
    assert part["versions"]["torch"] == torch.__version__ and "gymnasium" in part["versions"]
    assert part["git_commit"] is None or re.fullmatch(r"[0-9a-f]{40}", part["git_commit"])
    assert {name: config[name] for name in part} == part, "the first part is at the top level, too"


def test_progress_csv_has_its_columns_and_a_row_an_iteration(finished):
    table = read_table(finished.path)
    assert list(table[0]) == COLUMNS
    assert [row["global_step"] for row in table] == ["64", "128", "192"]
    assert all(math.isfinite(float(row[name])) for row in table for name in COLUMNS[4:])
    assert int(table[-1]["episodes"]) > 0 and float(table[-1]["episodic_length"]) < 48 and float(table[-1]["SPS"]) > 0


def test_auxiliary_csv_has_its_columns_and_a_row_an_epoch(run_once):
    table = read_table(run_once(ppg_procgen).path, "auxiliary")
    assert list(table[0]) == AUXILIARY_COLUMNS
    assert [(row["global_step"], row["phase"], row["epoch"]) for row in table] == [("128", "1", "1"), ("128", "1", "2")]
    assert all(math.isfinite(float(row[name])) for row in table for name in AUXILIARY_COLUMNS)


def test_tensorboard_shows_what_the_tables_hold_under_cleanrls_names(finished):
    accumulator = EventAccumulator(str(finished.path)).Reload()
    shown = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}

    def held(table, names):
        for name in names:
            points = [(int(row["global_step"]), float(row[name])) for row in read_table(finished.path, table)]
            yield name, [(step, pytest.approx(value, rel=1e-5)) for step, value in points if not math.isnan(value)]

    charts = ("episodic_return", "episodic_length", "episodes", "SPS")
    expected = {f"charts/{name}": points for name, points in held("progress", charts)}
    losses = sorted(set(COLUMNS[1:]) - set(charts))
    expected |= {f"losses/{name}": points for name, points in held("progress", losses)}
    if finished.script is ppg_procgen:
        expected |= {f"auxiliary/{name}": points for name, points in held("auxiliary", AUXILIARY_COLUMNS[1:])}
    assert shown == expected


def test_the_checkpoint_needs_no_trust_and_holds_the_agent(finished):
    checkpoint = torch.load(finished.path / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 192
    finished.script.Agent(15, channels=(4, 4, 4)).load_state_dict(checkpoint["agent"])


def test_output_that_is_no_terminal_is_one_line_and_standard_error_stays_silent(finished):
    assert finished.err == ""
    assert finished.out == f"{finished.path.relative_to(finished.cwd)} has 192 steps\n"


def test_the_same_command_gives_the_same_numbers_and_another_seed_gives_others(finished, train):
    options = THREE_ROLLOUTS | PHASE[finished.script]
    assert without_speed(train(finished.script, **options, run_name="again")) == without_speed(finished.path)
    other = without_speed(train(finished.script, **options, run_name="other", seed=2))
    for row, other_row in zip(without_speed(finished.path), other):
        assert row["policy_loss"] != other_row["policy_loss"] and row["value_loss"] != other_row["value_loss"]


def test_importing_the_scripts_trains_nothing_and_leaves_nothing(tmp_path):
    path = str(Path(ppg_procgen.__file__).parent)
    done = run([sys.executable, "-c", "import ppo_procgen, ppg_procgen"], tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not list(tmp_path.iterdir())


def open_terminal(columns):
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    return terminal, other_end


def read_terminal(terminal):
    """What has been drawn since the last call."""
    drawn = b""
    while select.select([terminal], [], [], 0.2)[0]:
        drawn += os.read(terminal, 65536)
    return drawn.decode()


def watch_terminal(words, cwd, columns, until, seconds=120):
    """What a command draws on a terminal of so many columns, until that matches the pattern `until`."""
    terminal, other_end = open_terminal(columns)
    process = subprocess.Popen(words, cwd=cwd, stdout=other_end, stderr=other_end, env=environment())
    os.close(other_end)
    drawn, deadline = b"", time.monotonic() + seconds
    try:
        while not re.search(until, drawn.decode(errors="replace")):
            assert time.monotonic() < deadline and process.poll() is None, drawn.decode(errors="replace")
            if select.select([terminal], [], [], 1)[0]:
                drawn += os.read(terminal, 65536)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return drawn.decode(errors="replace")


def assert_whole(line):
    """It fits 80 columns, and is not cut before it has shown everything."""
    assert len(line) <= 80
    assert re.search(r"\d[kM]?/25(\.0M|\d{6})\b", line), "steps of all"
    assert line.endswith("]")
    assert re.search(r"\d+(\.\d+)?k?step/s", line), "speed"
    assert re.search(r"<\d+:\d\d:\d\d", line), "time left"
    assert re.search(r"return (nan|-?\d+\.\d\d)\b", line), "return"


def test_a_terminal_shows_one_live_line_with_phase_steps_speed_return_and_time_left(tmp_path):
    options = TINY | dict(total_timesteps=25_000_000)
    later = r"policy [3-9]/32:"
    drawn = watch_terminal(command(ppg_procgen, **options), tmp_path, 80, until=later + r"[^\r]*\r")
    assert "\n" not in drawn and drawn.startswith("\r")
    lines = [line.rstrip() for line in drawn.split("\r")[:-1] if re.match(later, line)]
    assert lines
    for line in lines:
        assert_whole(line)
        iteration = int(re.match(r"policy (\d+)", line)[1])
        assert f" {64 * (iteration - 1)}/25.0M " in line


@pytest.mark.parametrize("hours, left", [(1.5, "[1:30:00<1:30:0"), (12, "[12:00:00<12:00:0")])
def test_the_line_fits_80_columns_also_where_it_is_longest(monkeypatch, tmp_path, hours, left):
    """In the last iteration of a phase, half way through 25 million steps, at the default sizes."""
    terminal, other_end = open_terminal(80)
    monkeypatch.setattr(sys, "stderr", open(other_end, "w"))
    args = ppg_procgen.Args(run_dir=str(tmp_path), total_timesteps=25_000_000)
    run = ppg_procgen.Run(args, False, {}, {})
    run.progress.start_t -= hours * 3600
    run.progress.n = run.num_iterations // 2 * run.rollout_steps
    run.progress.set_postfix_str("return -9.99", refresh=False)
    run.progress.set_description("policy 32/32")
    sys.stderr.flush()
    line = read_terminal(terminal).split("\r")[-1].rstrip()
    run.close("")
    read_terminal(terminal)
    monkeypatch.setattr(ppg_procgen, "RANK", 1)
    second = ppg_procgen.Run(args, False, {}, {})
    second.progress.set_description("policy 1/32")
    second.close("")
    assert read_terminal(terminal) == "", "the first process draws for all"
    sys.stderr.close()
    os.close(terminal)
    assert line.startswith("policy 32/32:  50%|") and left in line and "12.5M/25.0M" in line and "return -9.99" in line
    assert_whole(line)


# A terminal or a standard output that takes nothing


def test_a_run_goes_on_without_its_terminal_where_it_ignores_that_signal(tmp_path):
    """As one that was disowned: what it writes there is an error from then on."""
    terminal, other_end = open_terminal(80)
    words = command(ppg_procgen, **THREE_ROLLOUTS, **PHASE[ppg_procgen], run_name="left")
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    streams = dict(stdin=other_end, stdout=other_end, stderr=other_end)
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), preexec_fn=ignore, **streams)
    os.close(other_end)
    os.read(terminal, 1)
    os.close(terminal)
    assert process.wait(120) == 0
    assert len(read_table(tmp_path / "runs/left")) == 3


class Gone(io.StringIO):
    """Standard output whose reader has left."""

    def write(self, text):
        raise BrokenPipeError


@both_scripts
def test_a_run_ends_well_where_the_reader_of_its_output_has_left(train, monkeypatch, script):
    monkeypatch.setattr(sys, "stdout", Gone())
    run_path = train(script, **THREE_ROLLOUTS, **PHASE[script])
    assert len(read_table(run_path)) == 3
    print("what comes later does no harm either", flush=True)


def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


STREAMS = {
    "full": lambda: dict(stdout=open("/dev/full", "w")),
    "gone": lambda: dict(stdout=broken_pipe()),
    "both gone": lambda: dict(stdout=broken_pipe(), stderr=broken_pipe()),
    "closed": lambda: dict(preexec_fn=functools.partial(os.close, 1)),
}


def test_the_commands_train_to_their_end_without_a_standard_output(tmp_path):
    """Side by side, as each takes seconds to start."""
    runs = {}
    for case, script in zip(STREAMS, (ppo_procgen, ppg_procgen, ppo_procgen, ppg_procgen)):
        words = command(script, **THREE_ROLLOUTS, **PHASE[script], run_name=case)
        streams = dict(stderr=subprocess.PIPE) | STREAMS[case]()
        runs[case] = subprocess.Popen(words, cwd=tmp_path, env=environment(), **streams)
    for case, process in runs.items():
        err = process.communicate(timeout=120)[1] or b""
        assert process.returncode == 0, (case, err.decode())
        assert len(read_table(tmp_path / "runs" / case)) == 3
        assert err == b""


def test_a_machine_without_git_trains_all_the_same(train, monkeypatch):
    monkeypatch.setenv("PATH", "")
    run_path = train(ppo_procgen, **TINY, total_timesteps=64)
    assert json.loads((run_path / "config.json").read_text())["git_commit"] is None


# What the flags mean


def parse(monkeypatch, script, **options):
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags(**options)])
    return script.parse_args()


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A short run in an empty directory, through the command line's own path; returns the run's directory."""
    monkeypatch.chdir(tmp_path)
    return lambda script, **options: script.main(parse(monkeypatch, script, **options))


@both_scripts
def test_help_lists_every_flag_in_its_group(monkeypatch, capsys, script):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, script, help=True)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert script.__doc__.split("\n")[0] in " ".join(text.split())
    _, *groups = re.split(r"(?m)^\W*(\w+) options\W*$", text)
    flag = re.compile(r"^\W{1,3}(--[a-z-]+)", re.MULTILINE)
    listed = {name: set(flag.findall(lines)) for name, lines in zip(groups[::2], groups[1::2])}
    classes = {"problem": script.ProblemArgs, "ppo": script.PPOArgs, "machine": script.MachineArgs}
    if script is ppg_procgen:
        classes["ppg"] = script.PPGArgs
    for group, arguments in classes.items():
        assert listed[group] == {"--" + field.name.replace("_", "-") for field in dataclasses.fields(arguments)}
    assert {field.name for field in dataclasses.fields(script.Args)} == {
        field.name for arguments in classes.values() for field in dataclasses.fields(arguments)
    }


@both_scripts
def test_the_command_line_says_what_args_hold(monkeypatch, script):
    assert parse(monkeypatch, script) == script.Args(), "the defaults are valid"
    options = dict(env_id="maze", total_timesteps="100_000_000", num_levels="1_000", channels=(8, 16, 16))
    options |= dict(learning_rate="1e-3", microbatch_size=32, precision="float32", run_name="mine", compile=True)
    expected = options | dict(total_timesteps=100_000_000, num_levels=1000, learning_rate=0.001)
    assert parse(monkeypatch, script, **options) == script.Args(**expected)


def limits(script):
    """flag → what is just within its limits, and what is just outside."""
    counts = ["total_timesteps", "num_envs", "num_steps", "num_minibatches", "microbatch_size", "checkpoint_interval"]
    coefficients = ["learning_rate", "clip_coef", "ent_coef", "vf_coef", "kl_coef", "max_grad_norm"]
    if script is ppo_procgen:
        counts += ["update_epochs"]
    else:
        counts += ["n_pi", "e_pi", "e_v", "aux_minibatch_segments"]
        coefficients += ["beta_clone", "aux_learning_rate", "aux_kl_limit"]
        yield "e_aux", ["0"], ["-1"]
    yield from ((name, ["1"], ["0", "-3"]) for name in counts)
    yield from ((name, ["0"], ["-0.1", "nan", "inf"]) for name in coefficients)
    yield from ((name, ["0", "1"], ["-0.1", "1.01", "nan", "inf"]) for name in ("gamma", "gae_lambda"))
    yield from ((name, ["0", str(2**31 - 1)], ["-1", str(2**31)]) for name in ("seed", "num_levels"))
    yield "start_level", ["0", str(2**31 - 2)], ["-1", str(2**31)]


every_limit = pytest.mark.parametrize(
    "script, name, within, outside", [(script, *limit) for script in SCRIPTS for limit in limits(script)]
)


@every_limit
def test_a_number_just_outside_its_limit_is_refused_and_the_limit_is_not(
    refuse, monkeypatch, script, name, within, outside
):
    for value in outside:
        message = refuse(script, **TINY | dict(total_timesteps=64, num_levels=1) | {name: value})
        assert f"--{name.replace('_', '-')} {value}: expected " in message
    for value in within:
        options = dict(num_envs=1, num_steps=1, num_minibatches=1, total_timesteps=1, num_levels=1) | {name: value}
        assert getattr(parse(monkeypatch, script, **options), name) == float(value)


# Bad input


def listing(directory):
    return {path.relative_to(directory): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Runs a script in an empty directory on flags it must refuse; returns its one line of complaint."""
    monkeypatch.chdir(tmp_path)

    def refuse(script, box=False, **options):
        before = listing(tmp_path)
        with pytest.raises(SystemExit) as stop:
            script.main(parse(monkeypatch, script, **options))
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == ""
        if box:
            assert "--help" in err and "Traceback" not in err
        else:
            assert re.fullmatch(rf"{script.__name__}\.py: error: [^\n]+\n", err)
        assert listing(tmp_path) == before
        return err

    return refuse


@both_scripts
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_envs=5, total_timesteps=80, num_minibatches=3), "--num-minibatches 3: expected a divisor of 80"),
        (dict(total_timesteps=63), "--total-timesteps 63: expected at least 64"),
        (dict(channels=(4, 0, 4)), "--channels (4, 0, 4): expected"),
        (dict(start_level=5), "--start-level 5: expected --num-levels"),
        (dict(start_level=2**31 - 10, num_levels=10), "--start-level 2147483638: expected levels up to 2147483647"),
        (dict(run_name=""), "--run-name : expected a path or a name"),
        (dict(run_name="../elsewhere"), "--run-name ../elsewhere: expected the name of a directory"),
        (dict(run_dir="/proc/no/such"), "--run-dir /proc/no/such "),
        (dict(resume=""), "--resume : expected a path or a name"),
        (dict(resume="nowhere"), "--resume nowhere: expected the directory of a run"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(refuse, script, options, message):
    assert message in refuse(script, **TINY | dict(total_timesteps=64) | options)


def test_an_empty_resume_is_refused_also_in_the_directory_of_a_run(finished, refuse, monkeypatch):
    monkeypatch.chdir(finished.path)
    assert "--resume : expected a path or a name" in refuse(finished.script, resume="")


@both_scripts
@pytest.mark.parametrize(
    "name, value",
    [
        ("env_id", "starpilto"),
        ("distribution_mode", "extreme"),
        ("device", "toaster"),
        ("precision", "float16"),
        ("num_envs", "two"),
        ("total_timesteps", "1.5"),
        ("gamma", "high"),
        ("channels", (16, 32)),
        ("no_such_flag", "1"),
    ],
)
def test_what_is_no_number_no_choice_or_no_flag_is_refused_in_a_box(refuse, script, name, value):
    message = refuse(script, box=True, **TINY | dict(total_timesteps=64) | {name: value})
    assert "--" + name.replace("_", "-") in message
    assert str(value) in message or name == "channels"


def test_an_arch_that_is_none_is_refused_in_a_box(refuse):
    assert "--arch" in refuse(ppg_procgen, box=True, arch="single")


@both_scripts
def test_a_gpu_that_is_not_there_is_refused(refuse, monkeypatch, script):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device cuda: expected" in refuse(script, device="cuda")


@both_scripts
def test_each_process_needs_a_gpu_and_all_together_a_rollout(refuse, monkeypatch, script):
    monkeypatch.setattr(script, "WORLD_SIZE", 3)
    monkeypatch.setattr(script, "LOCAL_WORLD_SIZE", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = TINY | dict(total_timesteps=3 * 64)
    assert "--device cuda: expected a GPU a process, there are 2" in refuse(script, **options | dict(device="cuda"))
    message = refuse(script, **options | dict(total_timesteps=3 * 64 - 1))
    assert "--total-timesteps 191: expected at least 192" in message
    assert parse(monkeypatch, script, **options).total_timesteps == 192


@both_scripts
def test_too_little_memory_is_told_before_anything_is_written(refuse, monkeypatch, script):
    """A rollout is 64 · 12,288 bytes. PPO holds one while it plays the next; PPG a phase of two and the next."""
    needed = 64 * 12288 * (3 if script is ppg_procgen else 2)
    options = TINY | dict(total_timesteps=64) | PHASE[script]
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: SimpleNamespace(available=0.99 * needed))
    message = refuse(script, **options)
    assert "--num-envs 4: " in message
    assert f"take {needed / 1e9:.3g} GB" in message and f"{0.99 * needed / 1e9:.3g} GB at most" in message
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.01 * needed))
    assert script.main(parse(monkeypatch, script, **options)).exists()


@both_scripts
def test_two_processes_of_a_machine_share_its_memory(refuse, monkeypatch, script):
    needed = 64 * 12288 * (3 if script is ppg_procgen else 2)
    monkeypatch.setattr(script, "LOCAL_WORLD_SIZE", 2)
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.9 * needed))
    assert "--num-envs 4: " in refuse(script, **TINY | dict(total_timesteps=64) | PHASE[script])


@both_scripts
def test_the_process_that_has_least_memory_decides(refuse, monkeypatch, script):
    needed = 64 * 12288 * (3 if script is ppg_procgen else 2)
    options = TINY | dict(total_timesteps=64) | PHASE[script]
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: SimpleNamespace(available=1.01 * needed))
    for first, second in ((1, 0.9), (0.9, 1)):
        monkeypatch.setattr(script, "gather", lambda x, ratios=(first, second): [ratio * x for ratio in ratios])
        assert "--num-envs 4: " in refuse(script, **options)


@both_scripts
def test_a_run_never_overwrites_another(refuse, tmp_path, script):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "--run-name mine: expected a new directory" in refuse(script, **TINY, total_timesteps=64, run_name="mine")


@both_scripts
@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"script": "SCRIPT", "processes": 1, "args": {"no": 1}}'])
def test_resume_needs_a_config_of_this_script(refuse, tmp_path, script, text):
    (tmp_path / "begun").mkdir()
    if text is not None:
        (tmp_path / "begun" / "config.json").write_text(text.replace("SCRIPT", f"{script.__name__}.py"))
    assert "--resume begun: expected the directory of a run" in refuse(script, resume="begun")


@both_scripts
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("gamma", "0.999", "0.9"),
        ("seed", "1", "2"),
        ("num_envs", "4", "8"),
        ("channels", "(4, 4, 4)", (8, 16, 16)),
        ("microbatch_size", "None", "32"),
    ],
)
def test_resume_refuses_a_changed_flag_and_names_both_values(refuse, run_once, script, name, old, new):
    path = run_once(script).path
    before = listing(path)
    message = refuse(script, resume=path, **{name: new})
    shown = new if isinstance(new, str) else str(new)
    assert f"--{name.replace('_', '-')} {shown}: expected {old}, as the run was started with" in message
    assert listing(path) == before


@both_scripts
def test_resume_takes_the_runs_arguments_and_lets_what_changes_no_number_change(monkeypatch, run_once, script):
    path = run_once(script).path
    before = script.Args(**THREE_ROLLOUTS, **PHASE[script])
    assert parse(monkeypatch, script, resume=path) == dataclasses.replace(before, resume=str(path))
    options = dict(resume=str(path), total_timesteps=640, device="auto", checkpoint_interval=3, track=True)
    options |= dict(wandb_project_name="other")
    assert parse(monkeypatch, script, **options) == dataclasses.replace(before, **options)


@both_scripts
def test_resume_refuses_fewer_steps_the_other_scripts_run_and_another_number_of_processes(
    refuse, monkeypatch, run_once, script
):
    path = run_once(script).path
    assert "--total-timesteps 128: expected 192 or more" in refuse(script, resume=path, total_timesteps=128)
    other = SCRIPTS[1 - SCRIPTS.index(script)]
    message = refuse(script, resume=run_once(other).path)
    assert message.index(f"{other.__name__}.py", 20) < message.index(f"{script.__name__}.py", 20)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    message = refuse(script, resume=path)
    assert re.search(rf"--resume {path}: expected .*\b1\b.*\b2\b", message)


def test_a_refusal_is_all_that_the_shell_sees(tmp_path):
    done = run(command(ppg_procgen, num_envs=-1), tmp_path)
    assert done.returncode == 2 and done.stdout == b""
    assert re.fullmatch(rb"ppg_procgen\.py: error: --num-envs -1: expected [^\n]+\n", done.stderr)
    assert not list(tmp_path.iterdir())


# The README


def test_the_readmes_example_of_a_copied_script_applies_to_it_and_trains(tmp_path):
    source = Path(ppg_procgen.__file__).read_text()
    example = (Path(ppg_procgen.__file__).parent / "README.md").read_text().split("```diff\n")[1].split("```")[0]
    for hunk in re.split(r"^@@.*\n", example, flags=re.MULTILINE)[1:]:
        before, after = (
            "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " " + sign) for sign in "-+"
        )
        assert source.count(before) == 1
        source = source.replace(before, after)
    (tmp_path / "ppg_fast_value.py").write_text(source)

    options = (
        TINY | PHASE[ppg_procgen] | dict(total_timesteps=64, value_lr_factor=3, run_name="fast", channels=(4, 4, 4))
    )
    done = run([sys.executable, "ppg_fast_value.py", *flags(**options)], tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    groups = torch.load(tmp_path / "runs/fast/checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [5e-4, 1.5e-3]
    assert run([sys.executable, "ppg_fast_value.py", "--value-lr-factor=-1"], tmp_path).returncode == 2
