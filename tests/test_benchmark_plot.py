"""benchmark/plot.py: scores as worked out by hand, intervals that hold what they promise, and no silent omissions."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import tyro
from procgen.env import ENV_NAMES
from scipy import stats

import plot
import ppg_procgen
import ppo_procgen

pytestmark = pytest.mark.filterwarnings("error")

SCRIPTS = {"ppo_procgen.py": ppo_procgen, "ppg_procgen.py": ppg_procgen}
STEPS = range(100, 2001, 100)  # the last 5 % hold the last two rows


def config(script="ppo_procgen.py", **args):
    """config.json as the script writes it, as far as it is read here."""
    return {"script": script, "args": dataclasses.asdict(SCRIPTS.get(script, ppo_procgen).Args()) | args}


def make_run(path, script="ppo_procgen.py", steps=STEPS, returns=7.0, episodes=None, **args):
    """A made-up run. From the first row on, 100 episodes are finished, unless `episodes` says otherwise."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(script, **args)))
    rows = {"global_step": steps, "episodic_return": returns, "episodic_length": 50.0, "SPS": 90.0}
    rows["episodes"] = range(100, 100 + len(steps)) if episodes is None else episodes
    pd.DataFrame(rows).to_csv(path / "progress.csv", index=False)


def make_grid(path, games=("starpilot", "coinrun"), seeds=(1, 2, 3), scripts=tuple(SCRIPTS), **options):
    """Made-up runs, a little better with every seed."""
    for script in scripts:
        for env_id in games:
            for seed in seeds:
                run = path / script / env_id / str(seed)
                make_run(run, script, env_id=env_id, seed=seed, **{"returns": 7.0 + seed / 10} | options)
    return path


def write_curves(path, algo="external", games=("starpilot", "coinrun"), seeds=(1, 2, 3), **columns):
    rows = [(algo, env_id, seed, step, 6.0 + seed) for env_id in games for seed in seeds for step in STEPS]
    table = pd.DataFrame(rows, columns=["algo", "env_id", "seed", "global_step", "episodic_return"])
    table.assign(**columns).to_csv(path, index=False)
    return path


def call(*words):
    plot.main(tyro.cli(plot.Args, args=[str(word) for word in words]))


def report(tmp_path, *words):
    """scores.csv and scores.md of the command."""
    out = tmp_path / "figures"
    call(*words, "--out", out, "--resamples", 200)
    return pd.read_csv(out / "scores.csv"), (out / "scores.md").read_text()


def notes(text):
    return [line[2:] for line in text.partition("## Notes\n\n")[2].splitlines()]


@pytest.fixture
def quick(monkeypatch):
    """For tests of scores and notes: no figures."""
    monkeypatch.setattr(plot, "plot_games", lambda *args: None)
    monkeypatch.setattr(plot, "plot_mean_score", lambda *args: None)


@pytest.fixture
def figures(monkeypatch):
    """The figures that were written, by name; they stay open until the test is over."""
    found, save = {}, plot.finish

    def finish(figure, axes, args, name, *rest):
        found[name] = figure
        save(figure, axes, args, name, *rest)

    monkeypatch.setattr(plot, "finish", finish)
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    yield found
    monkeypatch.undo()
    plt.close("all")


# Statistics


def scores_of(*sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.exponential(size=size) + i for i, size in enumerate(sizes)]


def test_mean_median_and_iqm_are_those_worked_out_by_hand():
    scores = [np.array([0.0, 2.0]), np.array([1.0, 5.0]), np.array([10.0, 20.0]), np.array([-4.0, 0.0])]
    # The games' means are 1, 3, 15 and −2; the runs, sorted: −4, 0, 0, 1, 2, 5, 10, 20.
    assert plot.mean_score(scores) == 17 / 4
    assert plot.median_score(scores) == 2
    assert plot.iqm(scores) == (0 + 1 + 2 + 5) / 4


def test_iqm_is_scipys_trimmed_mean_also_for_unequal_numbers_of_runs_and_along_other_axes():
    scores = scores_of(3, 5, 2, 7)
    assert plot.iqm(scores) == pytest.approx(stats.trim_mean(np.concatenate(scores), 0.25))
    curves = [np.stack([game, game * 2, -game], axis=1) for game in scores]
    assert plot.iqm(curves) == pytest.approx([plot.iqm([curve[:, i] for curve in curves]) for i in range(3)])


def test_probability_of_improvement_counts_pairs_of_runs_within_a_game_and_ties_half():
    # Pairs of the first game: 1 > 0, 1 = 1, 3 > 0, 3 > 1, so 3.5 of 4; the second: 0 < 2 twice, so none of 2.
    assert plot.probability_of_improvement([np.array([1, 3]), np.array([0, 0])], [np.array([0, 1]), np.array([2])]) == (
        (3.5 / 4 + 0) / 2
    )
    rng = np.random.default_rng(3)
    scores = [rng.integers(6, size=size) for size in (3, 4, 2)]
    others = [rng.integers(6, size=size) for size in (5, 3, 3)]
    shares, ties = [], 0
    for game, other in zip(scores, others):
        points = 0
        for a in game:
            for b in other:
                points += 1 if a > b else 0.5 if a == b else 0
                ties += a == b
        shares.append(points / (len(game) * len(other)))
    assert ties and plot.probability_of_improvement(scores, others) == pytest.approx(sum(shares) / 3)
    assert plot.probability_of_improvement(others, scores) == pytest.approx(1 - sum(shares) / 3)


