"""Learning curves and scores of seeded runs, with honest uncertainty.

    python benchmark/plot.py runs/benchmark --out figures
    python benchmark/plot.py runs/benchmark --curves published.csv --mode easy --format pdf

Reads config.json and progress.csv of every run below the given directories, and the defaults of the scripts that they
name. Writes a panel for each game (`curves`), the mean normalized score (`mean_normalized_score`), `scores.csv` and
`scores.md`.

Runs of one script with different arguments are different algorithms here: each has a label of its own that names what
differs from the script's defaults. Nothing is smoothed beyond the mean of the last 100 episodes that progress.csv has.
"""

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.ticker import EngFormatter
from scipy import stats

from common import ROOT, fail, load_script

plt.switch_backend("Agg")  # files only, no window


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()  # directories that hold runs, at any depth
    curves: tuple[Path, ...] = ()  # CSV files of others: columns algo, env_id, seed, global_step, episodic_return
    mode: Literal["easy", "hard"] | None = None  # distribution mode of those curves
    max_steps: int | None = None  # end the curves, and take the scores, at this many environment steps
    out: Path = Path("figures")  # directory to write to
    format: Literal["png", "svg", "pdf"] = "png"  # of the figures
    resamples: int = 2000  # bootstrap resamples behind each interval
    seed: int = 0  # of the bootstrap


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
# Arguments of the problem, and the precision: what all runs have in common of them stands in captions, not in labels.
PROBLEM = ("distribution_mode", "num_levels", "start_level", "num_envs", "num_steps", "channels", "precision")
# fmt: on
RUN = ["algo", "env_id", "seed"]  # columns that name a run
WINDOW = 100  # episodes in the mean of progress.csv
FINAL_SHARE = 0.05  # of the steps, over which the final score is the mean
FEW_SEEDS = 5  # with fewer in a game, 95 % intervals by bootstrap hold the true value clearly less often than that


def read_runs(directories):
    """Runs below the directories: a table, the distribution mode, what all have in common, in words, and notes.

    The table has a row per row of progress.csv. Columns: algo, env_id, seed, global_step, episodic_return, and
    precision and git_commit, with a word for each value that the parts of the run have. Rows before the 100th episode
    are left out: their mean favours short episodes.
    """
    paths, configs, progress, notes = {}, [], [], []
    files = ("config.json", "progress.csv")
    for directory in directories:
        found = {path.parent for name in files for path in directory.rglob(name)}
        absent = {path: [name for name in files if not (path / name).exists()] for path in sorted(found)}
        absent = {path: names for path, names in absent.items() if ".incomplete-" not in path.name}
        if all(absent.values()):
            fail(f"{directory}: expected a directory with runs below it, each with a config.json and a progress.csv")
        notes += [f"{path}: left out, it has no {names[0]}" for path, names in absent.items() if names]
        paths |= {path.resolve(): path for path, names in absent.items() if not names}  # a run below two counts once

    for path in paths.values():
        try:
            config = json.loads((path / "config.json").read_text())
            args = config["args"] | {"processes": config.get("processes", 1)}
            parts = [config, *config.get("parts", [])]
            if args["env_id"] not in SCORE_RANGES[args["distribution_mode"]] or not isinstance(args["seed"], int):
                raise ValueError(f"env_id is {args['env_id']}, seed is {args['seed']}")
            columns = {"env_id": args["env_id"], "seed": args["seed"]}
            for name in ("precision", "git_commit"):
                columns[name] = " ".join({str(part.get(name) or "unknown")[:10] for part in parts})
            rows = pd.read_csv(path / "progress.csv")[["global_step", "episodic_return", "episodes"]].astype(float)
            configs.append({"script": str(config["script"]), "args": args, "path": path})
            progress.append(rows.assign(**columns))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            fail(f"{path}: expected the config.json and progress.csv of a run ({reason})")

    modes = sorted({config["args"]["distribution_mode"] for config in configs})
    if len(modes) > 1:
        fail(f"{' '.join(map(str, directories))}: expected runs of one distribution mode, not {', '.join(modes)}")

    algos, in_common, more = labels(configs)
    tables, seen = [], {}
    for algo, config, rows in zip(algos, configs, progress):
        run = f"{algo}, {config['args']['env_id']}, seed {config['args']['seed']}"
        if run in seen:
            fail(f"{config['path']}: expected one run of {run}, and {seen[run]} is another")
        seen[run] = config["path"]
        full = rows[rows.episodes >= WINDOW].dropna()
        if full.empty:
            number = int(max([0, *rows.episodes.dropna()]))
            notes.append(f"{run}: left out, {number} of {WINDOW} episodes have finished")
        tables.append(full.drop(columns="episodes").assign(algo=algo))
    if len({config["args"].get("num_envs") for config in configs}) > 1:
        notes.append("the runs differ in num_envs, which matters as much as the algorithm: compare with care")
    return pd.concat(tables), modes[0], in_common, notes + more


