"""Which loss reaches which part of the network, and how often each encoder runs.

A part that a loss must not reach has no gradient at all (None): with a gradient of zero, Adam's
momentum would still move it.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

import ppg_procgen
import ppo_procgen
from ppg_procgen import auxiliary_objective, policy_objective

ARCHS = ["dual", "shared", "detach"]
every_arch = pytest.mark.parametrize("arch", ARCHS)
SMALL = dict(channels=(4, 4, 4), features=16)


def make_agent(arch):
    torch.manual_seed(0)
    return ppg_procgen.Agent(15, arch, **SMALL)


def random_observations(batch=4):
    torch.manual_seed(1)
    return torch.randint(0, 256, (batch, 64, 64, 3), dtype=torch.uint8)


def policy_loss_of(logits):
    """The policy's loss on actions whose probability has changed a little since the rollout."""
    policy, actions = Categorical(logits=logits), torch.arange(len(logits))
    log_ratio = policy.log_prob(actions) - (policy.log_prob(actions).detach() - 0.1)
    advantages = torch.linspace(-1.5, 1, len(logits))
    return policy_objective(log_ratio, advantages, 0.2, 0.0) - 0.01 * policy.entropy().mean()


def value_loss_of(values):
    return 0.5 * F.mse_loss(values, torch.ones_like(values))


def gradients(agent, loss):
    """{parameter: its gradient} for those that the loss reaches."""
    agent.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in agent.named_parameters() if p.grad is not None}


def parts(gradients):
    """The parts of the network with a gradient; and no gradient is all zeros."""
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    return {name.split(".")[0] for name in gradients}


# The policy phase


@every_arch
def test_auxiliary_head_gets_no_gradient_in_policy_phase(arch):
    agent = make_agent(arch)
    logits, values = agent(random_observations())
    reached = parts(gradients(agent, policy_loss_of(logits) + value_loss_of(values)))
    encoders = {"encoder", "value_encoder"} if arch == "dual" else {"encoder"}
    assert reached == encoders | {"policy_head", "value_head"}


@every_arch
def test_policy_loss_reaches_the_policy_encoder_and_head_alone(arch):
    agent = make_agent(arch)
    logits, _ = agent(random_observations())
    assert parts(gradients(agent, policy_loss_of(logits))) == {"encoder", "policy_head"}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("dual", {"value_encoder", "value_head"}),
        ("shared", {"encoder", "value_head"}),
        ("detach", {"value_head"}),
    ],
)
def test_value_loss_reaches_the_policy_encoder_in_policy_phase_only_if_shared(arch, expected):
    agent = make_agent(arch)
    _, values = agent(random_observations())
    assert parts(gradients(agent, value_loss_of(values))) == expected
    _, values = agent(random_observations(), policy=False)
    assert parts(gradients(agent, value_loss_of(values))) == expected


@every_arch
def test_adding_the_value_loss_changes_the_policy_encoders_gradient_only_if_shared(arch):
    agent = make_agent(arch)
    logits, values = agent(random_observations())
    both = gradients(agent, policy_loss_of(logits) + value_loss_of(values))
    logits, _ = agent(random_observations())
    policy_alone = gradients(agent, policy_loss_of(logits))
    names = [name for name in policy_alone if name.startswith("encoder.")]
    assert names
    assert all(torch.equal(both[name], policy_alone[name]) == (arch != "shared") for name in names)


# The auxiliary phase


@every_arch
def test_auxiliary_value_loss_reaches_the_policy_encoder_in_auxiliary_phase(arch):
    agent = make_agent(arch)
    logits, aux_values, _ = agent.auxiliary(random_observations())
    targets = torch.ones_like(aux_values)
    _, aux_value_loss, _ = auxiliary_objective(aux_values, targets, logits, logits.detach(), 1.0)
    assert parts(gradients(agent, aux_value_loss)) == {"encoder", "aux_value_head"}


