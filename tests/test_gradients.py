"""Training on what was played: `update` and `auxiliary_epoch` against slow loops with losses written out by hand.

The loops here take whole minibatches in the same random order, differentiate a loss that is written out again, scale
the gradient and step, all by hand. Every coefficient differs from its default and from the others. A part of the
network that a loss must not reach has no gradient at all: with a gradient of zero, Adam's momentum would still move it.
"""

import copy

import pytest
import torch

import ppg_procgen
import ppo_procgen
from training import both_scripts

NUM_STEPS, NUM_ENVS = 6, 4
RATE = 0.005  # of plain gradient descent
COEFFICIENTS = dict(gamma=0.9, gae_lambda=0.6, clip_coef=0.15, ent_coef=0.3, vf_coef=0.7, kl_coef=0.4)
SIZES = dict(num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_minibatches=3, device="cpu", precision="float32")
ARCHS = ["dual", "shared", "detach"]
every_arch = pytest.mark.parametrize("arch", ARCHS)

# In which of the two phases a value loss reaches the policy's encoder depends on the architecture.
VALUE_PARTS = {
    "dual": {"value_encoder", "value_head"},
    "shared": {"encoder", "value_head"},
    "detach": {"value_head"},
}
ENCODERS = {"dual": {"encoder", "value_encoder"}, "shared": {"encoder"}, "detach": {"encoder"}}
POLICY_PARTS = {"encoder", "policy_head"}


def make_agent(script, arch=None):
    """A small network far from its initialization, where policies are nearly uniform and biases 0."""
    torch.manual_seed(0)
    agent = script.Agent(15, *([arch] if arch else []), channels=(4, 4, 4), features=16)
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            parameter += (0.3 if "head" in name else 0.05) * torch.randn_like(parameter)
    return agent


def random_observations(*shape):
    """Coarse random patterns: a network tells them apart, and no two are alike."""
    return (
        torch.randint(0, 256, (*shape, 4, 4, 3), dtype=torch.uint8).repeat_interleave(16, -3).repeat_interleave(16, -2)
    )


def log_probabilities(logits):
    return logits - logits.exp().sum(1, keepdim=True).log()


def outputs(agent, arch, observations, detached):
    """logits, auxiliary values (or None), values, from the parts of the network"""
    features = agent.encoder(observations)
    value_features = agent.value_encoder(observations) if arch == "dual" else features
    if detached:
        value_features = value_features.detach()
    aux_values = agent.aux_value_head(features)[:, 0] if arch else None
    return agent.policy_head(features), aux_values, agent.value_head(value_features)[:, 0]


def gradient_step(agent, loss, max_grad_norm):
    """Gradient descent by hand on what the loss reaches; returns the gradient's norm before it was scaled down."""
    gradients = torch.autograd.grad(loss, list(agent.parameters()), allow_unused=True)
    norm = sum(g.double().square().sum() for g in gradients if g is not None).sqrt().item()
    scale = max_grad_norm / norm if 0 < max_grad_norm < norm else 1.0
    with torch.no_grad():
        for parameter, gradient in zip(agent.parameters(), gradients):
            if gradient is not None:
                parameter -= RATE * scale * gradient
    return norm


def mean(xs):
    return sum(xs) / len(xs)


def assert_trained_alike(before, trained, expected):
    """Every parameter moved as in `expected`, and did not move at all where it did not move there."""
    for (name, start), one, other in zip(before.named_parameters(), trained.parameters(), expected.parameters()):
        moved, should_move = one - start, other - start
        assert (moved - should_move).norm() <= 5e-4 * should_move.norm(), name


def sgd(agent):
    return torch.optim.SGD(agent.parameters(), lr=RATE)


class Recorder(torch.optim.Adam):
    """Adam with momentum in every parameter, which notes the parts of the network that each step moves."""

    def __init__(self, agent):
        super().__init__(agent.parameters(), lr=1e-3)
        self.agent, self.moved = agent, []
        for parameter in agent.parameters():
            parameter.grad = torch.ones_like(parameter)
        super().step()
        self.zero_grad()

    def step(self):
        before = copy.deepcopy(self.agent.state_dict())
        super().step()
        after = self.agent.state_dict()
        self.moved.append({name.split(".")[0] for name in after if not torch.equal(after[name], before[name])})


# The policy phase


