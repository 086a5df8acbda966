"""The training loop itself: main() on a small network, with spies on what it calls.

The fixture `train` runs it and returns a Log. 4 environments × 16 steps make a rollout of 64 steps,
4 segments; 3 rollouts make a phase of 12 segments.
"""

import copy
import csv
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppg_procgen
import ppo_procgen

NUM_ENVS, NUM_STEPS, N_PI = 4, 16, 3
ROLLOUT = NUM_ENVS * NUM_STEPS
# Random play earns and loses a reward now and then, and dies within some 30 steps.
GAME = dict(env_id="fruitbot", distribution_mode="hard")
OPTIONS = GAME | dict(num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_minibatches=2, device="cpu", precision="float32")
PPG_OPTIONS = dict(n_pi=N_PI, e_aux=2, aux_minibatch_segments=4)


class Log:
    """What a run did, in order; each event knows its iteration, from 1, and its phase."""

    def __init__(self):
        self.events, self.iteration = [], 1
        self.rollout_over = self.auxiliary = False
        self.old_agents = {}  # by iteration: the agent as the policy phase left it

    def add(self, kind, **values):
        values = {name: x.detach().clone() if torch.is_tensor(x) else x for name, x in values.items()}
        event = SimpleNamespace(kind=kind, iteration=self.iteration, auxiliary=self.auxiliary, **values)
        self.events.append(event)

    def of(self, kind, auxiliary=None, iterations=None):
        """The events of a kind, of one phase and some iterations if asked for."""
        return [
            event
            for event in self.events
            if event.kind == kind
            and auxiliary in (None, event.auxiliary)
            and (iterations is None or event.iteration in iterations)
        ]

    def played(self):
        """The observations acted upon, straight from Procgen: [iteration, step, environment, 64, 64, 3]."""
        observations = np.stack([event.observations for event in self.of("environment")])
        return observations[:-1].reshape(-1, NUM_STEPS, NUM_ENVS, 64, 64, 3)

    def origins(self, iterations):
        """observation → (iteration, environment, step), one to one."""
        played = self.played()
        places = [(i, env, t) for i in iterations for env in range(NUM_ENVS) for t in range(NUM_STEPS)]
        origins = {played[i - 1, t, env].tobytes(): (i, env, t) for i, env, t in places}
        assert len(origins) == len(places)
        return origins


@pytest.fixture
def train(monkeypatch, tmp_path):
    def train(script=ppg_procgen, **options):
        log = Log()
        run_name = f"run{len(list(tmp_path.iterdir()))}"
        defaults = OPTIONS | (PPG_OPTIONS if script is ppg_procgen else {}) | dict(total_timesteps=N_PI * ROLLOUT)
        args = script.Args(**defaults | dict(run_dir=str(tmp_path), run_name=run_name) | options)
        with monkeypatch.context() as patch:
            spy(patch, log, script)
            run_path = script.main(args)
        with open(run_path / "progress.csv") as file:
            log.rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        return log

    return train


