"""benchmark/plot.py: scores as worked out by hand, intervals that hold what they promise, and no silent omissions."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

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
STEPS = range(100, 2001, 100)  # the last 5 % reach from the last row but one to the last
OPTIONS = plot.Args(resamples=300)


def config(script="ppo_procgen.py", **args):
    """config.json as the script writes it, as far as it is read here."""
    defaults = dataclasses.asdict(SCRIPTS.get(script, ppo_procgen).Args())
    return json.loads(json.dumps({"script": script, "args": defaults | args}))


def make_run(path, script="ppo_procgen.py", steps=STEPS, returns=7.0, episodes=None, origin=None, **args):
    """A made-up run. From the first row on, 100 episodes are finished, unless `episodes` says otherwise.

    `origin` is what config.json has beside script and arguments.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(script, **args) | (origin or {})))
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


def means(*games):
    """The mean of each game, as an array."""
    return [np.asarray(game, dtype=float) for game in games]


def test_mean_median_and_iqm_are_those_worked_out_by_hand():
    scores = means([0, 2], [1, 5], [10, 20], [-4, 0])
    # The games' means are 1, 3, 15 and −2; the runs, sorted: −4, 0, 0, 1, 2, 5, 10, 20.
    assert plot.mean_interval(scores)[0] == 17 / 4
    assert plot.median(*scores) == 2
    assert plot.iqm(*scores) == (0 + 1 + 2 + 5) / 4


def test_iqm_is_scipys_trimmed_mean_also_for_unequal_numbers_of_runs_and_along_other_axes():
    scores = scores_of(3, 5, 2, 7)
    assert plot.iqm(*scores) == pytest.approx(stats.trim_mean(np.concatenate(scores), 0.25))
    curves = [np.stack([game, game * 2, -game]) for game in scores]
    assert plot.iqm(*curves) == pytest.approx([plot.iqm(*(curve[i] for curve in curves)) for i in range(3)])


def test_probability_of_improvement_counts_pairs_of_runs_within_a_game_and_ties_half():
    # Pairs of the first game: 1 > 0, 1 = 1, 3 > 0, 3 > 1, so 3.5 of 4; the second: 0 < 2 twice, so none of 2.
    assert plot.probability_of_improvement(*means([1, 3], [0, 0], [0, 1], [2])) == (3.5 / 4 + 0) / 2
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
    assert ties and plot.probability_of_improvement(*scores, *others) == pytest.approx(sum(shares) / 3)
    assert plot.probability_of_improvement(*others, *scores) == pytest.approx(1 - sum(shares) / 3)


# Intervals of means


def test_for_one_game_the_interval_is_students_and_beside_a_baseline_welchs():
    values, baseline = scores_of(4, 3, seed=2)
    student = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert plot.mean_interval([values]) == pytest.approx((values.mean(), student.low, student.high))
    welch = stats.ttest_ind(values, baseline, equal_var=False).confidence_interval(0.95)
    difference = values.mean() - baseline.mean()
    assert plot.mean_interval([values], [baseline]) == pytest.approx((difference, welch.low, welch.high))


def test_welchs_interval_by_hand():
    # Means 10 and 4; variances of the means 12 / 3 = 4 and 8 / 2 = 4; degrees of freedom by Welch and Satterthwaite.
    degrees = (4 + 4) ** 2 / (4**2 / 2 + 4**2 / 1)
    half = stats.t.ppf(0.975, degrees) * 8**0.5
    assert plot.mean_interval(means([8, 8, 14]), means([2, 6])) == pytest.approx((6, 6 - half, 6 + half))


def test_over_games_the_interval_is_that_of_welch_and_satterthwaite_by_hand():
    # Means 10, 4 and 1, their variances 12 / 3, 8 / 2 and 4 / 4, with 2, 1 and 3 degrees of freedom.
    games = means([8, 8, 14], [2, 6], [4, 0, 0, 0])
    half = stats.t.ppf(0.975, 9**2 / (16 / 2 + 16 / 1 + 1 / 3)) * 9**0.5 / 3
    assert plot.mean_interval(games) == pytest.approx((5, 5 - half, 5 + half))
    # The baseline has means 1, 2 and 3, with variances 2 / 2, 2 / 2 and 0.
    half = stats.t.ppf(0.975, 11**2 / (16 / 2 + 16 / 1 + 1 / 3 + 1 / 1 + 1 / 1)) * 11**0.5 / 3
    assert plot.mean_interval(games, means([0, 2], [1, 3], [3, 3])) == pytest.approx((3, 3 - half, 3 + half))


def test_runs_that_are_alike_have_an_interval_without_width():
    assert plot.mean_interval(means([10, 10, 10], [4, 4])) == (7, 7, 7)
    assert plot.mean_interval(means([10, 10, 10]), means([4, 4, 4])) == (6, 6, 6)