def test_welchs_interval_by_hand_and_one_run_has_none():
    # Means 10 and 4; variances of the means 12 / 3 = 4 and 8 / 2 = 4; degrees of freedom by Welch and Satterthwaite.
    values, baseline_values = np.array([8.0, 8.0, 14.0]), np.array([2.0, 6.0])
    degrees = (4 + 4) ** 2 / (4**2 / 2 + 4**2 / 1)
    half = stats.t.ppf(0.975, degrees) * 8**0.5
    assert plot.welch_interval(values, baseline_values) == pytest.approx((6, 6 - half, 6 + half))
    difference, low, high = plot.welch_interval(values, np.array([4.0]))
    assert difference == 6 and np.isnan(low) and np.isnan(high)
    assert plot.welch_interval(np.full(3, 10.0), np.full(3, 4.0)) == (6, 6, 6)


def test_students_interval_is_scipys_and_one_run_has_none():
    values = np.random.default_rng(0).normal(size=(4, 3))
    mean, low, high = plot.student_interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean == pytest.approx(values.mean(0))
    assert low == pytest.approx(expected.low) and high == pytest.approx(expected.high)
    mean, low, high = plot.student_interval(values[:1])
    assert (mean == values[0]).all() and np.isnan(low).all() and np.isnan(high).all()


# The bootstrap


def quantile(values, q):
    """Linear interpolation between order statistics."""
    values = sorted(values)
    i = int(q * (len(values) - 1))
    return values[i] + (q * (len(values) - 1) - i) * (values[i + 1] - values[i])


def average(values):
    return sum(values) / len(values)


def middle(values):
    cut = len(values) // 4
    return average(sorted(values)[cut : len(values) - cut])


@pytest.mark.parametrize("name", ["mean", "iqm", "difference", "improvement"])
def test_the_bootstrap_is_a_brute_force_bootstrap_with_one_run_fewer_in_each_game_and_students_tails(name):
    groups = [scores_of(3, 3, 4)] + ([scores_of(3, 4, 3, seed=1)] if name in ("difference", "improvement") else [])
    statistic, slow = {
        "mean": (plot.mean_score, lambda a: average([average(game) for game in a])),
        "iqm": (plot.iqm, lambda a: middle([run for game in a for run in game])),
        "difference": (
            plot.difference,
            lambda a, b: average([average(game) - average(other) for game, other in zip(a, b)]),
        ),
        "improvement": (
            plot.probability_of_improvement,
            lambda a, b: average([average([x > y for x in game for y in other]) for game, other in zip(a, b)]),
        ),
    }[name]
    draw = random.Random(5)
    values = [
        slow(*([[draw.choice(list(game)) for _ in range(len(game) - 1)] for game in group] for group in groups))
        for _ in range(8_000)
    ]
    tail = NormalDist().cdf(stats.t.ppf(0.025, df=2 + 2 + 3))
    expected = quantile(values, tail), quantile(values, 1 - tail)
    low, high = plot.bootstrap_interval(statistic, groups, 20_000, np.random.default_rng(0))
    assert (low, high) == pytest.approx(expected, abs=0.04 * (expected[1] - expected[0]))


def test_the_bootstrap_never_takes_a_run_for_one_of_another_game():
    scores = [np.full(3, score) for score in (0.0, 1.0, 5.0, 50.0)]
    better = [game + 1e-3 for game in scores]
    for statistic, groups, value in (
        (plot.mean_score, [scores], 14),
        (plot.median_score, [scores], 3),
        (plot.iqm, [scores], 3),
        (plot.difference, [better, scores], 1e-3),
        (plot.probability_of_improvement, [better, scores], 1),
    ):
        low, high = plot.bootstrap_interval(statistic, groups, 500, np.random.default_rng(0))
        assert low == high == pytest.approx(value)


def test_a_band_is_the_interval_at_every_step_and_reproducible():
    curves = [np.random.default_rng(i).normal(size=(3, 4)) for i in range(2)]
    low, high = plot.bootstrap_interval(plot.mean_score, [curves], 300, np.random.default_rng(7))
    for i in range(4):
        column = [curve[:, i] for curve in curves]
        alone = plot.bootstrap_interval(plot.mean_score, [column], 300, np.random.default_rng(7))
        assert alone == pytest.approx((low[i], high[i]))
    assert (low < high).all()


def test_a_game_with_a_single_run_leaves_no_interval():
    scores = [np.array([1.0, 2.0, 3.0]), np.array([1.0])]
    assert np.isnan(plot.bootstrap_interval(plot.mean_score, [scores], 100, np.random.default_rng(0))).all()
    curves = [np.ones((3, 5)), np.ones((1, 5))]
    low, high = plot.bootstrap_interval(plot.mean_score, [curves], 100, np.random.default_rng(0))
    assert low.shape == high.shape == (5,) and np.isnan(low).all()


# Coverage: how often an interval holds the truth, over simulated data


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_students_interval_holds_the_mean_in_95_of_100_cases(seeds):
    _, low, high = plot.student_interval(np.random.default_rng(seeds).normal(size=(seeds, 10_000)))
    assert 0.94 < ((low <= 0) & (high >= 0)).mean() < 0.96


