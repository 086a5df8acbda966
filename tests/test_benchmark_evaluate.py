"""benchmark/evaluate.py: every episode counts once, intervals hold what they promise, videos show what was played."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
import tyro
from procgen import ProcgenGym3Env
from scipy import stats

import evaluate
import ppg_procgen
import ppo_procgen

SIZES = dict(num_envs=2, num_steps=8, num_minibatches=2, total_timesteps=16, device="cpu", precision="float32")
SIZES |= dict(channels=(4, 8, 8))


@pytest.fixture(autouse=True)
def called_as_a_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each script: PPO on all levels, PPG with one encoder on levels 5 to 7."""
    path = tmp_path_factory.mktemp("runs")
    sizes = SIZES | dict(env_id="starpilot", run_dir=str(path))
    ppo_procgen.main(ppo_procgen.Args(run_name="ppo", **sizes))
    options = dict(arch="detach", n_pi=1, e_aux=1, num_levels=3, start_level=5, seed=2)
    ppg_procgen.main(ppg_procgen.Args(run_name="ppg", **sizes, **options))
    return path


@pytest.fixture
def ppo(runs, tmp_path):
    return shutil.copytree(runs / "ppo", tmp_path / "ppo")


@pytest.fixture
def ppg(runs, tmp_path):
    return shutil.copytree(runs / "ppg", tmp_path / "ppg")


def parse(words):
    return tyro.cli(evaluate.Args, args=[str(word) for word in words])


def result(*words):
    """What the command saves."""
    return json.loads(evaluate.main(parse(words)).read_text())


def change_args(run, **args):
    """As if the run had been trained with other arguments."""
    config = json.loads((run / "config.json").read_text())
    config["args"] |= args
    (run / "config.json").write_text(json.dumps(config))


class PixelAgent(torch.nn.Module):
    """Its logits are sums of integers below 2²⁴, exact in any order, whatever the batch."""

    def __init__(self):
        super().__init__()
        weights = np.random.default_rng(0).integers(-3, 4, size=(64 * 64 * 3, 15))
        self.weights = torch.nn.Parameter(torch.from_numpy(weights).float())
        self.rows = 0

    def forward(self, observations):
        self.rows += len(observations)
        return observations.flatten(1).float() @ self.weights, None


class ConstantAgent(torch.nn.Module):
    """One distribution over the actions, everywhere."""

    def __init__(self, probabilities):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, observations):
        return self.logits.expand(len(observations), -1), None


# Episodes


def test_each_environments_first_episode_counts_once_and_is_played_to_its_end():
    num_envs, options = 10, dict(num_levels=0, start_level=0, distribution_mode="easy")
    agent = PixelAgent()
    envs = ppo_procgen.ProcgenVecEnv("bigfish", num_envs, 3, **options)
    returns, lengths, actions = evaluate.play(agent, envs, greedy=True, seed=0)
    envs.close()

    expected = []
    for i in range(num_envs):
        env, episodic_return, episodic_length, over = (
            ProcgenGym3Env(num_envs, "bigfish", rand_seed=3, **options),
            0,
            0,
            0,
        )
        while not over:
            _, observations, _ = env.observe()
            logits = observations["rgb"][i].reshape(-1).astype(int) @ agent.weights.detach().numpy().astype(int)
            assert actions[episodic_length, i] == logits.argmax()
            env.act(np.full(num_envs, logits.argmax()))
            rewards, _, starts = env.observe()
            episodic_return, episodic_length, over = episodic_return + rewards[i], episodic_length + 1, starts[i]
        env.close()
        expected.append((episodic_return, episodic_length))

    assert list(zip(returns, lengths)) == expected
    assert lengths.max() > 2 * lengths.min(), "some would have had time for another episode"
    assert agent.rows == lengths.sum(), "the network sees no observation of an environment that is through"
    assert actions.shape == (lengths.max(), num_envs) and actions.dtype == np.uint8
    assert all((actions[length:, i] == 0).all() for i, length in enumerate(lengths))


