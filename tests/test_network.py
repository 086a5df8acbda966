"""The network: its initialization, its shapes, and its forward pass against one written out here."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ppg_procgen
import ppo_procgen
from training import ROLLOUT, assert_same_end, both_scripts, train

AGENTS = {
    "ppo": lambda **options: ppo_procgen.Agent(15, **options),
    "ppg dual": lambda **options: ppg_procgen.Agent(15, "dual", **options),
    "ppg shared": lambda **options: ppg_procgen.Agent(15, "shared", **options),
    "ppg detach": lambda **options: ppg_procgen.Agent(15, "detach", **options),
}
every_agent = pytest.mark.parametrize("make_agent", AGENTS.values(), ids=AGENTS.keys())


def random_observations(batch):
    torch.manual_seed(0)
    return torch.randint(0, 256, (batch, 64, 64, 3), dtype=torch.uint8)


def randomize(module):
    """Weights and biases that are all different from one another: fresh biases are 0 and would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


# Initialization


@both_scripts
def test_normalize_weights_of_a_case_worked_by_hand(script):
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, -0.5]]))  # norms 5 and 0.5
        layer.bias.fill_(7.0)
    assert script.normalize_weights(layer, 10.0) is layer
    assert layer.weight.tolist() == [[6.0, 8.0], [0.0, -10.0]]
    assert layer.bias.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("channels", [(16, 32, 32), (4, 4, 4)])
@every_agent
def test_every_unit_starts_with_the_norm_of_its_layer_and_without_bias(make_agent, channels):
    agent = make_agent(channels=channels)
    expected = {"policy_head": 0.1, "value_head": 0.1}
    if hasattr(agent, "aux_value_head"):
        expected["aux_value_head"] = 0.1
    for encoder in [name for name in ("encoder", "value_encoder") if getattr(agent, name, None) is not None]:
        expected[f"{encoder}.dense"] = 1.4
        for first in (0, 4, 8):  # a stack is a convolution, a pooling and two residual blocks
            expected[f"{encoder}.stacks.{first}"] = 1.0
            for block in (first + 2, first + 3):
                expected[f"{encoder}.stacks.{block}.conv1"] = math.sqrt(1 / math.sqrt(3) / math.sqrt(2))
                expected[f"{encoder}.stacks.{block}.conv2"] = math.sqrt(1 / math.sqrt(3) / math.sqrt(2))

    layers = {name: layer for name, layer in agent.named_modules() if hasattr(layer, "weight")}
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        norms = [sum(w * w for w in unit) ** 0.5 for unit in layer.weight.flatten(1).tolist()]
        assert norms == pytest.approx([expected[name]] * len(norms), rel=1e-5), name
        assert layer.bias.tolist() == [0.0] * len(norms), name


@both_scripts
def test_norm_of_a_residual_convolution_is_about_0_639(script):
    norms = script.ResidualBlock(4).conv1.weight.flatten(1).norm(dim=1)
    assert norms.tolist() == pytest.approx([0.639] * 4, abs=5e-4)


# Shapes and sizes


def test_ppg_by_default_has_two_encoders_of_16_32_32_channels_and_256_features():
    stack1 = (3 * 16 * 9 + 16) + 4 * (16 * 16 * 9 + 16)
    stack2 = (16 * 32 * 9 + 32) + 4 * (32 * 32 * 9 + 32)
    stack3 = (32 * 32 * 9 + 32) + 4 * (32 * 32 * 9 + 32)
    dense = 32 * 8 * 8 * 256 + 256
    policy_head, value_head = 256 * 15 + 15, 256 + 1
    encoder = stack1 + stack2 + stack3 + dense
    assert 2 * encoder + policy_head + 2 * value_head == 1_248_657

    def size(agent):
        return sum(parameter.numel() for parameter in agent.parameters())

    assert size(ppg_procgen.Agent(15)) == 1_248_657
    assert size(ppg_procgen.Agent(15, "shared")) == encoder + policy_head + 2 * value_head
    assert size(ppg_procgen.Agent(15, "detach")) == encoder + policy_head + 2 * value_head
    assert size(ppo_procgen.Agent(15)) == encoder + policy_head + value_head


@every_agent
def test_agent_maps_pixels_to_a_row_of_logits_and_one_value_each(make_agent):
    logits, values = make_agent(channels=(4, 4, 4), features=16)(random_observations(5))
    assert logits.shape == (5, 15) and values.shape == (5,)
    assert logits.dtype == values.dtype == torch.float32


@pytest.mark.parametrize("arch", ["dual", "shared", "detach"])
def test_auxiliary_forward_adds_one_auxiliary_value_each(arch):
    agent = ppg_procgen.Agent(15, arch, channels=(4, 4, 4), features=16)
    logits, aux_values, values = agent.auxiliary(random_observations(5))
    assert logits.shape == (5, 15) and aux_values.shape == (5,) and values.shape == (5,)


@both_scripts
def test_channels_and_features_of_the_encoder_can_be_chosen(script):
    encoder = script.Encoder(channels=(2, 3, 5), features=7)
    convolutions = [layer for layer in encoder.stacks if isinstance(layer, nn.Conv2d)]
    assert [(layer.in_channels, layer.out_channels) for layer in convolutions] == [(3, 2), (2, 3), (3, 5)]
    assert encoder(random_observations(2)).shape == (2, 7)
    assert script.Encoder(channels=(2, 2), features=7)(random_observations(2)).shape == (2, 7)


