"""The rollout, and the training loop around the steps of the algorithm: what follows what, with what, how often.

The steps themselves are tested in test_mathematics.py and test_gradients.py. Here `main` runs on a tiny encoder.
"""

import csv
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from procgen import ProcgenGym3Env

import ppg_procgen
import ppo_procgen
from training import PPG_SIZES, SIZES, TinyEncoder, both_scripts, load, train

pytestmark = pytest.mark.usefixtures("small_agent_in_an_empty_directory")

# Every number differs from its default and from the others. 3 environments × 8 steps make a rollout.
OPTIONS = dict(seed=5, num_levels=4, start_level=50, num_envs=3, num_steps=8, num_minibatches=4, microbatch_size=5)
OPTIONS |= dict(gamma=0.9, gae_lambda=0.6, clip_coef=0.15, ent_coef=0.03, vf_coef=0.7, kl_coef=0.4)
OPTIONS |= dict(learning_rate=2e-3, max_grad_norm=0.8, total_timesteps=7 * 24 + 1)
PPG_OPTIONS = dict(n_pi=3, e_pi=2, e_v=1, e_aux=4, beta_clone=1.7, aux_learning_rate=7e-3, aux_minibatch_segments=4)


def options_of(script):
    return OPTIONS | (dict(update_epochs=2) if script is ppo_procgen else PPG_OPTIONS)


def make_agent(script, *arch):
    """A tiny agent far from uniform policies."""
    torch.manual_seed(0)
    agent = script.Agent(15, *arch, channels=(4, 4, 4), bfloat16=False)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return agent