def make_rollout(agent):
    """obs, actions, logprobs, advantages, value targets; ratios on both sides of the clip, advantages of both signs."""
    torch.manual_seed(1)
    obs = random_observations(NUM_STEPS, NUM_ENVS)
    actions = torch.randint(0, 15, (NUM_STEPS, NUM_ENVS))
    with torch.no_grad():
        logits, values = agent(obs.flatten(0, 1))
    logprobs = log_probabilities(logits).gather(1, actions.view(-1, 1)).view(NUM_STEPS, NUM_ENVS)
    change = 0.3 * torch.randn(NUM_STEPS, NUM_ENVS)
    advantages = torch.randn(NUM_STEPS, NUM_ENVS)
    quadrants = {(bool(c > 0), bool(a > 0)) for c, a in zip(change[change.abs() > 0.2], advantages[change.abs() > 0.2])}
    assert len(quadrants) == 4 and (change.abs() < 0.1).any()
    value_targets = values.view(NUM_STEPS, NUM_ENVS) + 1.5 + torch.randn(NUM_STEPS, NUM_ENVS)
    return obs, actions, logprobs - change, advantages, value_targets


def epochs_of(args):
    """What is trained in each epoch."""
    if not hasattr(args, "e_pi"):
        return ["policy and value"] * args.update_epochs
    if args.e_pi == args.e_v:
        return ["policy and value"] * args.e_pi
    return ["value"] * args.e_v + ["policy"] * args.e_pi


def slow_update(agent, arch, rollout, args):
    """Train by hand; returns the metrics."""
    obs, actions, logprobs, advantages, value_targets = rollout
    metrics = {name: [] for name in ("policy_loss", "entropy", "approx_kl", "clipfrac", "value_loss", "grad_norm")}
    for trained in epochs_of(args):
        order = torch.randperm(NUM_STEPS * NUM_ENVS).tolist()
        size = NUM_STEPS * NUM_ENVS // args.num_minibatches
        for start in range(0, len(order), size):
            places = [divmod(k, NUM_ENVS) for k in order[start : start + size]]
            mb_obs = torch.stack([obs[t, env] for t, env in places])
            logits, _, values = outputs(agent, arch, mb_obs, detached=arch == "detach")
            surrogates, penalties, entropies, kls, clipped, errors = [], [], [], [], [], []
            for (t, env), log_pi, value in zip(places, log_probabilities(logits), values):
                log_ratio = log_pi[actions[t, env]] - logprobs[t, env]
                ratio, advantage, clip = log_ratio.exp(), advantages[t, env], args.clip_coef
                farthest = ratio
                if clip > 0:
                    farthest = ratio.clamp(max=1 + clip) if advantage > 0 else ratio.clamp(min=1 - clip)
                surrogates.append(farthest * advantage)
                penalties.append(log_ratio**2 / 2)
                entropies.append(-(log_pi.exp() * log_pi).sum())
                kls.append((ratio - 1 - log_ratio).item())
                clipped.append(float(clip > 0 and not 1 - clip <= ratio <= 1 + clip))
                errors.append((value - value_targets[t, env]) ** 2)
            policy_loss = args.kl_coef * mean(penalties) - mean(surrogates)
            value_loss = args.vf_coef * mean(errors)
            loss = 0
            if "policy" in trained:
                loss = loss + policy_loss - args.ent_coef * mean(entropies)
                metrics["policy_loss"].append(policy_loss.item())
                metrics["entropy"].append(mean(entropies).item())
                metrics["approx_kl"].append(mean(kls))
                metrics["clipfrac"].append(mean(clipped))
            if "value" in trained:
                loss = loss + value_loss
                metrics["value_loss"].append(value_loss.item())
            metrics["grad_norm"].append(gradient_step(agent, loss, args.max_grad_norm))
    assert args.max_grad_norm == 0 or min(metrics["grad_norm"]) < args.max_grad_norm < max(metrics["grad_norm"])
    return {f"losses/{name}": mean(xs) for name, xs in metrics.items()}


