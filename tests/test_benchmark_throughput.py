"""benchmark/throughput.py: time goes to the part that spent it, in the work that the scripts do at their defaults."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tyro

import throughput
from training import SCRIPTS

FAST = throughput.Args(num_envs=8, num_steps=4, device="cpu")


@pytest.fixture(autouse=True)
def called_as_a_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["throughput.py"])


def parse(words):
    return tyro.cli(throughput.Args, args=[str(word) for word in words])


def test_time_goes_to_the_part_under_way_and_the_last_phase_counts(monkeypatch):
    """Nor does the time between the parts count."""
    now = 0

    def takes(seconds, result=None):
        def step(*args, **kwargs):
            nonlocal now
            now += seconds
            return result or (args, kwargs)

        return step

    class ProcgenVecEnv:
        step = takes(2)

    class Buffer:
        record_old_policy = takes(4)

    def play(envs):
        nonlocal now
        now += 1
        for _ in range(3):
            envs.step("actions")
            now += 10

    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    script = SimpleNamespace(ProcgenVecEnv=ProcgenVecEnv, Buffer=Buffer, play=play)
    script.targets, script.update, script.auxiliary_epoch = takes(7), takes(70, "losses"), takes(50)
    clock = throughput.Clock()
    clock.watch(script)
    between = takes(1000)
    for _ in range(2):
        between()
        script.play(script.ProcgenVecEnv())
        between()
        script.targets()
        between()
        assert script.update("agent", weight=1) == "losses"
        between()
        script.Buffer().record_old_policy()
        for _ in range(2):
            script.auxiliary_epoch()
            between()
    assert clock.seconds == {"acting": 1 + 3 * 10, "environment": 3 * 2, "update": 7 + 70, "auxiliary": 4 + 2 * 50}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_shares_of_time_add_up_and_memory_is_that_of_full_rollouts(script):
    line = throughput.measure(FAST, Path(script.__file__), "float32", False)
    shares = [line[f"{part} %"] for part in ("environment", "acting", "update", "auxiliary")]
    assert sum(shares) == pytest.approx(100)
    assert all(share > 0 for share in shares[:3]) and (shares[3] > 0) == (script is SCRIPTS[1])

    # 32 rollouts of observations for PPG, two for PPO; the process itself has loaded torch.
    observations = (32 if script is SCRIPTS[1] else 2) * 8 * 256 * 64 * 64 * 3
    assert 0.2e9 < 1e9 * line["memory, GB"] - observations < 4e9


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_shortened_run_has_the_minibatches_and_epochs_of_the_defaults(script):
    default = script.Args()
    args = throughput.shortened(default, parse(["--num-steps", "64"]))
    changed = {name for name, value in vars(args).items() if value != getattr(default, name)}
    assert changed - {"n_pi", "aux_minibatch_segments"} == {
        "num_steps",
        "num_minibatches",
        "total_timesteps",
        "checkpoint_interval",
    }
    assert args.num_envs * args.num_steps // args.num_minibatches == 64 * 256 // 8
    assert args.total_timesteps == 2 * 64 * 64  # a phase to warm up, and one that counts
    if script is SCRIPTS[1]:
        assert (args.n_pi, args.aux_minibatch_segments * args.num_steps) == (1, 4 * 256)


def test_a_measurement_ends_with_the_command(tmp_path):
    words = [sys.executable, throughput.__file__, "--out", str(tmp_path / "table")]
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (measuring := [p for p in psutil.Process(command.pid).children() if "spawn_main" in str(p.cmdline())]):
        assert command.poll() is None
        time.sleep(0.05)
    time.sleep(5)  # let it get to work
    command.terminate()
    assert command.wait(10) == 128 + signal.SIGTERM
    assert not any(process.is_running() for process in measuring)


def test_the_command_prints_the_table_that_it_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(throughput, "alone", lambda function, *arguments: function(*arguments))
    args = throughput.dataclasses.replace(FAST, scripts=(Path(SCRIPTS[0].__file__),), out=tmp_path / "v1.2.txt")
    table = throughput.main(args)
    text = (tmp_path / "v1.2.txt").read_text()
    assert capsys.readouterr().out == text
    assert "starpilot, 8 environments" in text
    row = next(line.split() for line in text.splitlines() if "ppo_procgen" in line)
    assert row[:4] == ["ppo_procgen", "float32", "no", f"{table['steps/s'][0]:,.0f}"]
    _, in_hardware = SCRIPTS[0].start_process(SCRIPTS[0].Args(num_envs=8, device="cpu"), num_rollouts=2)
    assert list(table.precision) == (["float32", "bfloat16"] if in_hardware else ["float32"])
    assert [path.name for path in tmp_path.iterdir()] == ["v1.2.txt"]


def test_compile_is_measured_beside_its_absence(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(throughput, "alone", lambda function, args, *rest: measured.append(rest) or {"steps/s": 1.0})
    throughput.main(parse(["--compile", "--precisions", "float32", "bfloat16", "--out", tmp_path / "table"]))
    paths = [Path(script.__file__) for script in SCRIPTS]
    assert set(measured) == {(p, x, c) for p in paths for x in ("float32", "bfloat16") for c in (False, True)}
    assert len(measured) == 2 * 2 * 2


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--num-envs", "0"], "--num-envs 0: expected 1 or more"),
        (["--scripts"], "--scripts: expected at least one training script"),
        (["--scripts", "missing.py"], "--scripts missing.py: expected a training script"),
        (["--scripts", __file__], "expected ppo_procgen.py, ppg_procgen.py or a copy"),
        (["--microbatch-size", "0"], "--microbatch-size 0: expected a number from 1"),
        (["--out", "missing/table"], "--out missing/table: expected the name of a file, in a directory that can be"),
        (["--out", "."], "--out .: expected the name of a file"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_measured(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        throughput.main(parse(words))
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and expected in error
    assert not list(tmp_path.iterdir())