def watch(patch, owner, name, note):
    """Have `note(result, *arguments)` called after each call of owner.name."""
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        result = original(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    patch.setattr(owner, name, watched)


def table(run_path, name):
    """Its rows, as numbers."""
    with open(run_path / f"{name}.csv") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def snapshot(agent):
    return {name: x.clone() for name, x in agent.state_dict().items()}


# The rollout


@both_scripts
def test_each_step_of_a_rollout_holds_what_was_seen_done_and_earned_there(script):
    """Three rollouts, one after the other, against the same actions played on a bare ProcgenGym3Env."""
    num_steps, num_envs, seed = 22, 4, 2
    agent, envs = make_agent(script), script.ProcgenVecEnv("fruitbot", num_envs, seed, "hard")
    by_hand = ProcgenGym3Env(num=num_envs, env_name="fruitbot", rand_seed=seed, distribution_mode="hard")
    torch.manual_seed(1)
    every_reward, every_start = [], []
    for _ in range(3):
        obs, actions, logprobs, rewards, values, starts = script.play(agent, envs, num_steps)
        assert obs.shape == (num_steps, num_envs, 64, 64, 3) and obs.dtype == torch.uint8
        assert actions.shape == logprobs.shape == rewards.shape == (num_steps, num_envs)
        assert values.shape == starts.shape == (num_steps + 1, num_envs)
        for t in range(num_steps + 1):
            _, seen, firsts = by_hand.observe()
            with torch.no_grad():
                logits, expected_values = agent(torch.from_numpy(seen["rgb"]))
            assert starts[t].tolist() == firsts.tolist()
            torch.testing.assert_close(values[t], expected_values)
            if t < num_steps:
                assert np.array_equal(obs[t], seen["rgb"])
                log_pi = logits.log_softmax(1)
                expected = torch.stack([log_pi[env, actions[t, env]] for env in range(num_envs)])
                torch.testing.assert_close(logprobs[t], expected)
                by_hand.act(actions[t].numpy())
                assert rewards[t].tolist() == by_hand.observe()[0].tolist()
        assert not any(x.requires_grad for x in (obs, actions, logprobs, rewards, values, starts))
        every_reward.append(rewards)
        every_start.append(starts)
    by_hand.close()
    envs.close()

    starts = torch.stack(every_start)
    assert starts[0, 0].all() and starts[:, 1:-1].any() and starts[:, -1].any()  # ends in the middle, and at the end
    assert (torch.cat(every_reward) != 0).any() and values.std() > 0.01


@both_scripts
def test_actions_are_sampled_from_the_policy(script):
    agent = make_agent(script)
    with torch.no_grad():
        agent.policy_head.weight.zero_()
        agent.policy_head.bias.fill_(-math.inf)
        agent.policy_head.bias[[4, 9]] = torch.tensor([0.75, 0.25]).log()
    envs = script.ProcgenVecEnv("bigfish", 16, seed=1)
    torch.manual_seed(6)
    _, actions, logprobs, _, _, _ = script.play(agent, envs, 60)
    envs.close()
    assert set(actions.unique().tolist()) == {4, 9}
    assert (actions == 4).float().mean().item() == pytest.approx(0.75, abs=0.04)  # three standard errors of 960 draws
    assert 0.5 < (actions[0] == 4).float().mean() < 1  # each environment by itself
    torch.testing.assert_close(logprobs.exp(), torch.where(actions == 4, 0.75, 0.25))


# The whole loop


def written_out(script, args):
    """Train as `main` should, without its bookkeeping; returns the agent and the losses of both tables."""
    torch.manual_seed(args.seed)
    agent = script.Agent(15, *([args.arch] if script is ppg_procgen else []), channels=args.channels, bfloat16=False)
    torch.manual_seed(args.seed)
    levels = dict(distribution_mode=args.distribution_mode, num_levels=args.num_levels, start_level=args.start_level)
    envs = script.ProcgenVecEnv(args.env_id, num_envs=args.num_envs, seed=args.seed, **levels)
    normalizer = script.RewardNormalizer(args.num_envs)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-8)
    progress, auxiliary = [], []
    if script is ppg_procgen:
        aux_optimizer, buffer = torch.optim.Adam(agent.parameters(), args.aux_learning_rate, eps=1e-8), script.Buffer()

    for iteration in range(1, math.ceil(args.total_timesteps / (args.num_envs * args.num_steps)) + 1):
        global_step = iteration * args.num_envs * args.num_steps
        obs, actions, logprobs, rewards, values, starts = script.play(agent, envs, args.num_steps)
        advantages, value_targets, explained = script.targets(rewards, values, starts, normalizer, args)
        losses = script.update(agent, optimizer, (obs, actions, logprobs, advantages, value_targets), args)
        losses["losses/explained_variance"] = explained
        progress.append({"global_step": global_step} | {name.split("/")[1]: x for name, x in losses.items()})
        if script is ppg_procgen and args.e_aux > 0:
            buffer.append({"obs": obs, "value_targets": value_targets})
            if iteration % args.n_pi == 0:
                buffer.record_old_policy(agent)
                for epoch in range(1, args.e_aux + 1):
                    losses = script.auxiliary_epoch(agent, aux_optimizer, buffer, args)
                    losses = {name.split("/")[1]: x for name, x in losses.items()}
                    place = {"global_step": global_step, "phase": iteration // args.n_pi, "epoch": epoch}
                    auxiliary.append(place | losses)
                buffer = script.Buffer()
    envs.close()
    return agent, progress, auxiliary


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (ppo_procgen, {}),
        (ppg_procgen, dict(arch="dual")),
        (ppg_procgen, dict(arch="shared", e_pi=2, e_v=2)),
        (ppg_procgen, dict(arch="detach")),
        (ppg_procgen, dict(e_aux=0)),
    ],
    ids=["ppo", "ppg dual", "ppg shared", "ppg detach", "ppg without auxiliary phases"],
)
def test_main_trains_to_the_bit_as_its_steps_in_their_order_do(script, options):
    options = options_of(script) | options
    args = script.Args(**SIZES | options)
    run_path = train(script, **options)
    agent, progress, auxiliary = written_out(script, args)

    trained = load(run_path)["agent"]
    assert trained.keys() == agent.state_dict().keys()
    assert [name for name, x in agent.state_dict().items() if not torch.equal(x, trained[name])] == []
    rows = table(run_path, "progress")
    assert len(rows) == 8
    charts = ("episodic_return", "episodic_length", "episodes", "SPS")
    assert [{name: x for name, x in row.items() if name not in charts} for row in rows] == progress
    if options.get("e_aux"):
        assert table(run_path, "auxiliary") == auxiliary and len(auxiliary) == 8
    else:
        assert auxiliary == [] and not (run_path / "auxiliary.csv").exists()


@both_scripts
def test_the_checkpoint_holds_the_text_of_the_tables(script):
    run_path = train(script, **options_of(script))
    progress, auxiliary = (run_path / f"{name}.csv" for name in ("progress", "auxiliary"))
    expected = {"progress": progress.read_text(), "auxiliary": auxiliary.read_text() if auxiliary.exists() else ""}
    assert load(run_path)["tables"] == expected
    assert auxiliary.exists() == (script is ppg_procgen)


# Who trains when