def test_sampled_actions_come_as_often_as_the_policy_says_and_greedy_ones_are_the_most_probable():
    probabilities = [0.4, 0.1, 0.2, 0.3] + [0.0] * 11
    played = []
    for greedy, seed in ((False, 0), (False, 0), (False, 1), (True, 0)):
        envs = ppo_procgen.ProcgenVecEnv("starpilot", 30, 0)
        _, lengths, actions = evaluate.play(ConstantAgent(probabilities), envs, greedy, seed)
        envs.close()
        played.append(np.concatenate([actions[:length, i] for i, length in enumerate(lengths)]))
    first, again, other_seed, greedy = played
    frequencies = np.bincount(first, minlength=15) / len(first)
    assert len(first) > 1_000 and frequencies == pytest.approx(probabilities, abs=4 * 0.5 / len(first) ** 0.5)
    assert np.array_equal(first, again) and not np.array_equal(first, other_seed)
    assert (greedy == 0).all()


# The network


@pytest.mark.parametrize("name, script", [("ppo", ppo_procgen), ("ppg", ppg_procgen)])
def test_the_network_that_plays_is_the_one_that_trained(runs, name, script):
    config, state_dict, global_step = evaluate.read_run(runs / name)
    loaded = evaluate.load_script(evaluate.ROOT / config["script"], "--script", ("Agent",))
    agent = evaluate.load_agent(config, state_dict, loaded, torch.device("cpu"))
    checkpoint = torch.load(runs / name / "checkpoint.pt", weights_only=True)
    trained = script.Agent(15, *(["detach"] if name == "ppg" else []), channels=(4, 8, 8))
    trained.load_state_dict(checkpoint["agent"])
    observations = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    with torch.no_grad():
        assert all(map(torch.equal, agent(observations), trained(observations)))
    assert global_step == checkpoint["global_step"] == 16 and not agent.encoder.bfloat16
    assert getattr(agent, "arch", None) == ("detach" if name == "ppg" else None)

    config["precision"] = "bfloat16"
    assert evaluate.load_agent(config, state_dict, loaded, torch.device("cpu")).encoder.bfloat16
    assert sys.modules[script.__name__] is script, "the import leaves others' modules alone"


def test_a_file_of_weights_plays_as_the_run_it_is_from(ppg, tmp_path):
    saved = result(ppg, "--episodes", 3)
    config, state_dict, global_step = evaluate.read_run(ppg)
    weights, video = tmp_path / "small.pt", tmp_path / "agent.mp4"
    torch.save({"agent": state_dict, "global_step": global_step, "config": config}, weights)
    assert result(weights, "--episodes", 3, "--video", video) == saved
    assert len(imageio.imread(video, plugin="pyav")) == saved["evaluation"]["episodic_lengths"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "agent.mp4",
        "ppg",
        "small.pt",
        "small__evaluation__16-steps__easy__levels-5-8__3-episodes__sampled__seed-0.json",
    ]


# What is saved


def test_the_same_command_prints_and_saves_the_same(ppg):
    words = [ppg, "--episodes", 6, "--device", "cpu"]
    saved = result(*words)
    (path,) = ppg.glob("evaluation*")
    assert path.name == "evaluation__16-steps__easy__levels-5-8__6-episodes__sampled__seed-0.json"
    before = path.read_bytes()
    path.unlink()

    command = [sys.executable, evaluate.__file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, env=os.environ | dict(OMP_NUM_THREADS="1"), timeout=300)
    assert (done.returncode, done.stderr) == (0, b""), "no progress bar where standard error is no terminal"
    assert path.read_bytes() == before
    mean = saved["evaluation"]["statistics"]["mean"]
    assert f"6 episodes on levels 5 to 7, easy\n  episodic return: mean {mean:.2f} (95 %" in done.stdout.decode()
    assert str(path) in done.stdout.decode()


def test_the_file_holds_the_run_the_settings_every_episode_and_the_statistics(ppg):
    saved = result(ppg, "--episodes", 8, "--seed", 4, "--greedy", "--num-levels", 2)
    run = {name: saved[name] for name in ("script", "env_id", "run_seed", "global_step")}
    assert run == dict(script="ppg_procgen.py", env_id="starpilot", run_seed=2, global_step=16)
    settings = dict(episodes=8, distribution_mode="easy", num_levels=2, start_level=5, greedy=True, seed=4, gap=False)
    assert settings.items() <= saved["settings"].items()

    played = saved["evaluation"]
    returns, lengths, stats = played["episodic_returns"], played["episodic_lengths"], played["statistics"]
    assert len(returns) == len(lengths) == len(played["level_seeds"]) == stats["episodes"] == 8
    assert set(played["level_seeds"]) == {5, 6}
    assert stats["mean_95_interval"] == evaluate.mean_interval(returns)
    for name, value in (("mean", np.mean(returns)), ("mean_episodic_length", np.mean(lengths))):
        assert stats[name] == pytest.approx(value)
    assert (stats["min"], stats["max"]) == (min(returns), max(returns))