def test_a_band_is_the_interval_at_every_step():
    games = [np.random.default_rng(i).normal(size=(4, runs)) for i, runs in enumerate((3, 5))]
    games[0][1], games[1][1] = 2, 4  # at the second step all runs are alike
    band = np.array(plot.mean_interval(games))
    for i in range(4):
        assert band[:, i] == pytest.approx(plot.mean_interval([game[i] for game in games]))
    assert (band[:, 1] == 3).all() and (band[1] < band[2]).sum() == 3


def test_a_game_with_a_single_run_leaves_no_interval():
    for groups in ([means([1, 2, 3], [1])], [means([1, 2, 3]), means([1])]):
        assert np.isnan(plot.mean_interval(*groups)[1:]).all() and np.isfinite(plot.mean_interval(*groups)[0])
        games = [game for group in groups for game in group]
        value, low, high = plot.bootstrap_interval(plot.median, games, OPTIONS)
        assert value == 1.5 and np.isnan([low, high]).all()
    value, low, high = plot.mean_interval([np.ones((5, 3)), np.ones((5, 1))])
    assert value.shape == low.shape == high.shape == (5,) and np.isnan([low, high]).all()


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


@pytest.mark.parametrize("name", ["median", "iqm", "improvement"])
def test_the_bootstrap_is_a_brute_force_bootstrap_with_as_many_draws_as_runs_in_each_game(name):
    groups = [scores_of(3, 5, 4)] + ([scores_of(3, 4, 3, seed=1)] if name == "improvement" else [])
    statistic, slow = {
        "median": (plot.median, lambda a: sorted(average(game) for game in a)[1]),
        "iqm": (plot.iqm, lambda a: middle([run for game in a for run in game])),
        "improvement": (
            plot.probability_of_improvement,
            lambda a, b: average([average([x > y for x in game for y in other]) for game, other in zip(a, b)]),
        ),
    }[name]
    draw = random.Random(5)
    values = [
        slow(*([draw.choices(list(game), k=len(game)) for game in group] for group in groups)) for _ in range(8_000)
    ]
    expected = quantile(values, 0.025), quantile(values, 0.975)
    games = [game for group in groups for game in group]
    value, low, high = plot.bootstrap_interval(statistic, games, plot.Args(resamples=20_000))
    assert value == pytest.approx(slow(*groups))
    assert (low, high) == pytest.approx(expected, abs=0.02 * (expected[1] - expected[0]))


def test_the_bootstrap_never_takes_a_run_for_one_of_another_game():
    scores = [np.full(3, score) for score in (0.0, 1.0, 5.0, 50.0)]
    better = [game + 1e-3 for game in scores]
    for statistic, games, value in (
        (plot.median, scores, 3),
        (plot.iqm, scores, 3),
        (plot.probability_of_improvement, [*better, *scores], 1),
    ):
        assert plot.bootstrap_interval(statistic, games, OPTIONS) == pytest.approx((value, value, value))


def test_the_bootstrap_repeats_itself_with_its_seed_and_with_no_other():
    games = scores_of(5, 5, 5)
    assert plot.bootstrap_interval(plot.iqm, games, OPTIONS) == plot.bootstrap_interval(plot.iqm, games, OPTIONS)
    other = plot.Args(resamples=300, seed=1)
    assert plot.bootstrap_interval(plot.iqm, games, OPTIONS) != plot.bootstrap_interval(plot.iqm, games, other)


# Coverage: how often an interval holds the truth, over simulated data


def coverage(deviations, seeds, baseline):
    """How often the interval holds the true mean, 0, of games whose runs have these standard deviations."""
    rng = np.random.default_rng(len(deviations) + seeds)
    games, others = ([rng.normal(scale=scale, size=(20_000, seeds)) for scale in deviations] for _ in range(2))
    _, low, high = plot.mean_interval(games, others if baseline else ())
    return ((low <= 0) & (high >= 0)).mean()


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_students_interval_holds_the_mean_in_95_of_100_cases(seeds):
    assert 0.945 < coverage([1], seeds, baseline=False) < 0.955


@pytest.mark.parametrize("baseline", [False, True], ids=["mean", "difference"])
@pytest.mark.parametrize("largest", [1, 10, 30])
def test_the_interval_over_16_games_holds_the_mean_also_where_one_game_varies_most(largest, baseline):
    """A bootstrap over 3 seeds does in 79 and 90 of 100 cases, where one game has 30 or 10 times the deviation."""
    assert 0.92 < coverage([largest, *[1] * 15], 3, baseline) < 0.97


# Curves and final scores


def curve(steps, returns):
    return pd.DataFrame({"global_step": steps, "episodic_return": returns})


def test_curves_meet_where_all_have_rows_and_are_straight_between_rows():
    curves = [curve([0, 10, 30], [0, 10, 50]), curve([5, 25, 100], [1, 5, 80])]
    steps, returns = plot.on_common_steps(curves, num_points=6)
    assert steps == pytest.approx([5, 10, 15, 20, 25, 30])
    assert returns[:, 0] == pytest.approx([5, 10, 20, 30, 40, 50])
    assert returns[:, 1] == pytest.approx([1, 2, 3, 4, 5, 10])
    assert len(plot.on_common_steps(curves)[0]) == 200, "enough for a figure"