@both_scripts
def test_each_phase_trains_with_an_adam_of_its_own_and_its_own_step_size(script, monkeypatch):
    """The first step of an Adam moves parameters by its step size; later ones depend on what it saw before."""
    agents, moves = [], []
    watch(monkeypatch, script, "play", lambda result, agent, *_: agents.append(snapshot(agent)))
    watch(monkeypatch, script, "update", lambda result, agent, *_: agents.append(snapshot(agent)))
    options = dict(num_minibatches=1, learning_rate=2e-3, total_timesteps=2 * 16)
    if script is ppg_procgen:
        options |= dict(n_pi=1, e_aux=1, aux_learning_rate=7e-3, aux_minibatch_segments=100)
        watch(monkeypatch, script, "auxiliary_epoch", lambda result, agent, *_: agents.append(snapshot(agent)))
    else:
        options |= dict(update_epochs=1)
    run_path = train(script, **options)

    for before, after in itertools.pairwise(agents):
        moves.append(max((x - y).abs().max().item() for x, y in zip(before.values(), after.values())))
    state = load(run_path)
    assert moves[0] == pytest.approx(2e-3, rel=1e-3)
    assert state["optimizer"]["param_groups"][0]["lr"] == 2e-3
    steps = [{x["step"].item() for x in state["optimizer"]["state"].values()}]
    if script is ppg_procgen:
        assert moves[1] == pytest.approx(7e-3, rel=1e-3)
        assert state["aux_optimizer"]["param_groups"][0]["lr"] == 7e-3
        steps.append({x["step"].item() for x in state["aux_optimizer"]["state"].values()})
        # The policy phase's Adam knows nothing of the auxiliary value head.
        assert len(state["aux_optimizer"]["state"]) == len(state["optimizer"]["state"]) + 2
    assert steps == [{2}] * len(steps)
    for name in ("optimizer", "aux_optimizer")[: len(steps)]:
        group = state[name]["param_groups"][0]
        assert (group["eps"], group["betas"], group["weight_decay"]) == (1e-8, (0.9, 0.999), 0)


@pytest.mark.parametrize("arch", ["dual", "shared", "detach"])
def test_training_leaves_the_auxiliary_head_alone_until_the_auxiliary_phase(arch, monkeypatch):
    moved, agents = [], []

    def note(phase, agent):
        if agents:
            before, after = agents[-1], agent.state_dict()
            moved.append((phase, {name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}))
        agents.append(snapshot(agent))

    watch(monkeypatch, ppg_procgen, "play", lambda result, agent, *_: agents or note("play", agent))
    watch(monkeypatch, ppg_procgen, "update", lambda result, agent, *_: note("policy", agent))
    watch(monkeypatch, ppg_procgen, "auxiliary_epoch", lambda result, agent, *_: note("auxiliary", agent))
    train(ppg_procgen, arch=arch, n_pi=2, e_aux=2, total_timesteps=4 * 16)
    parts = {"encoder", "policy_head", "value_head"} | ({"value_encoder"} if arch == "dual" else set())
    phase = [("policy", parts)] * 2 + [("auxiliary", parts | {"aux_value_head"})] * 2
    assert moved == phase * 2
    assert {name.split(".")[0] for name in agents[0]} == parts | {"aux_value_head"}


def test_the_old_policy_is_what_the_policy_phase_left_and_stays_put(monkeypatch):
    left, epochs, old_agent = [], [], make_agent(ppg_procgen, "dual")

    def note(result, agent, optimizer, buffer, args):
        old_agent.load_state_dict(left[-1])
        for rollout in buffer:
            with torch.no_grad():
                expected, new = (x(rollout["obs"].flatten(0, 1))[0] for x in (old_agent, agent))
            old_logits = rollout["old_logits"].flatten(0, 1)
            epochs.append((torch.allclose(old_logits, expected, atol=1e-5), torch.allclose(old_logits, new, atol=1e-4)))

    watch(monkeypatch, ppg_procgen, "update", lambda result, agent, *_: left.append(snapshot(agent)))
    watch(monkeypatch, ppg_procgen, "auxiliary_epoch", note)
    train(ppg_procgen, total_timesteps=6 * 16, aux_learning_rate=7e-3)
    assert epochs == [(True, False)] * 2 * 3 * 3  # phases, epochs, rollouts