def test_statistics_by_hand():
    stats = evaluate.statistics(np.array([0.0, 1.0, 1.0, 10.0]), np.array([4, 6, 5, 7]))
    assert (stats["mean"], stats["median"], stats["min"], stats["max"]) == (3, 1, 0, 10)
    assert stats["standard_deviation"] == pytest.approx(((9 + 4 + 4 + 49) / 4) ** 0.5)
    assert stats["mean_episodic_length"] == 5.5


def test_greedy_and_sampled_episodes_differ_and_each_has_its_file(ppo):
    sampled, greedy = result(ppo, "--episodes", 4), result(ppo, "--episodes", 4, "--greedy")
    assert sampled["evaluation"]["episodic_lengths"] != greedy["evaluation"]["episodic_lengths"]
    names = sorted(path.name for path in ppo.glob("evaluation*"))
    start = "evaluation__16-steps__easy__levels-all__4-episodes__"
    assert names == [f"{start}greedy__seed-0.json", f"{start}sampled__seed-0.json"]


def test_a_single_episode_is_enough_for_all_but_an_interval(ppg, capsys):
    saved = result(ppg, "--episodes", 1, "--gap")
    stats = saved["training_levels"]["statistics"]
    assert stats["mean_95_interval"] is None and stats["mean"] == stats["median"] == stats["max"]
    assert saved["gap"]["mean_95_interval"] is None
    assert capsys.readouterr().out.count("(no interval, as returns do not differ)") == 3


def test_other_levels_and_another_difficulty_can_be_played(ppo, ppg):
    hard = result(ppo, "--episodes", 3, "--num-levels", 2, "--start-level", 2**31 - 3, "--distribution-mode", "hard")
    assert set(hard["evaluation"]["level_seeds"]) <= {2**31 - 3, 2**31 - 2}
    everything = result(ppg, "--episodes", 3, "--num-levels", 0)["evaluation"]
    assert (everything["num_levels"], everything["start_level"]) == (0, 0) and min(everything["level_seeds"]) > 10_000


# Intervals


def test_intervals_by_hand():
    """t = 4.3027 for 2 degrees of freedom. The samples' means 2 and 3 have variances 1 and 16 / 3."""
    assert evaluate.mean_interval([0.0, 7.5, 7.5]) == pytest.approx([5 - 2.5 * 4.3027, 5 + 2.5 * 4.3027], abs=1e-3)
    freedom = (1 + 16 / 3) ** 2 / (1**2 / 1 + (16 / 3) ** 2 / 2)
    reach = stats.t.ppf(0.975, freedom) * (1 + 16 / 3) ** 0.5
    assert evaluate.mean_interval([1.0, 3.0], [-1.0, 3.0, 7.0]) == pytest.approx([-1 - reach, -1 + reach])


def test_an_interval_holds_the_mean_as_often_as_it_says_or_there_is_none():
    """P(success) 0.9, over all numbers of successes; for exponential returns, of a thousand samples each."""
    for episodes, none, coverage in ((2, 0.820, 1.0), (10, 0.349, 0.997), (20, 0.122, 0.997), (100, 0.0, 0.932)):
        given = held = 0
        for successes in range(episodes + 1):
            interval = evaluate.mean_interval([10.0] * successes + [0.0] * (episodes - successes))
            probability = stats.binom.pmf(successes, episodes, 0.9)
            given += probability * (interval is not None)
            held += probability * (interval is not None and interval[0] <= 9 <= interval[1])
        assert (1 - given, held / given) == pytest.approx((none, coverage), abs=1e-3)

    rng = np.random.default_rng(0)
    for episodes, lowest in ((10, 0.87), (100, 0.92)):
        held = [low <= 5 <= high for low, high in map(evaluate.mean_interval, rng.exponential(5, (1000, episodes)))]
        assert lowest <= np.mean(held) <= 0.97