UPDATES = {
    "ppo": (ppo_procgen, None, dict(update_epochs=2, max_grad_norm=8.0)),
    "ppo in microbatches": (ppo_procgen, None, dict(update_epochs=2, microbatch_size=3, max_grad_norm=8.0)),
    "ppo, kl variant": (ppo_procgen, None, dict(update_epochs=2, microbatch_size=3, clip_coef=0, kl_coef=1.3)),
    "ppg": (ppg_procgen, "dual", dict(e_pi=2, e_v=2, max_grad_norm=8.0)),
    "ppg in microbatches": (ppg_procgen, "dual", dict(e_pi=2, e_v=2, microbatch_size=3, max_grad_norm=8.0)),
    "ppg, kl variant": (ppg_procgen, "dual", dict(e_pi=2, e_v=2, microbatch_size=3, clip_coef=0, kl_coef=1.3)),
    "ppg shared": (ppg_procgen, "shared", dict(e_pi=1, e_v=1, microbatch_size=5)),
    "ppg detach": (ppg_procgen, "detach", dict(e_pi=1, e_v=1, microbatch_size=5)),
    "ppg, more value epochs": (ppg_procgen, "dual", dict(e_pi=2, e_v=3, microbatch_size=3, max_grad_norm=2.0)),
    "ppg, more policy epochs": (ppg_procgen, "dual", dict(e_pi=2, e_v=1)),
    "ppg shared, more value epochs": (ppg_procgen, "shared", dict(e_pi=1, e_v=2)),
    "ppg detach, more value epochs": (ppg_procgen, "detach", dict(e_pi=1, e_v=2)),
}
every_update = pytest.mark.parametrize(("script", "arch", "options"), UPDATES.values(), ids=UPDATES)


@every_update
def test_update_trains_and_reports_as_a_slow_loop_over_the_same_minibatches_does(script, arch, options):
    args = script.Args(**SIZES | COEFFICIENTS | options)
    before = make_agent(script, arch)
    trained, expected, rollout = copy.deepcopy(before), copy.deepcopy(before), make_rollout(before)
    torch.manual_seed(2)
    losses = script.update(trained, sgd(trained), rollout, args)
    torch.manual_seed(2)
    assert losses == pytest.approx(slow_update(expected, arch, rollout, args), rel=1e-3)
    assert_trained_alike(before, trained, expected)