def spy(patch, log, script):
    """Have the functions that `script` trains with write to the log."""
    agent_class, adam_step = script.Agent, torch.optim.Adam.step

    def watch(owner, name, note):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            result = original(*args, **kwargs)
            note(result, *args, **kwargs)
            return result

        patch.setattr(owner, name, watched)

    def make_small_agent(*args, **kwargs):
        log.agent = agent_class(*args, channels=(4, 4, 4), features=16, **kwargs)
        log.first_agent = copy.deepcopy(log.agent)
        return log.agent

    def note_environment(observations, rewards=None, terminations=None):
        if log.rollout_over:
            log.iteration, log.auxiliary, log.rollout_over = log.iteration + 1, False, False
        log.add("environment", observations=observations, rewards=rewards, terminations=terminations)

    def note_gae(advantages, rewards, values, starts, gamma, gae_lambda):
        log.rollout_over = True
        log.add("gae", advantages=advantages, rewards=rewards, values=values, starts=starts)

    def note_policy(loss, log_ratio, advantages, clip_coef, kl_coef):
        log.add("policy", log_ratio=log_ratio, advantages=advantages, clip_coef=clip_coef, kl_coef=kl_coef)

    def note_forward(outputs, agent, observations, policy=True, value=True):
        training = torch.is_grad_enabled()
        log.add("forward", observations=observations, logits=outputs[0], values=outputs[1], training=training)

    def note_auxiliary(outputs, agent, observations):
        if not log.auxiliary:
            log.auxiliary = True
            log.old_agents[log.iteration] = copy.deepcopy(agent)
        log.observations = observations

    def note_objective(losses, aux_values, value_targets, logits, old_logits, beta_clone):
        observations = log.observations
        log.add("objective", observations=observations, targets=value_targets, logits=logits, old_logits=old_logits)

    def step(optimizer, *args, **kwargs):
        before = copy.deepcopy(log.agent.state_dict())
        adam_step(optimizer, *args, **kwargs)
        changed = {name.split(".")[0] for name, x in log.agent.state_dict().items() if not torch.equal(x, before[name])}
        log.add("step", optimizer=optimizer, changed=changed)

    patch.setattr(script, "Agent", make_small_agent)
    patch.setattr(torch.optim.Adam, "step", step)
    watch(script.ProcgenVecEnv, "reset", lambda result, *_, **__: note_environment(result[0]))
    watch(script.ProcgenVecEnv, "step", lambda result, *_: note_environment(*result[:3]))
    watch(script, "gae", note_gae)
    watch(script, "policy_objective", note_policy)
    watch(script.F, "mse_loss", lambda loss, values, targets: log.add("value", targets=targets))
    if script is ppg_procgen:
        watch(agent_class, "forward", note_forward)
        watch(agent_class, "auxiliary", note_auxiliary)
        watch(script, "auxiliary_objective", note_objective)


def keys(observations):
    return [observation.tobytes() for observation in np.asarray(observations)]


# Rollouts and the minibatches of the policy phase


def test_each_value_reward_and_start_stands_at_its_own_step(train):
    log = train(seed=2, total_timesteps=7 * ROLLOUT, n_pi=7, e_aux=0)
    steps = log.of("environment")[1:]
    rewards, terminations = (
        np.stack([getattr(step, name) for step in steps]).reshape(7, NUM_STEPS, NUM_ENVS)
        for name in ("rewards", "terminations")
    )
    assert rewards.any() and terminations[:-1, -1].any()  # with this seed, episodes end in a rollout's last step too

    acted = [event for event in log.of("forward") if not event.training and event.values is not None]
    for i, gae in enumerate(log.of("gae")):
        forwards = acted[i * (NUM_STEPS + 1) : (i + 1) * (NUM_STEPS + 1)]  # the last is for the value after the rollout
        seen = np.concatenate([log.played()[i], [steps[(i + 1) * NUM_STEPS - 1].observations]])
        assert np.array_equal(torch.stack([event.observations for event in forwards]), seen)
        assert torch.equal(torch.stack([event.values for event in forwards]), gae.values)

        begins = np.ones(NUM_ENVS) if i == 0 else terminations[i - 1, -1]
        assert np.array_equal(gae.starts, np.concatenate([[begins], terminations[i]]))
        assert np.array_equal(np.sign(gae.rewards), np.sign(rewards[i]))


def test_a_minibatch_of_the_policy_phase_is_a_set_of_whole_environments(train):
    log = train(e_pi=2, e_v=2, microbatch_size=10)
    for iteration in (1, 2, 3):
        origins = log.origins([iteration])
        minibatches = [[]]
        for event in log.events:
            if event.iteration == iteration and not event.auxiliary:
                if event.kind == "forward" and event.training:
                    minibatches[-1] += [origins[key] for key in keys(event.observations)]
                elif event.kind == "step":
                    minibatches.append([])

        assert minibatches.pop() == [] and len(minibatches) == 4
        for first, second in (minibatches[:2], minibatches[2:]):  # the two epochs
            assert len({env for _, env, _ in first}) == len({env for _, env, _ in second}) == 2
            assert sorted(first + second) == sorted(origins.values())


def aligned(observations, numbers, expected):
    """Whether each observation comes with the number that `expected` has for it."""
    pairs = zip(keys(observations), numbers.tolist(), strict=True)
    return all(math.isclose(expected[key], number, rel_tol=1e-5, abs_tol=1e-7) for key, number in pairs)


