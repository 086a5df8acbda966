"""The launcher: a grid that always completes, whatever interrupts it, and never mixes configurations."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import torch
from filelock import FileLock
from procgen.env import ENV_NAMES
from ray.cluster_utils import Cluster

import ppg_procgen
import ppo_procgen
import run

ROOT = Path(run.__file__).parent.parent
RUN = [sys.executable, str(ROOT / "benchmark" / "run.py")]
SCRIPTS = ["--scripts", str(ROOT / "ppo_procgen.py"), str(ROOT / "ppg_procgen.py")]
GRID = [*SCRIPTS, "--seeds", "1", "2"]
PPG_ARGS = ["--ppg-args", "--n-pi 3 --e-aux 1 --aux-minibatch-segments 2"]
TINY = ["--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2", "--device", "cpu"]
TINY += ["--checkpoint-interval", "1"]
TOTAL = 12 * 2 * 16


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """run.py in this process, in an empty directory: standard output, standard error, and the exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        code = 0
        try:
            run.main()
        except SystemExit as stop:
            code = stop.code
        return *capsys.readouterr(), code

    return call


def training_in(out):
    """The training scripts at work in the grid's directory, by the directory of their run."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if (
            any(word.endswith("_procgen.py") for word in words)
            and str(out) in " ".join(words)
            and "--scripts" not in words
        ):
            at = words.index("--resume") + 1 if "--resume" in words else None
            path = Path(words[at]) if at else Path(*(words[words.index(f) + 1] for f in ("--run-dir", "--run-name")))
            found[path] = process
    return found


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def training_with_checkpoints(out, number):
    """`number` of the processes at work whose runs have a checkpoint and are not about to end, or nothing."""
    busy = {}
    for path, process in training_in(out).items():
        progress = path / "progress.csv"
        if (path / "checkpoint.pt").exists() and len(progress.read_text().splitlines()) < 9:
            busy[path] = process
    return busy if len(busy) >= number else {}


def without_time(path):
    return pd.read_csv(path / "progress.csv").drop(columns="SPS")


def test_a_grid_completes_after_ctrl_c_a_killed_run_and_a_lost_node(tmp_path, call, monkeypatch):
    out = tmp_path / "grid"
    words = [*GRID, *PPG_ARGS, "--out", str(out)]
    script_words = ["--", *TINY, "--total-timesteps", str(TOTAL)]

    # Ctrl-C at a terminal, which reaches the whole foreground process group, Ray's processes included.
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(RUN[0], [*RUN, *words, *script_words])
    os.set_blocking(terminal, False)
    screen = bytearray()

    def overview():
        with contextlib.suppress(OSError):  # nothing to read, or the other end is closed
            screen.extend(os.read(terminal, 65536))
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode(errors="ignore"))

    # The overview lags behind the scripts: interrupt once it has shown them, too.
    summary = re.compile(r"\d done, 2 running, \d waiting, 0 failed, 0:\d\d:\d\d left")
    row = re.compile(r"pp[og]_procgen +starpilot +running +[12] +\d+ +384 +\d+ +(nan|-?\d+\.\d\d)")
    interrupted = wait_until(
        lambda: summary.search(text := overview()) and row.search(text) and training_with_checkpoints(out, 2)
    )
    os.write(terminal, b"\x03")
    status = wait_until(lambda: overview() and ((done := os.waitpid(pid, os.WNOHANG))[0] and done))[1]
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert not training_in(out)
    for path in interrupted:
        assert "stopped after" in path.with_name(f"{path.name}.log").read_text()

    # The same command on a cluster of two nodes, with a core each.
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
    second_node = cluster.add_node(num_cpus=1)
    address = ["--address", cluster.address]
    log = open(tmp_path / "cluster.log", "w")
    launcher = subprocess.Popen([*RUN, *words, *address, *script_words], stdout=log, stderr=log)

    killed, process = wait_until(lambda: training_with_checkpoints(out, 1)).popitem()
    process.kill()
    wait_until(lambda: "=== " in killed.with_name(f"{killed.name}.log").read_text().partition("--resume")[2])

    raylet = psutil.Process(second_node.all_processes["raylet"][0].process.pid)

    def training_on_second_node():
        busy = training_with_checkpoints(out, 1).items()
        return next(((path, process) for path, process in busy if raylet in process.parents()), None)

    lost, process = wait_until(training_on_second_node)
    cluster.remove_node(second_node, allow_graceful=False)
    process.wait(20)
    steps_of_lost = without_time(lost).global_step.iloc[-1]

    assert launcher.wait(300) == 0, (tmp_path / "cluster.log").read_text()
    cluster.shutdown()
    assert "4 done, 0 running, 0 waiting, 0 failed" in (tmp_path / "cluster.log").read_text()
    assert without_time(lost).global_step.iloc[-1] == TOTAL > steps_of_lost
    for path in (killed, lost):
        assert path.with_name(f"{path.name}.log").read_text().count("--resume") >= 1

    # Once more: there is nothing left to do.
    logs = {path: path.read_text() for path in out.rglob("*.log")}
    assert len(logs) == 4
    assert call(*words, *script_words) == ("4 done, 0 running, 0 waiting, 0 failed\n", "", 0)
    assert {path: path.read_text() for path in out.rglob("*.log")} == logs

    # What was interrupted has the rows of a run that never was.
    for path in {*list(interrupted)[:1], killed, lost}:
        script = {"ppo_procgen": ppo_procgen, "ppg_procgen": ppg_procgen}[path.parts[-3]]
        arguments = ["--seed", path.name, *script_words[1:], "--run-name", path.parts[-3]]
        arguments += shlex.split(PPG_ARGS[1]) if script is ppg_procgen else []
        monkeypatch.setattr(sys, "argv", [script.__file__, *arguments, f"--run-dir=alone/{path.name}"])
        pd.testing.assert_frame_equal(without_time(path), without_time(script.main(script.parse_args())))


FULL_DISK = """
def save(*args):
    if args[0]["global_step"] and not Path(FULL).exists():
        Path(FULL).touch()
        raise OSError(28, "No space left on device")
    whole(*args)