@both_scripts
@pytest.mark.parametrize("size, sizes", [(None, [64, 36]), (40, [40, 40, 20])], ids=["64 on a CPU", "as asked for"])
def test_microbatches_have_at_most_so_many_steps(script, size, sizes):
    seen = []
    agent = make_agent(script)
    agent.encoder.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    args = script.Args(**SIZES | dict(num_steps=25, num_minibatches=1, microbatch_size=size))
    rollout = [torch.zeros(25, NUM_ENVS, *shape) for shape in ((64, 64, 3), (), (), (), ())]
    rollout[0], rollout[1] = rollout[0].byte(), rollout[1].long()
    script.update(agent, sgd(agent), rollout, args)
    assert seen == sizes * (len(seen) // len(sizes)) and len(seen) > 0


@both_scripts
def test_every_epoch_sees_every_step_once_in_an_order_of_its_own(script):
    agent, seen = make_agent(script), []
    rollout = make_rollout(agent)
    agent.encoder.register_forward_hook(
        lambda module, inputs, output: seen.extend(x.numpy().tobytes() for x in inputs[0])
    )
    epochs = dict(update_epochs=2) if script is ppo_procgen else dict(e_pi=2, e_v=2)
    script.update(agent, sgd(agent), rollout, script.Args(**SIZES | epochs))
    steps = [x.numpy().tobytes() for x in rollout[0].flatten(0, 1)]
    first, second = seen[: len(steps)], seen[len(steps) :]
    assert sorted(first) == sorted(second) == sorted(steps) and first != second != steps != first


@both_scripts
@pytest.mark.parametrize("entry", [2, 3, 4], ids=["logprobs", "advantages", "value targets"])
def test_update_refuses_a_gradient_that_is_not_finite_before_the_step(script, entry):
    before = make_agent(script)
    agent, rollout = copy.deepcopy(before), make_rollout(before)
    rollout[entry].fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        script.update(agent, sgd(agent), rollout, script.Args(**SIZES))
    assert all(torch.equal(*pair) for pair in zip(agent.parameters(), before.parameters()))


@every_arch
@pytest.mark.parametrize(("e_pi", "e_v"), [(2, 2), (1, 2), (2, 1)])
def test_with_unequal_epochs_the_value_function_trains_alone_and_then_the_policy(arch, e_pi, e_v):
    agent = make_agent(ppg_procgen, arch)
    optimizer, args = Recorder(agent), ppg_procgen.Args(**SIZES | dict(e_pi=e_pi, e_v=e_v))
    ppg_procgen.update(agent, optimizer, make_rollout(agent), args)
    if e_pi == e_v:
        assert optimizer.moved == [VALUE_PARTS[arch] | POLICY_PARTS] * 3 * e_pi
    else:
        assert optimizer.moved == [VALUE_PARTS[arch]] * 3 * e_v + [POLICY_PARTS] * 3 * e_pi


def test_ppo_trains_its_whole_network_at_every_step():
    agent = make_agent(ppo_procgen)
    optimizer = Recorder(agent)
    ppo_procgen.update(agent, optimizer, make_rollout(agent), ppo_procgen.Args(**SIZES | dict(update_epochs=2)))
    assert optimizer.moved == [{"encoder", "policy_head", "value_head"}] * 6


# The auxiliary phase


def make_buffer(agent, num_rollouts=3, num_steps=5):
    """Rollouts whose π_old is another policy than the agent's, so that the KL matters from the first step on."""
    torch.manual_seed(3)
    buffer = ppg_procgen.Buffer()
    for _ in range(num_rollouts):
        obs = random_observations(num_steps, NUM_ENVS)
        with torch.no_grad():
            logits, values = agent(obs.flatten(0, 1))
        old_logits = logits.view(num_steps, NUM_ENVS, 15) + torch.randn(num_steps, NUM_ENVS, 15)
        value_targets = values.view(num_steps, NUM_ENVS) + 1.5 + torch.randn(num_steps, NUM_ENVS)
        buffer.append({"obs": obs, "value_targets": value_targets, "old_logits": old_logits})
    return buffer


def slow_auxiliary_epoch(agent, arch, buffer, args):
    """Train by hand; returns the metrics."""
    num_steps = len(buffer[0]["obs"])
    order = torch.randperm(len(buffer) * NUM_ENVS).tolist()
    per_step = {"aux_value_loss": [], "aux_kl": [], "true_value_loss": []}
    norms = []
    while order:
        segments, order = order[: args.aux_minibatch_segments], order[args.aux_minibatch_segments :]
        rollouts = [(buffer[k // NUM_ENVS], k % NUM_ENVS) for k in segments]
        places = [(rollout, t, env) for rollout, env in rollouts for t in range(num_steps)]
        mb_obs = torch.stack([rollout["obs"][t, env] for rollout, t, env in places])
        logits, aux_values, values = outputs(agent, arch, mb_obs, detached=False)
        aux_errors, kls, errors = [], [], []
        for (rollout, t, env), log_pi, aux_value, value in zip(places, log_probabilities(logits), aux_values, values):
            (log_pi_old,) = log_probabilities(rollout["old_logits"][t, env][None])
            kls.append((log_pi_old.exp() * (log_pi_old - log_pi)).sum())
            aux_errors.append((aux_value - rollout["value_targets"][t, env]) ** 2 / 2)
            errors.append((value - rollout["value_targets"][t, env]) ** 2 / 2)
        joint_loss = mean(aux_errors) + args.beta_clone * mean(kls)
        norms.append(gradient_step(agent, joint_loss + mean(errors), args.max_grad_norm))
        for xs, more in zip(per_step.values(), (aux_errors, kls, errors)):
            xs += [x.item() for x in more]
    assert args.max_grad_norm == 0 or min(norms) < args.max_grad_norm < max(norms)
    return {f"auxiliary/{name}": mean(xs) for name, xs in per_step.items()}


def aux_args(num_rollouts=3, num_steps=5, **options):
    sizes = SIZES | dict(num_steps=num_steps, num_minibatches=1, n_pi=num_rollouts)
    return ppg_procgen.Args(**sizes | COEFFICIENTS | dict(beta_clone=1.7, aux_minibatch_segments=5) | options)


@every_arch
@pytest.mark.parametrize(
    "options",
    [
        dict(),  # of 12 segments: two whole minibatches, and one of 2
        dict(microbatch_size=7),
        dict(aux_minibatch_segments=100, microbatch_size=9, beta_clone=0.2, max_grad_norm=0.0),
    ],
    ids=["minibatches", "microbatches", "one partial minibatch"],
)
def test_auxiliary_epoch_trains_and_reports_as_a_slow_loop_over_the_same_segments_does(arch, options):
    args = aux_args(**dict(max_grad_norm=11.0 if arch == "dual" else 7.0) | options)
    before = make_agent(ppg_procgen, arch)
    buffer, trained, expected = make_buffer(before), copy.deepcopy(before), copy.deepcopy(before)
    torch.manual_seed(4)
    losses = ppg_procgen.auxiliary_epoch(trained, sgd(trained), buffer, args)
    torch.manual_seed(4)
    assert losses == pytest.approx(slow_auxiliary_epoch(expected, arch, buffer, args), rel=1e-3)
    assert_trained_alike(before, trained, expected)
    assert buffer.aux_epochs == 1


@pytest.mark.parametrize("per_minibatch, sizes", [(4, [4, 4, 4]), (5, [5, 5, 2]), (100, [12])])
def test_every_segment_is_seen_once_an_epoch(per_minibatch, sizes):
    agent, seen = make_agent(ppg_procgen, "dual"), []
    buffer = make_buffer(agent)
    origins = {
        rollout["obs"][t, env].numpy().tobytes(): (i, env, t)
        for i, rollout in enumerate(buffer)
        for env in range(NUM_ENVS)
        for t in range(5)
    }
    agent.encoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numpy()))
    orders = []
    for _ in range(2):
        ppg_procgen.auxiliary_epoch(agent, sgd(agent), buffer, aux_args(aux_minibatch_segments=per_minibatch))
        minibatches = [[origins[x.tobytes()] for x in minibatch] for minibatch in seen]
        segments = [{(i, env) for i, env, _ in minibatch} for minibatch in minibatches]
        assert [len(minibatch) for minibatch in segments] == sizes  # a segment is one environment in one rollout
        assert [len(minibatch) for minibatch in minibatches] == [size * 5 for size in sizes]  # and has 5 steps
        orders.append([origin for minibatch in minibatches for origin in minibatch])
        assert sorted(orders[-1]) == sorted(origins.values())
        seen.clear()
    assert orders[0] != orders[1]  # each epoch in an order of its own


def test_a_minibatch_holds_whole_segments_and_each_step_with_its_own_target():
    buffer = make_buffer(make_agent(ppg_procgen, "dual"))
    obs, value_targets, old_logits = buffer.minibatch(torch.tensor([9, 2]), torch.device("cpu"))
    for k, (rollout, env, t) in enumerate([(buffer[i], env, t) for i, env in ((2, 1), (0, 2)) for t in range(5)]):
        assert torch.equal(obs[k], rollout["obs"][t, env])
        assert value_targets[k] == rollout["value_targets"][t, env]
        assert torch.equal(old_logits[k], rollout["old_logits"][t, env])
    assert len(obs) == len(value_targets) == len(old_logits) == 10


@every_arch
def test_the_old_policy_is_the_one_at_the_time_of_recording_and_stays_put(arch):
    agent = make_agent(ppg_procgen, arch)
    buffer = make_buffer(agent)
    for rollout in buffer:
        del rollout["old_logits"]
    buffer.record_old_policy(agent)
    with torch.no_grad():
        expected = [torch.stack([agent(obs)[0] for obs in rollout["obs"]]) for rollout in buffer]
    for _ in range(2):
        assert all(torch.allclose(r["old_logits"], x, atol=1e-5) for r, x in zip(buffer, expected, strict=True))
        assert not any(rollout["old_logits"].requires_grad for rollout in buffer)
        losses = ppg_procgen.auxiliary_epoch(agent, sgd(agent), buffer, aux_args())
    assert losses["auxiliary/aux_kl"] > 1e-3  # while the policy itself moved


def test_beta_clone_holds_the_policy_in_place():
    kls = []
    for beta_clone in (0.0, 30.0):
        agent = make_agent(ppg_procgen, "dual")
        buffer, optimizer = make_buffer(agent), torch.optim.Adam(agent.parameters(), lr=3e-3)
        buffer.record_old_policy(agent)
        for _ in range(4):
            losses = ppg_procgen.auxiliary_epoch(agent, optimizer, buffer, aux_args(beta_clone=beta_clone))
        kls.append(losses["auxiliary/aux_kl"])
    assert kls[1] < kls[0] / 3


@every_arch
def test_the_auxiliary_phase_trains_the_whole_network_at_every_step(arch):
    agent = make_agent(ppg_procgen, arch)
    optimizer = Recorder(agent)
    ppg_procgen.auxiliary_epoch(agent, optimizer, make_buffer(agent), aux_args())
    assert optimizer.moved == [ENCODERS[arch] | {"policy_head", "value_head", "aux_value_head"}] * 3


@pytest.mark.parametrize("entry", ["value_targets", "old_logits"])
def test_an_auxiliary_epoch_refuses_a_gradient_that_is_not_finite_before_the_step(entry):
    before = make_agent(ppg_procgen, "dual")
    agent, buffer = copy.deepcopy(before), make_buffer(before)
    for rollout in buffer:
        rollout[entry].fill_(float("inf") if entry == "value_targets" else 0.0)
        rollout[entry][..., 0] = float("inf")
    with pytest.raises((RuntimeError, ValueError)):  # torch's Categorical is the first to notice such logits
        ppg_procgen.auxiliary_epoch(agent, sgd(agent), buffer, aux_args())
    assert all(torch.equal(*pair) for pair in zip(agent.parameters(), before.parameters()))


def test_a_loaded_buffer_is_the_saved_one():
    saved, loaded = make_buffer(make_agent(ppg_procgen, "dual")), ppg_procgen.Buffer()
    saved.aux_epochs = 2
    loaded.load_state_dict(saved.state_dict())
    assert len(loaded) == len(saved) == 3 and loaded.aux_epochs == 2
    for one, other in zip(loaded, saved):
        assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# Which loss reaches which part of the network


def parts_reached(agent, loss):
    """The parts of the network with a gradient; and no gradient is all zeros."""
    agent.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    return {name.split(".")[0] for name in gradients}


def policy_terms(logits):
    """The policy's loss, KL penalty and entropy bonus, one by one."""
    log_pi = log_probabilities(logits)
    log_ratio = log_pi[:, 3] - (log_pi[:, 3].detach() - 0.1)
    advantages = torch.linspace(-1.5, 1, len(logits))
    yield ppg_procgen.policy_loss(log_ratio, advantages, 0.2, 0.0)
    yield ppg_procgen.policy_loss(log_ratio, torch.zeros(len(logits)), 0.0, 1.0)
    yield (log_pi.exp() * log_pi).sum(1).mean()


@every_arch
def test_policy_loss_reaches_the_policy_encoder_and_head_alone(arch):
    agent, observations = make_agent(ppg_procgen, arch), random_observations(4)
    for term in range(3):
        loss = list(policy_terms(agent(observations)[0]))[term]
        assert parts_reached(agent, loss) == POLICY_PARTS


@every_arch
def test_value_loss_reaches_the_policy_encoder_in_the_policy_phase_only_if_shared(arch):
    agent = make_agent(ppg_procgen, arch)
    _, values = agent(random_observations(4))
    assert parts_reached(agent, (values - 1).square().mean()) == VALUE_PARTS[arch]


@every_arch
def test_in_the_auxiliary_phase_each_loss_reaches_its_head_and_the_encoder_below_even_with_detach(arch):
    agent = make_agent(ppg_procgen, arch)
    observations = random_observations(4)
    value_parts = VALUE_PARTS[arch] | ({"encoder"} if arch == "detach" else set())
    for term, expected in enumerate([{"encoder", "aux_value_head"}, POLICY_PARTS, value_parts]):
        logits, aux_values, values = agent.auxiliary(observations)
        targets, old_logits = torch.ones(4), torch.linspace(-1, 1, 60).view(4, 15)
        _, aux_value_loss, kl = ppg_procgen.auxiliary_loss(aux_values, targets, logits, old_logits, 1.0)
        assert parts_reached(agent, [aux_value_loss, kl, (values - targets).square().mean()][term]) == expected


@pytest.mark.parametrize("phase", ["forward", "auxiliary"])
@every_arch
def test_every_encoder_runs_once_in_a_pass(arch, phase):
    agent, runs = make_agent(ppg_procgen, arch), []
    for name in ENCODERS[arch]:
        getattr(agent, name).register_forward_hook(lambda module, inputs, output, name=name: runs.append(name))
    getattr(agent, phase)(random_observations(4))
    assert sorted(runs) == sorted(ENCODERS[arch])