def expected_numbers(log, compute):
    """observation → its entry in compute(event), for every call of gae and what was played."""
    pairs = zip(log.played(), log.of("gae"), strict=True)
    return {
        key: number
        for observations, event in pairs
        for key, number in zip(keys(observations.reshape(-1, 64, 64, 3)), compute(event).flatten().tolist())
    }


def targets_of(event):
    return event.advantages + event.values[:-1]


def normalized_advantages(event):
    advantages = event.advantages.double().numpy()
    return torch.from_numpy((advantages - advantages.mean()) / (advantages.std() + 1e-8))


def test_policy_minibatches_hold_each_observation_with_its_own_advantage_and_target(train):
    log = train(e_aux=0)
    targets, advantages = expected_numbers(log, targets_of), expected_numbers(log, normalized_advantages)
    training = [event for event in log.of("forward") if event.training]
    assert len(training) == 6
    for forward, policy, value in zip(training, log.of("policy"), log.of("value"), strict=True):
        assert aligned(forward.observations, policy.advantages, advantages)
        assert aligned(forward.observations, value.targets, targets)
        assert not aligned(forward.observations, policy.advantages.roll(1), advantages)


def test_the_first_minibatch_meets_the_very_policy_that_played(train):
    """log-ratio 0 also says that observations, actions and their log-probabilities belong together."""
    log = train(learning_rate=5e-3)
    for iteration in (1, 2, 3):
        first, second = log.of("policy", iterations=[iteration])
        assert first.log_ratio.abs().max() < 1e-4
        assert second.log_ratio.abs().max() > 1e-4


def test_policy_objective_gets_the_coefficients_asked_for(train):
    log = train(clip_coef=0.0, kl_coef=1.0)
    assert {(event.clip_coef, event.kl_coef) for event in log.of("policy")} == {(0.0, 1.0)}
    assert all(math.isfinite(row["policy_loss"]) and row["approx_kl"] > 0 for row in log.rows)


# Who trains what


def test_with_equal_epochs_one_optimizer_trains_policy_and_value_function_together(train):
    steps = train().of("step", auxiliary=False)
    assert len(steps) == 6 and len({step.optimizer for step in steps}) == 1
    assert all(step.changed == {"encoder", "policy_head", "value_encoder", "value_head"} for step in steps)


@pytest.mark.parametrize(
    "arch, value_parts",
    [
        ("dual", {"value_encoder", "value_head"}),
        ("shared", {"encoder", "value_head"}),
        ("detach", {"value_head"}),
    ],
)
def test_with_unequal_epochs_the_value_function_trains_first_and_the_policy_after_it(train, arch, value_parts):
    log = train(arch=arch, e_v=3, e_pi=1)
    for iteration in (1, 2, 3):
        events = [e for e in log.events if e.iteration == iteration and not e.auxiliary]
        # 2 minibatches an epoch: 3 × 2 for the value function, 1 × 2 for the policy
        order = [event.kind for event in events if event.kind in ("value", "policy", "step")]
        assert order == ["value", "step"] * 6 + ["policy", "step"] * 2

        steps = [event for event in events if event.kind == "step"]
        assert all(step.changed == value_parts for step in steps[:6])
        assert all(step.changed == {"encoder", "policy_head"} for step in steps[6:])

    value_optimizers, policy_optimizers = (
        {step.optimizer for i in (1, 2, 3) for step in log.of("step", False, [i])[part]}
        for part in (slice(6), slice(6, None))
    )
    assert len(value_optimizers) == len(policy_optimizers) == 1 and value_optimizers != policy_optimizers


def test_the_auxiliary_phase_trains_everything_with_an_adam_of_its_own(train):
    log = train(aux_learning_rate=1e-3)
    auxiliary, policy = log.of("step", auxiliary=True), log.of("step", auxiliary=False)
    assert len(auxiliary) == 6 and len({step.optimizer for step in auxiliary}) == 1
    assert auxiliary[0].optimizer is not policy[0].optimizer
    everything = {"encoder", "policy_head", "aux_value_head", "value_encoder", "value_head"}
    # At the first step π is π_old: nothing pulls at the policy head yet.
    assert set.union(*(step.changed for step in auxiliary)) == everything
    rates = [step.optimizer.param_groups[0]["lr"] for step in (auxiliary[0], policy[0])]
    assert rates == [1e-3, 5e-4]