@every_arch
def test_kl_reaches_the_policy_encoder_and_head_in_auxiliary_phase(arch):
    agent = make_agent(arch)
    logits, aux_values, _ = agent.auxiliary(random_observations())
    old_logits = torch.randn_like(logits)
    _, _, kl = auxiliary_objective(aux_values, torch.ones_like(aux_values), logits, old_logits, 1.0)
    assert parts(gradients(agent, kl)) == {"encoder", "policy_head"}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("dual", {"value_encoder", "value_head"}),
        ("shared", {"encoder", "value_head"}),
        ("detach", {"encoder", "value_head"}),
    ],
)
def test_value_loss_reaches_the_one_encoder_in_auxiliary_phase_even_with_detach(arch, expected):
    agent = make_agent(arch)
    _, _, values = agent.auxiliary(random_observations())
    assert parts(gradients(agent, value_loss_of(values))) == expected


# Encoders that are not asked for are not run


def count_encoder_runs(agent, forward):
    runs = {"encoder": 0, "value_encoder": 0}

    def count(module, inputs, output, name):
        runs[name] += 1

    for name in runs:
        encoder = getattr(agent, name)
        if encoder is not None:
            encoder.register_forward_hook(functools.partial(count, name=name))
    forward(random_observations())
    return runs["encoder"], runs["value_encoder"]


@pytest.mark.parametrize(("policy", "value", "expected"), [(1, 1, (1, 1)), (1, 0, (1, 0)), (0, 1, (0, 1))])
def test_dual_runs_only_the_encoders_that_are_asked_for(policy, value, expected):
    agent = make_agent("dual")
    forward = functools.partial(agent, policy=bool(policy), value=bool(value))
    assert count_encoder_runs(agent, forward) == expected


