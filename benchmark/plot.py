"""Learning curves and scores of seeded runs, with honest uncertainty.

    python benchmark/plot.py runs/benchmark --out figures
    python benchmark/plot.py runs/benchmark --curves published.csv --mode easy --format pdf

Reads config.json and progress.csv of every run below the given directories, and nothing else. Writes a panel for
each game (`curves`), the mean normalized score (`mean_normalized_score`), `scores.csv` and `scores.md`.

Runs of one script with different arguments are different algorithms here: each has a label of its own that
names what sets it apart. Nothing is smoothed beyond the mean of the last 100 episodes that progress.csv has.
"""

import json
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import matplotlib

matplotlib.use("Agg")  # files only, no window

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.ticker import EngFormatter
from scipy import stats

from common import fail


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """directories that hold runs, at any depth"""
    curves: tuple[Path, ...] = ()
    """CSV files with curves from elsewhere: columns algo, env_id, seed, global_step, episodic_return"""
    mode: Literal["easy", "hard"] | None = None
    """distribution mode of those curves"""
    max_steps: int | None = None
    """leave out everything after this many environment steps"""
    out: Path = Path("figures")
    """directory to write to"""
    format: Literal["png", "svg", "pdf"] = "png"
    """of the figures"""
    resamples: int = 2000
    """bootstrap resamples behind each interval"""
    seed: int = 0
    """of the bootstrap"""


# (R_min, R_max) of each game; normalized score = (R − R_min) / (R_max − R_min), where R_min is the return without
# vision and R_max the best possible or attained. Source: Cobbe et al. 2019, arXiv 1912.01588, appendix. (The authors'
# plotting code has 1 to 10 for jumper and 1.5 to 10 for leaper in easy mode.)
# fmt: off
SCORE_RANGES = {
    "easy": {
        "bigfish": (1, 40), "bossfight": (0.5, 13), "caveflyer": (3.5, 12), "chaser": (0.5, 13), "climber": (2, 12.6),
        "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-1.5, 32.4), "heist": (3.5, 10), "jumper": (3, 10),
        "leaper": (3, 10), "maze": (5, 10), "miner": (1.5, 13), "ninja": (3.5, 10), "plunder": (4.5, 30),
        "starpilot": (2.5, 64),
    },
    "hard": {
        "bigfish": (0, 40), "bossfight": (0.5, 13), "caveflyer": (2, 13.4), "chaser": (0.5, 14.2), "climber": (1, 12.6),
        "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-0.5, 27.2), "heist": (2, 10), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (4, 10), "miner": (1.5, 20), "ninja": (2, 10), "plunder": (3, 30),
        "starpilot": (1.5, 35),
    },
}
# Published mean normalized scores on all 16 games, hard, after 100M steps: Cobbe et al. 2020, arXiv 2009.04416.
PUBLISHED_HARD_100M = {"PPG": 0.757, "PPO": 0.576}
# Okabe and Ito's colours, which colour-blind readers tell apart; neighbours differ in greyscale, all in their dashes.
STYLES = [("#0072B2", "-"), ("#E69F00", "--"), ("#000000", ":"), ("#CC79A7", "-."), ("#009E73", (0, (5, 1, 1, 1))),
          ("#D55E00", (0, (1, 1))), ("#56B4E9", (0, (8, 2)))]
# Arguments that say where, when or how fast a run ran, but not what it learned.
BOOKKEEPING = ("env_id", "seed", "device", "run_dir", "run_name", "resume", "checkpoint_interval", "track",
               "wandb_project_name", "wandb_entity", "total_timesteps", "microbatch_size", "compile", "buffer_device")
# fmt: on
WINDOW = 100  # episodes in the mean of progress.csv
# Runs beyond one a game, from which on the bootstrap's 95 % intervals hold the true mean in about 94 % of simulated
# cases or more. With 2 games and 3 seeds it is 91 %, with a single game and 3 seeds 76 %.
MIN_EXTRA_RUNS = 8
FINAL_SHARE = 0.05  # of the steps, over which the final score is the mean