@pytest.mark.parametrize("arch", ["dual", "shared", "detach"])
def test_every_architecture_trains_from_end_to_end(train, arch):
    log = train(arch=arch)
    always = [name for name in log.rows[0] if not name.startswith("aux_") and not name.startswith("episodic_")]
    assert all(math.isfinite(row[name]) for row in log.rows for name in always)
    assert all(math.isfinite(value) for name, value in log.rows[-1].items() if name.startswith("aux_"))

    for (name, before), after in zip(log.first_agent.named_parameters(), log.agent.parameters(), strict=True):
        assert torch.isfinite(after).all() and not torch.equal(before, after), name
    assert (log.agent.value_encoder is not None) == (arch == "dual")


# The auxiliary phase


def test_the_old_policy_is_what_the_policy_phase_left_and_stays_put(train):
    log = train(total_timesteps=2 * N_PI * ROLLOUT, aux_learning_rate=5e-3)
    for iteration in (3, 6):
        events = log.of("objective", iterations=[iteration])
        assert len(events) == 6
        with torch.no_grad():
            for event in events:
                expected, _ = log.old_agents[iteration](event.observations)
                assert torch.allclose(event.old_logits, expected, atol=1e-5)
        # while the policy itself moves
        assert not torch.allclose(events[-1].logits, events[-1].old_logits, atol=1e-3)


@pytest.mark.parametrize("per_minibatch, sizes", [(4, [4, 4, 4]), (5, [5, 5, 2]), (100, [12])])
def test_every_segment_is_seen_once_an_epoch(train, per_minibatch, sizes):
    log = train(total_timesteps=2 * N_PI * ROLLOUT, aux_minibatch_segments=per_minibatch, microbatch_size=24)
    for iterations in ((1, 2, 3), (4, 5, 6)):
        origins = log.origins(iterations)
        minibatches = [[]]
        for event in log.events:
            if event.auxiliary and event.iteration == iterations[-1]:
                if event.kind == "objective":
                    minibatches[-1] += [origins[key] for key in keys(event.observations)]
                elif event.kind == "step":
                    minibatches.append([])

        assert minibatches.pop() == []
        epochs = minibatches[: len(sizes)], minibatches[len(sizes) :]
        for epoch in epochs:
            assert sorted(itertools.chain(*epoch)) == sorted(origins.values())
            steps_seen = [Counter((i, env) for i, env, _ in minibatch) for minibatch in epoch]
            assert [len(counter) for counter in steps_seen] == sizes
            assert all(set(counter.values()) == {NUM_STEPS} for counter in steps_seen)
        assert epochs[0] != epochs[1]  # each epoch in an order of its own


def test_value_targets_stay_with_their_observations(train):
    log = train(total_timesteps=2 * N_PI * ROLLOUT)
    expected = expected_numbers(log, targets_of)
    events = log.of("objective")
    assert len(events) == 12
    assert all(aligned(event.observations, event.targets, expected) for event in events)

    # Shifted by an environment or by a step, none would pass.
    for dim in (0, 1):
        shifted = expected_numbers(log, lambda event, dim=dim: targets_of(event).roll(1, dim))
        assert not any(aligned(event.observations, event.targets, shifted) for event in events)


def test_true_value_head_and_auxiliary_head_learn_the_same_targets(train):
    log = train()
    auxiliary = [event for event in log.events if event.auxiliary and event.kind in ("objective", "value")]
    # Per minibatch: the squared error inside auxiliary_objective, that objective, the value head's squared error.
    assert [event.kind for event in auxiliary] == ["value", "objective", "value"] * 6
    assert all(torch.equal(x.targets, y.targets) for x, y in itertools.pairwise(auxiliary) if x.kind != "value")


def divergence_after(log):
    """Mean KL(π_old ‖ π) over what was played, of the policy before and after the auxiliary phase."""
    observations = torch.from_numpy(log.played().reshape(-1, 64, 64, 3))
    with torch.no_grad():
        old, new = (agent(observations)[0].log_softmax(1) for agent in (log.old_agents[3], log.agent))
    return (old.exp() * (old - new)).sum(1).mean().item()