@pytest.mark.parametrize("samples", [([10.0] * 20,), ([10.0],), ([10.0] * 20, [0.0, 10.0]), ([0.0, 10.0], [10.0])])
def test_returns_that_do_not_differ_give_no_interval(samples):
    assert evaluate.mean_interval(*samples) is None


# The generalization gap


def test_the_gap_is_between_the_training_levels_and_levels_strictly_outside_them(ppg, capsys):
    saved = result(ppg, "--episodes", 5, "--gap")
    seen, unseen = saved["training_levels"], saved["unseen_levels"]
    assert set(seen["level_seeds"]) <= {5, 6, 7} and len(seen["level_seeds"]) == 5
    assert all(8 <= level_seed < 2**31 - 1 for level_seed in unseen["level_seeds"]) and len(unseen["level_seeds"]) == 5
    assert max(unseen["level_seeds"]) > 2**30, "from the whole range"
    returns, unseen_returns = seen["episodic_returns"], unseen["episodic_returns"]
    assert saved["gap"]["mean"] == pytest.approx(np.mean(returns) - np.mean(unseen_returns))
    assert saved["gap"]["mean_95_interval"] == evaluate.mean_interval(returns, unseen_returns)
    out = capsys.readouterr().out
    assert "levels 5 to 7" in out and f"levels 8 to {2**31 - 2}" in out and "generalization gap" in out
    assert [path.name for path in ppg.glob("evaluation*")] == [
        "evaluation__16-steps__easy__levels-5-8__gap__5-episodes__sampled__seed-0.json"
    ]


@pytest.mark.parametrize("levels", [evaluate.Levels("easy", 3, 5), evaluate.Levels("hard", 2**31 - 9, 8)])
def test_a_level_seed_names_the_level_that_is_played(levels):
    envs = ppo_procgen.ProcgenVecEnv("coinrun", 3, 0, **vars(levels))
    observations, _ = envs.reset()
    for observation, info in zip(observations, envs.procgen.get_info()):
        level = evaluate.Levels(levels.distribution_mode, 1, int(info["level_seed"]))
        alone = ppo_procgen.ProcgenVecEnv("coinrun", 1, 7, **vars(level))
        assert np.array_equal(alone.reset()[0][0], observation)
        alone.close()
    envs.close()


# Videos


def scaled_down(picture):
    """[512, 512, 3] → [64, 64, 3], means of 8 × 8 pixels"""
    return picture.reshape(64, 8, 64, 8, 3).mean((1, 3))


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_the_video_shows_the_first_episode_frame_by_frame(monkeypatch, ppg, tmp_path, suffix):
    pictures, show = [], evaluate.frames

    def frames(*args):
        for picture in show(*args):
            pictures.append(scaled_down(picture))
            yield picture

    monkeypatch.setattr(evaluate, "frames", frames)
    path = tmp_path / f"agent.{suffix}"
    length = result(ppg, "--episodes", 3, "--video", path)["evaluation"]["episodic_lengths"][0]
    video = imageio.imread(path, plugin="pyav")
    assert video.shape[:3] == (length, 512, 512)
    assert imageio.immeta(path, plugin="pyav")["fps"] == pytest.approx(15)
    for frame, picture in zip(video, pictures, strict=True):
        assert np.abs(scaled_down(frame[..., :3]) - picture).mean() < 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name, "ppg"]


def test_a_replay_is_the_episode_that_was_evaluated():
    """Its pictures, scaled down, are the observations; it ends in the step in which the episode ended."""
    options = dict(num_levels=20, start_level=3)
    envs = ppo_procgen.ProcgenVecEnv("bigfish", 8, 1, **options)
    _, lengths, actions = evaluate.play(PixelAgent(), envs, greedy=False, seed=0)
    envs.close()

    envs = ppo_procgen.ProcgenVecEnv("bigfish", 1, 1, render_mode="rgb_array", **options)
    steps, observations = [], []
    step, reset = envs.step, envs.reset

    def watch(values):
        observations.append(values[0][0])
        return values

    envs.reset = lambda: watch(reset())
    envs.step = lambda actions: steps.append(watch(step(actions))) or steps[-1]
    pictures = [picture.copy() for picture in evaluate.frames(envs, actions, lengths[:1])]
    envs.close()
    assert [bool(terminations[0]) for _, _, terminations, _, _ in steps] == [False] * (lengths[0] - 1) + [True]
    assert len(pictures) == lengths[0]
    for picture, observation in zip(pictures, observations):
        assert np.corrcoef(scaled_down(picture).flatten(), observation.flatten())[0, 1] > 0.9