def test_an_auxiliary_phase_has_the_observations_and_targets_of_its_own_rollouts(monkeypatch):
    played, aimed_at, seen = [], [], []
    watch(monkeypatch, ppg_procgen, "play", lambda result, *_: played.append(result[0].clone()))
    watch(monkeypatch, ppg_procgen, "targets", lambda result, *_: aimed_at.append(result[1].clone()))
    watch(
        monkeypatch,
        ppg_procgen,
        "auxiliary_epoch",
        lambda result, agent, optimizer, buffer, args: seen.append([*buffer]),
    )
    train(ppg_procgen, total_timesteps=6 * 16)
    assert len(played) == 6 and len(seen) == 2 * 3
    for k, buffer in enumerate(seen):
        phase = slice(0, 3) if k < 3 else slice(3, 6)
        for rollout, obs, value_targets in zip(buffer, played[phase], aimed_at[phase], strict=True):
            assert torch.equal(rollout["obs"], obs) and torch.equal(rollout["value_targets"], value_targets)


# The phases


def places(run_path):
    return [(row["global_step"], row["phase"], row["epoch"]) for row in table(run_path, "auxiliary")]


def test_the_auxiliary_phase_follows_every_n_pi_iterations_and_not_a_remainder():
    """One step more than seven rollouts is asked for: eight are played, and none is dropped."""
    run_path = train(ppg_procgen, n_pi=3, e_aux=2, total_timesteps=7 * 16 + 1)
    progress, auxiliary = table(run_path, "progress"), table(run_path, "auxiliary")
    assert [row["global_step"] for row in progress] == [16 * i for i in range(1, 9)]
    assert places(run_path) == [(48, 1, 1), (48, 1, 2), (96, 2, 1), (96, 2, 2)]
    assert list(auxiliary[0]) == ["global_step", "phase", "epoch", "aux_value_loss", "aux_kl", "true_value_loss"]
    assert all(math.isfinite(x) for row in auxiliary for x in row.values())
    state = load(run_path)
    assert state["global_step"] == 8 * 16 and len(state["processes"][0]["buffer"]["rollouts"]) == 2  # of the cut phase


@both_scripts
def test_a_whole_number_of_rollouts_is_played_to_the_step(script):
    progress = table(train(script, total_timesteps=3 * 16), "progress")
    assert [row["global_step"] for row in progress] == [16, 32, 48]


def test_an_auxiliary_phase_at_the_end_of_training_is_not_left_out():
    run_path = train(ppg_procgen, n_pi=2, e_aux=3, total_timesteps=2 * 16)
    assert places(run_path) == [(32, 1, 1), (32, 1, 2), (32, 1, 3)]
    assert load(run_path)["processes"][0]["buffer"] == {"rollouts": [], "aux_epochs": 0}


@pytest.mark.parametrize("options", [dict(total_timesteps=2 * 16), dict(total_timesteps=7 * 16, e_aux=0)])
def test_no_auxiliary_phase_when_training_ends_before_it_or_it_has_no_epochs(options, monkeypatch):
    epochs = []
    watch(monkeypatch, ppg_procgen, "auxiliary_epoch", lambda *_: epochs.append(1))
    run_path = train(ppg_procgen, **options)
    assert len(table(run_path, "progress")) == options["total_timesteps"] // 16
    assert epochs == [] and load(run_path)["tables"]["auxiliary"] == ""


def test_without_auxiliary_phases_no_observation_is_kept():
    run_path = train(ppg_procgen, e_aux=0, total_timesteps=2 * 16)
    assert load(run_path)["processes"][0]["buffer"]["rollouts"] == []


def test_the_auxiliary_phase_ends_with_the_epoch_that_passes_the_limit():
    options = dict(n_pi=2, e_aux=4, total_timesteps=4 * 16, aux_minibatch_segments=1, beta_clone=0.0)
    first = table(train(ppg_procgen, run_name="no_limit", **options), "auxiliary")[:4]
    kls = [row["aux_kl"] for row in first]
    assert 0 < kls[0] < kls[1]
    for limit, epochs in ((1e9, [1, 2, 3, 4]), ((kls[0] + kls[1]) / 2, [1, 2]), (0.0, [1])):
        run_path = train(ppg_procgen, run_name=f"limit_{limit}", aux_kl_limit=limit, **options)
        assert [epoch for _, phase, epoch in places(run_path) if phase == 1] == epochs
        assert places(run_path)[len(epochs)][1:] == (2, 1)  # and the next phase begins anew


# What is played


def recorded(patch, script):
    """Every environment that training makes, with what it showed and drew."""
    made = []

    class Recorded(script.ProcgenVecEnv):
        def __init__(self, *args, **kwargs):
            made.append(self)
            self.rewards, self.ends = [], []
            super().__init__(*args, **kwargs)
            self.first_observations = self.observations
            self.level_seeds = {info["level_seed"] for info in self.procgen.get_info()}

        def step(self, actions):
            result = super().step(actions)
            self.rewards.append(result[1])
            self.ends.append(result[2])
            self.level_seeds |= {info["level_seed"] for info in self.procgen.get_info()}
            return result

    patch.setattr(script, "ProcgenVecEnv", Recorded)
    return made