def test_beta_clone_holds_the_policy_in_place(train):
    strong, none = (divergence_after(train(beta_clone=beta, e_aux=6, aux_learning_rate=5e-3)) for beta in (1000.0, 0.0))
    assert strong < 1e-4 and none > 10 * strong


def test_the_auxiliary_phase_follows_every_n_pi_iterations_and_not_a_remainder(train):
    """One step more than seven rollouts is asked for: eight are played, and none is dropped."""
    log = train(total_timesteps=7 * ROLLOUT + 1)
    assert [row["global_step"] for row in log.rows] == [ROLLOUT * i for i in range(1, 9)]
    assert len(log.of("gae")) == 8 and len(log.of("environment")) == 8 * NUM_STEPS + 1
    assert {event.iteration for event in log.events if event.auxiliary} == {3, 6}

    assert [row["aux_epochs"] for row in log.rows] == [0, 0, 2, 0, 0, 2, 0, 0]
    columns = [f"aux_{loss}_{epoch}" for loss in ("value_loss", "kl", "true_value_loss") for epoch in ("first", "last")]
    for row in log.rows:
        assert all(math.isfinite(row[column]) == (row["aux_epochs"] > 0) for column in columns)


def test_no_auxiliary_phase_when_training_ends_before_it(train):
    log = train(total_timesteps=2 * ROLLOUT)
    assert len(log.rows) == 2 and not any(event.auxiliary for event in log.events)


def test_no_auxiliary_phase_with_no_epochs(train):
    log = train(e_aux=0)
    assert not any(event.auxiliary for event in log.events)
    assert len(log.of("step")) == 6 and [row["aux_epochs"] for row in log.rows] == [0, 0, 0]


@pytest.mark.parametrize("limit, epochs", [(None, 3), (1e9, 3), (0.0, 1)])
def test_the_auxiliary_phase_ends_with_the_epoch_that_passes_the_limit(train, limit, epochs):
    log = train(total_timesteps=4 * ROLLOUT, n_pi=2, e_aux=3, aux_kl_limit=limit)
    assert [row["aux_epochs"] for row in log.rows] == [0, epochs, 0, epochs]
    assert len(log.of("objective")) == 2 * epochs * 2  # 2 minibatches of 4 segments
    assert all(row["aux_kl_last"] > 0 for row in log.rows if row["aux_epochs"])


# progress.csv


@pytest.mark.parametrize("script", [ppo_procgen, ppg_procgen])
def test_episodic_return_is_the_mean_of_the_last_hundred_episodes_in_plain_rewards(train, script):
    options = dict(update_epochs=1) if script is ppo_procgen else dict(e_aux=0)
    log = train(script, num_envs=16, num_steps=64, total_timesteps=5 * 1024, **options)

    returns, lengths = np.zeros(16), np.zeros(16)
    finished = []  # (return, length) of every episode, in the order in which they ended
    counts = []
    for t, event in enumerate(log.of("environment")[1:], start=1):
        returns += event.rewards
        lengths += 1
        for env in np.flatnonzero(event.terminations):
            finished.append((returns[env], lengths[env]))
            returns[env] = lengths[env] = 0
        if t % 64 == 0:
            row = log.rows[t // 64 - 1]
            mean_return, mean_length = np.mean(finished[-100:], axis=0) if finished else (math.nan, math.nan)
            assert row["episodic_return"] == pytest.approx(mean_return, nan_ok=True)
            assert row["episodic_length"] == pytest.approx(mean_length, nan_ok=True)
            counts.append(len(finished))

    assert [row["episodes"] for row in log.rows] == counts
    assert counts[-1] > 110 and np.mean(finished, axis=0)[0] != pytest.approx(log.rows[-1]["episodic_return"])


@pytest.mark.parametrize("script", [ppo_procgen, ppg_procgen])
def test_episodic_return_is_empty_before_an_episode_has_ended(train, script):
    log = train(script, total_timesteps=ROLLOUT, num_steps=16)
    assert math.isnan(log.rows[0]["episodic_return"]) and log.rows[0]["episodes"] == 0