def read_runs(directories):
    """All runs below the directories: a table with a row per row of progress.csv, the distribution mode, and notes.

    Columns: algo, env_id, seed, global_step, episodic_return. Rows before the 100th episode are left out: their mean
    favours short episodes.
    """
    configs, progress, notes, read = [], [], [], set()
    for directory in directories:
        if not directory.is_dir():
            fail(f"{directory}: expected a directory with runs")
        found = {name: {path.parent for path in directory.rglob(name)} for name in ("config.json", "progress.csv")}
        paths = sorted(path for path in set.union(*found.values()) if ".incomplete-" not in path.name)
        notes += [f"{path}: left out, it has no {name}" for name in found for path in paths if path not in found[name]]
        paths = [path for path in paths if all(path in having for having in found.values())]
        if not paths:
            fail(f"{directory}: expected runs below it, directories with a config.json and a progress.csv")
        for path in paths:
            if path.resolve() in read:  # below two of the directories
                continue
            read.add(path.resolve())
            try:
                config = json.loads((path / "config.json").read_text())
                if not {"env_id", "seed", "distribution_mode", "num_envs"} <= config["args"].keys():
                    raise ValueError("arguments are missing")
                for name, accepted in (("env_id", SCORE_RANGES["easy"]), ("distribution_mode", SCORE_RANGES)):
                    if config["args"][name] not in accepted:
                        raise ValueError(f"{name} is {config['args'][name]}")
                if not isinstance(config["args"]["seed"], int):
                    raise ValueError(f"seed is {config['args']['seed']}")
                arguments = config["args"] | {"processes": config.get("processes", 1)}
                configs.append({"script": config["script"], "args": arguments, "path": path})
                columns = ["global_step", "episodic_return", "episodes"]
                progress.append(pd.read_csv(path / "progress.csv")[columns].astype(float))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = str(error).split("\n")[0]
                fail(f"{path}: expected the config.json and progress.csv of a run ({reason})")

    modes = sorted({config["args"]["distribution_mode"] for config in configs})
    if len(modes) > 1:
        where = " ".join(map(str, directories))
        fail(f"{where}: expected runs of one distribution mode, these have {', '.join(modes)}")

    tables, seen = [], {}
    for config, rows, algo in zip(configs, progress, labels(configs)):
        env_id, seed = config["args"]["env_id"], config["args"]["seed"]
        if (algo, env_id, seed) in seen:
            other = seen[algo, env_id, seed]
            fail(f"{config['path']}: expected one run of {algo}, {env_id}, seed {seed}, and {other} is another")
        seen[algo, env_id, seed] = config["path"]
        full = rows[rows.episodes >= WINDOW].dropna()
        if full.empty:
            number = int(max([0, *rows.episodes.dropna()]))
            notes.append(f"{algo}, {env_id}, seed {seed}: left out, {number} of {WINDOW} episodes have finished")
        tables.append(full[["global_step", "episodic_return"]].assign(algo=algo, env_id=env_id, seed=seed))
    if len({config["args"]["num_envs"] for config in configs}) > 1:
        notes.append("the runs differ in num_envs, which matters as much as the algorithm: compare with care")
    return pd.concat(tables), modes[0], notes


def labels(configs):
    """A name for each run's algorithm: that of the script, and the arguments in which the run is unlike most others."""
    names = []
    for config in configs:
        twins = [other["args"] for other in configs if other["script"] == config["script"]]
        name = {"ppo_procgen.py": "PPO", "ppg_procgen.py": "PPG"}.get(config["script"], Path(config["script"]).stem)
        for argument in dict.fromkeys(argument for twin in twins for argument in twin):
            value = config["args"].get(argument)
            like_this = sum(twin.get(argument) == value for twin in twins)
            if argument not in BOOKKEEPING and like_this <= len(twins) / 2:
                name += f", {argument}={value}"
        names.append(name)
    return names