whole, torch.save = torch.save, save
"""


def test_a_run_that_keeps_failing_is_reported_and_the_others_go_on(tmp_path):
    """Seed 1 has a damaged checkpoint. Seed 2 cannot save its last one once it has all rows, and is resumed."""
    script = tmp_path / "ppo_procgen.py"
    text = Path(ppo_procgen.__file__).read_text()
    prelude = f"FULL = {str(tmp_path / 'full')!r}\n{FULL_DISK}\n"
    script.write_text(text.replace('if __name__ == "__main__":', prelude + 'if __name__ == "__main__":'))
    words = ["--scripts", str(script), "--env-ids", "coinrun", "--seeds", "1", "2", "--out", "out"]
    words += ["--retries", "1", "--cpus-per-run", "0.5", "--", *TINY, "--total-timesteps", "32"]
    broken, full = (tmp_path / "out" / "ppo_procgen" / "coinrun" / seed for seed in "12")
    broken.mkdir(parents=True)
    (broken / "checkpoint.pt").write_text("no checkpoint")

    result = subprocess.run([*RUN, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert result.returncode == 1
    assert "1 done, 0 running, 0 waiting, 1 failed" in result.stdout
    for failure in (1, 2):
        assert f"{broken}.log: failure {failure} at 0 steps: RuntimeError: exit code 2: " in result.stdout
    assert "failure 3" not in result.stdout
    assert (broken / "checkpoint.pt").read_text() == "no checkpoint"

    assert re.search(rf"{full}.log: failure 1 at \d+ steps: RuntimeError: exit code 1: .*No space left", result.stdout)
    assert len(without_time(full)) == 1 and not list(full.parent.glob("2.incomplete-*"))
    assert torch.load(full / "checkpoint.pt", weights_only=True)["global_step"] == 32


@pytest.mark.parametrize("gpus, visible", [(0, ""), (0.5, "3")])
def test_runs_see_no_gpu_unless_they_are_given_some(gpus, visible, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray sets it for a run with a share of a GPU
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])\n")
    one = run.Run(script, "coinrun", 1, [], 32, tmp_path / "runs" / "1")
    list(run.train(one, run.environment(run.Args(cpus_per_run=2.5, gpus_per_run=gpus))))
    assert one.log.read_text().splitlines()[-1] == f"{visible} 2"


@pytest.mark.parametrize(
    "last_words, reason",
    [
        ("sys.exit('script.py: error: --gamma 2: expected 1')", "exit code 1: script.py: error: --gamma 2: expected 1"),
        ("raise ValueError('odd')", "exit code 1: ValueError: odd"),
        ("print('32 of 128 steps', flush=True); os.kill(os.getpid(), 9)", "exit code -9: 32 of 128 steps"),
        ("os._exit(3)", "exit code 3: "),
    ],
)
def test_the_reason_of_a_failure_is_the_last_error_of_this_attempt(last_words, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import atexit, os, sys\natexit.register(print, '64 of 128 steps')\n{last_words}\n")
    one = run.Run(script, "coinrun", 1, [], 32, tmp_path / "runs" / "1")
    one.log.parent.mkdir()
    one.log.write_text("ValueError: of an earlier attempt\n")
    with pytest.raises(RuntimeError, match=f"^{re.escape(reason)}$"):
        list(run.train(one, {}))


def test_dry_run_prints_the_96_commands_of_the_full_grid_and_writes_nothing(tmp_path, call):
    words = [*SCRIPTS, "--env-ids", "all", "--seeds", "1", "2", "3", "--ppg-args", "--n-pi 8", "--dry-run"]
    out, _, code = call(*words, "--", "--total-timesteps", "1_000_000")

    assert code == 0
    lines = out.splitlines()
    assert all(line.startswith("OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= ") for line in lines)
    assert len(lines) == len(set(lines)) == 16 * 3 * 2
    assert [("--n-pi 8" in line) for line in lines] == [("ppg_procgen.py" in line) for line in lines]
    for env_id in ENV_NAMES:
        assert sum(f"--env-id {env_id} " in line for line in lines) == 6
    # Whole seeds first: a grid that is stopped early is a smaller grid.
    assert [line.split("--seed ")[1][0] for line in lines] == ["1"] * 32 + ["2"] * 32 + ["3"] * 32
    assert list(tmp_path.iterdir()) == []


def test_a_line_of_dry_run_is_a_command_that_starts_or_resumes_the_run(tmp_path, call):
    words = ["--scripts", str(ROOT / "ppo_procgen.py"), "--env-ids", "coinrun", "--seeds", "7", "--dry-run"]
    run_path = tmp_path / "runs" / "benchmark" / "ppo_procgen" / "coinrun" / "7"
    steps = []
    for total in ("32", "64", "64"):
        line, _, _ = call(*words, "--", *TINY, "--total-timesteps", total)
        subprocess.run(line, shell=True, check=True, capture_output=True)
        steps.append(list(without_time(run_path).global_step))
        # What a kill before the first checkpoint leaves is put aside, not overwritten.
        if total == "64" and len(steps) == 2:
            assert "--resume" in line
            (run_path / "checkpoint.pt").unlink()
            rows = (run_path / "progress.csv").read_text().splitlines(keepends=True)
            (run_path / "progress.csv").write_text("".join(rows[:-1]))
    assert steps == [[32], [32, 64], [32, 64]]
    (aside,) = run_path.parent.glob("7.incomplete-*")
    assert list(without_time(aside).global_step) == [32]

    # What was put aside does not hold up a grid that grows.
    assert "--resume" in call(*words, "--", *TINY, "--total-timesteps", "96")[0]


def test_a_run_under_way_elsewhere_is_left_alone(existing_run, call):
    words = ["--scripts", str(ROOT / "ppg_procgen.py"), "--seeds", "1", "--dry-run", "--", *SAME]
    with FileLock(existing_run / ".lock"):
        assert call(*words)[:2] == ("", "0 done, 1 running, 0 waiting, 0 failed\n")
    assert call(*words)[0].startswith("mv ")


@pytest.fixture
def existing_run(tmp_path):
    """A directory of one PPG run, with the arguments of its config.json to change."""
    path = tmp_path / "runs" / "benchmark" / "ppg_procgen" / "starpilot" / "1"
    path.mkdir(parents=True)
    arguments = dataclasses.asdict(ppg_procgen.Args(total_timesteps=1_000_000))
    (path / "config.json").write_text(json.dumps({"script": "ppg_procgen.py", "args": arguments}))
    return path


SAME = ["--total-timesteps", "1_000_000"]


@pytest.mark.parametrize(
    "own, of_scripts, message",
    [
        ([], [*SAME, "--n-pi", "8"], "--n-pi 8: expected 32, as in {run}, or another --out"),
        (["--ppg-args", "--arch detach"], SAME, "--arch detach: expected dual, as in {run}, or"),
        (["--seeds", "2"], [*SAME, "--gamma", "0.9"], "--gamma 0.9: expected 0.999, as in {run}"),
        ([], ["--total-timesteps", "500_000"], "--total-timesteps 500000: expected 1000000, as in {run}"),
        (["--seeds", "2"], ["--total-timesteps", "2_000_000"], "--total-timesteps 2000000: expected 1000000"),
        (["--scripts", "nowhere.py"], SAME, "--scripts nowhere.py: expected a training script, a Python file"),
        (["--scripts", run.__file__], SAME, "expected ppo_procgen.py, ppg_procgen.py or a copy; this file has no"),
        (["--seeds", "1", "1"], SAME, "--seeds: expected at least one of each, each once"),
        (["--seeds"], SAME, "--seeds: expected at least one of each, each once"),
        (["--env-ids", "maze", "maze"], SAME, "--env-ids, --seeds: expected at least one of each, each once"),
        (["--seeds", "-1"], SAME, "--seeds -1: expected 0 to 2147483647"),
        (["--cpus-per-run", "0"], SAME, "--cpus-per-run 0.0: expected 0.0001 to 2147483647"),
        (["--gpus-per-run", "1.5"], SAME, "--gpus-per-run 1.5: expected a whole number, or a fraction of one GPU"),
        (["--memory-per-run", "nan"], SAME, "--memory-per-run nan: expected 0 to 2147483647"),
        (["--retries", "-1"], SAME, "--retries -1: expected 0 to 2147483647"),
        (["--ppo-args", "--gamma 1"], SAME, "--ppo-args --gamma 1: expected among --scripts one with ppo in its name"),
        (["--ppg-args", "--n-pi '8"], SAME, "--ppg-args --n-pi '8: expected words, quoted as in a shell"),
        (["--scripts", "bad.py"], SAME, "--scripts bad.py: expected a training script that can be imported (Name"),
        (["--out", "bad.py"], SAME, "--out bad.py: expected a directory that can be written to"),
        ([], [*SAME, "--device", "cuda"], "--device cuda: expected a GPU"),
        (["--gamma", "0.9"], SAME, "--gamma 0.9: expected flags of run.py; those of the scripts come after --"),
        ([], [*SAME, "--seed", "3"], "--seed: run.py sets this flag itself"),
        ([], [*SAME, "--run_dir=x"], "--run_dir=x: run.py sets this flag itself"),
        ([], [*SAME, "--num-minibatches", "7"], "--num-minibatches 7: expected a divisor of 16384"),
        ([], [*SAME, "--channels", "8", "16", "16"], "--channels [8, 16, 16]: expected [16, 32, 32], as in"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag_before_anything_is_written(
    own, of_scripts, message, existing_run, tmp_path, call
):
    (tmp_path / "bad.py").write_text("nonsense\n")
    before = sorted(tmp_path.rglob("*"))
    words = [*own, "--dry-run", "--", *of_scripts]
    if "--scripts" not in own:
        words = ["--scripts", str(ROOT / "ppg_procgen.py"), *words]
    _, error, code = call(*words)
    assert code == 2
    assert error.count("\n") == 1 and message.format(run=existing_run) in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", ["{", "{}", '{"args": 3}'])
def test_a_damaged_config_in_the_directory_of_the_grid_is_named(content, existing_run, call):
    (existing_run / "config.json").write_text(content)
    assert f"{existing_run}/config.json is not the config.json of one" in call("--dry-run", "--", *SAME)[1]


@pytest.mark.parametrize("rows", ["", "64,abc\n", "64,9\n64,9,1\n"])
def test_a_damaged_progress_csv_means_that_the_checkpoint_decides(rows, tmp_path):
    (tmp_path / "progress.csv").write_text(f"global_step,SPS\n{rows}")
    assert run.last_row(SimpleNamespace(path=tmp_path)) == {}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "nowhere.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_refused_at_once(address, tmp_path, call):
    _, error, code = call("--scripts", str(ROOT / "ppg_procgen.py"), "--address", address, "--", *SAME)
    assert code == 2 and error.count("\n") == 1
    assert f"--address {address}: expected the host:port of a Ray cluster" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seeds, total", [(["1"], "1_000_000"), (["1", "2"], "2_000_000"), (["2"], "1_000_000")])
def test_a_grid_may_grow_by_seeds_and_as_a_whole_by_steps(seeds, total, existing_run, call):
    words = ["--scripts", str(ROOT / "ppg_procgen.py"), "--seeds", *seeds, "--dry-run", "--", "--total-timesteps"]
    assert len(call(*words, total)[0].splitlines()) == len(seeds)


@pytest.fixture
def one_run(tmp_path):
    """A run of 100 steps whose progress.csv has 128."""
    path = tmp_path / "ppo_procgen" / "coinrun" / "1"
    path.mkdir(parents=True)
    (path / "progress.csv").write_text("global_step,SPS\n64,9\n128,9\n")
    return run.Run(tmp_path / "script.py", "coinrun", 1, [], 100, path)


def save_checkpoint(one, steps, **own):
    torch.save({"global_step": steps, "tables": {}, "processes": [own]}, one.path / "checkpoint.pt")


def test_a_run_is_finished_when_its_last_row_and_its_checkpoint_are_of_the_end(one_run):
    observations = torch.zeros(2, dtype=torch.uint8)
    cut_short = {"rollouts": [{"obs": observations}], "aux_epochs": 0}
    auxiliary_phase = {"rollouts": [{"obs": observations, "old_logits": torch.zeros(2)}], "aux_epochs": 1}
    for finished, steps, own in (
        (False, 64, {}),  # the last checkpoint was lost
        (False, 128, {"buffer": auxiliary_phase}),
        (True, 128, {}),
        (True, 128, {"buffer": cut_short}),
    ):
        save_checkpoint(one_run, steps, **own)
        for newer in (one_run.path / "progress.csv", one_run.path / "checkpoint.pt"):  # a copy may have other times
            os.utime(newer, (2e9, 2e9))
            assert run.is_finished(one_run) == finished
            os.utime(newer, (1e9, 1e9))
        (one_run.path / ".finished").unlink(missing_ok=True)
    (one_run.path / "checkpoint.pt").write_text("no checkpoint")
    assert not run.is_finished(one_run)
    save_checkpoint(one_run, 128)
    (one_run.path / "progress.csv").write_text("global_step,SPS\n64,9\n")
    assert not run.is_finished(one_run)


def test_a_run_with_all_its_rows_and_no_checkpoint_is_finished_if_it_was_seen_to_be(one_run):
    assert not run.is_finished(one_run)
    save_checkpoint(one_run, 128)
    assert run.is_finished(one_run)
    (one_run.path / "checkpoint.pt").unlink()  # by its owner, to save space
    assert run.is_finished(one_run)
    one_run.total_timesteps = 128
    assert run.is_finished(one_run)
    one_run.total_timesteps = 129  # more steps need a checkpoint to go on from
    assert not run.is_finished(one_run)
    (one_run.path / ".finished").write_text("")  # the disk was full
    one_run.total_timesteps = 100
    assert not run.is_finished(one_run)


@pytest.mark.parametrize("earlier", ["all rows", "nothing"])
def test_a_run_that_could_not_write_its_only_checkpoint_is_trained_again(earlier, one_run, tmp_path):
    """Where a launch finds its remains, and where its first attempt leaves them; finished, it is left alone."""
    if earlier == "nothing":
        shutil.rmtree(one_run.path)
    one_run.script.write_text(
        f"""import sys