def test_the_grid_has_16_tiles_that_dim_when_their_episodes_are_over(monkeypatch, ppo, tmp_path):
    lengths = np.array([8] + [1, 2, 3, 4, 5] * 3)

    def play_briefly(agent, envs, greedy, seed):
        actions = np.random.default_rng(0).integers(15, size=(8, 16)).astype(np.uint8)
        return np.zeros(16), lengths, actions

    monkeypatch.setattr(evaluate, "play", play_briefly)
    path = tmp_path / "grid.mp4"
    result(ppo, "--episodes", 16, "--video", path, "--grid")
    video = imageio.imread(path, plugin="pyav")
    assert video.shape == (8, 1024, 1024, 3)

    envs = ppo_procgen.ProcgenVecEnv("starpilot", 16, 0, render_mode="rgb_array")
    envs.reset()
    first = [info["rgb"] for info in envs.procgen.get_info()]
    envs.close()
    for i, length in enumerate(lengths):
        tiles = video[:, i // 4 * 256 :, i % 4 * 256 :][:, :256, :256].astype(float)
        halved = np.mean([first[i][y::2, x::2] for y in (0, 1) for x in (0, 1)], axis=0)
        assert np.abs(tiles[0] - halved).mean() < 10
        for t in range(length, 8):
            assert tiles[t].mean() == pytest.approx(tiles[length - 1].mean() / 3, rel=0.15, abs=2)
            assert np.abs(tiles[t] - tiles[length]).mean() < 2, "it stays at its last frame"


# Bad input


def leaves(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("*")}


def refused(capsys, tmp_path, *words):
    """The one line that refuses the command, which has written nothing."""
    before = leaves(tmp_path)
    with pytest.raises(SystemExit) as stop:
        evaluate.main(parse(words))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1, captured
    assert captured.err.startswith("evaluate.py: error: ") and "expected" in captured.err
    assert leaves(tmp_path) == before
    return captured.err


@pytest.mark.parametrize(
    "words, start, reason",
    [
        ("--episodes 0", "--episodes 0: ", "1 to 2147483647"),
        ("--num-levels -1", "--num-levels -1: ", "0 to 2147483647"),
        ("--start-level -5", "--start-level -5: ", "0 to 2147483647"),
        ("--seed 2147483648", "--seed 2147483648: ", "0 to 2147483647"),
        ("--num-levels 0 --start-level 9", "--start-level 9: ", "--num-levels"),
        ("--num-levels 2 --start-level 2147483646", "--start-level 2147483646 --num-levels 2: ", "2147483646"),
        ("--gap --num-levels 4", "--num-levels 4: ", "--gap"),
        ("--gap --start-level 0", "--start-level 0: ", "--gap"),
        ("--gap --distribution-mode hard", "--distribution-mode hard: ", "--gap"),
        ("--grid", "--grid: ", "--video"),
        ("--grid --video a.mp4 --episodes 15", "--episodes 15: ", "16"),
        ("--video a.avi", "--video a.avi: ", ".mp4 or .gif"),
        ("--video nowhere/a.mp4", "--video nowhere/a.mp4: ", "directory"),
        ("--device cuda", "--device cuda: ", "a GPU"),
        ("--script nowhere.py", "--script nowhere.py: ", "training script"),
        ("--script README.md", "--script README.md: ", "training script"),
        ("--script tests/preload.py", "--script tests/preload.py: ", "no Agent"),
        ("--script ppo_procgen.py", "--script", "the script that trained"),
    ],
)
def test_bad_flags_are_refused_in_one_line(monkeypatch, capsys, ppg, tmp_path, words, start, reason):
    monkeypatch.chdir(evaluate.ROOT)
    complaint = refused(capsys, tmp_path, ppg, *words.split())
    assert complaint.startswith(f"evaluate.py: error: {start}") and reason in complaint


def test_a_gap_needs_levels_that_were_not_trained_on(capsys, ppo, ppg, tmp_path):
    assert "--gap: " in (complaint := refused(capsys, tmp_path, ppo, "--gap")) and "all levels" in complaint
    change_args(ppg, start_level=8, num_levels=2**31 - 9)
    assert "--gap: expected levels up to 2147483645" in refused(capsys, tmp_path, ppg, "--gap")


@pytest.mark.parametrize(
    "problem", ["missing", "no config", "no json", "no checkpoint", "truncated", "foreign", "no steps", "weights"]
)
def test_a_directory_that_is_no_run_is_refused_in_one_line(capsys, ppo, tmp_path, problem):
    config, checkpoint = ppo / "config.json", ppo / "checkpoint.pt"
    if problem == "missing":
        ppo = tmp_path / "missing"
    elif problem == "no config":
        config.unlink()
    elif problem == "no json":
        config.write_text("{")
    elif problem == "no checkpoint":
        checkpoint.unlink()
    elif problem == "truncated":
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    elif problem == "foreign":
        torch.save({"weights": torch.zeros(1)}, checkpoint)
    elif problem == "no steps":
        torch.save({"agent": {}}, checkpoint)
    else:
        ppo = checkpoint  # a file of weights would have a config
    assert f"RUN_DIR {ppo}: " in refused(capsys, tmp_path, ppo)


@pytest.mark.parametrize("steps", ["../16", -1, None])
def test_a_checkpoint_writes_no_file_elsewhere(capsys, ppo, tmp_path, steps):
    checkpoint = torch.load(ppo / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"global_step": steps}, ppo / "checkpoint.pt")
    assert f"RUN_DIR {ppo}: " in refused(capsys, tmp_path, ppo)


