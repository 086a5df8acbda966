"""benchmark/throughput.py: time goes to the part that spent it, and the limit is what the network alone would need."""

import functools
import itertools
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
import torch
import tyro

import throughput
from training import SCRIPTS

FAST = ["--num-envs", "8", "--num-steps", "4", "--microbatch-sizes", "8", "--device", "cpu", "--compile", "off"]


@pytest.fixture(autouse=True)
def called_as_a_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["throughput.py"])
    monkeypatch.setattr(throughput, "rate", functools.partial(throughput.rate, seconds=0.01))


def parse(words):
    return tyro.cli(throughput.Args, args=[str(word) for word in words])


def test_time_goes_to_the_part_under_way_and_the_first_phase_does_not_count(monkeypatch):
    """Nor does the time from where a checkpoint may be due to the next part."""
    times = iter([10, 13, 13, 20, 20, 21, 25, 30])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))

    class Run:
        def show(self, phase):
            shown.append(phase)

        def checkpoint(self, interval=None, finished=False):
            return interval, finished

    clock, shown = throughput.PhaseClock(), []
    run = clock.timed(Run)()
    parts = ["policy phase 1/1, rollout", "policy phase 1/1, update", "auxiliary phase, π_old", "auxiliary phase 1/6"]
    for part in parts:
        run.show(part)
    assert not clock.seconds and shown == parts

    for part in parts[:3]:
        run.show(part)
    assert run.checkpoint(3) == (3, False)
    run.show(parts[3])
    assert run.checkpoint(finished=True) == (None, True)
    assert clock.seconds == {"rollout": 3, "update": 7, "auxiliary": 1 + 5}


def test_the_rate_is_the_median_of_the_repetitions(monkeypatch):
    times = itertools.accumulate([0, 4, 0, 1, 0, 2, 0, 2, 0, 100])  # repetitions of 4, 1, 2, 2 and 100 seconds
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    assert throughput.rate(lambda: None, 64, torch.device("cpu"), seconds=109) == 64 / 2


@pytest.mark.parametrize("script, passes", [*zip(SCRIPTS, (3, 1 + 6))], ids=("ppo", "ppg"))
def test_efficiency_compares_with_one_inference_and_the_training_passes_of_a_step(script, passes):
    line = throughput.measure(parse(FAST), script.__file__, "float32", False)
    limit = 1 / (1 / line["inference, samples/s"] + passes / line["training, samples/s"])
    assert line["limit, steps/s"] == pytest.approx(limit)
    assert line["efficiency"] == pytest.approx(line["steps/s"] / limit)

    shares = [line[f"{part} %"] for part in ("rollout", "update", "auxiliary")]
    assert sum(shares) == pytest.approx(100)
    assert all(share > 0 for share in shares[:2]) and (shares[2] > 0) == (script is SCRIPTS[1])

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
    words = [sys.executable, throughput.__file__, "--compile", "off", "--out", str(tmp_path / "table")]
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
    table = throughput.main(parse([*FAST, "--scripts", SCRIPTS[0].__file__, "--out", tmp_path / "v1.2"]))
    text = (tmp_path / "v1.2.md").read_text()
    assert capsys.readouterr().out == text
    assert "starpilot, 8 environments" in text and "| ppo_procgen | float32 | no |" in text
    _, in_hardware = SCRIPTS[0].start_process(SCRIPTS[0].Args(num_envs=8, device="cpu"), num_rollouts=2)
    assert list(table.precision) == (["float32", "bfloat16"] if in_hardware else ["float32"])
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "v1.2.csv"), table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2.csv", "v1.2.md"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--num-steps", "100"], "--num-steps 100: expected a divisor of 256"),
        (["--num-steps", "0"], "--num-steps 0: expected a divisor of 256"),
        (["--num-envs", "12"], "--num-envs 12: expected a multiple of the scripts' 8 minibatches"),
        (["--microbatch-sizes", "8", "0"], "--microbatch-sizes 0: expected 1 or more"),
        (["--scripts", "missing.py"], "--scripts missing.py: expected a training script"),
        (["--scripts", __file__], "expected ppo_procgen.py, ppg_procgen.py or a copy"),
        (["--microbatch-size", "0"], "--microbatch-size 0: expected a number from 1"),
        (["--out", "missing/table"], "--out missing/table: expected a name in a directory that can be written to"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_measured(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        throughput.main(parse(words))
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and expected in error
    assert not list(tmp_path.iterdir())