# The forward pass


def slow_encoder(parameters, observations):
    """The encoder of the paper, written out in float64 from its parameters alone."""

    def convolve(x, name):
        return F.conv2d(x, parameters[f"{name}.weight"].double(), parameters[f"{name}.bias"].double(), padding=1)

    x = torch.stack([observations[..., color] for color in range(3)], dim=1).double() * (1 / 255)
    for first in (0, 4, 8):
        x = F.max_pool2d(convolve(x, f"stacks.{first}"), kernel_size=3, stride=2, padding=1)
        for block in (first + 2, first + 3):
            inner = convolve(x.clamp(min=0), f"stacks.{block}.conv1")
            x = x + convolve(inner.clamp(min=0), f"stacks.{block}.conv2")
    x = x.clamp(min=0).reshape(len(observations), -1)
    x = x @ parameters["dense.weight"].double().T + parameters["dense.bias"].double()
    return x.clamp(min=0)


@both_scripts
@pytest.mark.parametrize("size", [{}, {"channels": (4, 5, 6), "features": 9}])
def test_features_agree_with_a_forward_pass_written_out(script, size):
    torch.manual_seed(1)
    encoder, observations = randomize(script.Encoder(**size)), random_observations(3)
    with torch.no_grad():
        features, expected = encoder(observations), slow_encoder(encoder.state_dict(), observations)
    assert (expected > 0).any() and (expected == 0).any()
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-4 * expected.max().item())


@both_scripts
def test_pixels_are_scaled_to_0_to_1(script):
    seen = []
    encoder = script.Encoder(channels=(4, 4, 4), features=8)
    encoder.stacks.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    observation = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    observation[0, 5, 9] = torch.tensor([255, 51, 0])
    encoder(observation)
    assert seen[0][0, :, 5, 9].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert seen[0].sum().item() == pytest.approx(1.2)


@every_agent
def test_heads_are_linear_in_the_features_of_their_encoders(make_agent):
    torch.manual_seed(2)
    agent = randomize(make_agent(channels=(4, 4, 4), features=16))
    observations = random_observations(3)
    with torch.no_grad():
        features = agent.encoder(observations)
        value_encoder = getattr(agent, "value_encoder", None) or agent.encoder
        expected_logits = features @ agent.policy_head.weight.T + agent.policy_head.bias
        expected_values = value_encoder(observations) @ agent.value_head.weight[0] + agent.value_head.bias
        logits, values = agent(observations)
        torch.testing.assert_close(logits, expected_logits)
        torch.testing.assert_close(values, expected_values)

        if hasattr(agent, "auxiliary"):
            expected_aux_values = features @ agent.aux_value_head.weight[0] + agent.aux_value_head.bias
            logits, aux_values, values = agent.auxiliary(observations)
            torch.testing.assert_close(logits, expected_logits)
            torch.testing.assert_close(aux_values, expected_aux_values)
            torch.testing.assert_close(values, expected_values)


# bfloat16


@both_scripts
def test_bfloat16_encoder_gives_nearly_the_same_features_in_float32(script):
    torch.manual_seed(3)
    exact = randomize(script.Encoder(channels=(4, 4, 4), features=16))
    rounded = script.Encoder(channels=(4, 4, 4), features=16, bfloat16=True)
    rounded.load_state_dict(exact.state_dict())
    with torch.no_grad():
        expected, features = exact(random_observations(4)), rounded(random_observations(4))
    assert features.dtype == torch.float32
    # A bfloat16 has 8 significant bits: there must be a rounding error, and a small one.
    assert 1e-4 < relative_error(features, expected) < 0.03


@every_agent
def test_parameters_and_gradients_stay_float32_with_bfloat16(make_agent):
    agent = make_agent(channels=(4, 4, 4), features=16, bfloat16=True)
    logits, values = agent(random_observations(2))
    assert logits.dtype == values.dtype == torch.float32
    (logits.square().sum() + values.square().sum()).backward()
    assert {parameter.dtype for parameter in agent.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in agent.encoder.parameters()} == {torch.float32}


def test_compiled_training_runs_every_pass_from_a_graph_and_computes_the_same(monkeypatch, tmp_path):
    # Graphs are recorded as ever, and then run as they are: a compiler would take minutes.
    compile, graphs, runs = torch.compile, [], []

    def record(graph, inputs):
        graphs.append(graph)
        return lambda *inputs: runs.append(graph) or graph(*inputs)

    options = dict(channels=(2, 2, 2), total_timesteps=3 * ROLLOUT, run_dir=str(tmp_path))
    run_path = train(ppg_procgen, run_name="plain", **options)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=record, dynamic=False))
    compiled_path = train(ppg_procgen, run_name="compiled", compile=True, **options)

    # One each for rollouts (and π_old), updates, and auxiliary minibatches of 4 segments and of the other 2
    assert len(graphs) == 4
    # 3 iterations: 8 steps and the observation after them, 2 minibatches. Then π_old of 3 · 8 steps, by the policy's
    # encoder alone, and 3 epochs of 2 minibatches.
    assert len(runs) == 2 * 3 * (8 + 1 + 2) + 3 * 8 + 2 * 3 * 2
    assert_same_end(compiled_path, run_path)