from pathlib import Path
path, full_disk = Path(sys.argv[6], sys.argv[8]), Path({str(tmp_path / "full")!r})
path.mkdir()
(path / "progress.csv").write_text("global_step,SPS\\n128,9\\n")
if full_disk.exists():
    full_disk.unlink()
    sys.exit("No space left on device")
(path / "checkpoint.pt").write_text("deleted soon")
"""
    )
    if earlier == "nothing":
        (tmp_path / "full").touch()
        with pytest.raises(RuntimeError, match="exit code 1: No space left on device"):
            list(run.train(one_run, {}))
        assert not run.is_finished(one_run)
    list(run.train(one_run, {}))
    (aside,) = one_run.path.parent.glob("1.incomplete-*")
    assert aside.is_dir() and run.last_row(SimpleNamespace(path=aside))["global_step"] == 128

    (one_run.path / "checkpoint.pt").unlink()
    log = one_run.log.read_text()
    assert run.is_finished(one_run)
    list(run.train(one_run, {}))
    assert one_run.log.read_text() == log and list(one_run.path.parent.glob("1.incomplete-*")) == [aside]


def test_time_left_adds_the_steps_left_at_the_pace_of_each_script():
    def one(script, state, step, pace=None):
        row = dict(global_step=step) | ({} if pace is None else dict(SPS=pace))
        return run.Run(Path(script), "starpilot", 1, [], 1000, Path("x"), row, state)

    # 5 s and 25 s under way, 50 s and 25 s waiting, on two cores.
    runs = [
        one("ppo", "running", 900, 20),
        one("ppg", "running", 0, 40),
        one("ppo", "waiting", 0),
        one("ppg", "waiting", 0),
    ]
    states = "0 done, 2 running, 2 waiting, 0 failed"
    assert run.summary(runs) == f"{states}, 0:00:{round((5 + 25 + 50 + 25) / 2)} left"
    # The last long run cannot be spread over the cores.
    runs = [one("ppo", "running", 0, 10), one("ppg", "running", 960, 40)]
    assert run.summary(runs).endswith(", 0:01:40 left")
    assert run.summary([one("ppo", "waiting", 0)]) == "0 done, 0 running, 1 waiting, 0 failed"
    assert run.summary([one("ppo", "done", 1000, 10)]) == "1 done, 0 running, 0 waiting, 0 failed"


def test_the_words_after_two_dashes_go_to_the_scripts():
    args, of_scripts = run.parse_args(
        ["--ppg-args", "--n-pi 8", "--seeds", "4", "5", "--", "--total-timesteps", "1_000"]
    )
    assert args.ppg_args == "--n-pi 8"
    assert args.seeds == (4, 5)
    assert of_scripts == ["--total-timesteps", "1_000"]
