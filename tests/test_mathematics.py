"""The pieces of the algorithm, against values worked out by hand and against slow plain loops.

Most functions here are in both scripts, to the letter (test_twins.py), so one of the two is tested.
"""

import functools
import math
import random

import pytest
import torch

import ppg_procgen
import ppo_procgen
from ppg_procgen import auxiliary_objective, gae, initial_reward_stats, normalize_rewards, policy_objective


def make_stats(returns, mean, variance, count):
    values = {"returns": returns, "mean": mean, "variance": variance, "count": count}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def column(*values):
    """A sequence of steps in one environment: [num_steps, 1]."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def random_starts(num_steps, num_envs):
    return (torch.rand(num_steps, num_envs) < 0.25).float()


# Reward normalization


def test_normalized_rewards_agree_with_a_slow_plain_implementation_over_three_rollouts():
    torch.manual_seed(0)
    num_steps, num_envs = 9, 3
    stats = initial_reward_stats(num_envs)
    running = [0.0] * num_envs
    every_return = []  # of all rollouts so far

    for scale in (1.0, 5.0, 0.2):
        rewards = scale * (torch.randn(num_steps, num_envs) + 0.5)
        starts = random_starts(num_steps, num_envs)
        starts[0] = torch.tensor([1.0, 0.0, 0.0])
        assert starts[1:].any()
        normalized, stats = normalize_rewards(rewards, starts, stats)

        for t in range(num_steps):
            for env in range(num_envs):
                carried = 0.0 if starts[t, env] == 1 else running[env]
                running[env] = rewards[t, env].item() + 0.99 * carried
                every_return.append(running[env])
        # The initial mean 0 and variance 1 weigh as much as 0.0001 observations.
        count = 1e-4 + len(every_return)
        mean = sum(every_return) / count
        variance = (1e-4 + sum(g * g for g in every_return)) / count - mean * mean
        expected = [[r / math.sqrt(variance + 1e-8) for r in row] for row in rewards.tolist()]
        assert max(abs(r) for row in expected for r in row) < 10  # nothing is clipped here

        assert normalized.dtype == torch.float32
        assert normalized.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]
        assert stats["returns"].tolist() == pytest.approx(running, rel=1e-6)
        assert stats["mean"].item() == pytest.approx(mean, rel=1e-6)
        assert stats["variance"].item() == pytest.approx(variance, rel=1e-6)
        assert stats["count"].item() == pytest.approx(count, rel=1e-12)


def test_normalized_rewards_of_a_case_worked_by_hand():
    # Both returns are 2: the first reward, then 1 + ½ · 2. Two values of mean 0 and variance 6 and
    # two 2s have mean 1 and mean square (12 + 8) / 4 = 5, so variance 4 and standard deviation 2.
    stats = make_stats([0.0], 0.0, 6.0, 2.0)
    normalized, stats = normalize_rewards(column(2, 1), column(1, 0), stats, discount=0.5)
    assert normalized.squeeze(1).tolist() == pytest.approx([1.0, 0.5])
    assert {name: value.tolist() for name, value in stats.items()} == {
        "returns": [2.0],
        "mean": 1.0,
        "variance": 4.0,
        "count": 4.0,
    }


def test_statistics_begin_with_mean_0_variance_1_and_count_a_ten_thousandth():
    stats = initial_reward_stats(2)
    assert {name: value.tolist() for name, value in stats.items()} == {
        "returns": [0.0, 0.0],
        "mean": 0.0,
        "variance": 1.0,
        "count": 1e-4,
    }


def test_return_of_reward_normalization_is_discounted_by_0_99():
    _, stats = normalize_rewards(column(1, 0, 0), column(1, 0, 0), initial_reward_stats(1))
    assert stats["returns"].item() == pytest.approx(0.99 * 0.99, rel=1e-6)


def test_return_of_reward_normalization_goes_on_across_rollouts_until_an_episode_ends():
    stats = make_stats([100.0, 100.0], 0.0, 1.0, 1.0)
    starts = torch.tensor([[0.0, 1.0]])  # the second environment begins an episode
    _, stats = normalize_rewards(torch.tensor([[1.0, 1.0]]), starts, stats)
    assert stats["returns"].tolist() == pytest.approx([1 + 99, 1], rel=1e-6)


@pytest.mark.parametrize("module", [ppo_procgen, ppg_procgen])
def test_training_keeps_gamma_out_of_reward_normalization(module, tmp_path, monkeypatch):
    small_agent = functools.partial(module.Agent, channels=(4, 4, 4), features=8)
    monkeypatch.setattr(module, "Agent", small_agent)

    def reward_stats_after_a_rollout(gamma):
        args = module.Args(
            env_id="chaser",  # pays at nearly every step
            num_envs=2,
            num_minibatches=1,
            num_steps=24,
            total_timesteps=48,
            device="cpu",
            precision="float32",
            gamma=gamma,
            run_dir=str(tmp_path),
            run_name=str(gamma),
        )
        return torch.load(module.main(args) / "checkpoint.pt", weights_only=True)["reward_stats"]

    low, high = reward_stats_after_a_rollout(0.3), reward_stats_after_a_rollout(0.999)
    assert high["returns"].abs().sum() > 0
    assert all(torch.equal(low[name], high[name]) for name in high)


def test_last_reward_of_a_rollout_changes_how_the_first_is_divided():
    starts = column(1, 1, 1)
    small, _ = normalize_rewards(column(1, 2, 3), starts, initial_reward_stats(1))
    large, _ = normalize_rewards(column(1, 2, 30), starts, initial_reward_stats(1))
    assert large[0] < small[0] / 5


def test_normalized_rewards_are_clipped_at_plus_and_minus_ten():
    # So much history that this rollout does not change it: standard deviation 0.01.
    stats = make_stats([0.0], 0.0, 1e-4, 1e12)
    normalized, _ = normalize_rewards(column(5, 0.05, -0.05, -5), column(1, 1, 1, 1), stats)
    assert normalized.squeeze(1).tolist() == pytest.approx([10, 5, -5, -10], rel=1e-3)


def test_rewards_are_divided_but_not_centred():
    rewards = column(1, 1.5, 2, 2.5)
    normalized, _ = normalize_rewards(rewards, column(1, 1, 1, 1), initial_reward_stats(1))
    assert (normalized > 0).all()
    torch.testing.assert_close(normalized / normalized[0], rewards)


def test_a_hundred_millionth_is_added_to_the_variance():
    # Without variance the divisor is √1e-8, so a game that has paid nothing yet divides by more than 0.
    stats = make_stats([0.0], 0.0, 0.0, 1e15)
    normalized, _ = normalize_rewards(column(0, 1e-5), column(1, 1), stats)
    assert normalized.squeeze(1).tolist() == pytest.approx([0.0, 0.1], rel=1e-4)


def test_reward_normalization_leaves_its_arguments_as_they_were():
    rewards, stats = column(1, 2, 300), initial_reward_stats(1)
    normalize_rewards(rewards, column(0, 0, 1), stats)
    assert rewards.squeeze(1).tolist() == [1, 2, 300]
    assert all(torch.equal(stats[name], value) for name, value in initial_reward_stats(1).items())


# Generalized advantage estimation


def slow_gae(rewards, values, starts, gamma, gae_lambda):
    """Â_t = Σ_k (γλ)^k δ_{t+k} up to the end of the episode, or of the rollout; lists of floats."""
    num_steps = len(rewards)

    def td_error(t):
        next_value = 0.0 if starts[t + 1] else values[t + 1]
        return rewards[t] + gamma * next_value - values[t]

    advantages = []
    for t in range(num_steps):
        end = next((k for k in range(t, num_steps) if starts[k + 1]), num_steps - 1)
        advantages.append(sum((gamma * gae_lambda) ** (k - t) * td_error(k) for k in range(t, end + 1)))
    return advantages


def random_rollout(num_steps=12, num_envs=4):
    torch.manual_seed(1)
    rewards, values = torch.randn(num_steps, num_envs), torch.randn(num_steps + 1, num_envs)
    starts = random_starts(num_steps + 1, num_envs)
    starts[:, 0] = 0  # one environment whose episode goes on beyond the rollout
    starts[-1, 1] = 1  # and one whose episode ends with it
    assert starts[1:-1].any()
    return rewards, values, starts


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.999, 0.95), (0.9, 0.5)])
def test_advantages_agree_with_the_sum_that_defines_them(gamma, gae_lambda):
    rewards, values, starts = random_rollout()
    advantages = gae(rewards, values, starts, gamma, gae_lambda)
    for env in range(rewards.shape[1]):
        columns = (x[:, env].tolist() for x in (rewards, values, starts))
        assert advantages[:, env].tolist() == pytest.approx(slow_gae(*columns, gamma, gae_lambda), rel=1e-4, abs=1e-6)


def test_advantages_of_a_case_worked_by_hand():
    # γ = λ = ½. δ = (1 + 1 − 1, 2 + 1.5 − 2, 4 + 2 − 3) = (1, 1.5, 3).
    # Â_2 = 3, Â_1 = 1.5 + ¼ · 3 = 2.25, Â_0 = 1 + ¼ · 2.25 = 1.5625.
    advantages = gae(column(1, 2, 4), column(1, 2, 3, 4), column(1, 0, 0, 0), 0.5, 0.5)
    assert advantages.squeeze(1).tolist() == [1.5625, 2.25, 3.0]


def test_advantages_of_a_case_with_an_episode_end_worked_by_hand():
    # As above, but step 1 ends its episode: δ_1 = 2 − 2 = 0, and nothing comes after it.
    advantages = gae(column(1, 2, 4), column(1, 2, 3, 4), column(1, 0, 1, 0), 0.5, 0.5)
    assert advantages.squeeze(1).tolist() == [1.0, 0.0, 3.0]


def test_reward_after_an_episode_end_does_not_leak_into_advantages_before_it():
    values, starts = column(1, 2, 3, 4, 5), column(0, 0, 1, 0, 0)
    poor = gae(column(1, 1, 0, 0), values, starts, 0.999, 0.95)
    rich = gae(column(1, 1, 100, 100), values, starts, 0.999, 0.95)
    assert torch.equal(rich[:2], poor[:2])
    assert (rich[2:] > poor[2:] + 50).all()


def test_value_of_the_next_episode_does_not_leak_into_advantages_before_its_start():
    low = gae(column(1, 1), column(1, 2, 3), column(0, 0, 1), 0.999, 0.95)
    high = gae(column(1, 1), column(1, 2, 300), column(0, 0, 1), 0.999, 0.95)
    assert torch.equal(low, high)


def test_with_lambda_1_an_advantage_is_the_discounted_return_minus_the_value():
    rewards, values, starts = random_rollout()
    advantages = gae(rewards, values, starts, 0.9, 1.0)
    for env in range(rewards.shape[1]):
        discounted_return = values[-1, env].item()
        for t in reversed(range(len(rewards))):
            discounted_return = rewards[t, env].item() + (0 if starts[t + 1, env] else 0.9 * discounted_return)
            expected = discounted_return - values[t, env].item()
            assert advantages[t, env].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_with_lambda_0_an_advantage_is_the_one_step_error():
    rewards, values, starts = random_rollout()
    advantages = gae(rewards, values, starts, 0.9, 0.0)
    for t in range(len(rewards)):
        for env in range(rewards.shape[1]):
            next_value = 0 if starts[t + 1, env] else values[t + 1, env].item()
            expected = rewards[t, env].item() + 0.9 * next_value - values[t, env].item()
            assert advantages[t, env].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# The policy's loss


def slow_policy_objective(log_ratios, advantages, clip_coef, kl_coef):
    total = 0.0
    for log_ratio, advantage in zip(log_ratios, advantages):
        ratio = math.exp(log_ratio)
        surrogate = ratio * advantage
        if clip_coef > 0:
            clipped_ratio = min(max(ratio, 1 - clip_coef), 1 + clip_coef)
            surrogate = min(surrogate, clipped_ratio * advantage)
        total += -surrogate + kl_coef * log_ratio * log_ratio / 2
    return total / len(log_ratios)


@pytest.mark.parametrize(("clip_coef", "kl_coef"), [(0.2, 0.0), (0.0, 1.0), (0.1, 0.7), (0.0, 0.0)])
def test_policy_objective_agrees_with_a_plain_loop(clip_coef, kl_coef):
    generator = random.Random(0)
    log_ratios = [generator.gauss(0, 0.4) for _ in range(50)]
    advantages = [generator.gauss(0.3, 1) for _ in range(50)]
    loss = policy_objective(torch.tensor(log_ratios), torch.tensor(advantages), clip_coef, kl_coef)
    assert loss.item() == pytest.approx(slow_policy_objective(log_ratios, advantages, clip_coef, kl_coef), rel=1e-5)


def test_clipped_objective_of_a_case_worked_by_hand():
    # ε = 0.2: min(1.5, 1.2) = 1.2, min(−1.5, −1.2) = −1.5, min(0.5, 0.8) = 0.5, min(−0.5, −0.8) = −0.8.
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    loss = policy_objective(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.0)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)


def test_with_clip_coef_0_the_ratio_is_not_clipped():
    log_ratio = torch.tensor([3.0, 0.25]).log()
    loss = policy_objective(log_ratio, torch.tensor([1.0, -2.0]), 0.0, 0.0)
    assert loss.item() == pytest.approx(-(3.0 - 0.5) / 2)


def test_kl_penalty_of_a_case_worked_by_hand():
    # ½ · mean (0.04, 0.16) = 0.05, three times that, and no advantage.
    loss = policy_objective(torch.tensor([0.2, -0.4]), torch.zeros(2), 0.0, 3.0)
    assert loss.item() == pytest.approx(0.15)


def policy_gradient(ratio, advantage, clip_coef, kl_coef=0.0):
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    policy_objective(log_ratio, torch.tensor([advantage]), clip_coef, kl_coef).backward()
    return log_ratio.grad.item()


@pytest.mark.parametrize(("ratio", "advantage"), [(1.3, 2.0), (0.7, -2.0)])
def test_policy_gradient_is_zero_where_the_ratio_has_gone_far_enough(ratio, advantage):
    assert policy_gradient(ratio, advantage, clip_coef=0.2) == 0
    assert policy_gradient(ratio, advantage, clip_coef=0.0) == pytest.approx(-ratio * advantage)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.3, -2.0), (0.7, 2.0), (1.1, 2.0), (0.9, -2.0), (1.0, 2.0)])
def test_policy_gradient_is_whole_where_the_ratio_has_gone_the_wrong_way_or_little(ratio, advantage):
    assert policy_gradient(ratio, advantage, clip_coef=0.2) == pytest.approx(-ratio * advantage)


def test_kl_penalty_pulls_the_ratio_back_to_1():
    assert policy_gradient(1.3, 0.0, clip_coef=0.0, kl_coef=2.0) == pytest.approx(2 * math.log(1.3))
    assert policy_gradient(0.7, 0.0, clip_coef=0.0, kl_coef=2.0) == pytest.approx(2 * math.log(0.7))


# The auxiliary phase's loss


def slow_kl(logits_p, logits_q):
    """KL(p ‖ q) of two lists of logits."""
    normalizer_p = sum(math.exp(x) for x in logits_p)
    normalizer_q = sum(math.exp(x) for x in logits_q)
    kl = 0.0
    for x, y in zip(logits_p, logits_q):
        p, q = math.exp(x) / normalizer_p, math.exp(y) / normalizer_q
        kl += p * math.log(p / q)
    return kl


def test_auxiliary_objective_of_the_worked_example():
    joint, aux_value_loss, kl = auxiliary_objective(
        aux_values=torch.tensor([2.5]),
        value_targets=torch.tensor([3.5]),
        logits=torch.tensor([[1.1, -0.1]]),
        old_logits=torch.tensor([[1.0, 0.0]]),
        beta_clone=1.0,
    )
    assert [f"{x.item():.4f}" for x in (aux_value_loss, kl, joint)] == ["0.5000", "0.0038", "0.5038"]


def test_auxiliary_objective_agrees_with_a_plain_loop():
    generator = random.Random(2)
    batch, num_actions, beta_clone = 6, 15, 0.7
    logits, old_logits = ([[generator.gauss(0, 1) for _ in range(num_actions)] for _ in range(batch)] for _ in range(2))
    predictions, targets = ([generator.gauss(0, 2) for _ in range(batch)] for _ in range(2))
    expected_value_loss = sum(0.5 * (v - target) ** 2 for v, target in zip(predictions, targets)) / batch
    expected_kl = sum(slow_kl(old, new) for old, new in zip(old_logits, logits)) / batch

    tensors = (torch.tensor(x) for x in (predictions, targets, logits, old_logits))
    joint, aux_value_loss, kl = auxiliary_objective(*tensors, beta_clone)
    assert aux_value_loss.item() == pytest.approx(expected_value_loss, rel=1e-5)
    assert kl.item() == pytest.approx(expected_kl, rel=1e-5)
    assert joint.item() == pytest.approx(expected_value_loss + beta_clone * expected_kl, rel=1e-5)


def test_kl_of_the_auxiliary_phase_is_from_the_old_policy_to_the_new():
    old, new = [0.0, 0.0], [4.0, 0.0]
    assert slow_kl(old, new) > 2 * slow_kl(new, old)  # the two directions are far apart here
    _, _, kl = auxiliary_objective(torch.zeros(1), torch.zeros(1), torch.tensor([new]), torch.tensor([old]), 1.0)
    assert kl.item() == pytest.approx(slow_kl(old, new), rel=1e-5)


@pytest.mark.parametrize("beta_clone", [0.0, 1.0, 10.0])
def test_beta_clone_weighs_the_kl_and_nothing_else(beta_clone):
    tensors = torch.tensor([2.5]), torch.tensor([3.5]), torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    joint, aux_value_loss, kl = auxiliary_objective(*tensors, beta_clone)
    assert aux_value_loss.item() == pytest.approx(0.5)
    assert kl.item() == pytest.approx(slow_kl([0.0, 0.0], [4.0, 0.0]), rel=1e-5)
    assert joint.item() == pytest.approx(0.5 + beta_clone * slow_kl([0.0, 0.0], [4.0, 0.0]), rel=1e-5)