@both_scripts
@pytest.mark.parametrize(
    "options",
    [
        dict(env_id="fruitbot", distribution_mode="hard", num_levels=3, start_level=50, seed=4),
        dict(env_id="bossfight", distribution_mode="easy", num_levels=2, seed=9),
        dict(env_id="fruitbot", distribution_mode="easy", seed=3),
    ],
)
def test_training_plays_the_game_in_the_mode_and_on_the_levels_asked_for(script, options, monkeypatch):
    made = recorded(monkeypatch, script)
    train(script, num_envs=4, num_steps=128, total_timesteps=3 * 512, **options)
    (envs,) = made
    assert np.sum(envs.ends) >= 8
    num_levels, start_level = options.get("num_levels", 0), options.get("start_level", 0)
    if num_levels:
        assert envs.level_seeds == set(range(start_level, start_level + num_levels))
    else:
        assert len(envs.level_seeds) >= 12 and max(envs.level_seeds) > 1_000_000

    games = dict(env_name=options["env_id"], distribution_mode=options["distribution_mode"], rand_seed=options["seed"])
    by_hand = ProcgenGym3Env(num=4, num_levels=num_levels, start_level=start_level, **games)
    assert np.array_equal(envs.first_observations, by_hand.observe()[1]["rgb"])
    by_hand.close()


@both_scripts
def test_episodic_return_is_the_mean_of_the_last_hundred_episodes_in_plain_rewards(script, monkeypatch):
    made = recorded(monkeypatch, script)
    monkeypatch.setattr(script, "update", lambda *_: {"losses/policy_loss": 0.0})  # nothing has to be learned here
    options = dict(e_aux=0) if script is ppg_procgen else {}
    run_path = train(script, num_envs=16, num_steps=64, total_timesteps=5 * 1024, **options)
    rows, (envs,) = table(run_path, "progress"), made

    returns, lengths = [0.0] * 16, [0] * 16
    finished, counts = [], []  # (return, length) of every episode, in the order in which they ended
    for t, (rewards, ends) in enumerate(zip(envs.rewards, envs.ends, strict=True), start=1):
        for env in range(16):
            returns[env], lengths[env] = returns[env] + rewards[env], lengths[env] + 1
            if ends[env]:
                finished.append((returns[env], lengths[env]))
                returns[env], lengths[env] = 0.0, 0
        if t % 64 == 0:
            mean_return, mean_length = np.mean(finished[-100:], axis=0)
            assert rows[t // 64 - 1]["episodic_return"] == pytest.approx(mean_return)
            assert rows[t // 64 - 1]["episodic_length"] == pytest.approx(mean_length)
            counts.append(len(finished))
    assert [row["episodes"] for row in rows] == counts
    assert counts[-1] > 110 and np.mean(finished, axis=0)[0] != pytest.approx(rows[-1]["episodic_return"])


@both_scripts
def test_sps_counts_the_steps_and_seconds_since_the_process_began_to_train(script, monkeypatch):
    """A rollout of 16 steps takes 4 seconds of this clock, an update none; in a resumed run, too."""
    seconds = [1000.0]
    monkeypatch.setattr(script, "time", SimpleNamespace(time=lambda: seconds[0], monotonic=lambda: seconds[0]))
    watch(monkeypatch, script, "play", lambda *_: seconds.append(seconds.pop() + 4))
    run_path = train(script, run_name="run", total_timesteps=3 * 16)
    seconds[0] += 1000
    train(script, resume=run_path, total_timesteps=5 * 16)
    assert [row["SPS"] for row in table(run_path, "progress")] == [16 / 4] * 5


@both_scripts
def test_episodic_return_is_empty_before_an_episode_has_ended(script):
    (row,) = table(train(script, total_timesteps=16), "progress")
    assert math.isnan(row["episodic_return"]) and math.isnan(row["episodic_length"]) and row["episodes"] == 0


def test_the_tiny_encoder_stands_in_for_the_one_that_trains():
    assert ppg_procgen.Encoder is ppo_procgen.Encoder is TinyEncoder
    assert PPG_SIZES["n_pi"] == 3 and SIZES["num_envs"] * SIZES["num_steps"] == 16  # what these tests count on