def read_curves(paths):
    """Curves from elsewhere, with the columns of `read_runs`."""
    types = {"algo": str, "env_id": str, "seed": int, "global_step": int, "episodic_return": float}
    tables = []
    for path in paths:
        try:
            table = pd.read_csv(path, dtype={"algo": str, "env_id": str})
            if absent := [name for name in types if name not in table]:
                raise ValueError(f"it has no {', '.join(absent)}")
            table = table[list(types)].dropna(subset="episodic_return")
            if table.empty:
                raise ValueError("no row has a return")
            if table[["algo", "env_id"]].isna().any(axis=None):
                raise ValueError("a row has no algo or no env_id")
            numbers = table[["seed", "global_step", "episodic_return"]].astype(float)
            whole = numbers[["seed", "global_step"]]
            if not np.isfinite(numbers).all(axis=None) or not ((whole >= 0) & (whole % 1 == 0)).all(axis=None):
                raise ValueError("a seed or step is no whole number, 0 or more, or a return is infinite")
            tables.append(table.astype(types))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).split("\n")[0]
            fail(f"--curves {path}: expected a CSV file with the columns {','.join(types)} ({reason})")
        unknown = sorted(set(table.env_id.astype(str)) - set(SCORE_RANGES["easy"]))
        if unknown:
            fail(f"--curves {path}: expected games of Procgen, not {', '.join(unknown)}")
    table = pd.concat(tables)
    again = table[table.duplicated(["algo", "env_id", "seed", "global_step"])]
    if len(again):
        row = again.iloc[0]
        where = f"{row.algo}, {row.env_id}, seed {row.seed}, has two at step {row.global_step}"
        fail(f"--curves {' '.join(map(str, paths))}: expected one row for each step of a curve; {where}")
    return table


def on_common_steps(curves, num_points=200):
    """Curves of several runs at the same steps, none of them extended beyond its first or last row.

    Args:
        curves: list of tables with global_step and episodic_return, a table a run
    Returns:
        steps [num_points], from the latest first row to the earliest last row, and returns [runs, num_points],
        interpolated linearly between rows; no points where the curves do not overlap
    """
    first = max(curve.global_step.iloc[0] for curve in curves)
    last = min(curve.global_step.iloc[-1] for curve in curves)
    steps = np.linspace(first, last, num_points if first <= last else 0)
    return steps, np.stack([np.interp(steps, curve.global_step, curve.episodic_return) for curve in curves])


def final_return(curve, horizon):
    """Mean episodic_return of a run over the last 5 % of the steps up to `horizon`; without a row there, the last."""
    curve = curve[curve.global_step <= horizon]
    last = curve[curve.global_step >= (1 - FINAL_SHARE) * horizon]
    return (last if len(last) else curve.tail(1)).episodic_return.mean()


def student_interval(values):
    """Mean of the runs and its 95 % interval by Student's t. values: [runs, ...] → mean, low, high [...].

    With one run the interval is NaN.
    """
    mean = values.mean(axis=0)
    if len(values) < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return mean, mean - half, mean + half


def welch_interval(values, baseline_values):
    """How much higher the mean of some runs is than that of others, and its 95 % interval by Welch's t-test.

    values: [runs], baseline_values: [other runs] → difference, low, high. With one run on a side the interval is NaN.
    """
    difference = values.mean() - baseline_values.mean()
    if min(len(values), len(baseline_values)) < 2:
        return difference, np.nan, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's, on runs that are alike
        return difference, *stats.ttest_ind(values, baseline_values, equal_var=False).confidence_interval(0.95)


# Statistics over games. scores: a list with an array [runs, ...] for each game; the result keeps the other axes.


def mean_score(scores):
    """Mean over games of the mean over runs."""
    return np.mean([game.mean(axis=0) for game in scores], axis=0)


def median_score(scores):
    """Median over games of the mean over runs."""
    return np.median([game.mean(axis=0) for game in scores], axis=0)


def iqm(scores):
    """Interquartile mean: of all runs of all games together, without the lowest and the highest quarter.

    Source: Agarwal et al. 2021, arXiv 2108.13264.
    """
    return stats.trim_mean(np.concatenate(scores), 0.25, axis=0)