def final_returns(scores):
    """By algorithm and game."""
    return scores[scores.metric == "episodic_return"].set_index(["algo", "env_id"]).value


def on_the_line(path, every, last, script="ppo_procgen.py", seeds=(1, 2), env_id="coinrun", **options):
    """Runs whose return is a hundredth of the step, and a little more with every seed."""
    steps = np.arange(every, last + 1, every)
    for seed in seeds:
        returns = steps / 100 + seed / 1000
        make_run(path / f"{script}-{env_id}-{seed}", script, steps, returns, env_id=env_id, seed=seed, **options)
    return path


def test_the_difference_is_taken_at_equal_samples(quick, tmp_path):
    """PPO has a row every 100 steps and PPG every 400, the last one after PPO's: on one line, they do not differ."""
    runs = on_the_line(tmp_path / "runs", every=100, last=1000)
    on_the_line(runs, every=400, last=1200, script="ppg_procgen.py")
    scores, text = report(tmp_path, runs)
    assert "at 1,000 environment steps" in text and "from 950 steps on" in text
    assert final_returns(scores).tolist() == pytest.approx([9.7515, 9.7515], rel=1e-5)
    differences = scores[scores.metric.isin(["difference", "difference_in_return"])]
    assert len(differences) == 2 and differences.value.tolist() == pytest.approx([0, 0], abs=1e-9)


def test_the_final_score_is_the_mean_of_the_curve_over_the_last_twentieth_of_the_steps(quick, tmp_path):
    make_run(tmp_path / "runs", steps=[800, 900, 960, 1000], returns=[50.0, 0.0, 6.0, 2.0])
    scores, _ = report(tmp_path, tmp_path / "runs")
    # From 950 steps on: 10 steps from 5 to 6 and 40 steps from 6 to 2.
    assert scores.value[0] == pytest.approx((10 * 5.5 + 40 * 4) / 50, abs=0.01)


def test_all_final_scores_begin_where_the_last_curve_begins_if_that_is_later(quick, tmp_path):
    runs = on_the_line(tmp_path / "runs", every=100, last=1000, seeds=[1])
    make_run(runs / "late", "ppg_procgen.py", steps=[980, 1000], returns=[4.0, 8.0], env_id="coinrun")
    scores, text = report(tmp_path, runs)
    assert "from 980 steps on" in text
    assert final_returns(scores).tolist() == pytest.approx([9.901, 6], rel=1e-5)


# Normalization


def test_score_ranges_are_those_of_the_16_games_in_both_modes():
    for mode in ("easy", "hard"):
        assert sorted(plot.SCORE_RANGES[mode]) == sorted(ENV_NAMES) and len(ENV_NAMES) == 16
        assert all(low < high for low, high in plot.SCORE_RANGES[mode].values())
    assert set(plot.SCORE_RANGES) == {"easy", "hard"}


def test_score_ranges_are_those_of_the_procgen_paper():
    """Its appendix, game by game: easy from and to, hard from and to."""
    paper = {
        "coinrun": (5, 10, 5, 10),
        "starpilot": (2.5, 64, 1.5, 35),
        "caveflyer": (3.5, 12, 2, 13.4),
        "dodgeball": (1.5, 19, 1.5, 19),
        "fruitbot": (-1.5, 32.4, -0.5, 27.2),
        "chaser": (0.5, 13, 0.5, 14.2),
        "miner": (1.5, 13, 1.5, 20),
        "jumper": (3, 10, 1, 10),
        "leaper": (3, 10, 1.5, 10),
        "maze": (5, 10, 4, 10),
        "bigfish": (1, 40, 0, 40),
        "heist": (3.5, 10, 2, 10),
        "climber": (2, 12.6, 1, 12.6),
        "plunder": (4.5, 30, 3, 30),
        "ninja": (3.5, 10, 2, 10),
        "bossfight": (0.5, 13, 0.5, 13),
    }
    ranges = {env_id: (*plot.SCORE_RANGES["easy"][env_id], *plot.SCORE_RANGES["hard"][env_id]) for env_id in ENV_NAMES}
    assert ranges == paper


def test_normalized_scores_by_hand():
    assert plot.normalize(2.5, "starpilot", "easy") == 0 and plot.normalize(64, "starpilot", "easy") == 1
    assert plot.normalize(np.array([1.5, 35.0]), "starpilot", "hard") == pytest.approx([0, 1])
    assert plot.normalize(-7.2, "fruitbot", "hard") == pytest.approx((-7.2 + 0.5) / 27.7)
    assert plot.normalize(np.array([7.0, 4.0]), "coinrun", "easy") == pytest.approx([0.4, -0.2])


# Labels


