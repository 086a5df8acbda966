"""The pieces of the algorithm, against values worked out by hand and against slow plain loops.

Loops are written in plain Python here, and every test runs on each script that has the piece.
"""

import math
import random

import pytest
import torch

from ppg_procgen import auxiliary_loss
from training import both_scripts


def column(*values):
    """A sequence of steps in one environment: [num_steps, 1]."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def random_starts(num_steps, num_envs):
    return (torch.rand(num_steps, num_envs) < 0.25).float()


# Reward normalization


def make_normalizer(script, returns, mean, variance, count):
    normalizer = script.RewardNormalizer(len(returns))
    state = {"returns": returns, "mean": mean, "variance": variance, "count": count}
    normalizer.load_state_dict({name: torch.tensor(x, dtype=torch.float64) for name, x in state.items()})
    return normalizer


def state_of(normalizer):
    return {name: x.tolist() for name, x in normalizer.state_dict().items()}


class SlowNormalizer:
    """The same in lists of floats; it remembers every return and takes the moments of all of them each time."""

    def __init__(self, num_envs):
        self.running = [0.0] * num_envs
        self.every_return = []

    def normalize(self, rewards, starts):
        for reward_row, start_row in zip(rewards, starts):
            for env, (reward, start) in enumerate(zip(reward_row, start_row)):
                self.running[env] = reward + (0.0 if start else 0.99 * self.running[env])
                self.every_return.append(self.running[env])
        # The initial mean 0 and variance 1 weigh as much as 0.0001 observations.
        self.count = 1e-4 + len(self.every_return)
        self.mean = sum(self.every_return) / self.count
        self.variance = (1e-4 + sum(g * g for g in self.every_return)) / self.count - self.mean**2
        divisor = math.sqrt(self.variance + 1e-8)
        return [[min(max(reward / divisor, -10.0), 10.0) for reward in row] for row in rewards]


@both_scripts
def test_normalized_rewards_agree_with_a_slow_plain_implementation_over_three_rollouts(script):
    torch.manual_seed(0)
    num_steps, num_envs = 9, 3
    normalizer, slow = script.RewardNormalizer(num_envs), SlowNormalizer(num_envs)
    for scale in (1.0, 5.0, 0.2):
        rewards = scale * (torch.randn(num_steps, num_envs) + 0.5)
        starts = random_starts(num_steps, num_envs)
        starts[0] = torch.tensor([1.0, 0.0, 0.0])
        assert starts[1:].any()
        normalized = normalizer(rewards, starts)
        expected = slow.normalize(rewards.tolist(), starts.tolist())
        assert max(abs(r) for row in expected for r in row) < 10  # nothing is clipped here

        assert normalized.dtype == torch.float32
        assert normalized.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]
        assert state_of(normalizer) == {
            "returns": pytest.approx(slow.running, rel=1e-6),
            "mean": pytest.approx(slow.mean, rel=1e-6),
            "variance": pytest.approx(slow.variance, rel=1e-6),
            "count": pytest.approx(slow.count, rel=1e-12),
        }


@both_scripts
def test_normalized_rewards_of_a_case_worked_by_hand(script):
    # The returns are 2 and 0.02 + 0.99 · 2 = 2. Two values of mean 0 and variance 6 and two 2s
    # have mean 1 and mean square (12 + 8) / 4 = 5, so variance 4 and standard deviation 2.
    normalizer = make_normalizer(script, [0.0], 0.0, 6.0, 2.0)
    normalized = normalizer(column(2, 0.02), column(1, 0))
    assert normalized.squeeze(1).tolist() == pytest.approx([1.0, 0.01])
    expected = {"returns": [2.0], "mean": 1.0, "variance": 4.0, "count": 4.0}
    assert state_of(normalizer) == {name: pytest.approx(x) for name, x in expected.items()}


@both_scripts
def test_statistics_begin_with_mean_0_variance_1_and_count_a_ten_thousandth(script):
    expected = {"returns": [0.0, 0.0], "mean": 0.0, "variance": 1.0, "count": 1e-4}
    normalizer = script.RewardNormalizer(2)
    assert state_of(normalizer) == expected
    assert {x.dtype for x in normalizer.state_dict().values()} == {torch.float64}


@both_scripts
def test_return_of_reward_normalization_is_discounted_by_0_99(script):
    normalizer = script.RewardNormalizer(1)
    normalizer(column(1, 0, 0), column(1, 0, 0))
    assert normalizer.returns.item() == pytest.approx(0.99 * 0.99, rel=1e-6)


@both_scripts
def test_return_of_reward_normalization_goes_on_across_rollouts_until_an_episode_ends(script):
    normalizer = make_normalizer(script, [100.0, 100.0], 0.0, 1.0, 1.0)
    normalizer(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]]))  # the second environment begins an episode
    assert normalizer.returns.tolist() == pytest.approx([1 + 99, 1], rel=1e-6)


@both_scripts
def test_last_reward_of_a_rollout_changes_how_the_first_is_divided(script):
    starts = column(1, 1, 1)
    small = script.RewardNormalizer(1)(column(1, 2, 3), starts)
    large = script.RewardNormalizer(1)(column(1, 2, 30), starts)
    assert large[0] < small[0] / 5


@both_scripts
def test_normalized_rewards_are_clipped_at_plus_and_minus_ten(script):
    # So much history that this rollout does not change it: standard deviation 0.01.
    normalizer = make_normalizer(script, [0.0], 0.0, 1e-4, 1e12)
    normalized = normalizer(column(5, 0.05, -0.05, -5), column(1, 1, 1, 1))
    assert normalized.squeeze(1).tolist() == pytest.approx([10, 5, -5, -10], rel=1e-3)


@both_scripts
def test_rewards_are_divided_but_not_centred(script):
    rewards = column(1, 1.5, 2, 2.5)
    normalized = script.RewardNormalizer(1)(rewards, column(1, 1, 1, 1))
    assert (normalized > 0).all()
    torch.testing.assert_close(normalized / normalized[0], rewards)


@both_scripts
def test_a_hundred_millionth_is_added_to_the_variance(script):
    # Without variance the divisor is √1e-8, so a game that has paid nothing yet divides by more than 0.
    normalizer = make_normalizer(script, [0.0], 0.0, 0.0, 1e15)
    normalized = normalizer(column(0, 1e-5), column(1, 1))
    assert normalized.squeeze(1).tolist() == pytest.approx([0.0, 0.1], rel=1e-4)


@both_scripts
def test_reward_normalization_leaves_its_arguments_as_they_were(script):
    rewards, starts = column(1, 2, 300), column(0, 0, 1)
    script.RewardNormalizer(1)(rewards, starts)
    assert rewards.squeeze(1).tolist() == [1, 2, 300] and starts.squeeze(1).tolist() == [0, 0, 1]


@both_scripts
def test_a_loaded_normalizer_goes_on_as_the_saved_one(script):
    torch.manual_seed(3)
    saved, loaded = script.RewardNormalizer(2), script.RewardNormalizer(2)
    saved(torch.randn(5, 2), random_starts(5, 2))
    loaded.load_state_dict(saved.state_dict())
    rewards, starts = torch.randn(5, 2), random_starts(5, 2)
    assert torch.equal(saved(rewards, starts), loaded(rewards, starts))
    assert state_of(saved) == state_of(loaded)


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
@both_scripts
def test_advantages_agree_with_the_sum_that_defines_them(script, gamma, gae_lambda):
    rewards, values, starts = random_rollout()
    advantages = script.gae(rewards, values, starts, gamma, gae_lambda)
    for env in range(rewards.shape[1]):
        columns = (x[:, env].tolist() for x in (rewards, values, starts))
        assert advantages[:, env].tolist() == pytest.approx(slow_gae(*columns, gamma, gae_lambda), rel=1e-4, abs=1e-6)


@both_scripts
def test_advantages_of_a_case_worked_by_hand(script):
    # γ = λ = ½. δ = (1 + 1 − 1, 2 + 1.5 − 2, 4 + 2 − 3) = (1, 1.5, 3).
    # Â_2 = 3, Â_1 = 1.5 + ¼ · 3 = 2.25, Â_0 = 1 + ¼ · 2.25 = 1.5625.
    advantages = script.gae(column(1, 2, 4), column(1, 2, 3, 4), column(1, 0, 0, 0), 0.5, 0.5)
    assert advantages.squeeze(1).tolist() == [1.5625, 2.25, 3.0]


@both_scripts
def test_advantages_of_a_case_with_an_episode_end_worked_by_hand(script):
    # As above, but step 1 ends its episode: δ_1 = 2 − 2 = 0, and nothing comes after it.
    advantages = script.gae(column(1, 2, 4), column(1, 2, 3, 4), column(1, 0, 1, 0), 0.5, 0.5)
    assert advantages.squeeze(1).tolist() == [1.0, 0.0, 3.0]


@both_scripts
def test_reward_after_an_episode_end_does_not_leak_into_advantages_before_it(script):
    values, starts = column(1, 2, 3, 4, 5), column(0, 0, 1, 0, 0)
    poor = script.gae(column(1, 1, 0, 0), values, starts, 0.999, 0.95)
    rich = script.gae(column(1, 1, 100, 100), values, starts, 0.999, 0.95)
    assert torch.equal(rich[:2], poor[:2])
    assert (rich[2:] > poor[2:] + 50).all()


@both_scripts
def test_value_of_the_next_episode_does_not_leak_into_advantages_before_its_start(script):
    low = script.gae(column(1, 1), column(1, 2, 3), column(0, 0, 1), 0.999, 0.95)
    high = script.gae(column(1, 1), column(1, 2, 300), column(0, 0, 1), 0.999, 0.95)
    assert torch.equal(low, high)


@both_scripts
def test_with_lambda_1_an_advantage_is_the_discounted_return_minus_the_value(script):
    rewards, values, starts = random_rollout()
    advantages = script.gae(rewards, values, starts, 0.9, 1.0)
    for env in range(rewards.shape[1]):
        discounted_return = values[-1, env].item()
        for t in reversed(range(len(rewards))):
            discounted_return = rewards[t, env].item() + (0 if starts[t + 1, env] else 0.9 * discounted_return)
            expected = discounted_return - values[t, env].item()
            assert advantages[t, env].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@both_scripts
def test_with_lambda_0_an_advantage_is_the_one_step_error(script):
    rewards, values, starts = random_rollout()
    advantages = script.gae(rewards, values, starts, 0.9, 0.0)
    for t in range(len(rewards)):
        for env in range(rewards.shape[1]):
            next_value = 0 if starts[t + 1, env] else values[t + 1, env].item()
            expected = rewards[t, env].item() + 0.9 * next_value - values[t, env].item()
            assert advantages[t, env].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# The policy's loss


def slow_policy_loss(log_ratios, advantages, clip_coef, kl_coef):
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
@both_scripts
def test_policy_loss_agrees_with_a_plain_loop(script, clip_coef, kl_coef):
    generator = random.Random(0)
    log_ratios = [generator.gauss(0, 0.4) for _ in range(50)]
    advantages = [generator.gauss(0.3, 1) for _ in range(50)]
    loss = script.policy_loss(torch.tensor(log_ratios), torch.tensor(advantages), clip_coef, kl_coef)
    assert loss.item() == pytest.approx(slow_policy_loss(log_ratios, advantages, clip_coef, kl_coef), rel=1e-5)


@both_scripts
def test_clipped_loss_of_a_case_worked_by_hand(script):
    # ε = 0.2: min(1.5, 1.2) = 1.2, min(−1.5, −1.2) = −1.5, min(0.5, 0.8) = 0.5, min(−0.5, −0.8) = −0.8.
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    loss = script.policy_loss(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.0)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)


@both_scripts
def test_with_clip_coef_0_the_ratio_is_not_clipped(script):
    log_ratio = torch.tensor([3.0, 0.25]).log()
    loss = script.policy_loss(log_ratio, torch.tensor([1.0, -2.0]), 0.0, 0.0)
    assert loss.item() == pytest.approx(-(3.0 - 0.5) / 2)


@both_scripts
def test_kl_penalty_of_a_case_worked_by_hand(script):
    # ½ · mean (0.04, 0.16) = 0.05, three times that, and no advantage.
    loss = script.policy_loss(torch.tensor([0.2, -0.4]), torch.zeros(2), 0.0, 3.0)
    assert loss.item() == pytest.approx(0.15)


def policy_gradient(script, ratio, advantage, clip_coef, kl_coef=0.0):
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    script.policy_loss(log_ratio, torch.tensor([advantage]), clip_coef, kl_coef).backward()
    return log_ratio.grad.item()


@pytest.mark.parametrize(("ratio", "advantage"), [(1.3, 2.0), (0.7, -2.0)])
@both_scripts
def test_policy_gradient_is_zero_where_the_ratio_has_gone_far_enough(script, ratio, advantage):
    assert policy_gradient(script, ratio, advantage, clip_coef=0.2) == 0
    assert policy_gradient(script, ratio, advantage, clip_coef=0.0) == pytest.approx(-ratio * advantage)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.3, -2.0), (0.7, 2.0), (1.1, 2.0), (0.9, -2.0), (1.0, 2.0)])
@both_scripts
def test_policy_gradient_is_whole_where_the_ratio_has_gone_the_wrong_way_or_little(script, ratio, advantage):
    assert policy_gradient(script, ratio, advantage, clip_coef=0.2) == pytest.approx(-ratio * advantage)


@both_scripts
def test_kl_penalty_pulls_the_ratio_back_to_1(script):
    assert policy_gradient(script, 1.3, 0.0, clip_coef=0.0, kl_coef=2.0) == pytest.approx(2 * math.log(1.3))
    assert policy_gradient(script, 0.7, 0.0, clip_coef=0.0, kl_coef=2.0) == pytest.approx(2 * math.log(0.7))


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


def test_auxiliary_loss_of_the_worked_example():
    joint, aux_value_loss, kl = auxiliary_loss(
        aux_values=torch.tensor([2.5]),
        value_targets=torch.tensor([3.5]),
        logits=torch.tensor([[1.1, -0.1]]),
        old_logits=torch.tensor([[1.0, 0.0]]),
        beta_clone=1.0,
    )
    assert [f"{x.item():.4f}" for x in (aux_value_loss, kl, joint)] == ["0.5000", "0.0038", "0.5038"]


def test_auxiliary_loss_agrees_with_a_plain_loop():
    generator = random.Random(2)
    batch, num_actions, beta_clone = 6, 15, 0.7
    logits, old_logits = ([[generator.gauss(0, 1) for _ in range(num_actions)] for _ in range(batch)] for _ in range(2))
    predictions, targets = ([generator.gauss(0, 2) for _ in range(batch)] for _ in range(2))
    expected_value_loss = sum(0.5 * (v - target) ** 2 for v, target in zip(predictions, targets)) / batch
    expected_kl = sum(slow_kl(old, new) for old, new in zip(old_logits, logits)) / batch

    tensors = (torch.tensor(x) for x in (predictions, targets, logits, old_logits))
    joint, aux_value_loss, kl = auxiliary_loss(*tensors, beta_clone)
    assert aux_value_loss.item() == pytest.approx(expected_value_loss, rel=1e-5)
    assert kl.item() == pytest.approx(expected_kl, rel=1e-5)
    assert joint.item() == pytest.approx(expected_value_loss + beta_clone * expected_kl, rel=1e-5)


def test_kl_of_the_auxiliary_phase_is_from_the_old_policy_to_the_new():
    old, new = [0.0, 0.0], [4.0, 0.0]
    assert slow_kl(old, new) > 2 * slow_kl(new, old)  # the two directions are far apart here
    _, _, kl = auxiliary_loss(torch.zeros(1), torch.zeros(1), torch.tensor([new]), torch.tensor([old]), 1.0)
    assert kl.item() == pytest.approx(slow_kl(old, new), rel=1e-5)


@pytest.mark.parametrize("beta_clone", [0.0, 1.0, 10.0])
def test_beta_clone_weighs_the_kl_and_nothing_else(beta_clone):
    tensors = torch.tensor([2.5]), torch.tensor([3.5]), torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    joint, aux_value_loss, kl = auxiliary_loss(*tensors, beta_clone)
    assert aux_value_loss.item() == pytest.approx(0.5)
    assert kl.item() == pytest.approx(slow_kl([0.0, 0.0], [4.0, 0.0]), rel=1e-5)
    assert joint.item() == pytest.approx(0.5 + beta_clone * slow_kl([0.0, 0.0], [4.0, 0.0]), rel=1e-5)


# The targets of a rollout


def mean_of(xs):
    return sum(xs) / len(xs)


def variance_of(xs):
    return mean_of([(x - mean_of(xs)) ** 2 for x in xs])


@both_scripts
def test_targets_agree_with_a_slow_plain_implementation_over_two_rollouts(script):
    """Normalized rewards, γ and λ each in its place, V_targ = Â + V, and Â scaled once over the whole rollout."""
    torch.manual_seed(4)
    num_steps, num_envs, gamma, gae_lambda = 11, 3, 0.9, 0.6
    args = script.Args(num_envs=num_envs, gamma=gamma, gae_lambda=gae_lambda)
    normalizer, slow = script.RewardNormalizer(num_envs), SlowNormalizer(num_envs)
    for scale in (7.0, 20.0):
        rewards = scale * (torch.randn(num_steps, num_envs) + 0.3)
        values, starts = torch.randn(num_steps + 1, num_envs) + 0.5, random_starts(num_steps + 1, num_envs)
        starts[[5, -1]] = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])  # ends in the middle and at the last step
        advantages, value_targets, explained_variance = script.targets(rewards, values, starts, normalizer, args)

        normalized = torch.tensor(slow.normalize(rewards.tolist(), starts[:-1].tolist()))
        slow_advantages, slow_targets = [], []  # [num_envs][num_steps]
        for env in range(num_envs):
            columns = [x[:, env].tolist() for x in (normalized, values, starts)]
            slow_advantages.append(slow_gae(*columns, gamma, gae_lambda))
            slow_targets.append([a + v for a, v in zip(slow_advantages[env], columns[1])])
        all_advantages, all_targets = ([x for xs in columns for x in xs] for columns in (slow_advantages, slow_targets))
        deviation = math.sqrt(variance_of(all_advantages)) + 1e-8
        for env in range(num_envs):
            expected = [(a - mean_of(all_advantages)) / deviation for a in slow_advantages[env]]
            assert advantages[:, env].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
            assert value_targets[:, env].tolist() == pytest.approx(slow_targets[env], rel=1e-3, abs=1e-5)
        # What the values leave unexplained is V_targ − V.
        expected = 1 - variance_of(all_advantages) / variance_of(all_targets)
        assert explained_variance == pytest.approx(expected, rel=1e-3)
        assert state_of(normalizer)["returns"] == pytest.approx(slow.running, rel=1e-5)


@both_scripts
def test_targets_of_a_case_worked_by_hand(script):
    # No variance but that of the history: rewards are divided by 2, so r = (2, 1). γ = ½, λ = 1, the episode goes on:
    # δ = (2 + ½ · 2 − 1, 1 + ½ · 4 − 2) = (2, 1), Â = (2 + ½ · 1, 1) = (2.5, 1), V_targ = (3.5, 3).
    # Â has mean 1.75 and deviation 0.75; explained variance 1 − 0.75² / 0.25² = −8.
    normalizer = make_normalizer(script, [0.0], 0.0, 4.0, 1e12)
    args = script.Args(num_envs=1, gamma=0.5, gae_lambda=1.0)
    rollout = column(4, 2), column(1, 2, 4), column(1, 0, 0)
    advantages, value_targets, explained_variance = script.targets(*rollout, normalizer, args)
    assert advantages.squeeze(1).tolist() == pytest.approx([1, -1], rel=1e-5)
    assert value_targets.squeeze(1).tolist() == pytest.approx([3.5, 3], rel=1e-5)
    assert explained_variance == pytest.approx(-8, rel=1e-4)


@both_scripts
def test_a_rollout_whose_advantages_are_all_the_same_has_advantages_of_0(script):
    # Nothing is earned and nothing is expected: the deviation is 0, and a hundred-millionth is added to it.
    args = script.Args(num_envs=2, gamma=0.9, gae_lambda=0.6)
    rollout = torch.zeros(4, 2), torch.zeros(5, 2), torch.zeros(5, 2)
    advantages, value_targets, _ = script.targets(*rollout, script.RewardNormalizer(2), args)
    assert torch.equal(advantages, torch.zeros(4, 2)) and torch.equal(value_targets, torch.zeros(4, 2))


@both_scripts
def test_gamma_does_not_enter_reward_normalization(script):
    torch.manual_seed(5)
    rollout = torch.randn(6, 2), torch.randn(7, 2), random_starts(7, 2)
    states = []
    for gamma in (0.3, 0.999):
        normalizer = script.RewardNormalizer(2)
        script.targets(*rollout, normalizer, script.Args(num_envs=2, gamma=gamma, gae_lambda=0.6))
        states.append(state_of(normalizer))
    assert states[0] == states[1]