def probability_of_improvement(scores, baseline_scores):
    """Mean over games of the probability that a run scores higher than a run of the baseline; ties count half.

    Source: Agarwal et al. 2021, arXiv 2108.13264 (the Mann-Whitney U statistic over its maximum).
    """
    wins = []
    for game, baseline in zip(scores, baseline_scores):
        difference = game[:, None] - baseline[None]
        wins.append(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(0, 1)))
    return np.mean(wins, axis=0)


def difference(scores, baseline_scores):
    """How much higher the mean score is than that of the baseline."""
    return mean_score(scores) - mean_score(baseline_scores)


def resample(scores, resamples, rng):
    """Draw runs with replacement within each game: a list of [runs − 1, resamples, ...], one array for each game.

    One run fewer than there are: the mean of n draws would vary less than the mean of the n runs does, by the
    factor (n − 1) / n, which matters at 3 runs. Source: Agarwal et al. 2021, arXiv 2108.13264, for the strata;
    Hesterberg 2015, arXiv 1411.5279, for the size.
    """
    return [game[rng.integers(len(game), size=(len(game) - 1, resamples))] for game in scores]


def bootstrap_interval(statistic, groups, resamples, rng):
    """95 % interval of statistic(*groups), each group being scores as above, by the expanded percentile bootstrap.

    The quantiles lie further out than 2.5 % and 97.5 %, as Student's t does with as many degrees of freedom as the
    smallest group has runs beyond one a game: with few runs, plain percentiles are too narrow. Returns low, high;
    NaN where a game has a single run. Source: Hesterberg 2015, arXiv 1411.5279.
    """
    if min(len(game) for scores in groups for game in scores) < 2:
        shape = np.shape(statistic(*groups))
        return np.full(shape, np.nan), np.full(shape, np.nan)
    values = statistic(*(resample(scores, resamples, rng) for scores in groups))
    degrees = min(sum(len(game) - 1 for game in scores) for scores in groups)
    tail = stats.norm.cdf(stats.t.ppf(0.025, degrees))
    return np.quantile(values, tail, axis=0), np.quantile(values, 1 - tail, axis=0)


def normalize(returns, env_id, mode):
    """(R − R_min) / (R_max − R_min) with the game's range."""
    low, high = SCORE_RANGES[mode][env_id]
    return (returns - low) / (high - low)


def comparable(table):
    """The algorithms that have most of the games, the games that all of those have, and notes on who is left out."""
    games = table.groupby("algo", sort=False).env_id.agg(lambda ids: set(ids))
    most = max(map(len, games))
    algos = [algo for algo in games.index if len(games[algo]) > most / 2]
    common = sorted(set.intersection(*(games[algo] for algo in algos)))
    others = [algo for algo in games.index if algo not in algos]
    notes = [f"{algo}: not among the scores over games, it has {len(games[algo])} of them" for algo in others]
    return algos, common, notes