def coverage(games, seeds, draw, truth, repetitions=1_000, resamples=500):
    """Of the mean score's interval, and of the plain percentile bootstrap with as many draws as there are runs."""
    rng, hits, plain_hits, block = np.random.default_rng(games * seeds), 0, 0, 100
    for _ in range(repetitions // block):
        scores = [draw(rng, (seeds, block)) for _ in range(games)]
        low, high = plot.bootstrap_interval(plot.mean_score, [scores], resamples, rng)
        hits += ((low <= truth) & (truth <= high)).sum()
        drawn = [game[rng.integers(seeds, size=(seeds, resamples))] for game in scores]
        low, high = np.quantile(plot.mean_score(drawn), [0.025, 0.975], axis=0)
        plain_hits += ((low <= truth) & (truth <= high)).sum()
    return hits / repetitions, plain_hits / repetitions


@pytest.mark.parametrize(
    "games, seeds, lowest, highest, skewed",
    [
        (16, 3, 0.92, 0.975, False),
        (16, 3, 0.91, 0.975, True),
        (16, 10, 0.925, 0.98, False),
        (4, 3, 0.90, 0.97, False),
        (2, 3, 0.87, 0.95, False),  # few runs: too narrow, and scores.md says so
    ],
)
def test_the_bootstrap_interval_holds_the_mean_about_as_often_as_it_says(games, seeds, lowest, highest, skewed):
    draw, truth = (np.random.Generator.exponential, 1) if skewed else (np.random.Generator.normal, 0)
    share, plain = coverage(games, seeds, lambda rng, size: draw(rng, size=size), truth)
    assert lowest < share < highest
    if seeds == 3:
        assert plain < lowest, "the bounds tell the interval from the plain percentile bootstrap"


# Curves and final scores


def curve(steps, returns):
    return pd.DataFrame({"global_step": steps, "episodic_return": returns})


def test_curves_meet_where_all_have_rows_and_are_straight_between_rows():
    curves = [curve([0, 10, 30], [0, 10, 50]), curve([5, 25, 100], [1, 5, 80])]
    steps, returns = plot.on_common_steps(curves, num_points=6)
    assert steps == pytest.approx([5, 10, 15, 20, 25, 30])
    assert returns[0] == pytest.approx([5, 10, 20, 30, 40, 50])
    assert returns[1] == pytest.approx([1, 2, 3, 4, 5, 10])


def test_curves_that_do_not_overlap_have_no_points_rather_than_invented_ones():
    steps, returns = plot.on_common_steps([curve([10, 20], [1, 2]), curve([30, 40], [3, 4])])
    assert steps.shape == (0,) and returns.shape == (2, 0)
    steps, returns = plot.on_common_steps([curve([10, 20], [1, 2]), curve([20, 40], [3, 4])])
    assert set(steps) == {20} and (returns == [[2], [3]]).all()


def test_the_final_return_is_the_mean_over_the_last_twentieth_of_the_steps():
    run = curve([900, 949, 950, 1000, 1001], [1.0, 2.0, 4.0, 8.0, 100.0])
    assert plot.final_return(run, 1000) == 6
    assert plot.final_return(run, 1001) == pytest.approx((8 + 100) / 2), "950 < 0.95 · 1001"
    assert plot.final_return(run, 949) == 2, "900 is just before 0.95 · 949"
    assert plot.final_return(curve([100, 200, 2000], [1.0, 3.0, 50.0]), 1000) == 3, "no row there: the last before"


# Normalization


def test_score_ranges_are_those_of_the_16_games_in_both_modes():
    for mode in ("easy", "hard"):
        assert sorted(plot.SCORE_RANGES[mode]) == sorted(ENV_NAMES) and len(ENV_NAMES) == 16
        assert all(low < high for low, high in plot.SCORE_RANGES[mode].values())
    assert set(plot.SCORE_RANGES) == {"easy", "hard"}


def test_normalized_scores_by_hand():
    assert plot.normalize(2.5, "starpilot", "easy") == 0 and plot.normalize(64, "starpilot", "easy") == 1
    assert plot.normalize(np.array([1.5, 35.0]), "starpilot", "hard") == pytest.approx([0, 1])
    assert plot.normalize(-7.2, "fruitbot", "hard") == pytest.approx((-7.2 + 0.5) / 27.7)
    assert plot.normalize(np.array([7.0, 4.0]), "coinrun", "easy") == pytest.approx([0.4, -0.2])


# Labels


def test_runs_that_differ_in_bookkeeping_only_share_a_label():
    changes = dict(seed=7, env_id="coinrun", device="cuda", run_dir="x", run_name="y", total_timesteps=9, track=True)
    changes |= dict(checkpoint_interval=3, resume="z", wandb_entity="w", wandb_project_name="v", microbatch_size=8)
    changes |= dict(compile=True, buffer_device="cpu")
    assert set(changes) == set(plot.BOOKKEEPING)
    configs = [config(**{name: value}) for name, value in changes.items()]
    assert set(plot.labels(configs)) == {"PPO"}


def test_an_ablation_is_named_after_the_argument_that_sets_it_apart():
    configs = [config(seed=seed) for seed in range(3)]
    configs += [config("ppg_procgen.py", seed=seed) for seed in range(3)]
    configs += [config("ppg_procgen.py", arch="detach"), config("ppg_procgen.py", arch="detach", e_aux=9)]
    configs += [config("wide_ppg.py", width=2), config("ppo.py")]
    assert plot.labels(configs)[:6] == ["PPO"] * 3 + ["PPG"] * 3
    assert plot.labels(configs)[6:] == ["PPG, arch=detach", "PPG, e_aux=9, arch=detach", "wide_ppg", "ppo"]


def test_where_no_value_is_the_usual_one_all_labels_name_it():
    assert plot.labels([config(), config(gamma=0.9)]) == ["PPO, gamma=0.999", "PPO, gamma=0.9"]


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_runs_of_a_script_from_before_it_had_an_argument_keep_a_label_of_their_own(lacking):
    labels = plot.labels([config("mine.py")] * lacking + [config("mine.py", width=1)] * 2)
    assert len(set(labels[:lacking])) == len(set(labels[lacking:])) == 1 and labels[0] != labels[-1]


def test_different_arguments_never_share_a_label():
    rng = random.Random(0)
    for _ in range(100):
        choices = dict(gamma=(0.9, 0.99, 0.999), num_envs=(16, 64), clip_coef=(0, 0.2), precision=("auto", "float32"))
        configs = [config(**{name: rng.choice(values) for name, values in choices.items()}) for _ in range(8)]
        labels = plot.labels(configs)
        for i in range(8):
            assert all((labels[i] == labels[j]) == (configs[i] == configs[j]) for j in range(8))


# Files


def finals_grid(path):
    """Both scripts, 2 games, 2 seeds; final returns as in `finals`, reached by way of others."""
    finals = {
        ("ppo_procgen.py", "starpilot"): (12, 18),
        ("ppo_procgen.py", "coinrun"): (7, 9),
        ("ppg_procgen.py", "starpilot"): (21, 33),
        ("ppg_procgen.py", "coinrun"): (7, 10),
    }
    episodes = [20, 99, *range(100, 118)]
    for (script, env_id), values in finals.items():
        for seed, final in enumerate(values):
            returns = [900.0, 900.0, *[3.0] * 16, final - 2, final + 2]
            make_run(path / f"{script}-{env_id}-{seed}", script, STEPS, returns, episodes, env_id=env_id, seed=seed)
    return path


def test_scores_csv_holds_the_values_worked_out_by_hand(quick, tmp_path):
    scores, text = report(tmp_path, finals_grid(tmp_path / "runs"))
    assert list(scores.columns) == ["algo", "env_id", "metric", "value", "low", "high", "std", "runs", "baseline"]
    assert len(scores) == 2 * (2 * 2 + 3) + 2 + 2
    scores = scores.set_index(["algo", "env_id", "metric"])

    row = scores.loc["PPO", "starpilot", "episodic_return"]
    half = stats.t.ppf(0.975, 1) * 3  # the standard deviation of 12 and 18 is 6 / √2, that of their mean 3
    assert list(row[:5]) == pytest.approx([15, 15 - half, 15 + half, 6 / 2**0.5, 2], rel=1e-5)
    row = scores.loc["PPO", "starpilot", "normalized_score"]
    expected = [12.5 / 61.5, (12.5 - half) / 61.5, (12.5 + half) / 61.5, 6 / 2**0.5 / 61.5, 2]
    assert list(row[:5]) == pytest.approx(expected)

    row = scores.loc["PPG", "starpilot", "difference_in_return"]
    half = stats.t.ppf(0.975, 45**2 / (9**2 + 36**2)) * 45**0.5  # variances of the means: 18 / 2 and 72 / 2
    assert list(row[:3]) == pytest.approx([12, 12 - half, 12 + half], rel=1e-5) and row.baseline == "PPO"
    assert ("PPO", "starpilot", "difference_in_return") not in scores.index

    expected = {  # of two runs one is drawn: the interval reaches from the worse of each game to the better of each
        ("PPO", "mean"): ((12.5 / 61.5 + 0.6) / 2, (9.5 / 61.5 + 0.4) / 2, (15.5 / 61.5 + 0.8) / 2),
        ("PPO", "iqm"): ((15.5 / 61.5 + 0.4) / 2, (9.5 / 61.5 + 0.4) / 2, (15.5 / 61.5 + 0.8) / 2),
        ("PPG", "median"): ((24.5 / 61.5 + 0.7) / 2, (18.5 / 61.5 + 0.4) / 2, (30.5 / 61.5 + 1) / 2),
        # starpilot: always better; coinrun: 7 = 7, 7 < 9, 10 > 7, 10 > 9, so 2.5 of 4
        ("PPG", "difference"): ((12 / 61.5 + 0.1) / 2, (3 / 61.5 - 0.4) / 2, (21 / 61.5 + 0.6) / 2),
        ("PPG", "probability_of_improvement"): ((1 + 0.625) / 2, (1 + 0) / 2, (1 + 1) / 2),
    }
    for (algo, metric), values in expected.items():
        row = scores.loc[algo, "all", metric]
        assert (row.value, row.low, row.high, row.runs) == pytest.approx((*values, 4), rel=1e-5), metric
        compares = metric in ("difference", "probability_of_improvement")
        assert row.baseline == "PPO" if compares else pd.isna(row.baseline)
    assert ("PPO", "all", "probability_of_improvement") not in scores.index

    assert "easy, at 2,000 environment steps" in text and "Over games (2 of 16)" in text
    assert "last 5% of these steps (each value is a mean of 100 episodes;\nno further smoothing)" in text
    assert "| PPO | 4 | 0.402 [0.277, 0.526] | 0.402 [0.277, 0.526] | 0.326 [0.277, 0.526] |  |" in text
    assert "P(better than PPO)" in text and "| 0.812 [0.500, 1.000] |" in text
    assert "| starpilot | 15.00 ± 4.24 (2) | 27.00 ± 8.49 (2) |" in text
    assert "mean − PPO's" in text and "## Difference from PPO in each game" in text
    assert f"| starpilot | +12.00 [{12 - half:+.2f}, {12 + half:+.2f}] |" in text


@pytest.mark.parametrize(
    "suffix, magic", [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF-")], ids=["png", "svg", "pdf"]
)
def test_the_command_writes_two_figures_and_two_tables_and_prints_the_scores(tmp_path, suffix, magic):
    """With relative paths, on runs without checkpoints; no warning on standard error."""
    make_grid(tmp_path / "runs")
    command = [sys.executable, "-W", "error", plot.__file__, "runs", "--out", "a/b", "--format", suffix]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "a" / "b"
    names = [f"curves.{suffix}", f"mean_normalized_score.{suffix}", "scores.csv", "scores.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names[:2]:
        assert (out / name).read_bytes().startswith(magic) and (out / name).stat().st_size > 3_000
    assert done.stdout == (out / "scores.md").read_text() + "\n"


def lines(axes):
    return {line.get_label(): line.get_xydata() for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_figures_say_what_is_drawn_and_end_with_the_shortest_run(figures, tmp_path):
    runs = make_grid(tmp_path / "runs", seeds=(1, 2))
    make_run(runs / "short", steps=range(100, 1001, 100), returns=8.0, env_id="coinrun", seed=3)
    early = [5, 99, *range(100, 118)]  # its first 2 rows do not count
    make_run(runs / "late", returns=[900, 900, *[8.0] * 18], episodes=early, env_id="starpilot", seed=3)
    call(runs, "--out", tmp_path / "figures", "--resamples", 200)

    coinrun, starpilot = figures["curves"].axes
    assert (coinrun.get_title(), starpilot.get_title()) == ("coinrun", "starpilot")
    for panel, algo, first, last in (
        (coinrun, "PPO", 100, 1000),
        (coinrun, "PPG", 100, 2000),
        (starpilot, "PPO", 300, 2000),
    ):
        points = lines(panel)[algo]
        assert (points[0, 0], points[-1, 0]) == (first, last)
        assert points[:, 1] == pytest.approx(7.15 if algo == "PPG" else (7.1 + 7.2 + 8) / 3)
    (mean,) = figures["mean_normalized_score"].axes
    points = lines(mean)["PPO (6 runs)"]
    assert (points[0, 0], points[-1, 0]) == (300, 1000)
    returns = np.array([7.1, 7.2, 8.0])
    assert points[:, 1] == pytest.approx(np.mean([(returns - 5) / 5, (returns - 2.5) / 61.5]))
    assert lines(mean)["PPG (4 runs)"][-1, 0] == 2000

    captions = {name: figure.get_supxlabel() for name, figure in figures.items()}
    assert all("environment steps" in caption for caption in captions.values())
    assert "no smoothing beyond the 100 episodes" in captions["curves"].replace("\n", " ")
    assert "easy, 2 of 16 games" in captions["mean_normalized_score"]
    assert "no further smoothing" in captions["mean_normalized_score"].replace("\n", " ")


@pytest.mark.parametrize(
    "mode, end, words, drawn",
    [
        ("hard", 100_007_936, (), True),
        ("hard", 90_000_000, (), False),
        ("hard", 100_007_936, ("--max-steps", 50_000_000), False),
        ("easy", 100_007_936, (), False),
    ],
)
def test_published_scores_are_drawn_on_hard_at_100_million_steps_only(figures, tmp_path, mode, end, words, drawn):
    steps = range(end // 20, end + 1, end // 20)
    make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], distribution_mode=mode, steps=steps)
    call(tmp_path / "runs", "--out", tmp_path / "figures", "--resamples", 100, *words)
    (axes,) = figures["mean_normalized_score"].axes
    heights = {label: set(points[:, 1]) for label, points in lines(axes).items() if "published" in label}
    expected = {"PPG, published, 16 games: 0.757": {0.757}, "PPO, published, 16 games: 0.576": {0.576}}
    assert heights == (expected if drawn else {})


@pytest.mark.parametrize("case", ["one run", "ablations", "endless label"])
def test_nothing_is_cut_off_and_the_legend_covers_nothing(figures, tmp_path, case):
    words, runs = [], tmp_path / "runs"
    if case == "ablations":
        for i, options in enumerate(({}, dict(arch="detach", aux_learning_rate=0.001), dict(arch="shared", e_aux=9))):
            make_grid(runs / str(i), scripts=["ppg_procgen.py"], **options)
        make_grid(runs / "ppo", scripts=["ppo_procgen.py"])
        make_grid(runs / "kl", scripts=["ppo_procgen.py"], clip_coef=0.0, kl_coef=1.0)
    else:
        make_run(runs / "a", env_id="starpilot")
    if case == "endless label":
        label = "phasic policy gradient with everything turned on " * 4 + "x" * 150
        words = ["--mode", "easy", "--curves", write_curves(tmp_path / "c.csv", label, games=["starpilot"])]
    call(runs, "--out", tmp_path / "figures", "--resamples", 100, *words)
    assert set(figures) == {"curves", "mean_normalized_score"}
    for figure in figures.values():
        renderer = figure.canvas.get_renderer()
        box, everything = figure.bbox_inches, figure.get_tightbbox(renderer)
        assert everything.x0 >= 0 and everything.y0 >= 0 and everything.x1 <= box.x1 and everything.y1 <= box.y1
        (legend,) = figure.legends
        panels = [axes.get_tightbbox(renderer) for axes in figure.axes]
        assert legend.get_window_extent(renderer).y0 >= max(panel.y1 for panel in panels)
        assert min(panel.height for panel in panels) > 150, "the panels keep their height"
        assert figure._supxlabel.get_window_extent(renderer).y1 <= min(panel.y0 for panel in panels)


def test_fourteen_algorithms_look_different_and_the_first_seven_differ_in_both_ways():
    looks = [(look["color"], look["linestyle"]) for look in plot.style([str(i) for i in range(14)]).values()]
    assert len(set(looks)) == 14
    assert len({color for color, _ in looks[:7]}) == len({dashes for _, dashes in looks[:7]}) == 7


def test_the_full_grid_is_plotted_in_reasonable_time(tmp_path):
    steps = range(16_384, 1500 * 16_384 + 1, 16_384)
    rng = np.random.default_rng(0)
    for script in SCRIPTS:
        for env_id in ENV_NAMES:
            for seed in range(3):
                run = tmp_path / "runs" / script / env_id / str(seed)
                make_run(run, script, steps, rng.normal(size=1500).round(3), env_id=env_id, seed=seed)
    start = time.process_time()
    call(tmp_path / "runs", "--out", tmp_path / "figures")
    assert time.process_time() - start < 30
    text = (tmp_path / "figures" / "scores.md").read_text()
    assert "Over games (16 of 16)" in text and "| PPO | 48 |" in text and notes(text) == []


# What is missing is said


def test_a_whole_grid_needs_no_notes_but_missing_games_and_seeds_do(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=("starpilot", "coinrun", "maze"))
    (runs / "ppg_procgen.py" / "maze" / "2" / "config.json").unlink()
    (runs / "ppo_procgen.py" / "coinrun" / "1" / "config.json").unlink()
    (runs / "ppo_procgen.py" / "coinrun" / "3" / "config.json").unlink()
    scores, text = report(tmp_path, runs)
    assert [note for note in notes(text) if "no config.json" not in note][:5] == [
        "PPO: 3 of 16 games",
        "PPO, coinrun: no seed 1, 3",
        "PPO, coinrun: one seed, so no interval",
        "PPG: 3 of 16 games",
        "PPG, maze: no seed 2",
    ]
    assert np.isnan(scores[(scores.algo == "PPO") & (scores.metric == "mean")].low.item())
    assert scores[(scores.algo == "PPG") & (scores.metric == "mean")].low.item() > 0


def test_the_shortest_run_decides_where_scores_are_taken(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], returns=np.arange(100, 2001, 100) / 100)
    make_run(runs / "short", steps=range(100, 1001, 100), returns=4.0, env_id="maze", seed=1)
    scores, text = report(tmp_path, runs)
    place = "scores are taken at 1,000 steps, where the shortest run ends (PPO, maze, seed 1); the longest has 2,000"
    assert place in notes(text) and "at 1,000 environment steps" in text
    assert scores[(scores.env_id == "coinrun") & (scores.metric == "episodic_return")].value.item() == 10


def test_max_steps_leaves_out_what_comes_after(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], returns=np.arange(100, 2001, 100) / 100)
    scores, text = report(tmp_path, runs, "--max-steps", 550)
    assert "at 500 environment steps" in text and not any("shortest" in note for note in notes(text))
    assert scores.value[0] == 5


def test_few_runs_are_said_to_make_intervals_over_games_too_narrow(quick, tmp_path):
    note = "few games and seeds: the intervals over games are narrower than 95 % intervals should be"
    for games, noted in ((ENV_NAMES[:3], True), (ENV_NAMES[:4], False)):
        runs = make_grid(tmp_path / str(len(games)), games=games)
        assert (note in notes(report(tmp_path, runs)[1])) is noted
    make_grid(tmp_path / "4" / "ablation", games=ENV_NAMES[:4], seeds=(1, 2), gamma=0.9)
    assert note in notes(report(tmp_path, tmp_path / "4")[1])


def test_runs_that_have_just_begun_are_left_out_and_named(quick, tmp_path):
    runs = make_grid(tmp_path / "runs")
    make_run(runs / "begun", returns=3.0, episodes=range(20), env_id="coinrun", seed=4)
    make_run(runs / "empty", steps=[], returns=[], episodes=[], env_id="coinrun", seed=5)
    make_run(runs / "nothing", env_id="coinrun", seed=6)
    (runs / "nothing" / "progress.csv").unlink()
    make_run(runs / "cut", steps=[100], returns=[3.0], episodes=[np.nan], env_id="coinrun", seed=7)
    make_run(runs / "nameless", env_id="coinrun", seed=6)
    (runs / "nameless" / "config.json").unlink()
    make_run(runs / "7.incomplete-20250101-000000", env_id="coinrun", seed=6)
    scores, text = report(tmp_path, runs)
    left_out = sorted(note for note in notes(text) if "left out" in note)
    assert left_out == [
        f"{runs}/nameless: left out, it has no config.json",
        f"{runs}/nothing: left out, it has no progress.csv",
        "PPO, coinrun, seed 4: left out, 19 of 100 episodes have finished",
        "PPO, coinrun, seed 5: left out, 0 of 100 episodes have finished",
        "PPO, coinrun, seed 7: left out, 0 of 100 episodes have finished",
    ]
    assert set(scores[scores.metric == "episodic_return"].runs) == {3}


def test_a_truncated_last_line_and_rows_without_a_number_do_not_count(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], games=["coinrun"], seeds=[1])
    path = runs / "ppo_procgen.py" / "coinrun" / "1" / "progress.csv"
    for end in ("2100,9", "2100,9,50,90,1", "21", "2100,nan,50,90,130\n"):
        before = path.read_text()
        path.write_text(before + end)
        scores, text = report(tmp_path, runs)
        assert scores.value[0] == pytest.approx(7.1) and "at 2,000 environment" in text
        path.write_text(before)


