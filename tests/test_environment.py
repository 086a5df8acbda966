"""ProcgenVecEnv, against Procgen driven by hand and against Gymnasium's wrappers and checks."""

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import env_checker
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as wrappers
from procgen import ProcgenGym3Env
from procgen.env import ENV_NAMES

from training import SCRIPTS


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def make(request):
    """Each script's ProcgenVecEnv, with every environment closed when the test is over."""
    made = []

    def make(env_id="starpilot", num_envs=4, **options):
        made.append(request.param.ProcgenVecEnv(env_id, num_envs, **options))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def random_actions(num_steps, num_envs, seed=0, choices=15):
    return np.random.default_rng(seed).choice(choices, size=(num_steps, num_envs))


def play(envs, actions):
    """Step through `actions`; returns stacked observations, rewards and terminations."""
    steps = [envs.step(action)[:3] for action in actions]
    return [np.stack(column) for column in zip(*steps)]


def play_by_hand(actions, **options):
    """The same on a bare ProcgenGym3Env: observations and `first` have one entry more, the start."""
    env = ProcgenGym3Env(num=actions.shape[1], **options)
    columns = [env.observe()]
    for action in actions:
        env.act(action)
        columns.append(env.observe())
    env.close()
    rewards, observations, firsts = zip(*columns)
    return np.stack([observation["rgb"] for observation in observations]), np.stack(rewards[1:]), np.stack(firsts)


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_spaces_and_arrays_are_as_documented(make):
    envs = make(num_envs=3)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    assert envs.observation_space == batch_space(envs.single_observation_space, 3)
    assert envs.single_action_space == gym.spaces.Discrete(15)
    assert envs.action_space == batch_space(envs.single_action_space, 3)

    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space and infos == {}
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    assert observations in envs.observation_space and infos == {}
    for array, dtype in ((rewards, np.float32), (terminations, np.bool_), (truncations, np.bool_)):
        assert array.shape == (3,) and array.dtype == dtype