def labels(*configs):
    return plot.labels(configs)[0]


def test_runs_that_differ_in_bookkeeping_only_share_a_label():
    changes = dict(seed=7, env_id="coinrun", device="cuda", run_dir="x", run_name="y", total_timesteps=9, track=True)
    changes |= dict(checkpoint_interval=3, resume="z", wandb_entity="w", wandb_project_name="v", microbatch_size=8)
    changes |= dict(compile=True, buffer_device="cpu")
    assert set(changes) == set(plot.BOOKKEEPING)
    assert set(labels(*(config(**{name: value}) for name, value in changes.items()))) == {"PPO"}


def test_a_name_without_an_addition_stands_for_the_defaults_whatever_most_runs_have():
    usual, changed = config("ppg_procgen.py"), config("ppg_procgen.py", n_pi=8)
    assert labels(*[usual] * 3, *[changed] * 4) == ["PPG"] * 3 + ["PPG, n_pi=8"] * 4
    assert labels(changed, changed, config()) == ["PPG, n_pi=8", "PPG, n_pi=8", "PPO"]


def test_an_ablation_is_named_after_the_arguments_that_set_it_apart():
    configs = [config("ppg_procgen.py", arch="detach"), config("ppg_procgen.py", arch="detach", e_aux=9)]
    configs += [config(channels=[8, 16, 16]), config() | {"args": config()["args"] | {"processes": 4}}]
    expected = ["PPG, arch=detach", "PPG, e_aux=9, arch=detach", "PPO, channels=8 16 16", "PPO, processes=4"]
    assert labels(*configs) == expected


def test_the_problem_that_all_runs_have_in_common_stands_once_and_not_in_each_label():
    problem = dict(num_envs=16, channels=[8, 16, 16])
    configs = [config(**problem), config("ppg_procgen.py", **problem, n_pi=8), config("copy.py", **problem)]
    names, in_common, _ = plot.labels(configs)
    assert names == ["PPO", "PPG, n_pi=8", "copy"] and in_common == "num_envs=16, channels=8 16 16"
    assert plot.labels(configs[::-1])[:2] == (names[::-1], in_common)
    names, in_common, _ = plot.labels([*configs[:2], config(num_envs=16)])
    assert names == ["PPO, channels=8 16 16", "PPG, channels=8 16 16, n_pi=8", "PPO"] and in_common == "num_envs=16"


@pytest.mark.parametrize(
    "name, value",
    [("distribution_mode", "hard"), ("num_levels", 200), ("start_level", 5), ("num_envs", 8), ("num_steps", 64)],
)
def test_arguments_of_the_problem_are_told_from_those_of_the_algorithm(name, value):
    configs = [config(**{name: value}), config("ppg_procgen.py", **{name: value})]
    assert plot.labels(configs)[:2] == (["PPO", "PPG"], f"{name}={value}")
    assert plot.labels([config(gamma=0.9)] * 2)[:2] == (["PPO, gamma=0.9"] * 2, "")


def test_an_argument_that_the_script_no_longer_has_counts_only_where_its_runs_differ_in_it():
    assert labels(config(vf_clip=0.1), config(vf_clip=0.1), config("ppg_procgen.py")) == ["PPO", "PPO", "PPG"]
    assert labels(config(vf_clip=0.1), config(vf_clip=0.2)) == ["PPO, vf_clip=0.1", "PPO, vf_clip=0.2"]
    assert labels(*[config(vf_clip=0.1)] * 3, config()) == ["PPO, vf_clip=0.1"] * 3 + ["PPO"]


def test_runs_from_before_the_script_had_an_argument_have_its_default():
    old = config()
    del old["args"]["channels"], old["args"]["max_grad_norm"]
    assert labels(old, old, config(max_grad_norm=0.5)) == ["PPO", "PPO", "PPO, max_grad_norm=0.5"]


def test_of_a_copy_whose_defaults_nobody_knows_what_most_runs_have_goes_for_them_and_a_note_says_so():
    runs = [config("wide.py", width=2)] * 3 + [config("wide.py", width=8)] * 2
    elsewhere = str(Path(ppo_procgen.__file__).resolve())
    names, _, notes = plot.labels([*runs, config("../ppo_procgen.py"), config(elsewhere), config()])
    assert names == ["wide"] * 3 + ["wide, width=8"] * 2 + ["ppo_procgen", "ppo_procgen", "PPO"]
    end = "is not beside benchmark/, so its labels name what at most half of its runs have"
    assert notes == [f"wide.py {end}", f"../ppo_procgen.py {end}", f"{elsewhere} {end}"]


def test_the_defaults_of_a_script_beside_benchmark_are_those_it_has_itself(monkeypatch, tmp_path):
    text = (
        "from dataclasses import dataclass\n\n@dataclass\nclass Args:\n    width: int = 4\n    sizes: tuple = (1, 2)\n"
    )
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    runs = [{"script": "mine.py", "args": args} for args in ({"width": 2, "sizes": [1, 2]}, {"width": 4, "sizes": [3]})]
    assert plot.labels([runs[0], runs[0], runs[1]]) == (["mine, width=2", "mine, width=2", "mine, sizes=3"], "", [])