def labels(configs):
    """A name for each run's algorithm; what all runs have in common that is not the default, in words; and notes.

    A name is that of the script, and the arguments that differ from its defaults. If the script is not beside
    benchmark/, what more than half of its runs have is taken for its defaults.
    """

    def plain(args):
        return {name: " ".join(map(str, x)) if isinstance(x, list | tuple) else x for name, x in args.items()}

    scripts, runs = [config["script"] for config in configs], [plain(config["args"]) for config in configs]
    defaults, notes = {}, []
    for script in dict.fromkeys(scripts):
        known = {}
        if Path(script).name == script and (ROOT / script).is_file():
            known = plain(vars(load_script(ROOT / script, "config.json names", ["Args"]).Args())) | {"processes": 1}
        else:
            notes.append(f"{script} is not beside benchmark/, so its labels name what at most half of its runs have")
        twins = [i for i, name in enumerate(scripts) if name == script]
        defaults[script] = dict.fromkeys(name for i in twins for name in runs[i]) | known
        for i in twins:
            runs[i] = defaults[script] | runs[i]
        for name in defaults[script].keys() - known.keys():
            values = [runs[i][name] for i in twins]
            usual = max(values, key=values.count)
            # An argument that a known script no longer has is of no consequence unless its runs differ in it.
            enough = len(values) if known else len(values) // 2 + 1
            defaults[script][name] = usual if values.count(usual) >= enough else None

    unusual = [
        {name: value for name, value in args.items() if name not in BOOKKEEPING and value != defaults[script][name]}
        for script, args in zip(scripts, runs)
    ]
    shared = {name: value for own in unusual for name, value in own.items() if name in PROBLEM}
    shared = {name: value for name, value in shared.items() if all(args.get(name) == value for args in runs)}
    names = []
    for script, own in zip(scripts, unusual):
        name = {"ppo_procgen.py": "PPO", "ppg_procgen.py": "PPG"}.get(script, Path(script).stem)
        names.append(", ".join([name, *(f"{key}={own[key]}" for key in own if key not in shared)]))
    return names, ", ".join(f"{name}={value}" for name, value in shared.items()), notes


def read_curves(paths):
    """Curves from elsewhere, with the columns algo, env_id, seed, global_step, episodic_return."""
    types = {"algo": str, "env_id": str, "seed": int, "global_step": int, "episodic_return": float}
    tables = []
    for path in paths:
        try:
            table = pd.read_csv(path, usecols=list(types), dtype=types).dropna(subset="episodic_return")
            negative = (table[["seed", "global_step"]] < 0).any(axis=None)
            if table.empty or table.isna().any(axis=None) or negative or np.isinf(table.episodic_return).any():
                raise ValueError("rows need an algo, a game, a seed and a step of 0 or more, and a finite return")
        except (OSError, ValueError) as error:
            reason = str(error).split("\n")[0]
            fail(f"--curves {path}: expected a CSV file with the columns {','.join(types)} ({reason})")
        if unknown := sorted(set(table.env_id) - set(SCORE_RANGES["easy"])):
            fail(f"--curves {path}: expected games of Procgen, not {', '.join(unknown)}")
        tables.append(table)
    table = pd.concat(tables)
    for row in table[table.duplicated([*RUN, "global_step"])][:1].itertuples():
        where = f"{row.algo}, {row.env_id}, seed {row.seed}, has two at step {row.global_step}"
        fail(f"--curves {' '.join(map(str, paths))}: expected one row for each step of a curve; {where}")
    return table