def style(algos):
    """Colour and dashes for each algorithm, the same in all figures."""
    n = len(STYLES)  # from the n-th algorithm on, a colour comes again with other dashes
    return {algo: {"color": STYLES[i % n][0], "linestyle": STYLES[(i + i // n) % n][1]} for i, algo in enumerate(algos)}


def draw(axes, steps, mean, low, high, look, label):
    """A mean over steps with its band."""
    axes.plot(steps, mean, **look, linewidth=1.8, label=label, zorder=3)
    axes.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)


def finish(figure, axes, args, name, ylabel, caption):
    """Axes, legend and caption of a figure, and the file."""
    for panel in axes:
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlim(left=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    # Nothing is wider than the figure: about 14 letters of the caption, or 11 of the legend, fit into an inch.
    width = figure.get_figwidth()
    lines = [wrapped for line in caption.split("\n") for wrapped in textwrap.wrap(line, int(14 * width))]
    figure.supxlabel("\n".join(["environment steps", *lines]), fontsize="small")
    figure.supylabel(ylabel, fontsize="small")
    entries = {}
    for panel in axes:
        handles, names = panel.get_legend_handles_labels()
        entries |= dict(zip(names, handles))
    names = [textwrap.fill(name, int(11 * (width - 0.8))) for name in entries]
    widest = max(len(line) for name in names for line in name.split("\n")) / 11 + 0.8
    columns = min(3, len(names), max(1, int(width / widest)))
    figure.set_figheight(figure.get_figheight() + 0.2 * sum(name.count("\n") + 1 for name in names) / columns)
    figure.legend(entries.values(), names, loc="outside upper center", ncols=columns, frameon=False)
    figure.savefig(args.out / f"{name}.{args.format}", dpi=150)
    plt.close(figure)


def plot_games(table, looks, args):
    """A panel a game: each algorithm's mean and 95 % band over seeds, and a thin line for each seed."""
    games = sorted(table.env_id.unique())
    columns = min(4, len(games))
    rows = -(-len(games) // columns)
    size = (3.2 * columns + 1.2, 2.6 * rows + 1.2)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(games) :]:
        panel.remove()
    for env_id, panel in zip(games, axes.flat):
        panel.set_title(env_id, fontsize="medium")
        for algo, look in looks.items():
            runs = table[(table.algo == algo) & (table.env_id == env_id)]
            curves = [curve for _, curve in runs.groupby("seed")]
            for curve in curves:
                panel.plot(curve.global_step, curve.episodic_return, color=look["color"], linewidth=0.5, alpha=0.4)
            if curves:
                steps, returns = on_common_steps(curves)
                draw(panel, steps, *student_interval(returns), look, algo)
    caption = f"mean and 95 % Student interval over seeds; thin: one seed; no smoothing beyond the {WINDOW} episodes"
    finish(figure, axes.flat[: len(games)], args, "curves", f"mean return of the last {WINDOW} episodes", caption)


def plot_mean_score(table, algos, games, looks, mode, args, rng):
    """The mean normalized score of each algorithm over steps, with a stratified bootstrap band."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for algo in algos:
        runs = table[(table.algo == algo) & table.env_id.isin(games)]
        keys, curves = zip(*((key, curve) for key, curve in runs.groupby(["env_id", "seed"])))
        steps, returns = on_common_steps(curves)
        of_game = np.array([env_id for env_id, _ in keys])
        scores = [normalize(returns[of_game == env_id], env_id, mode) for env_id in games]
        interval = bootstrap_interval(mean_score, [scores], args.resamples, rng)
        draw(
            axes,
            steps,
            mean_score(scores),
            *interval,
            looks[algo],
            f"{algo} ({len(curves)} {'run' if len(curves) == 1 else 'runs'})",
        )
    if mode == "hard" and table.global_step.max() > 99e6:
        for (algo, score), linestyle in zip(PUBLISHED_HARD_100M.items(), ("--", ":")):
            axes.axhline(
                score, color="0.4", linestyle=linestyle, linewidth=1, label=f"{algo}, published, 16 games: {score}"
            )
    caption = f"{mode}, {len(games)} of 16 games; band: 95 % stratified bootstrap over runs\n"
    caption += f"returns are means of the last {WINDOW} episodes, no further smoothing"
    finish(figure, [axes], args, "mean_normalized_score", "mean normalized score", caption)


def score_table(table, algos, games, mode, horizon, args, rng):
    """All scores at `horizon` steps, a row each; env_id is "all" for what is computed over games."""
    runs = table.groupby(["algo", "env_id", "seed"], sort=False)[["global_step", "episodic_return"]]
    finals = runs.apply(final_return, horizon)
    rows = []
    for (algo, env_id), returns in finals.groupby(level=["algo", "env_id"], sort=False):
        mean, low, high = student_interval(returns.to_numpy())
        std = returns.std() if len(returns) > 1 else np.nan
        rows.append((algo, env_id, "episodic_return", mean, low, high, std, len(returns), None))
        normalized = normalize(returns, env_id, mode)
        mean, low, high = student_interval(normalized.to_numpy())
        rows.append((algo, env_id, "normalized_score", mean, low, high, normalized.std(), len(returns), None))
        if algo != algos[0] and (algos[0], env_id) in finals.index.droplevel("seed"):
            interval = welch_interval(returns.to_numpy(), finals[algos[0], env_id].to_numpy())
            rows.append((algo, env_id, "difference_in_return", *interval, np.nan, len(returns), algos[0]))

    if games:
        scores = {
            algo: [normalize(finals[algo][env_id].to_numpy(), env_id, mode) for env_id in games] for algo in algos
        }
        for algo in algos:
            groups = {name: [scores[algo]] for name in ("mean", "median", "iqm")}
            functions = {"mean": mean_score, "median": median_score, "iqm": iqm}
            if algo != algos[0]:
                compared = {"difference": difference, "probability_of_improvement": probability_of_improvement}
                groups |= {metric: [scores[algo], scores[algos[0]]] for metric in compared}
                functions |= compared
            for metric, statistic in functions.items():
                low, high = bootstrap_interval(statistic, groups[metric], args.resamples, rng)
                value, runs = statistic(*groups[metric]), sum(map(len, scores[algo]))
                baseline = algos[0] if len(groups[metric]) == 2 else None
                rows.append((algo, "all", metric, value, low, high, np.nan, runs, baseline))
    columns = ["algo", "env_id", "metric", "value", "low", "high", "std", "runs", "baseline"]
    return pd.DataFrame(rows, columns=columns)


def game_table(rows, cell):
    """Lines of a Markdown table with a row for each game and a column for each algorithm; `cell` words a score."""
    names = list(dict.fromkeys(rows.algo))
    lines = [f"| game | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for env_id in sorted(rows.env_id.unique()):
        of_game = rows[rows.env_id == env_id].set_index("algo")
        cells = [cell(of_game.loc[name]) if name in of_game.index else "" for name in names]
        lines.append(f"| {env_id} | {' | '.join(cells)} |")
    return lines


def markdown(scores, algos, games, mode, horizon, notes):
    """scores.md: what was measured, over games and for each game, and what is missing."""
    lines = [
        "# Scores",
        "",
        f"Procgen, {mode}, at {horizon:,} environment steps. A run's final score is the mean of its",
        f"`episodic_return` over the last {FINAL_SHARE:.0%} of these steps (each value is a mean of {WINDOW} episodes;",
        "no further smoothing).",
        "",
    ]
    over_games = scores[scores.env_id == "all"]
    if len(over_games):
        lines += [
            f"## Over games ({len(games)} of 16)",
            "",
            "Normalized scores, with 95 % intervals by stratified bootstrap, runs resampled within each game.",
            "",
            f"| algorithm | runs | mean | median | IQM | mean − {algos[0]}'s | P(better than {algos[0]}) |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for algo in algos:
            rows = over_games[over_games.algo == algo].set_index("metric")
            cells = [f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]" for row in rows.itertuples()]
            cells = [cell.replace(" [nan, nan]", "") for cell in cells]
            lines.append(f"| {algo} | {rows.runs.iloc[0]} | {' | '.join(cells + [''] * (5 - len(cells)))} |")
        lines.append("")

    lines += [
        "## Returns for each game",
        "",
        "Mean ± standard deviation over seeds (number of seeds).",
        "",
        *game_table(
            scores[scores.metric == "episodic_return"],
            lambda row: f"{row.value:.2f} ± {row['std']:.2f} ({row.runs})".replace(" ± nan", ""),
        ),
    ]
    differences = scores[scores.metric == "difference_in_return"]
    if len(differences):
        lines += [
            "",
            f"## Difference from {algos[0]} in each game",
            "",
            f"Mean return minus {algos[0]}'s, with the 95 % interval of Welch's t-test.",
            "",
            *game_table(
                differences,
                lambda row: f"{row.value:+.2f} [{row.low:+.2f}, {row.high:+.2f}]".replace(" [+nan, +nan]", ""),
            ),
        ]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def missing(table):
    """Notes on games and seeds that some algorithm lacks."""
    notes = []
    seeds = sorted(table.seed.unique())
    for algo, runs in table.groupby("algo", sort=False):
        if (number := runs.env_id.nunique()) < 16:
            notes.append(f"{algo}: {number} of 16 games")
        for env_id, of_game in runs.groupby("env_id"):
            absent = [str(seed) for seed in seeds if seed not in set(of_game.seed)]
            if absent:
                notes.append(f"{algo}, {env_id}: no seed {', '.join(absent)}")
            if of_game.seed.nunique() == 1:
                notes.append(f"{algo}, {env_id}: one seed, so no interval")
    return notes


def main(args):
    """Write figures and scores, as `args` say."""
    if not args.runs and not args.curves:
        fail("expected directories with runs, or --curves FILE.csv")
    if args.curves and args.mode is None:
        fail("--curves: expected --mode with it, the distribution mode of the curves")
    for name, lowest in (("resamples", 100), ("seed", 0), ("max_steps", 1)):
        if (value := getattr(args, name)) is not None and value < lowest:
            fail(f"--{name.replace('_', '-')} {value}: expected {lowest} or more")
    tables, mode, notes = [], args.mode, []
    if args.runs:
        table, mode, notes = read_runs(args.runs)
        tables.append(table)
        if args.mode not in (None, mode):
            fail(f"--mode {args.mode}: expected {mode}, the distribution mode of the runs; modes cannot be mixed")
    if args.curves:
        tables.append(read_curves(args.curves))
    if both := set.intersection(*(set(table.algo) for table in tables)) if len(tables) == 2 else None:
        fail(f"--curves: expected other names than those of the runs, and both have {', '.join(sorted(both))}")
    types = {"seed": int, "global_step": int, "episodic_return": float}
    table = pd.concat(tables).astype(types).sort_values("global_step", kind="stable")
    if table.empty:
        fail(f"expected a run in which {WINDOW} episodes have finished ({'; '.join(notes[:3])})")
    if args.max_steps is not None:
        first = table.global_step.min()
        if first > args.max_steps:
            fail(f"--max-steps {args.max_steps}: expected {first} or more, where the first curve begins")
        table = table[table.global_step <= args.max_steps]

    # PPO and PPG come first, so that they look the same in every figure and PPO is what others are compared with.
    algos = set(table.algo)
    baseline = "PPO" if "PPO" in algos else min((algo for algo in algos if algo.startswith("PPO")), default=None)
    order = sorted(algos, key=lambda algo: (algo != baseline, algo != "PPG", algo))
    table = table.assign(algo=pd.Categorical(table.algo, order)).sort_values(["algo", "env_id", "seed", "global_step"])
    table["algo"] = table.algo.astype(str)
    ends = table.groupby(["algo", "env_id", "seed"], sort=False).global_step.max()
    horizon = int(ends.min())
    starts = table.groupby(["algo", "env_id", "seed"], sort=False).global_step.min()
    if starts.max() > horizon:
        late, early = ("{}, {}, seed {}".format(*key) for key in (starts.idxmax(), ends.idxmin()))
        where = f"{early} ends at {horizon:,}, before the first value of {late} at {starts.max():,}"
        fail(f"expected runs that have steps in common; {where}: leave one of them out, or train it further")
    if horizon < ends.max():
        shortest = "{}, {}, seed {}".format(*ends.idxmin())
        where = f"scores are taken at {horizon:,} steps, where the shortest run ends ({shortest})"
        notes.append(f"{where}; the longest has {ends.max():,}")
    algos, games, left_out = comparable(table)
    notes += left_out + missing(table)
    extra = table[table.algo.isin(algos) & table.env_id.isin(games)].groupby("algo")[["env_id", "seed"]]
    extra = extra.apply(lambda runs: len(runs.drop_duplicates()) - runs.env_id.nunique())
    if any(0 < runs < MIN_EXTRA_RUNS for runs in extra.to_numpy().flat):
        notes.append("few games and seeds: the intervals over games are narrower than 95 % intervals should be")

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {args.out}: expected a directory that can be written to ({error.strerror})")
    rng = np.random.default_rng(args.seed)
    looks = style(order)
    plot_games(table, looks, args)
    if games:
        plot_mean_score(table, algos, games, looks, mode, args, rng)
    else:
        notes.append("no game that all algorithms have, so no scores over games")
    scores = score_table(table, algos, games, mode, horizon, args, rng)
    scores.to_csv(args.out / "scores.csv", index=False, float_format="%.6g")
    report = markdown(scores, algos, games, mode, horizon, notes)
    (args.out / "scores.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