def test_different_numbers_of_environments_are_noted(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"])
    assert not any("num_envs" in note for note in notes(report(tmp_path, runs)[1]))
    make_grid(runs / "ppg", scripts=["ppg_procgen.py"], num_envs=16)
    assert any("num_envs" in note for note in notes(report(tmp_path, runs)[1]))


def test_an_algorithm_with_few_of_the_games_does_not_shrink_the_comparison(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=("starpilot", "coinrun", "maze"), scripts=["ppo_procgen.py"])
    make_grid(runs / "ppg", games=("starpilot", "coinrun"), scripts=["ppg_procgen.py"])
    make_grid(runs / "kl", games=["maze"], scripts=["ppo_procgen.py"], kl_coef=1.0)
    scores, text = report(tmp_path, runs)
    assert "Over games (2 of 16)" in text and set(scores[scores.env_id == "all"].algo) == {"PPO", "PPG"}
    assert "PPO, kl_coef=1.0: not among the scores over games, it has 1 of them" in notes(text)
    assert set(scores[scores.env_id == "maze"].algo) == {"PPO", "PPO, kl_coef=1.0"}


def test_algorithms_without_a_common_game_have_scores_for_each_game_only(tmp_path):
    runs = make_grid(tmp_path / "runs", games=["starpilot"], scripts=["ppo_procgen.py"])
    make_grid(runs / "ppg", games=["coinrun"], scripts=["ppg_procgen.py"])
    scores, text = report(tmp_path, runs)
    assert "no game that all algorithms have, so no scores over games" in notes(text) and "Over games" not in text
    assert set(scores.env_id) == {"starpilot", "coinrun"}
    assert not (tmp_path / "figures" / "mean_normalized_score.png").exists()


# Curves from elsewhere


def test_curves_from_elsewhere_stand_beside_the_runs_or_alone(quick, tmp_path):
    curves = write_curves(tmp_path / "curves.csv")
    scores, text = report(tmp_path, "--curves", curves, "--mode", "hard")
    assert set(scores.algo) == {"external"} and "Procgen, hard" in text
    value = scores[(scores.env_id == "starpilot") & (scores.metric == "normalized_score")].value.item()
    assert value == pytest.approx((8 - 1.5) / 33.5, rel=1e-5)
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"])
    scores, _ = report(tmp_path, runs, "--curves", curves, "--mode", "easy")
    assert list(dict.fromkeys(scores.algo)) == ["PPO", "external"]
    row = scores[scores.metric == "probability_of_improvement"]
    assert row.algo.item() == "external" and row.value.item() == pytest.approx(2 / 3), "8 and 9 win, 7 loses"


def test_an_algorithm_may_be_called_by_a_number_and_gaps_are_bridged(quick, tmp_path):
    curves = write_curves(tmp_path / "curves.csv", algo="7")
    table = pd.read_csv(curves)
    table.loc[table.global_step == 1000, "episodic_return"] = np.nan
    table.to_csv(curves, index=False)
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"])
    scores, _ = report(tmp_path, runs, "--curves", curves, "--mode", "easy", "--max-steps", 1000)
    scores = scores[scores.metric == "episodic_return"].astype({"algo": str}).set_index(["algo", "env_id"])
    assert scores.loc[("7", "coinrun"), "value"] == 8


# Bad input


def refused(capsys, tmp_path, *words):
    """The one line that refuses the command, which has written nothing."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        call(*words, "--out", tmp_path / "figures")
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1, captured
    assert ": error: " in captured.err and "expected" in captured.err
    assert sorted(tmp_path.rglob("*")) == before
    return captured.err


def test_modes_are_never_mixed(capsys, tmp_path):
    easy = make_grid(tmp_path / "easy")
    hard = make_grid(tmp_path / "hard", distribution_mode="hard")
    assert "one distribution mode, these have easy, hard" in refused(capsys, tmp_path, easy, hard)
    assert "--mode hard: expected easy" in refused(capsys, tmp_path, easy, "--mode", "hard")
    curves = write_curves(tmp_path / "curves.csv")
    assert "cannot be mixed" in refused(capsys, tmp_path, easy, "--curves", curves, "--mode", "hard")


def test_two_runs_of_one_seed_are_refused(capsys, tmp_path):
    make_run(tmp_path / "a" / "first", env_id="coinrun", seed=3)
    make_run(tmp_path / "a" / "second", env_id="coinrun", seed=3, device="cuda")
    complaint = refused(capsys, tmp_path, tmp_path / "a")
    assert f"{tmp_path}/a/second: expected one run of PPO, coinrun, seed 3, and {tmp_path}/a/first" in complaint


def test_commands_without_enough_are_refused(capsys, tmp_path):
    assert "--curves FILE.csv" in refused(capsys, tmp_path)
    assert "directory with runs" in refused(capsys, tmp_path, tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    assert f"{tmp_path}/none: expected runs below it" in refused(capsys, tmp_path, tmp_path / "none")
    curves = write_curves(tmp_path / "curves.csv")
    assert "--mode" in refused(capsys, tmp_path, "--curves", curves)
    for flag, value, accepted in (("resamples", 9, 100), ("seed", -1, 0), ("max-steps", 0, 1), ("max-steps", 50, 100)):
        complaint = refused(capsys, tmp_path, "--curves", curves, "--mode", "easy", f"--{flag}", value)
        assert f"--{flag} {value}: expected {accepted} or more" in complaint
    assert "--curves" in refused(capsys, tmp_path, "--curves", tmp_path / "none.csv", "--mode", "easy")
    make_run(tmp_path / "begun", episodes=range(20))
    assert "100 episodes have finished (PPO, starpilot, seed 1: left out, 19 of" in refused(
        capsys, tmp_path, tmp_path / "begun"
    )


ARGS = {"env_id": "coinrun", "seed": 2, "distribution_mode": "easy", "num_envs": 64}
CONFIG = json.dumps({"script": "ppg_procgen.py", "args": ARGS})


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "gpt"}'),
        ("config.json", '{"script": "ppo_procgen.py", "args": {"seed": 1}}'),
        ("config.json", '{"script": "ppo_procgen.py", "args": []}'),
        ("config.json", CONFIG.replace("coinrun", "coinrum")),
        ("config.json", CONFIG.replace("easy", "simple")),
        ("config.json", CONFIG.replace("2", '"two"')),
        ("progress.csv", ""),
        ("progress.csv", "time/total_timesteps,rollout/ep_rew_mean\n100,3\n"),
        ("progress.csv", "global_step,episodic_return,episodes\n100,much,200\n"),
    ],
)
def test_what_is_no_run_is_refused_by_its_path(capsys, tmp_path, name, content):
    runs = make_grid(tmp_path / "runs")
    broken = runs / "ppg_procgen.py" / "coinrun" / "2"
    (broken / name).write_text(content)
    assert f"{broken}: expected the config.json and progress.csv of a run (" in refused(capsys, tmp_path, runs)


SPOILT = {"game": ("env_id", "pong"), "half a seed": ("seed", 1.5), "negative step": ("global_step", -100),
          "infinite": ("episodic_return", np.inf)}  # fmt: skip


@pytest.mark.parametrize(
    "problem", [*SPOILT, "column", "text", "empty", "no name", "no game", "no seed", "no rows", "twice"]
)
def test_curves_of_another_shape_are_refused(capsys, tmp_path, problem):
    path = write_curves(tmp_path / "curves.csv")
    table = pd.read_csv(path)
    if problem == "column":
        table = table.rename(columns={"global_step": "step"})
    elif problem == "text":
        table = table.assign(episodic_return="high")
    elif problem in SPOILT:
        column, value = SPOILT[problem]
        table = table.assign(**{column: value})
    elif problem == "no rows":
        table = table[:0]
    elif problem in ("no name", "no game", "no seed"):
        column = {"no name": "algo", "no game": "env_id", "no seed": "seed"}[problem]
        table[column] = table[column].astype(object)
        table.loc[3, column] = np.nan
    elif problem == "twice":
        table = pd.concat([table, table[:1]])
    table.to_csv(path, index=False)
    if problem == "empty":
        path.write_text("")
    complaint = refused(capsys, tmp_path, "--curves", path, "--mode", "easy")
    assert f"--curves {path}: expected" in complaint
    assert {"game": "not pong", "twice": "seed 1, has two at step 100"}.get(problem, "columns algo,env_id") in complaint


def test_curves_from_elsewhere_are_not_pooled_with_runs_of_the_same_name(capsys, tmp_path):
    runs, curves = make_grid(tmp_path / "runs"), write_curves(tmp_path / "curves.csv", "PPG", seeds=(7, 8))
    assert "both have PPG" in refused(capsys, tmp_path, runs, "--curves", curves, "--mode", "easy")


def test_runs_without_a_step_in_common_are_refused_by_name(capsys, tmp_path):
    runs = make_grid(tmp_path / "runs", games=["coinrun"])
    make_run(runs / "slow", episodes=[*range(10), *range(100, 110)], env_id="plunder", seed=1)
    make_run(runs / "begun", steps=[100, 200], env_id="maze", seed=2)
    complaint = refused(capsys, tmp_path, runs)
    assert "PPO, maze, seed 2 ends at 200, before the first value of PPO, plunder, seed 1 at 1,100" in complaint


def test_runs_that_are_named_twice_count_once(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"])
    once, twice = report(tmp_path, runs)[0], report(tmp_path, runs, runs / "ppo_procgen.py", tmp_path / "." / "runs")[0]
    assert once.equals(twice)


def test_without_a_plain_ppo_the_first_variant_of_it_is_the_baseline(quick, tmp_path):
    make_grid(tmp_path / "runs")
    make_grid(tmp_path / "runs" / "other", scripts=["ppo_procgen.py"], gamma=0.9)
    scores, text = report(tmp_path, tmp_path / "runs")
    assert "P(better than PPO, gamma=0.9)" in text
    assert set(scores.baseline.dropna()) == {"PPO, gamma=0.9"}


def test_an_output_that_is_no_directory_is_refused(capsys, tmp_path):
    runs = make_grid(tmp_path / "runs")
    Path(tmp_path / "figures").write_text("")
    assert f"--out {tmp_path}/figures: expected a directory" in refused(capsys, tmp_path, runs)


# The results of this repository


def test_runs_of_the_scripts_are_read_whatever_else_they_left_behind(quick, tmp_path):
    """An auxiliary.csv, a lock, and the remains of a run that was put aside."""
    sizes = dict(num_envs=2, num_steps=8, num_minibatches=2, channels=(4, 4, 4), device="cpu", run_dir=str(tmp_path))
    for script in SCRIPTS.values():
        options = dict(n_pi=1, e_aux=1) if script is ppg_procgen else {}
        path = script.main(script.Args(total_timesteps=16, run_name=script.__name__, **sizes, **options))
        rows = pd.read_csv(path / "progress.csv").assign(episodes=100, episodic_return=7.0)
        rows.to_csv(path / "progress.csv", index=False)
        path.with_name(f"{path.name}.incomplete-20200101-000000").mkdir()
    scores, _ = report(tmp_path, tmp_path)
    assert set(scores.algo) == {"PPO", "PPG"} and (scores[scores.metric == "episodic_return"].value == 7).all()


def test_the_scores_in_the_repository_are_those_of_its_runs(tmp_path):
    results = Path(plot.__file__).parent / "results"
    call(results, "--out", tmp_path)
    assert (tmp_path / "scores.md").read_text() == (results / "scores.md").read_text()