def test_a_script_beside_benchmark_that_cannot_be_imported_is_refused(capsys, monkeypatch, tmp_path):
    (tmp_path / "ppo_procgen.py").write_text("import nothing_of_that_name")
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    complaint = refused(capsys, tmp_path, make_grid(tmp_path / "runs"))
    assert f"config.json names {tmp_path}/ppo_procgen.py: expected a training script that can be" in complaint


def test_where_no_value_is_the_usual_one_all_labels_of_a_copy_name_it():
    assert labels(config("wide.py"), config("wide.py", gamma=0.9)) == ["wide, gamma=0.999", "wide, gamma=0.9"]


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_runs_of_a_copy_from_before_it_had_an_argument_keep_a_label_of_their_own(lacking):
    names = labels(*[config("mine.py")] * lacking, *[config("mine.py", width=1)] * 2)
    assert len(set(names[:lacking])) == len(set(names[lacking:])) == 1 and names[0] != names[-1]


@pytest.mark.parametrize("script", ["ppo_procgen.py", "copy.py"])
def test_different_arguments_never_share_a_label(script):
    rng = random.Random(0)
    for _ in range(100):
        choices = dict(gamma=(0.9, 0.99, 0.999), num_envs=(16, 64), clip_coef=(0, 0.2), precision=("auto", "float32"))
        configs = [config(script, **{name: rng.choice(values) for name, values in choices.items()}) for _ in range(8)]
        names = labels(*configs)
        for i in range(8):
            assert all((names[i] == names[j]) == (configs[i] == configs[j]) for j in range(8))


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
    columns = ["algo", "env_id", "metric", "value", "low", "high", "std", "runs", "baseline", "interval"]
    assert list(scores.columns) == columns
    assert len(scores) == 2 * (2 * 2 + 3) + 2 + 2
    assert scores[scores.env_id == "all"]["std"].isna().all(), "of seeds, which a game has"
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

    # Variances of the games' means, normalized: PPO's starpilot and coinrun, then PPG's.
    v = (18 / 2) / 61.5**2, (2 / 2) / 5**2, (72 / 2) / 61.5**2, (4.5 / 2) / 5**2
    ppo, ppg = (12.5 / 61.5 + 0.6) / 2, (24.5 / 61.5 + 0.7) / 2
    half = stats.t.ppf(0.975, (v[0] + v[1]) ** 2 / (v[0] ** 2 + v[1] ** 2)) * (v[0] + v[1]) ** 0.5 / 2
    half_of_difference = stats.t.ppf(0.975, sum(v) ** 2 / sum(x**2 for x in v)) * sum(v) ** 0.5 / 2
    expected = {
        ("PPO", "mean"): (ppo, ppo - half, ppo + half),
        ("PPG", "difference"): (ppg - ppo, ppg - ppo - half_of_difference, ppg - ppo + half_of_difference),
        # One resample in 16 has the worse run of both games twice, and one the better.
        ("PPO", "iqm"): ((15.5 / 61.5 + 0.4) / 2, (9.5 / 61.5 + 0.4) / 2, (15.5 / 61.5 + 0.8) / 2),
        ("PPG", "median"): ((24.5 / 61.5 + 0.7) / 2, (18.5 / 61.5 + 0.4) / 2, (30.5 / 61.5 + 1) / 2),
        # starpilot: always better; coinrun: 7 = 7, 7 < 9, 10 > 7, 10 > 9, so 2.5 of 4
        ("PPG", "probability_of_improvement"): ((1 + 0.625) / 2, (1 + 0) / 2, (1 + 1) / 2),
    }
    for (algo, metric), values in expected.items():
        row = scores.loc[algo, "all", metric]
        assert (row.value, row.low, row.high, row.runs) == pytest.approx((*values, 4), rel=1e-5), metric
        compares = metric in ("difference", "probability_of_improvement")
        assert row.baseline == "PPO" if compares else pd.isna(row.baseline)
    assert ("PPO", "all", "probability_of_improvement") not in scores.index
    methods = scores.reset_index().groupby("metric").interval.unique().map(" ".join)
    assert methods.to_dict() == {
        **dict.fromkeys(["episodic_return", "normalized_score"], "Student"),
        **dict.fromkeys(["mean", "difference"], "Welch-Satterthwaite"),
        **dict.fromkeys(["median", "iqm", "probability_of_improvement"], "bootstrap, approximate"),
        "difference_in_return": "Welch",
    }

    assert "easy, at 2,000 environment steps" in text and "Over games (2 of 16)" in text
    assert (
        "from 1,900 steps on, linear between rows (each value is a mean of 100\nepisodes; no further smoothing)" in text
    )
    means = f"0.402 [{ppo - half:.3f}, {ppo + half:.3f}] | 0.402 ~[0.277, 0.526] | 0.326 ~[0.277, 0.526]"
    assert f"| PPO | 4 | {means} |  |  |" in text
    assert "~ approximate, as a rule too narrow: in some game there are fewer than 5 seeds." in text
    assert "P(better than PPO)" in text and "| 0.812 ~[0.500, 1.000] |" in text
    assert "| starpilot | 15.00 ± 4.24 (2) | 27.00 ± 8.49 (2) |" in text
    assert "mean − that of PPO" in text and "## Difference from PPO in each game" in text
    half = stats.t.ppf(0.975, 45**2 / (9**2 + 36**2)) * 45**0.5
    assert f"| starpilot | +12.00 [{12 - half:+.2f}, {12 + half:+.2f}] |" in text