@pytest.mark.parametrize(("policy", "value"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("arch", ["shared", "detach"])
def test_one_encoder_runs_once(arch, policy, value):
    agent = make_agent(arch)
    assert count_encoder_runs(agent, functools.partial(agent, policy=policy, value=value)) == (1, 0)


@every_arch
def test_every_encoder_runs_once_in_auxiliary_phase(arch):
    agent = make_agent(arch)
    assert count_encoder_runs(agent, agent.auxiliary) == (1, int(arch == "dual"))


@every_arch
def test_what_is_not_asked_for_is_none_and_the_rest_is_unchanged(arch):
    agent = make_agent(arch)
    logits, values = agent(random_observations())
    logits_alone, no_values = agent(random_observations(), value=False)
    no_logits, values_alone = agent(random_observations(), policy=False)
    assert no_values is None and no_logits is None
    assert torch.equal(logits_alone, logits) and torch.equal(values_alone, values)


# The training loop itself: every gradient step of one iteration, recorded


def record_steps(module, tmp_path, monkeypatch, **arguments):
    """Run `module.main` for one iteration; returns [(optimizer, {parameter: gradient})], one for each step.

    In Adam's place goes plain gradient descent: Adam's first steps blow rounding errors up to the
    size of the step.
    """
    agents, steps = [], []
    original_agent = module.Agent

    def small_agent(*positional, **options):
        agents.append(original_agent(*positional, **options, **SMALL))
        return agents[-1]

    def step(optimizer, closure=None):
        named = {name: p for name, p in agents[0].named_parameters() if p.grad is not None}
        steps.append((optimizer, {name: p.grad.clone() for name, p in named.items()}))
        with torch.no_grad():
            for parameter in named.values():
                parameter -= 0.1 * parameter.grad

    args = dict(
        num_envs=4,
        num_steps=8,
        num_minibatches=2,
        total_timesteps=4 * 8,
        device="cpu",
        precision="float32",
        run_dir=str(tmp_path),
        run_name=f"run{len(list(tmp_path.iterdir()))}",
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "Agent", small_agent)
        patch.setattr(torch.optim.Adam, "step", step)
        module.main(module.Args(**args | arguments))
    return steps


PPG = dict(n_pi=1, e_aux=2, aux_minibatch_segments=3)  # of 4 segments: a whole minibatch and a partial one


@pytest.mark.parametrize(
    ("module", "arguments", "expected_steps"),
    [
        (ppo_procgen, dict(update_epochs=2), 2 * 2),
        (ppg_procgen, dict(PPG), 2 + 2 * 2),
        (ppg_procgen, dict(PPG, e_pi=2, arch="detach"), (2 + 1) * 2 + 2 * 2),
    ],
)
def test_gradients_of_microbatches_add_up_to_those_of_the_whole_minibatch(
    module, arguments, expected_steps, tmp_path, monkeypatch
):
    whole = record_steps(module, tmp_path, monkeypatch, microbatch_size=1000, **arguments)
    # A minibatch is 16 steps, in the auxiliary phase 24 or 8: no multiple of 5.
    chunks = record_steps(module, tmp_path, monkeypatch, microbatch_size=5, **arguments)
    assert len(whole) == len(chunks) == expected_steps
    for (_, expected), (_, actual) in zip(whole, chunks):
        assert actual.keys() == expected.keys()
        # Where gradients cancel (of the KL, while π is still π_old) what is left is rounding, about 1e-8.
        for name in expected:
            assert (actual[name] - expected[name]).norm() <= 1e-3 * expected[name].norm() + 1e-7, name


def test_partial_auxiliary_minibatch_is_averaged_over_what_it_holds(tmp_path, monkeypatch):
    # All 4 segments, once as a whole minibatch and once as less than a twentieth of one.
    whole = record_steps(ppg_procgen, tmp_path, monkeypatch, n_pi=1, e_aux=1, aux_minibatch_segments=4)
    partial = record_steps(ppg_procgen, tmp_path, monkeypatch, n_pi=1, e_aux=1, aux_minibatch_segments=100)
    assert len(whole) == len(partial) == 2 + 1
    for name, gradient in whole[-1][1].items():
        torch.testing.assert_close(partial[-1][1][name], gradient, rtol=1e-4, atol=1e-7)


@every_arch
def test_training_leaves_the_auxiliary_head_alone_until_the_auxiliary_phase(arch, tmp_path, monkeypatch):
    steps = record_steps(ppg_procgen, tmp_path, monkeypatch, arch=arch, **PPG)
    encoders = {"encoder", "value_encoder"} if arch == "dual" else {"encoder"}
    policy_phase, auxiliary_phase = steps[:2], steps[2:]
    assert [parts(gradients) for _, gradients in policy_phase] == [encoders | {"policy_head", "value_head"}] * 2
    assert len(auxiliary_phase) == 4
    for _, gradients in auxiliary_phase:
        assert {name.split(".")[0] for name in gradients} == encoders | {"policy_head", "value_head", "aux_value_head"}


def test_with_unequal_epochs_first_the_value_function_trains_alone_and_then_the_policy(tmp_path, monkeypatch):
    steps = record_steps(ppg_procgen, tmp_path, monkeypatch, e_v=2, e_pi=1, n_pi=2)
    value_part, policy_part = {"value_encoder", "value_head"}, {"encoder", "policy_head"}
    assert [parts(gradients) for _, gradients in steps] == [value_part] * 4 + [policy_part] * 2
    value_optimizer, policy_optimizer = steps[0][0], steps[-1][0]
    assert value_optimizer is not policy_optimizer
    assert [optimizer for optimizer, _ in steps] == [value_optimizer] * 4 + [policy_optimizer] * 2


def test_auxiliary_phase_has_an_optimizer_of_its_own(tmp_path, monkeypatch):
    steps = record_steps(ppg_procgen, tmp_path, monkeypatch, **PPG)
    assert [optimizer is steps[0][0] for optimizer, _ in steps] == [True] * 2 + [False] * 4
    assert len({id(optimizer) for optimizer, _ in steps}) == 2