def cut(table, max_steps):
    """The curves up to `max_steps`, where each that goes on gets its interpolated value, and notes on later ones."""
    curves, notes = [], []
    for run, curve in table.groupby(RUN, sort=False):
        steps, last = curve.global_step, min(max_steps, curve.global_step.iloc[-1])
        if steps.iloc[0] > max_steps:
            where = f"its first value is at {steps.iloc[0]:,} steps, after --max-steps {max_steps}"
            notes.append("{}, {}, seed {}: left out, ".format(*run) + where)
        else:
            end = {"global_step": last, "episodic_return": np.interp(last, steps, curve.episodic_return)}
            curves.append(pd.concat([curve[steps < last], curve.tail(1).assign(**end)]))
    if not curves:
        fail(f"--max-steps {max_steps}: expected {table.global_step.min()} or more, where the first curve begins")
    return pd.concat(curves), notes


def on_common_steps(curves, num_points=200):
    """Curves of several runs, tables with global_step and episodic_return, at the same steps, linear between rows.

    Returns steps [num_points], from the latest first row to the earliest last row, and returns [num_points, runs].
    """
    first = max(curve.global_step.iloc[0] for curve in curves)
    last = min(curve.global_step.iloc[-1] for curve in curves)
    steps = np.linspace(first, last, num_points)
    return steps, np.stack([np.interp(steps, curve.global_step, curve.episodic_return) for curve in curves], axis=-1)


def normalize(returns, env_id, mode):
    """(R − R_min) / (R_max − R_min) with the game's range."""
    low, high = SCORE_RANGES[mode][env_id]
    return (returns - low) / (high - low)


# Statistics over games. The scores of each game are an array [..., runs]; the result keeps the other axes. Median, IQM,
# P(better) and their intervals are those of Agarwal et al. 2021, arXiv 2108.13264.


def mean_interval(games, baseline_games=()):
    """Mean over games of the mean over runs, minus that of the baseline, and its 95 % interval: value, low, high.

    Student's t with the degrees of freedom of Welch and Satterthwaite: no two games, or algorithms, need to have the
    same variance. For one game that is Student's interval and, with a baseline, Welch's. NaN if a game has one run.
    Source: Satterthwaite 1946, doi 10.2307/3002019.
    """
    samples = [*games, *baseline_games]
    value = sum(game.mean(axis=-1) for game in games) - sum(game.mean(axis=-1) for game in baseline_games)
    value = value / len(games)
    if min(game.shape[-1] for game in samples) < 2:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    variances = np.stack([game.var(axis=-1, ddof=1) / game.shape[-1] for game in samples], axis=-1)
    total = variances.sum(axis=-1)
    with np.errstate(invalid="ignore"):  # 0 / 0, where all runs of a game are alike
        degrees = total**2 / (variances**2 / [game.shape[-1] - 1 for game in samples]).sum(axis=-1)
    half = np.where(total > 0, stats.t.ppf(0.975, degrees) * np.sqrt(total) / len(games), 0)
    return value, value - half, value + half


def median(*games, axis=-1):
    """Median over games of the mean over runs."""
    return np.median([game.mean(axis=axis) for game in games], axis=0)


def iqm(*games, axis=-1):
    """Interquartile mean: of all runs of all games together, without the lowest and the highest quarter."""
    return stats.trim_mean(np.concatenate(games, axis=axis), 0.25, axis=axis)