@pytest.mark.parametrize("seeds, approximate", [(4, True), (5, False)])
def test_bootstrap_intervals_of_fewer_than_5_seeds_in_some_game_are_called_approximate(
    quick, tmp_path, seeds, approximate
):
    runs = make_grid(tmp_path / "runs", games=("coinrun", "maze"), seeds=range(6))
    for seed in range(seeds, 6):
        shutil.rmtree(runs / "ppo_procgen.py" / "maze" / str(seed))
    scores, text = report(tmp_path, runs)
    methods = scores[scores.env_id == "all"].set_index(["algo", "metric"]).interval
    expected = "bootstrap, approximate" if approximate else "bootstrap"
    for algo, metric in (("PPO", "median"), ("PPO", "iqm"), ("PPG", "probability_of_improvement")):
        assert methods[algo, metric] == expected
    assert methods["PPG", "median"] == methods["PPG", "iqm"] == "bootstrap"
    assert text.count("~[") == (3 if approximate else 0) and ("~ approximate" in text) is approximate


@pytest.mark.parametrize(
    "suffix, magic", [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF-")], ids=["png", "svg", "pdf"]
)
def test_the_command_writes_two_figures_and_two_tables_and_prints_the_scores(tmp_path, suffix, magic):
    """With relative paths, on runs without checkpoints; no warning on standard error."""
    make_grid(tmp_path / "runs")
    quiet = ["-W", "error", "-W", "ignore:unclosed file:ResourceWarning"]  # one that Procgen leaves
    command = [sys.executable, *quiet, plot.__file__, "runs", "--out", "a/b", "--format", suffix]
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
    assert not any("all runs" in caption for caption in captions.values())
    assert all("environment steps" in caption for caption in captions.values())
    assert "no smoothing beyond the 100 episodes" in captions["curves"].replace("\n", " ")
    assert "easy, 2 of 16 games" in captions["mean_normalized_score"]
    assert "no further smoothing" in captions["mean_normalized_score"].replace("\n", " ")


def test_what_all_runs_have_in_common_stands_in_both_captions_and_in_scores_md(figures, tmp_path):
    runs = make_grid(tmp_path / "runs", num_envs=16, channels=(8, 16, 16), seeds=[1])
    call(runs, "--out", tmp_path / "figures")
    in_common = "all runs: num_envs=16, channels=8 16 16"
    assert len(figures) == 2 and all(in_common in figure.get_supxlabel() for figure in figures.values())
    assert f"\n\n{in_common}\n\n## Over games" in (tmp_path / "figures" / "scores.md").read_text()
    assert list(lines(figures["curves"].axes[0])) == ["PPO", "PPG"]


def test_max_steps_ends_all_curves_there(figures, tmp_path):
    runs = on_the_line(tmp_path / "runs", every=400, last=2000, seeds=[0, 2])
    make_run(runs / "short", "ppg_procgen.py", env_id="coinrun", steps=[400, 800], returns=[5.0, 6.0])
    call(runs, "--out", tmp_path / "figures", "--resamples", 100, "--max-steps", 1000)
    curves, mean = lines(figures["curves"].axes[0]), lines(figures["mean_normalized_score"].axes[0])
    assert curves["PPO"][-1] == pytest.approx([1000, 10.001]) and curves["PPG"][-1] == pytest.approx([800, 6])
    assert mean["PPO (2 runs)"][-1] == pytest.approx([1000, 5.001 / 5])
    thin = [line.get_xydata() for line in figures["curves"].axes[0].get_lines() if line.get_linewidth() == 0.5]
    assert [points[-1, 0] for points in thin] == [1000, 1000, 800] and thin[1][-1, 1] == pytest.approx(10.002)


def test_the_bands_are_those_of_students_t_in_a_game_and_of_welch_and_satterthwaite_over_games(figures, tmp_path):
    make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"])
    call(tmp_path / "runs", "--out", tmp_path / "figures", "--resamples", 100)
    returns = np.array([7.1, 7.2, 7.3])
    expected = {
        "curves": plot.mean_interval([returns])[1:],
        "mean_normalized_score": plot.mean_interval([(returns - 5) / 5, (returns - 2.5) / 61.5])[1:],
    }
    for name, (low, high) in expected.items():
        (band,) = figures[name].axes[0].collections
        assert set(band.get_paths()[0].vertices[:, 1].round(6)) == {round(low, 6), round(high, 6)}
    captions = {name: figure.get_supxlabel().replace("\n", " ") for name, figure in figures.items()}
    assert "mean and 95 % Student interval over seeds" in captions["curves"]
    assert "band: 95 % Welch-Satterthwaite interval over runs" in captions["mean_normalized_score"]


@pytest.mark.parametrize("apart", [0.1, 1.0])
def test_the_wide_band_of_two_seeds_does_not_flatten_the_curves(figures, tmp_path, apart):
    """Curves from 1 to 3 and `apart` higher; the band reaches 6.353 · apart from their mean, and is cut at 1.5."""
    for seed in (1, 2):
        returns = [1 + apart * (seed - 1), 3 + apart * (seed - 1)]
        make_run(tmp_path / f"runs/{seed}", env_id="coinrun", seed=seed, steps=[100, 200], returns=returns)
    call(tmp_path / "runs", "--out", tmp_path / "figures", "--resamples", 100)
    half = 1 + 6.353 * apart
    half = half + 0.05 * 2 * half if apart == 0.1 else 1.5 * 2  # matplotlib's margin, or half of what the curves span
    middle = 2 + apart / 2
    assert figures["curves"].axes[0].get_ylim() == pytest.approx((middle - half, middle + half), rel=1e-3)


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
    assert final_returns(scores)["PPO", "coinrun"] == pytest.approx(9.75)


def test_with_max_steps_rows_after_it_still_tell_how_high_the_curve_is(quick, tmp_path):
    runs = on_the_line(tmp_path / "runs", every=400, last=2000, seeds=[0])
    scores, text = report(tmp_path, runs, "--max-steps", 1000)
    assert "at 1,000 environment steps" in text and not any("shortest" in note for note in notes(text))
    assert final_returns(scores)["PPO", "coinrun"] == pytest.approx(9.75)
    scores, text = report(tmp_path, runs, "--max-steps", 3000)
    assert "at 2,000 environment steps" in text and final_returns(scores)["PPO", "coinrun"] == pytest.approx(19.5)


def test_who_begins_after_max_steps_is_left_out_and_named(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=["coinrun"], scripts=["ppo_procgen.py"])
    make_run(runs / "late", steps=[501, 600], env_id="coinrun", seed=4)
    make_run(runs / "later", "ppg_procgen.py", steps=[1200, 1300], env_id="coinrun", seed=1)
    make_run(runs / "just in time", steps=[500, 600], env_id="coinrun", seed=5)
    scores, text = report(tmp_path, runs, "--max-steps", 500)
    assert set(scores.algo) == {"PPO"} and set(scores[scores.metric == "episodic_return"].runs) == {4}
    assert notes(text)[:2] == [
        "PPG, coinrun, seed 1: left out, its first value is at 1,200 steps, after --max-steps 500",
        "PPO, coinrun, seed 4: left out, its first value is at 501 steps, after --max-steps 500",
    ]


def test_seeds_of_different_precision_or_commit_in_one_mean_are_noted(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=["coinrun", "maze"], seeds=(1, 2), origin={"precision": "float32"})
    for env_id in ("coinrun", "maze"):
        make_run(runs / env_id, env_id=env_id, seed=3, origin={"precision": "bfloat16"})
    commits = {"precision": "float32", "git_commit": "b" * 40, "parts": [{"git_commit": "a" * 40}, {}]}
    make_run(runs / "resumed", "ppg_procgen.py", env_id="maze", seed=3, origin=commits)
    assert [note for note in notes(report(tmp_path, runs)[1]) if "different" in note] == [
        "PPO, coinrun, maze: different precision in one mean (bfloat16, float32)",
        "PPG, maze: different git_commit in one mean (aaaaaaaaaa, bbbbbbbbbb, unknown)",
        "PPG, maze: different precision in one mean (float32, unknown)",
    ]


@pytest.mark.parametrize("name", ["precision", "git_commit"])
def test_a_run_that_was_resumed_in_another_precision_or_at_another_commit_is_noted(quick, tmp_path, name):
    parts = [{"precision": "float32", "git_commit": "a"}, {"precision": "float32", "git_commit": "a", name: "other"}]
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], seeds=[1], origin=parts[0] | {"parts": parts[:1]})
    assert not any("different" in note for note in notes(report(tmp_path, runs)[1]))
    make_run(runs / "resumed", "ppg_procgen.py", env_id="maze", origin=parts[0] | {"parts": parts})
    values = f"{parts[0][name]}, other"
    assert f"PPG, maze: different {name} in one mean ({values})" in notes(report(tmp_path, runs)[1])