def test_it_is_a_gymnasium_vector_environment_that_resets_in_the_same_step(make):
    envs = make()
    assert isinstance(envs, VectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.num_envs == 4


def test_gymnasiums_environment_checks_pass(make):
    """Those that suit a vector environment; the one about reused data takes a single environment."""
    envs = make()
    env_checker.check_observation_space(envs.observation_space)
    env_checker.check_action_space(envs.action_space)
    env_checker.check_reset_return_type(envs)
    env_checker.check_reset_options(envs)
    env_checker.check_reset_seed_determinism(envs)
    env_checker.check_returned_data_not_reused(make(num_envs=1))


@pytest.mark.parametrize(
    "wrap",
    [
        wrappers.RecordEpisodeStatistics,
        wrappers.NormalizeReward,
        wrappers.DictInfoToList,
        lambda envs: wrappers.ClipReward(envs, 0, 1),
        lambda envs: wrappers.TransformReward(envs, lambda rewards: rewards / 2),
        lambda envs: wrappers.TransformAction(envs, lambda actions: 14 - actions),
    ],
)
def test_gymnasiums_vector_wrappers_accept_it(make, wrap):
    """All but those that change observations: these refuse every environment with SAME_STEP."""
    envs = wrap(make())
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    for action in random_actions(5, 4):
        observations, rewards, _, _, _ = envs.step(action)
        assert observations in envs.observation_space and rewards.shape == (4,)


@pytest.mark.parametrize("env_id", ["starpilot", "fruitbot"])
def test_it_shows_what_procgen_shows_and_resets_in_the_step_that_ends_an_episode(make, env_id):
    actions = random_actions(200, 4)
    envs = make(env_id, seed=3)
    start, _ = envs.reset()
    observations, rewards, terminations = play(envs, actions)

    by_hand = play_by_hand(actions, env_name=env_id, rand_seed=3, distribution_mode="easy")
    assert equal([np.concatenate([start[None], observations]), rewards, terminations], [*by_hand[:2], by_hand[2][1:]])
    assert terminations.any() and rewards.any()


def test_ends_of_episodes_are_terminations_and_never_truncations(make):
    envs = make("bossfight", seed=3)
    envs.reset()
    steps = [envs.step(action) for action in random_actions(200, 4)]
    assert sum(terminations.sum() for _, _, terminations, _, _ in steps) > 0
    assert not any(truncations.any() for _, _, _, truncations, _ in steps)


def test_arrays_once_returned_are_left_alone(make):
    envs = make("bossfight", seed=3)
    kept = [envs.reset()[0]]
    copies = [kept[0].copy()]
    for action in random_actions(100, 4):
        arrays = envs.step(action)[:4]
        kept += arrays
        copies += [array.copy() for array in arrays]
    assert equal(kept, copies)


def test_every_episode_is_counted_also_where_two_end_at_once(make):
    """The statistics that feed progress.csv, and RecordEpisodeStatistics, against a count on a bare ProcgenGym3Env."""
    actions = random_actions(400, 8)
    bare = make("starpilot", 8, seed=1)
    envs = wrappers.RecordEpisodeStatistics(bare, buffer_length=1000)
    envs.reset()
    play(envs, actions[:200])
    assert 0 < bare.num_episodes < 100 and len(bare.last_episodes) == bare.num_episodes
    play(envs, actions[200:])

    _, rewards, firsts = play_by_hand(actions, env_name="starpilot", rand_seed=1, distribution_mode="easy")
    episodes, begun = [], [0] * 8
    for t in range(400):
        for env in np.flatnonzero(firsts[t + 1]):
            episodes.append((rewards[begun[env] : t + 1, env].sum(), t + 1 - begun[env]))
            begun[env] = t + 1

    assert list(zip(envs.return_queue, envs.length_queue, strict=True)) == episodes
    assert envs.episode_count == bare.num_episodes == len(episodes) == firsts[1:].sum()
    assert list(bare.last_episodes) == episodes[-len(bare.last_episodes) :]
    assert (firsts[1:].sum(axis=1) > 1).any() and len({episode_return for episode_return, _ in episodes}) > 1


@pytest.mark.parametrize("processes, kept", [(1, 100), (3, 34)])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_processes_keep_the_last_100_episodes_between_them(monkeypatch, script, processes, kept):
    monkeypatch.setattr(script, "WORLD_SIZE", processes)
    envs = script.ProcgenVecEnv("starpilot", 64)
    play(envs, random_actions(300, 64))
    assert len(envs.last_episodes) == kept < envs.num_episodes
    envs.close()


def test_a_seed_fixes_the_trajectory_and_another_gives_another(make):
    actions = random_actions(150, 4)
    trajectories = []
    for seed in (1, 1, 2):
        envs = make(seed=seed)
        start, _ = envs.reset()
        trajectories.append([start, *play(envs, actions)])
    assert equal(trajectories[0], trajectories[1])
    assert not np.array_equal(trajectories[0][0], trajectories[2][0])


def test_reset_with_a_seed_restarts_the_sequence_of_that_seed(make):
    actions = random_actions(150, 4)
    fresh, used = make(seed=7), make(seed=1)
    used.reset()
    play(used, actions[:20])

    starts = [fresh.reset()[0], used.reset(seed=7)[0]]
    assert np.array_equal(*starts)
    trajectories = [play(envs, actions) for envs in (fresh, used)]
    assert equal(*trajectories) and trajectories[0][2].any()


def test_reset_in_mid_episode_begins_new_episodes_everywhere(make):
    envs = make(num_envs=8, seed=1)
    envs.reset()
    levels = [info["level_seed"] for info in envs.procgen.get_info()]
    play(envs, random_actions(10, 8))
    assert levels == [info["level_seed"] for info in envs.procgen.get_info()]  # still the same episodes

    observations, _ = envs.reset()
    _, shown, firsts = envs.procgen.observe()
    assert firsts.all() and np.array_equal(observations, shown["rgb"])
    assert not set(levels) & {info["level_seed"] for info in envs.procgen.get_info()}


def test_a_new_environment_has_begun_and_a_reset_before_the_first_step_changes_nothing(make):
    envs = make("coinrun", 8, seed=1)
    shown, levels = envs.observations.copy(), [info["level_seed"] for info in envs.procgen.get_info()]
    assert envs.starts.all() and shown.std() > 0
    assert np.array_equal(envs.reset()[0], shown) and envs.starts.all()
    assert [info["level_seed"] for info in envs.procgen.get_info()] == levels


@pytest.mark.parametrize("seed", [None, 3])
def test_a_reset_forgets_the_episodes_it_abandons_and_counts_none_of_them(make, seed):
    envs = make("starpilot", 8, seed=1)
    play(envs, random_actions(60, 8))
    episodes, count = list(envs.last_episodes), envs.num_episodes
    assert envs.episode_lengths.any() and envs.episode_returns.any() and count > 0
    envs.reset(seed=seed)
    assert not envs.episode_lengths.any() and not envs.episode_returns.any() and envs.starts.all()
    assert list(envs.last_episodes) == episodes and envs.num_episodes == count


def levels_played(envs, num_steps):
    envs.reset()
    levels = []
    for action in random_actions(num_steps, envs.num_envs):
        envs.step(action)
        levels += [info["level_seed"] for info in envs.procgen.get_info()]
    return set(levels)


def test_num_levels_and_start_level_restrict_the_levels(make):
    restricted = make("bossfight", 8, seed=1, num_levels=5, start_level=20)
    assert levels_played(restricted, 200) == {20, 21, 22, 23, 24}
    restricted.reset(seed=2)
    assert levels_played(restricted, 50) <= {20, 21, 22, 23, 24}


def test_levels_are_without_limit_by_default(make):
    levels = levels_played(make("bossfight", 8, seed=1), 200)
    assert len(levels) > 20 and max(levels) > 1_000_000


def test_one_level_is_the_same_game_whatever_the_seed(make):
    starts = [make(num_envs=2, seed=seed, num_levels=1, start_level=9).reset()[0] for seed in (1, 2)]
    assert np.array_equal(*starts) and np.array_equal(starts[0][0], starts[0][1])


def statistics(envs):
    """Copies, so that they stay what they were."""
    running = envs.episode_returns.tolist(), envs.episode_lengths.tolist()
    return *running, [tuple(episode) for episode in envs.last_episodes], envs.num_episodes


@pytest.mark.parametrize("env_id", ENV_NAMES)
def test_a_restored_state_goes_on_exactly_in_a_fresh_environment(make, env_id):
    # Running right and jumping is what ends episodes where random moves go nowhere.
    actions = random_actions(250, 8, choices=[7, 7, 8] if env_id in ("coinrun", "climber", "ninja", "jumper") else 15)
    envs, restored = make(env_id, 8, seed=1), make(env_id, 8, seed=2)
    play(envs, actions[:50])
    state = envs.state_dict()
    shown = envs.observations, envs.starts, statistics(envs)
    trajectory = play(envs, actions[50:])

    restored.load_state_dict(state)
    assert equal(shown[:2], [restored.observations, restored.starts]) and statistics(restored) == shown[2]
    assert equal(trajectory, play(restored, actions[50:]))
    assert statistics(restored) == statistics(envs)
    if env_id in ("starpilot", "coinrun", "fruitbot", "bossfight", "chaser", "dodgeball", "leaper"):
        assert trajectory[2].sum() > 1  # it went on across ends of episodes too


def test_a_state_can_be_loaded_again_and_replaces_what_was_there(make):
    envs, restored = make("starpilot", 8, seed=1), make("starpilot", 8, seed=2)
    actions = random_actions(300, 8)
    play(envs, actions[:150])
    state, expected = envs.state_dict(), statistics(envs)
    assert expected[2]
    for _ in range(2):  # the second time, into an environment that has finished episodes of its own
        restored.load_state_dict(state)
        assert statistics(restored) == expected
        play(restored, actions[150:])
        assert statistics(restored) != expected


def test_a_state_survives_a_file_and_what_is_played_after_it(make, tmp_path):
    """torch.save takes it, weights_only loads it, and it stays what it was."""
    envs, restored = make("starpilot", 8, seed=1), make("starpilot", 8, seed=2)
    actions = random_actions(200, 8)
    play(envs, actions[:100])
    state = envs.state_dict()
    torch.save(state, tmp_path / "state.pt")
    trajectory = play(envs, actions[100:])
    torch.save(state, tmp_path / "later.pt")
    for name in ("state.pt", "later.pt"):
        restored = make("starpilot", 8, seed=2)
        restored.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        assert equal(trajectory, play(restored, actions[100:]))
        assert statistics(restored) == statistics(envs)


@pytest.mark.parametrize("env_id", ENV_NAMES)
def test_all_sixteen_games_run_in_easy_and_hard(make, env_id):
    for mode in ("easy", "hard"):
        envs = make(env_id, distribution_mode=mode)
        start, _ = envs.reset(seed=1)
        observations, rewards, terminations = play(envs, random_actions(10, 4))
        assert start.std() > 0 and not np.array_equal(observations[-1], start)
        assert np.isfinite(rewards).all() and not terminations.all()


def test_options_reach_procgen_also_after_a_reset_with_a_seed(make):
    plain, bare = make("coinrun", seed=1), make("coinrun", seed=1, use_backgrounds=False)
    for seed in (None, 4):
        assert not np.array_equal(plain.reset(seed=seed)[0], bare.reset(seed=seed)[0])
    assert bare.procgen.options["use_backgrounds"] is False
    assert bare.procgen.options["num_threads"] == min(4, os.cpu_count())