@pytest.mark.parametrize("args", [dict(distribution_mode="../hard"), dict(env_id="pong"), dict(num_levels="all")])
def test_a_config_that_no_script_writes_is_refused(capsys, ppo, tmp_path, args):
    change_args(ppo, **args)
    assert f"RUN_DIR {ppo}: " in refused(capsys, tmp_path, ppo)


@pytest.mark.parametrize("name", ["lost.py", "{elsewhere}/ppo_procgen.py", "../{here}/ppo_procgen.py", "..", ""])
def test_a_run_names_no_script_but_one_beside_benchmark(capsys, ppo, tmp_path, name):
    shutil.copy(ppo_procgen.__file__, tmp_path)
    config = json.loads((ppo / "config.json").read_text())
    config["script"] = name.format(elsewhere=tmp_path, here=evaluate.ROOT.name)
    (ppo / "config.json").write_text(json.dumps(config))
    assert "expected --script too" in refused(capsys, tmp_path, ppo)
    assert result(ppo, "--script", tmp_path / "ppo_procgen.py", "--episodes", 1)["script"] == config["script"]


def test_what_could_not_be_saved_is_not_played(monkeypatch, capsys, ppo, tmp_path):
    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(evaluate.tempfile, "TemporaryFile", read_only)
    assert "Read-only file system" in refused(capsys, tmp_path, ppo)


# Interruptions


@pytest.mark.parametrize("moment, signum", [("playing", signal.SIGINT), ("rendering", signal.SIGTERM)])
def test_an_interruption_leaves_nothing_half_written_and_no_traceback(ppo, tmp_path, moment, signum):
    words = ["--episodes", "500" if moment == "playing" else "1", "--video", str(tmp_path / "agent.mp4")]
    process = subprocess.Popen(
        [sys.executable, evaluate.__file__, str(ppo), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | dict(OMP_NUM_THREADS="1"),
    )
    if moment == "playing":
        assert b"actions sampled" in process.stdout.readline()
    else:
        while not (tmp_path / "agent.tmp.mp4").exists():
            assert process.poll() is None
            time.sleep(0.01)
    process.send_signal(signum)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 128 + signum and b"Traceback" not in complaint and complaint.count(b"\n") <= 1, (
        complaint
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ppo"]
    assert len(list(ppo.glob("evaluation*"))) == (moment == "rendering")