def test_a_copy_of_a_script_is_plotted_with_a_note_on_its_labels(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=["coinrun"], seeds=[1, 2, 3])
    make_run(runs / "mine", "mine.py", env_id="coinrun", seed=1, width=2)
    scores, text = report(tmp_path, runs)
    assert set(scores.algo) == {"PPO", "PPG", "mine"}
    assert any(note.startswith("mine.py is not beside benchmark/") for note in notes(text))


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
    assert not any("differ in num_envs" in note for note in notes(report(tmp_path, runs)[1]))
    make_grid(runs / "ppg", scripts=["ppg_procgen.py"], num_envs=16)
    assert any("differ in num_envs" in note for note in notes(report(tmp_path, runs)[1]))


def test_an_algorithm_with_few_of_the_games_does_not_shrink_the_comparison(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", games=("starpilot", "coinrun", "maze"), scripts=["ppo_procgen.py"])
    make_grid(runs / "ppg", games=("starpilot", "coinrun"), scripts=["ppg_procgen.py"])
    make_grid(runs / "kl", games=["maze"], scripts=["ppo_procgen.py"], kl_coef=1.0)
    scores, text = report(tmp_path, runs)
    assert "Over games (2 of 16)" in text and set(scores[scores.env_id == "all"].algo) == {"PPO", "PPG"}
    assert "PPO, kl_coef=1.0: not among the scores over games, it has 1 of them" in notes(text)
    assert set(scores[scores.env_id == "maze"].algo) == {"PPO", "PPO, kl_coef=1.0"}


def test_half_of_the_games_is_not_most_of_them(quick, tmp_path):
    runs = make_grid(tmp_path / "runs")
    make_grid(runs / "kl", games=["coinrun"], scripts=["ppo_procgen.py"], kl_coef=1.0)
    scores, text = report(tmp_path, runs)
    assert "Over games (2 of 16)" in text and set(scores[scores.env_id == "all"].algo) == {"PPO", "PPG"}


def test_ppo_and_ppg_come_before_all_others(quick, tmp_path):
    curves = write_curves(tmp_path / "others.csv", algo="A2C")
    scores, _ = report(tmp_path, make_grid(tmp_path / "runs"), "--curves", curves, "--mode", "easy")
    assert list(dict.fromkeys(scores.algo)) == ["PPO", "PPG", "A2C"]


def test_runs_of_several_processes_are_an_algorithm_of_their_own(quick, tmp_path):
    runs = make_grid(tmp_path / "runs", scripts=["ppo_procgen.py"], origin={"processes": 4})
    assert set(report(tmp_path, runs)[0].algo) == {"PPO, processes=4"}


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
    assert "one distribution mode, not easy, hard" in refused(capsys, tmp_path, easy, hard)
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
    assert f"{tmp_path}/none: expected a directory with runs below it" in refused(capsys, tmp_path, tmp_path / "none")
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


def test_without_a_plain_ppo_its_variant_with_the_fewest_changes_is_the_baseline(quick, tmp_path):
    make_grid(tmp_path / "runs" / "kl", scripts=["ppo_procgen.py"], clip_coef=0.0, kl_coef=1.0)
    make_grid(tmp_path / "runs" / "λ", scripts=["ppo_procgen.py"], gae_lambda=0.9)
    make_grid(tmp_path / "runs" / "γ", scripts=["ppo_procgen.py"], gamma=0.9)
    make_grid(tmp_path / "runs" / "ppg", scripts=["ppg_procgen.py"])
    scores, text = report(tmp_path, tmp_path / "runs")
    assert "P(better than PPO, gae_lambda=0.9)" in text
    assert set(scores.baseline.dropna()) == {"PPO, gae_lambda=0.9"}
    names = ["PPO, gae_lambda=0.9", "PPG", "PPO, clip_coef=0.0, kl_coef=1.0", "PPO, gamma=0.9"]
    assert list(dict.fromkeys(scores.algo)) == names


def test_without_any_ppo_the_first_algorithm_is_the_baseline(quick, tmp_path):
    make_grid(tmp_path / "runs", scripts=["ppg_procgen.py"])
    make_grid(tmp_path / "runs" / "detach", scripts=["ppg_procgen.py"], arch="detach")
    assert set(report(tmp_path, tmp_path / "runs")[0].baseline.dropna()) == {"PPG"}


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
    scores, text = report(tmp_path, tmp_path)
    labels = {"PPO, num_minibatches=2", "PPG, num_minibatches=2, n_pi=1, e_aux=1"}
    assert set(scores.algo) == labels and (scores[scores.metric == "episodic_return"].value == 7).all()
    assert "all runs: num_envs=2, num_steps=8, channels=4 4 4" in text
    assert not any("different" in note for note in notes(text))


def test_the_scores_in_the_repository_are_those_of_its_runs(tmp_path):
    results = Path(plot.__file__).parent / "results"
    call(results, "--out", tmp_path)
    assert (tmp_path / "scores.md").read_text() == (results / "scores.md").read_text()