def probability_of_improvement(*games, axis=-1):
    """Mean over games of the probability that a run scores higher than a run of the baseline; ties count half.

    It is the Mann-Whitney U statistic over its maximum. The baseline's games follow those of the algorithm.
    """
    pairs = zip(games[: len(games) // 2], games[len(games) // 2 :])
    signs = [np.sign(game[..., :, None] - baseline[..., None, :]).mean(axis=(-2, -1)) for game, baseline in pairs]
    return (np.mean(signs, axis=0) + 1) / 2


def bootstrap_interval(statistic, games, args):
    """statistic(*games) and its 95 % interval by the stratified percentile bootstrap: value, low, high.

    Runs are drawn with replacement within each game, as many as it has. NaN if a game has one run.
    """
    if min(map(len, games)) < 2:
        return statistic(*games), np.nan, np.nan
    options = dict(n_resamples=args.resamples, method="percentile", rng=args.seed)
    return statistic(*games), *stats.bootstrap(games, statistic, **options).confidence_interval


def comparable(table):
    """The algorithms that have most of the games, the games that all of those have, and notes on who is left out."""
    games = table.groupby("algo", sort=False).env_id.agg(set)
    enough = games.map(len) > games.map(len).max() / 2
    notes = [
        f"{algo}: not among the scores over games, it has {len(few)} of them" for algo, few in games[~enough].items()
    ]
    return list(games.index[enough]), sorted(set.intersection(*games[enough])), notes


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
        # Bands may pass the curves by half their range: that of two seeds is 13 times as wide as they are apart.
        heights, (low, high) = np.concatenate([line.get_ydata() for line in panel.lines]), panel.get_ylim()
        room = np.ptp(heights) / 2 or np.inf
        panel.set_ylim(max(low, heights.min() - room), min(high, heights.max() + room))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    # Nothing is wider than the figure: about 14 letters of the caption, or 11 of the legend, fit into an inch.
    width = figure.get_figwidth()
    lines = [wrapped for line in caption.split("\n") for wrapped in textwrap.wrap(line, int(14 * width))]
    figure.supxlabel("\n".join(["environment steps", *lines]), fontsize="small")
    figure.supylabel(ylabel, fontsize="small")
    entries = {name: handle for panel in axes for handle, name in zip(*panel.get_legend_handles_labels())}
    names = [textwrap.fill(name, int(11 * (width - 0.8))) for name in entries]
    widest = max(len(line) for name in names for line in name.split("\n")) / 11 + 0.8
    columns = min(3, len(names), max(1, int(width / widest)))
    figure.set_figheight(figure.get_figheight() + 0.2 * sum(name.count("\n") + 1 for name in names) / columns)
    figure.legend(entries.values(), names, loc="outside upper center", ncols=columns, frameon=False)
    figure.savefig(args.out / f"{name}.{args.format}", dpi=150)
    plt.close(figure)


def plot_games(table, looks, remark, args):
    """A panel a game: each algorithm's mean and 95 % band over seeds, and a thin line for each seed."""
    games = sorted(table.env_id.unique())
    rows, columns = -(-len(games) // 4), min(4, len(games))
    size = (3.2 * columns + 1.2, 2.6 * rows + 1.2)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(games) :]:
        panel.remove()
    for env_id, panel in zip(games, axes.flat):
        panel.set_title(env_id, fontsize="medium")
        for algo, runs in table[table.env_id == env_id].groupby("algo", sort=False):
            curves = [curve for _, curve in runs.groupby("seed")]
            for curve in curves:
                panel.plot(curve.global_step, curve.episodic_return, color=looks[algo]["color"], lw=0.5, alpha=0.4)
            steps, returns = on_common_steps(curves)
            draw(panel, steps, *mean_interval([returns]), looks[algo], algo)
    caption = f"mean and 95 % Student interval over seeds; thin: one seed; no smoothing beyond the {WINDOW} episodes"
    finish(
        figure, axes.flat[: len(games)], args, "curves", f"mean return of the last {WINDOW} episodes", caption + remark
    )


def plot_mean_score(table, algos, games, looks, mode, remark, args):
    """The mean normalized score of each algorithm over steps, with its 95 % band."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for algo in algos:
        runs = table[(table.algo == algo) & table.env_id.isin(games)]
        curves = dict(list(runs.groupby(["env_id", "seed"])))
        steps, returns = on_common_steps(curves.values())
        of_game = np.array([env_id for env_id, _ in curves])
        scores = [normalize(returns[:, of_game == env_id], env_id, mode) for env_id in games]
        label = f"{algo} ({len(curves)} {'run' if len(curves) == 1 else 'runs'})"
        draw(axes, steps, *mean_interval(scores), looks[algo], label)
    if mode == "hard" and table.global_step.max() > 99e6:
        for (algo, score), dashes in zip(PUBLISHED_HARD_100M.items(), ("--", ":")):
            axes.axhline(score, color="0.4", ls=dashes, lw=1, label=f"{algo}, published, 16 games: {score}")
    caption = f"{mode}, {len(games)} of 16 games; band: 95 % Welch-Satterthwaite interval over runs\n"
    caption += f"returns are means of the last {WINDOW} episodes, no further smoothing"
    finish(figure, [axes], args, "mean_normalized_score", "mean normalized score", caption + remark)


def score_table(table, algos, games, mode, window, args):
    """All scores, a row each; env_id is "all" for what is computed over games.

    A run's final score is the mean of its curve, linear between rows, over `window` (first step, last step).
    """
    steps = np.linspace(*window, 1_001)
    runs = table.groupby(RUN, sort=False)[["global_step", "episodic_return"]]
    finals = runs.apply(lambda run: np.interp(steps, run.global_step, run.episodic_return).mean())
    finals = {key: of_game.to_numpy() for key, of_game in finals.groupby(level=RUN[:2], sort=False)}
    rows = []

    def add(algo, env_id, metric, own, others=(), statistic=None):
        if statistic is None:
            interval = mean_interval(own, others)
            method = "Welch-Satterthwaite" if len(own) > 1 else "Welch" if others else "Student"
        else:
            interval = bootstrap_interval(statistic, [*own, *others], args)
            method = "bootstrap, approximate" if min(map(len, [*own, *others])) < FEW_SEEDS else "bootstrap"
        std = np.nan if env_id == "all" or others else pd.Series(own[0]).std()
        number, baseline = sum(map(len, own)), algos[0] if others else None
        rows.append((algo, env_id, metric, *interval, std, number, baseline, method))

    for (algo, env_id), returns in finals.items():
        add(algo, env_id, "episodic_return", [returns])
        add(algo, env_id, "normalized_score", [normalize(returns, env_id, mode)])
        if algo != algos[0] and (algos[0], env_id) in finals:
            add(algo, env_id, "difference_in_return", [returns], [finals[algos[0], env_id]])
    scores = {algo: [normalize(finals[algo, env_id], env_id, mode) for env_id in games] for algo in algos}
    for algo, own in scores.items() if games else ():
        add(algo, "all", "mean", own)
        add(algo, "all", "median", own, statistic=median)
        add(algo, "all", "iqm", own, statistic=iqm)
        if algo != algos[0]:
            add(algo, "all", "difference", own, scores[algos[0]])
            add(algo, "all", "probability_of_improvement", own, scores[algos[0]], probability_of_improvement)
    columns = ["algo", "env_id", "metric", "value", "low", "high", "std", "runs", "baseline", "interval"]
    return pd.DataFrame(rows, columns=columns)


def game_table(rows, form):
    """Lines of a Markdown table with a row for each game and a column for each algorithm; `form` words a score."""
    rows = rows.assign(cell=[form.format(**row) for row in rows.to_dict("records")])
    cells = rows.pivot(index="env_id", columns="algo", values="cell")[list(dict.fromkeys(rows.algo))].fillna("")
    lines = [f"| game | {' | '.join(cells.columns)} |", f"| --- |{' --- |' * len(cells.columns)}"]
    return lines + [f"| {env_id} | {' | '.join(row)} |" for env_id, row in zip(cells.index, cells.to_numpy())]


def markdown(scores, algos, games, mode, window, remark, notes):
    """scores.md: what was measured, over games and for each game, and what is missing."""
    lines = [
        f"# Scores\n\nProcgen, {mode}, at {window[1]:,} environment steps. A run's final score is the mean of its",
        f"`episodic_return` from {window[0]:,.0f} steps on, linear between rows (each value is a mean of {WINDOW}",
        f"episodes; no further smoothing).{remark}",
    ]
    over_games = scores[scores.env_id == "all"]
    over_games = over_games.assign(sign=np.where(over_games.interval.str.contains("approximate"), "~", ""))
    if len(over_games):
        lines += [
            f"\n## Over games ({len(games)} of 16)\n",
            "Normalized scores with 95 % intervals: of means by the t of Welch and Satterthwaite; of median, IQM and P",
            "by stratified bootstrap (percentiles; runs drawn within each game).\n",
            f"| algorithm | runs | mean | median | IQM | mean − that of {algos[0]} | P(better than {algos[0]}) |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for algo, rows in over_games.groupby("algo", sort=False):
            cells = ["{value:.3f} {sign}[{low:.3f}, {high:.3f}]".format(**row) for row in rows.to_dict("records")]
            lines.append(f"| {algo} | {rows.runs.iloc[0]} | {' | '.join(cells + [''] * (5 - len(cells)))} |")
        if over_games.sign.any():
            lines.append(f"\n~ approximate, as a rule too narrow: in some game there are fewer than {FEW_SEEDS} seeds.")

    lines.append("\n## Returns for each game\n\nMean ± standard deviation over seeds (number of seeds).\n")
    lines += game_table(scores[scores.metric == "episodic_return"], "{value:.2f} ± {std:.2f} ({runs})")
    differences = scores[scores.metric == "difference_in_return"]
    if len(differences):
        lines.append(f"\n## Difference from {algos[0]} in each game\n")
        lines.append(f"Mean return minus that of {algos[0]}, with the 95 % interval of Welch's t-test.\n")
        lines += game_table(differences, "{value:+.2f} [{low:+.2f}, {high:+.2f}]")
    if notes:
        lines += ["\n## Notes\n", *(f"- {note}" for note in notes)]
    # One run has no deviation and no interval.
    return re.sub(r" ± nan| ~?\[\+?nan, \+?nan\]", "", "\n".join(lines)) + "\n"


def remarks(table):
    """Notes on games and seeds that some algorithm lacks, and on seeds that ran in different ways."""
    notes, seeds = [], sorted(table.seed.unique())
    for algo, runs in table.groupby("algo", sort=False):
        if (number := runs.env_id.nunique()) < 16:
            notes.append(f"{algo}: {number} of 16 games")
        mixed = {}
        for env_id, of_game in runs.groupby("env_id"):
            if absent := [str(seed) for seed in seeds if seed not in set(of_game.seed)]:
                notes.append(f"{algo}, {env_id}: no seed {', '.join(absent)}")
            if of_game.seed.nunique() == 1:
                notes.append(f"{algo}, {env_id}: one seed, so no interval")
            for name in {"precision", "git_commit"} & set(table):
                values = " ".join(of_game[name].dropna().unique()).split()
                if len(set(values)) > 1:
                    mixed.setdefault((name, ", ".join(sorted(set(values)))), []).append(env_id)
        for (name, values), games in sorted(mixed.items()):
            notes.append(f"{algo}, {', '.join(games)}: different {name} in one mean ({values})")
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
    tables, mode, in_common, notes = [], args.mode, "", []
    if args.runs:
        table, mode, in_common, notes = read_runs(args.runs)
        tables.append(table)
        if args.mode not in (None, mode):
            fail(f"--mode {args.mode}: expected {mode}, the distribution mode of the runs; modes cannot be mixed")
    if args.curves:
        tables.append(read_curves(args.curves))
    if both := set.intersection(*(set(table.algo) for table in tables)) if len(tables) == 2 else None:
        fail(f"--curves: expected other names than those of the runs, and both have {', '.join(sorted(both))}")
    table = pd.concat(tables).astype({"seed": int, "global_step": int}).sort_values([*RUN, "global_step"])
    if table.empty:
        fail(f"expected a run in which {WINDOW} episodes have finished ({'; '.join(notes[:3])})")
    if args.max_steps is not None:
        table, late = cut(table, args.max_steps)
        notes += late

    # The baseline, PPO with the fewest changes, and PPG come first, so that they look the same in every figure.
    baseline = min((x for x in set(table.algo) if x.startswith("PPO")), key=lambda x: (x.count(","), x), default=None)
    order = sorted(set(table.algo), key=lambda algo: (algo != baseline, algo != "PPG", algo))
    table = pd.concat([table[table.algo == algo] for algo in order])
    steps = table.groupby(RUN, sort=False).global_step.agg(["min", "max"])
    horizon = int(steps["max"].min())
    if steps["min"].max() > horizon:
        late, early = ("{}, {}, seed {}".format(*key) for key in (steps["min"].idxmax(), steps["max"].idxmin()))
        where = f"{early} ends at {horizon:,}, before the first value of {late} at {steps['min'].max():,}"
        fail(f"expected runs that have steps in common; {where}: leave one of them out, or train it further")
    if horizon < steps["max"].max():
        shortest = "{}, {}, seed {}".format(*steps["max"].idxmin())
        where = f"scores are taken at {horizon:,} steps, where the shortest run ends ({shortest})"
        notes.append(f"{where}; the longest has {steps['max'].max():,}")
    window = max((1 - FINAL_SHARE) * horizon, steps["min"].max()), horizon  # the same for all
    algos, games, left_out = comparable(table)
    notes += left_out + remarks(table)

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {args.out}: expected a directory that can be written to ({error.strerror})")
    looks, remark = style(order), f"\n\nall runs: {in_common}" if in_common else ""
    plot_games(table, looks, remark, args)
    if games:
        plot_mean_score(table, algos, games, looks, mode, remark, args)
    else:
        notes.append("no game that all algorithms have, so no scores over games")
    scores = score_table(table, algos, games, mode, window, args)
    scores.to_csv(args.out / "scores.csv", index=False, float_format="%.6g")
    report = markdown(scores, algos, games, mode, window, remark, notes)
    (args.out / "scores.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
