"""Phasic Policy Gradient (PPG) on Procgen, in one file.

When policy and value function share an encoder, each gains from what the other learns; but their
gradients interfere there, and both must train for equally many epochs, though the value function
tolerates many more over the same data. PPG (Cobbe et al. 2020, arXiv 2009.04416) keeps the gain and
avoids both costs by taking turns:

- the policy phase: N_π iterations of PPO, each a rollout and an update on it, in which policy and
  value function have an encoder each (`--arch shared` and `detach`: one for both);
- the auxiliary phase: E_aux epochs over all N_π rollouts teach the policy's encoder to predict the
  value targets (advantage estimate + value, as of each rollout), through an auxiliary value head
  that serves nothing else. A KL penalty holds the policy itself where it was. The value function
  trains on the same targets for as many epochs, which are more than the policy would tolerate.

    python ppg_procgen.py --env-id starpilot --n-pi 32 --e-aux 6
    python ppg_procgen.py --help

| flag            | symbol  | meaning                                                           |
| --------------- | ------- | ----------------------------------------------------------------- |
| `n_pi`          | N_π     | iterations in a policy phase                                      |
| `e_pi`          | E_π     | epochs of the policy over each rollout                            |
| `e_v`           | E_V     | epochs of the value function over each rollout                    |
| `e_aux`         | E_aux   | epochs of an auxiliary phase over the N_π rollouts                |
| `beta_clone`    | β_clone | weight of the KL penalty that holds the policy in place there     |
| `gamma`         | γ       | discount                                                          |
| `gae_lambda`    | λ       | bias-variance trade-off of the advantage estimate                 |
| `clip_coef`     | ε       | how far the probability ratio may move before clipping            |
| `ent_coef`      | β_S     | weight of the entropy bonus                                       |
| `kl_coef`       | β       | weight of the KL penalty (0: clipping alone)                      |
"""

import sys

if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit(
        f"Procgen runs on Python 3.10, 3.11 and 3.12; this is Python {sys.version.split()[0]}.\n"
        "Get one of them, for instance with uv (pip install uv):\n"
        "    uv venv --seed --python 3.12 .venv && .venv/bin/pip install -r requirements.txt"
    )

import contextlib
import csv
import dataclasses
import difflib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from procgen import ProcgenGym3Env
from procgen.env import ENV_NAMES, EXPLORATION_LEVEL_SEEDS
from torch.distributions import Categorical, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# torchrun starts several processes and numbers them; a script that is started alone is the first of one.
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE, LOCAL_WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@dataclass
class Args:
    env_id: str = "starpilot"
    """the Procgen game, one of the 16"""
    seed: int = 1
    """seed of the environments, the network and the sampling"""
    total_timesteps: int = 25_000_000
    """environment steps, summed over environments and processes; rounded up to a whole rollout"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """difficulty of the levels; every game has easy and hard"""
    num_levels: int = 0
    """number of distinct training levels; 0 means no limit"""
    start_level: int = 0
    """the first level; training uses levels start_level to start_level + num_levels - 1"""
    num_envs: int = 64
    """environments that step side by side, in each process"""
    num_steps: int = 256
    """steps per environment in a rollout; what one environment does in one rollout is a segment"""
    num_minibatches: int = 8
    """minibatches per epoch; each is num_envs / num_minibatches whole segments"""
    learning_rate: float = 5e-4
    """Adam's step size"""
    gamma: float = 0.999
    """γ, the discount"""
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation"""
    n_pi: int = 32
    """N_π, iterations in a policy phase"""
    e_pi: int = 1
    """E_π, epochs of the policy over each rollout"""
    e_v: int = 1
    """E_V, epochs of the value function over each rollout; if this differs from e_pi, they come before the policy's"""
    e_aux: int = 6
    """E_aux, epochs of an auxiliary phase; 0 means no auxiliary phase"""
    beta_clone: float = 1.0
    """β_clone, weight of KL(π_old ‖ π) in the auxiliary phase"""
    aux_minibatch_segments: int = 4
    """segments of num_steps steps in a minibatch of the auxiliary phase, in each process"""
    aux_learning_rate: float = 5e-4
    """Adam's step size in the auxiliary phase"""
    aux_kl_limit: float | None = None
    """end an auxiliary phase early once an epoch's mean KL passes this (try 0.02; None: never)"""
    arch: Literal["dual", "shared", "detach"] = "dual"
    """dual: an encoder each for policy and value function; shared: one, which both train in both phases;
    detach: one, which the value function trains in the auxiliary phase only"""
    clip_coef: float = 0.2
    """ε of the clipped objective; 0 turns clipping off"""
    ent_coef: float = 0.01
    """β_S, weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the squared value error in the PPO update, the ½ in ½ (V − V_targ)²"""
    kl_coef: float = 0.0
    """β, weight of the KL penalty ½ (log-ratio)²; 1 together with --clip-coef 0 is PPO-KL"""
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """arithmetic of the encoder; auto is bfloat16 where the hardware has it; on a GPU, float32 is TF32"""
    microbatch_size: int | None = None
    """samples per forward and backward pass; gradients add up to those of the whole minibatch (None: 64 on
    a CPU, where activations then stay in cache, and the whole minibatch on a GPU)"""
    compile: bool = False
    """torch.compile the network, meant for GPUs: slow to start, and rounding differs a little"""
    run_dir: str = "runs"
    """directory that holds the runs"""
    run_name: str | None = None
    """directory of this run inside run_dir (None: <env_id>__<script>__<seed>__<time>)"""
    resume: str | None = None
    """directory of a run to go on with, from its last checkpoint and with its arguments"""
    checkpoint_interval: int | None = None
    """iterations between checkpoints (None: n_pi, at the end of each phase, when the buffer is empty)"""
    track: bool = False
    """mirror the metrics to Weights & Biases (WANDB_MODE=offline works)"""
    wandb_project_name: str = "ppg-procgen"
    """the Weights & Biases project"""
    wandb_entity: str | None = None
    """the Weights & Biases team (None: your own)"""


# fmt: off
LIMITS = {  # (lowest, highest) value that a flag accepts
    **dict.fromkeys(("total_timesteps", "num_envs", "num_steps", "num_minibatches", "microbatch_size",
                     "checkpoint_interval", "n_pi", "e_pi", "e_v", "aux_minibatch_segments"), (1, math.inf)),
    **dict.fromkeys(("learning_rate", "clip_coef", "ent_coef", "vf_coef", "kl_coef", "e_aux", "beta_clone",
                     "aux_learning_rate", "aux_kl_limit"), (0, math.inf)),
    **dict.fromkeys(("gamma", "gae_lambda"), (0, 1)),
    **dict.fromkeys(("seed", "num_levels", "start_level"), (0, 2**31 - 1)),
}
# Means over an auxiliary epoch: ½ (V_aux − V_targ)², KL(π_old ‖ π), and ½ (V − V_targ)² of the value head itself.
AUX_LOSSES = ("aux_value_loss", "aux_kl", "aux_true_value_loss")
CHECKPOINT_FORMAT = f"{Path(__file__).name} 4"
RESUME_MAY_CHANGE = ("resume", "total_timesteps", "device", "checkpoint_interval", "track", "wandb_project_name",
                     "wandb_entity")
GAMES_WITH_MODE = {
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": tuple(sorted(EXPLORATION_LEVEL_SEEDS)),
}
# fmt: on


class ProcgenVecEnv(VectorEnv):
    """Procgen's batched C++ environment as a Gymnasium vector environment.

    Observations are uint8 [num_envs, 64, 64, 3], actions integers [num_envs] in 0..14, rewards
    float32 [num_envs]. An episode that ends is followed by the first observation of the next one
    in the same step (`AutoresetMode.SAME_STEP`). Procgen keeps the last observation of an episode
    to itself, so `infos` has no `final_obs`; and it does not tell a time-out from any other end,
    so every end is a termination and `truncations` are all False.

    Source: Cobbe et al. 2019, Leveraging Procedural Generation to Benchmark Reinforcement
    Learning, arXiv 1912.01588.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, env_id, num_envs, seed=0, distribution_mode="easy", num_levels=0, start_level=0, **options):
        """`seed` (0 to 2³¹ − 1) picks the sequence of levels; `options` go to ProcgenGym3Env."""
        # Exploration mode is one fixed level, and Procgen refuses to be told which.
        levels = {} if distribution_mode == "exploration" else dict(num_levels=num_levels, start_level=start_level)
        threads = min(4, os.cpu_count() or 1)
        self.options = (
            dict(env_name=env_id, distribution_mode=distribution_mode, num_threads=threads) | levels | options
        )

        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.observation_space = gym.spaces.Box(0, 255, (num_envs, 64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)
        self.action_space = gym.spaces.MultiDiscrete([15] * num_envs)

        self.procgen = ProcgenGym3Env(num=num_envs, rand_seed=seed, **self.options)

    def reset(self, *, seed=None, options=None):
        """Begin a new episode everywhere; with a seed, from the first level of that seed's sequence."""
        super().reset(seed=seed)
        if seed is not None:
            self.procgen.close()
            self.procgen = ProcgenGym3Env(num=self.num_envs, rand_seed=seed, **self.options)

        _, observations, starts = self.procgen.observe()
        if not starts.all():
            # Action −1 is Procgen's way to abandon an episode.
            self.procgen.act(np.full(self.num_envs, -1))
            _, observations, _ = self.procgen.observe()
        return observations["rgb"], {}

    def step(self, actions):
        """Act in every environment; `terminations[i]` says that `observations[i]` begins a new episode."""
        self.procgen.act(np.asarray(actions))
        rewards, observations, starts = self.procgen.observe()
        return observations["rgb"], rewards, starts, np.zeros_like(starts), {}

    def get_state(self):
        """The games as a list of num_envs byte strings. Keep the last observation beside it: a
        restored game draws its next observation only after its next step."""
        return self.procgen.get_state()

    def set_state(self, state):
        """Put back what `get_state` returned, in this process or in another."""
        self.procgen.set_state(state)

    def close_extras(self, **kwargs):
        self.procgen.close()


def normalize_weights(layer, norm):
    """Rescale each output unit's weights to L2 norm `norm` and zero the biases; returns the layer.

    The direction stays that of PyTorch's default initialization. Source: the PPG authors' release.
    """
    with torch.no_grad():
        norms = layer.weight.flatten(1).norm(dim=1)
        layer.weight.mul_((norm / norms).view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias.zero_()
    return layer


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), shape unchanged. Source: Espeholt et al. 2018 (IMPALA), figure 3."""

    def __init__(self, channels):
        super().__init__()
        # 3 stacks of 2 blocks each add to the features: a block's gain is 1/√3/√2, so that the sum
        # does not grow. The block's two convolutions multiply theirs: each has the root of it.
        norm = math.sqrt(1 / math.sqrt(3) / math.sqrt(2))
        self.conv1 = normalize_weights(nn.Conv2d(channels, channels, 3, padding=1), norm)
        self.conv2 = normalize_weights(nn.Conv2d(channels, channels, 3, padding=1), norm)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Encoder(nn.Module):
    """IMPALA's residual encoder: uint8 pixels [batch, 64, 64, 3] → float32 features [batch, features].

    With `bfloat16`, its arithmetic runs in bfloat16 wherever that is safe (autocast); parameters,
    gradients and output stay float32. Source: Espeholt et al. 2018, arXiv 1802.01561, figure 3
    (right), without the LSTM.
    """

    def __init__(self, channels=(16, 32, 32), features=256, bfloat16=False):
        super().__init__()
        self.bfloat16 = bfloat16
        layers = []
        for in_channels, out_channels in zip((3, *channels), channels):
            layers += [
                normalize_weights(nn.Conv2d(in_channels, out_channels, 3, padding=1), 1.0),
                nn.MaxPool2d(3, stride=2, padding=1),
                ResidualBlock(out_channels),
                ResidualBlock(out_channels),
            ]
        self.stacks = nn.Sequential(*layers)
        side = 64 // 2 ** len(channels)
        self.dense = normalize_weights(nn.Linear(channels[-1] * side * side, features), 1.4)
        # Procgen's images are channels-last in memory already: so are the weights, and no
        # convolution has to rearrange its input.
        self.to(memory_format=torch.channels_last)

    def forward(self, observations):
        with torch.autocast(observations.device.type, torch.bfloat16, enabled=self.bfloat16):
            x = observations.permute(0, 3, 1, 2).float() / 255
            x = F.relu(self.stacks(x).flatten(1))
            return F.relu(self.dense(x)).float()


class Agent(nn.Module):
    """Policy, value function, and the auxiliary value head on the policy's encoder.

    Source: Cobbe et al. 2020, figure 1; section 3.6 for one encoder (`shared`, `detach`).
    """

    def __init__(self, num_actions, arch="dual", **encoder_options):
        super().__init__()
        self.arch = arch
        self.encoder = Encoder(**encoder_options)
        self.value_encoder = Encoder(**encoder_options) if arch == "dual" else None
        features = self.encoder.dense.out_features
        self.policy_head = normalize_weights(nn.Linear(features, num_actions), 0.1)
        self.value_head = normalize_weights(nn.Linear(features, 1), 0.1)
        self.aux_value_head = normalize_weights(nn.Linear(features, 1), 0.1)

    def forward(self, observations, policy=True, value=True):
        """uint8 [batch, 64, 64, 3] → logits [batch, num_actions], values [batch], as the policy phase trains them.

        What is not asked for is None, and an encoder that serves it alone does not run.
        """
        features = self.encoder(observations) if policy or self.arch != "dual" else None
        logits = self.policy_head(features) if policy else None
        if not value:
            return logits, None

        value_features = self.value_encoder(observations) if self.arch == "dual" else features
        if self.arch == "detach":
            value_features = value_features.detach()
        return logits, self.value_head(value_features).squeeze(1)

    def auxiliary(self, observations):
        """uint8 [batch, 64, 64, 3] → logits [batch, num_actions], auxiliary values [batch], values [batch],
        as the auxiliary phase trains them.

        Nothing is detached: with one encoder the value function's gradient reaches it, with `detach` too,
        as the paper says. (The authors' code keeps it out in both phases.)
        """
        features = self.encoder(observations)
        value_features = self.value_encoder(observations) if self.arch == "dual" else features
        aux_values = self.aux_value_head(features).squeeze(1)
        return self.policy_head(features), aux_values, self.value_head(value_features).squeeze(1)


def initial_reward_stats(num_envs):
    """What `normalize_rewards` carries from rollout to rollout, before the first: a weak guess of variance 1."""
    return {
        "returns": torch.zeros(num_envs, dtype=torch.float64),
        "mean": torch.tensor(0.0, dtype=torch.float64),
        "variance": torch.tensor(1.0, dtype=torch.float64),
        "count": torch.tensor(1e-4, dtype=torch.float64),
    }


def normalize_rewards(rewards, starts, stats, discount=0.99, clip=10.0):
    """Divide rewards by the running standard deviation of a discounted return.

    The return runs forward in time, G_t = r_t + discount · (1 − start_t) · G_{t−1}, and on from one
    rollout to the next; its discount is not γ. The whole rollout enters the statistics before any
    of its rewards is divided. Rewards are not centred: that would change what the agent wants.

    Args:
        rewards: [num_steps, num_envs], what the environment paid for the action at step t
        starts: [num_steps, num_envs], 1 where observation t begins an episode
        stats: `returns` [num_envs] and the scalars `mean`, `variance`, `count`, float64
    Returns:
        normalized rewards [num_steps, num_envs] float32 within ±clip, and the new stats
    Source: the PPG authors' release; moments merged as in Chan et al. 1979.
    """
    returns, mean, variance, count = (stats[name] for name in ("returns", "mean", "variance", "count"))
    rewards, starts = rewards.double(), starts.double()

    batch = torch.zeros_like(rewards)
    for t in range(len(rewards)):
        returns = rewards[t] + discount * (1 - starts[t]) * returns
        batch[t] = returns

    new_count = count + batch.numel()
    delta = batch.mean() - mean
    new_mean = mean + delta * batch.numel() / new_count
    sum_of_squares = variance * count + batch.var(correction=0) * batch.numel()
    new_variance = (sum_of_squares + delta**2 * count * batch.numel() / new_count) / new_count

    normalized = (rewards / torch.sqrt(new_variance + 1e-8)).clamp(-clip, clip).float()
    return normalized, {"returns": returns, "mean": new_mean, "variance": new_variance, "count": new_count}


def gae(rewards, values, starts, gamma, gae_lambda):
    """Generalized advantage estimation.

    δ_t = r_t + γ V(s_{t+1}) − V(s_t);  Â_t = δ_t + γλ Â_{t+1}; both cut where an episode ends.

    Args:
        rewards: [num_steps, num_envs]
        values, starts: [num_steps + 1, num_envs]; starts[t + 1] says that step t ended an episode
    Returns:
        advantages [num_steps, num_envs]
    Source: Schulman et al. 2015, arXiv 1506.02438, equation 16.
    """
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        not_done = 1 - starts[t + 1]
        delta = rewards[t] + gamma * not_done * values[t + 1] - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * not_done * advantage
    return advantages


def policy_objective(log_ratio, advantages, clip_coef, kl_coef):
    """PPO's policy loss, to be minimized, as a scalar: −L^CLIP + kl_coef · mean ½ (log-ratio)².

    Args:
        log_ratio: [batch], log π(a|s) − log π_played(a|s), with π_played the policy of the rollout
        advantages: [batch], normalized
        clip_coef: ε; with 0 the ratio is not clipped
        kl_coef: weight of the penalty, a second-order approximation of the KL divergence
    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; the penalty: Cobbe et al. 2020,
    arXiv 2009.04416, section 3.5.
    """
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    if clip_coef > 0:
        surrogate = torch.min(surrogate, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    return kl_coef * 0.5 * (log_ratio**2).mean() - surrogate.mean()


def auxiliary_objective(aux_values, value_targets, logits, old_logits, beta_clone):
    """L_joint, to be minimized: ½ mean (V_aux − V_targ)² + beta_clone · mean KL(π_old ‖ π).

    Args:
        aux_values, value_targets: [batch]
        logits, old_logits: [batch, num_actions], of π and of π_old, the policy before the auxiliary phase
    Returns:
        the scalars L_joint, auxiliary value loss, KL
    Source: Cobbe et al. 2020, arXiv 2009.04416, section 2, L^joint and L^aux.
    """
    aux_value_loss = 0.5 * F.mse_loss(aux_values, value_targets)
    kl = kl_divergence(Categorical(logits=old_logits), Categorical(logits=logits)).mean()
    return aux_value_loss + beta_clone * kl, aux_value_loss, kl


def has_bfloat16(device):
    """Whether the hardware multiplies bfloat16 matrices natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class PlainProgress(tqdm):
    """tqdm for an output that is no terminal: whole lines in place of one line redrawn."""

    def display(self, msg=None, pos=None):
        print(self, file=self.fp, flush=True)


def available_memory(device):
    """Bytes that this process may still allocate on `device`; on a CPU a container's limit counts too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    for line in Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # control groups, version 2
            root, names, cache = "/sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            root, cache = "/sys/fs/cgroup/memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = Path(root + path)
        for level in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file here, or no limit ("max")
                limit, in_use = (int((level / name).read_text()) for name in names)
                # Files that are only cached count as used, but give way to whoever needs the memory.
                counts = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
                available = min(available, limit - in_use + int(counts.get(cache, 0)))
    return available


def stop_unless_finite(agent, iteration, losses):
    """End the run, before the optimizer's step, on a loss or a gradient that is infinite or no number."""
    gradient_sum = sum(parameter.grad.sum() for parameter in agent.parameters() if parameter.grad is not None)
    checked = losses | {f"the gradient of {' + '.join(losses)}": gradient_sum}
    finite = torch.stack(list(checked.values())).isfinite().tolist()  # waits for a GPU once
    culprits = [name for name, is_finite in zip(checked, finite) if not is_finite]
    if culprits:
        sys.exit(f"iteration {iteration}: {culprits[0]} is not finite; stopped before the optimizer's step")


@contextlib.contextmanager
def exchange():
    """End this process, in one line, when it cannot exchange data with the others: most often one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        problem = str(error).split("\n")[0]
        sys.exit(f"process {RANK}: lost the other processes, the last checkpoint counts ({problem})")


def gather(x, everywhere=True):
    """What every process has for x, as a list in the order of the processes; alone, [x].

    If not everywhere, only the first process gets it, and the others an empty list.
    """
    if WORLD_SIZE == 1:
        return [x]
    xs = [None] * WORLD_SIZE
    with exchange():
        if everywhere:
            dist.all_gather_object(xs, x)
        else:
            dist.gather_object(x, xs if RANK == 0 else None)
    return xs if everywhere or RANK == 0 else []


def gather_envs(x):
    """[n, num_envs] of every process, side by side and on the CPU: [n, WORLD_SIZE · num_envs]."""
    return torch.cat(gather(x.cpu()), dim=1)


def average(tensors):
    """Replace each tensor by its mean over the processes, all in one exchange."""
    if WORLD_SIZE == 1:
        return
    means = torch.cat([x.flatten() for x in tensors]) / WORLD_SIZE
    with exchange():
        dist.all_reduce(means)
    for x, mean in zip(tensors, means.split([x.numel() for x in tensors])):
        x.copy_(mean.view_as(x))


def average_gradients(agent):
    """The gradient of the mean loss over all processes; they then take the same step and stay equal."""
    average([parameter.grad for parameter in agent.parameters() if parameter.grad is not None])


@contextlib.contextmanager
def replacing(path, mode="w"):
    """A file to write; once it is whole and on the disk it takes the place of `path`.

    Renaming is atomic: a crash at any moment leaves either the old file or the new one.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, mode, newline=None if "b" in mode else "") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path, rows):
    """Replace the table at `path` by these rows (dictionaries with the same keys) as CSV."""
    with replacing(path) as file:
        csv_writer = csv.DictWriter(file, rows[0])
        csv_writer.writeheader()
        csv_writer.writerows(rows)


def fail(message):
    """Report bad input in one line on standard error, once a machine, and exit with code 2 as argument parsers do."""
    if LOCAL_RANK == 0:
        print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    """Arguments from the command line; with --resume, the run's own arguments are the defaults."""
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.resume is None:
        return args

    try:
        config = json.loads((Path(args.resume) / "config.json").read_text())
        if config["script"] != Path(__file__).name:
            fail(f"--resume {args.resume}: expected a run of {Path(__file__).name}, that is one of {config['script']}")
        stored = Args(**config["args"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--resume {args.resume}: expected the directory of a run of {Path(__file__).name}, with its config.json")
    args = tyro.cli(Args, default=dataclasses.replace(stored, resume=args.resume))

    # What could change the result has to stay as it was.
    for name, value in vars(stored).items():
        flag, new_value = "--" + name.replace("_", "-"), getattr(args, name)
        if name == "total_timesteps" and new_value < value:
            fail(f"{flag} {new_value}: this run was started with {value}; when resuming, expected that or more")
        if name not in RESUME_MAY_CHANGE and new_value != value:
            fail(f"{flag} {new_value}: this run was started with {value}; when resuming, leave the flag out")
    return args


def check_args(args):
    """Refuse arguments that cannot work, before anything is written."""
    if args.env_id not in ENV_NAMES:
        nearest = difflib.get_close_matches(args.env_id, ENV_NAMES, n=1, cutoff=0.0)[0]
        fail(f"--env-id {args.env_id}: no such game, did you mean {nearest}? Expected one of {', '.join(ENV_NAMES)}")
    games = GAMES_WITH_MODE.get(args.distribution_mode, ENV_NAMES)
    if args.env_id not in games:
        mode = args.distribution_mode
        fail(f"--distribution-mode {mode}: {args.env_id} has no such mode; expected one of {', '.join(games)}")
    if args.distribution_mode == "exploration" and (args.num_levels, args.start_level) != (0, 0):
        levels = f"--num-levels {args.num_levels} --start-level {args.start_level}"
        fail(f"{levels}: exploration mode is one fixed level; expected 0 and 0")

    for name, (low, high) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            accepted = f"a finite number, {low} or more" if high == math.inf else f"{low} to {high}"
            fail(f"--{name.replace('_', '-')} {value}: expected {accepted}")
    if args.run_name is not None and not re.fullmatch(r"\w[\w .+=-]*", args.run_name):
        fail(f"--run-name {args.run_name!r}: expected a name, of letters, digits, spaces and _ . + = -")
    if args.num_envs % args.num_minibatches:
        fail(f"--num-envs {args.num_envs}: expected a multiple of --num-minibatches {args.num_minibatches}")
    rollout = args.num_envs * args.num_steps * WORLD_SIZE
    if args.total_timesteps < rollout:
        fail(f"--total-timesteps {args.total_timesteps}: expected at least one rollout, {rollout} steps")

    gpus = torch.cuda.device_count()
    if LOCAL_WORLD_SIZE > 1 and args.device != "cpu" and (":" in args.device or 0 < gpus < LOCAL_WORLD_SIZE):
        fail(f"--device {args.device}: expected cpu, or auto with a GPU for each of {LOCAL_WORLD_SIZE} processes")
    try:
        # A process that only touches another's GPU takes memory there.
        torch.zeros(1, device={"auto": "cpu", "cuda": f"cuda:{LOCAL_RANK}"}.get(args.device, args.device)).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(f"--device {args.device}: expected auto, cpu or a device that is present ({str(error).splitlines()[0]})")


def main(args):
    """Train as `args` say and return the directory of the run."""
    check_args(args)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if device.type == "cuda":
        device = torch.device("cuda", LOCAL_RANK if device.index is None else device.index)
        torch.cuda.set_device(device)
    if args.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
        except Exception as error:
            problem = str(error).split("\n")[0]
            fail(f"--compile: expected a C++ compiler or, for a GPU, Triton, as torch.compile needs ({problem})")
    if WORLD_SIZE > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    bfloat16 = args.precision == "bfloat16" or (args.precision == "auto" and has_bfloat16(device))
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    microbatch_size = args.microbatch_size or (64 if device.type == "cpu" else minibatch_size)
    num_iterations = math.ceil(args.total_timesteps / (batch_size * WORLD_SIZE))
    # Without auxiliary phases every iteration is a phase of its own, and the buffer holds one rollout.
    n_pi = args.n_pi if args.e_aux > 0 else 1

    # Nearly all memory goes to the observations that rollout and buffer keep, a byte per pixel and colour.
    rollout_bytes = batch_size * 64 * 64 * 3
    buffer_bytes, buffer_device = n_pi * rollout_bytes, device

    # If a GPU has no room for both beside the activations, about 3 MB a sample, the buffer lies in the memory of the
    # host, pinned (a GPU reads it by itself), and pinned memory comes in powers of two.
    all_bytes = rollout_bytes + buffer_bytes + 3e6 * microbatch_size
    if device.type == "cuda" and all_bytes > min(gather(available_memory(device))):
        buffer_bytes, buffer_device = n_pi * 2 ** math.ceil(math.log2(rollout_bytes)), torch.device("cpu")

    needs = {device: rollout_bytes}
    needs[buffer_device] = needs.get(buffer_device, 0) + buffer_bytes
    for place, needed in needs.items():
        needed *= LOCAL_WORLD_SIZE if place.type == "cpu" else 1
        available = min(gather(available_memory(place)))
        if needed > available:
            gigabytes = f"{needed / 1e9:.3g} GB of memory on {place}, and {available / 1e9:.3g} GB are available"
            fail(f"the observations need {gigabytes}; lower --num-envs, --num-steps or --n-pi")

    torch.manual_seed(args.seed)
    torch.distributions.Distribution.set_default_validate_args(False)  # `stop_unless_finite` says more
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    # Every process has environments and random numbers of its own, but begins with the same parameters.
    process_seed = (args.seed + 1_000_003 * RANK) % 2**31
    levels = (args.distribution_mode, args.num_levels, args.start_level)
    envs = RecordEpisodeStatistics(
        ProcgenVecEnv(args.env_id, args.num_envs, process_seed, *levels),
        buffer_length=math.ceil(100 / WORLD_SIZE),
    )
    agent = Agent(envs.single_action_space.n, args.arch, bfloat16=bfloat16).to(device)
    torch.manual_seed(process_seed)

    # Compiled, the small batches of the rollout run as CUDA graphs: the GPU would need less time for its kernels than
    # the CPU needs to launch them one by one.
    act = torch.compile(agent.forward, mode="reduce-overhead", dynamic=False) if args.compile else agent
    if args.compile:
        agent.compile(dynamic=False)
        agent.auxiliary = torch.compile(agent.auxiliary, dynamic=False)

    # An Adam for each kind of step, as their gradients differ in scale. Each holds all parameters and skips those
    # that its loss does not reach, whose gradient is None.
    policy_optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-8)  # with value if E_V = E_π
    value_optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-8)  # idle if E_V = E_π
    aux_optimizer = torch.optim.Adam(agent.parameters(), lr=args.aux_learning_rate, eps=1e-8)

    # The rollout. Observation t, whether it begins an episode, what the agent did there, and the
    # reward for it; `values` and `starts` also cover the observation after the last step. Rewards and
    # starts stay on the CPU, where they come from and where advantages are computed.
    obs = torch.zeros(args.num_steps, args.num_envs, 64, 64, 3, dtype=torch.uint8, device=device)
    starts = torch.zeros(args.num_steps + 1, args.num_envs)
    actions = torch.zeros(args.num_steps, args.num_envs, dtype=torch.long, device=device)
    logprobs = torch.zeros(args.num_steps, args.num_envs, device=device)
    values = torch.zeros(args.num_steps + 1, args.num_envs, device=device)
    rewards = torch.zeros(args.num_steps, args.num_envs)
    # Observations travel to a GPU through memory that it can read by itself, while the CPU goes on.
    upload = torch.zeros(args.num_envs, 64, 64, 3, dtype=torch.uint8, pin_memory=device.type == "cuda")

    # The buffer of the auxiliary phase, 6.4 GB at the defaults: observations and value targets of all N_π iterations.
    # One tensor a rollout, as checkpoints take them one by one; environments first, so that a segment is contiguous.
    segments_shape, pinned = (args.num_envs, args.num_steps), buffer_device != device
    aux_obs = [
        torch.zeros(*segments_shape, 64, 64, 3, dtype=torch.uint8, device=buffer_device, pin_memory=pinned)
        for _ in range(n_pi)
    ]
    aux_value_targets = [torch.zeros(segments_shape, device=device) for _ in range(n_pi)]

    reward_stats = initial_reward_stats(args.num_envs * WORLD_SIZE)
    next_obs, _ = envs.reset()
    next_starts = np.ones(args.num_envs, dtype=bool)
    iteration = global_step = 0
    rows = []  # of progress.csv
    metrics = {}  # of the iteration under way
    in_auxiliary_phase = False
    aux_old_logits = []  # logits of π_old, a tensor a rollout
    aux_means = []  # AUX_LOSSES of each finished epoch of an auxiliary phase

    if args.resume:
        run_path = Path(args.resume)
        try:
            # Only tensors and plain containers are read: a checkpoint from a stranger runs no code.
            checkpoint = torch.load(run_path / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
            if checkpoint["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"that one is in format '{checkpoint['format']}'")
        except Exception as error:
            problem = str(error).split("\n")[0] or type(error).__name__
            fail(f"--resume {run_path}: expected a checkpoint.pt in format '{CHECKPOINT_FORMAT}' there ({problem})")
        if (number := len(checkpoint["processes"])) != WORLD_SIZE:
            fail(f"--resume {run_path}: this run has {number} processes; expected as many, there are {WORLD_SIZE} now")
        process = checkpoint["processes"][RANK]
        agent.load_state_dict(checkpoint["agent"])
        policy_optimizer.load_state_dict(checkpoint["policy_optimizer"])
        value_optimizer.load_state_dict(checkpoint["value_optimizer"])
        aux_optimizer.load_state_dict(checkpoint["aux_optimizer"])
        for i, (rollout_obs, rollout_value_targets) in enumerate(process["buffer"]):
            aux_obs[i].copy_(rollout_obs)
            aux_value_targets[i].copy_(rollout_value_targets)
        aux_old_logits = [logits.to(device) for logits in process["aux_old_logits"]]
        in_auxiliary_phase, aux_means = checkpoint["in_auxiliary_phase"], checkpoint["aux_means"]
        metrics = checkpoint["metrics"]
        reward_stats = checkpoint["reward_stats"]
        envs.unwrapped.set_state(process["envs"])
        next_obs, next_starts = process["next_obs"].numpy(), process["next_starts"].numpy()
        envs.episode_returns = process["episode_returns"].numpy()
        envs.episode_lengths = process["episode_lengths"].numpy()
        envs.return_queue.extend(process["return_queue"])
        envs.length_queue.extend(process["length_queue"])
        envs.episode_count = process["episode_count"]
        torch.set_rng_state(process["rng"])
        if device.type == "cuda" and "cuda_rng" in process:
            torch.cuda.set_rng_state(process["cuda_rng"], device)
        iteration, global_step, rows = (checkpoint[name] for name in ("iteration", "global_step", "rows"))
    else:
        run_name = args.run_name or f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
        run_path = gather(Path(args.run_dir) / run_name)[0]  # its name has a time, and clocks differ
        try:
            if RANK == 0:
                run_path.mkdir(parents=True)
        except FileExistsError:
            fail(f"--run-name {run_name}: {run_path} exists; expected a new name, or --resume {run_path}")
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: expected a directory that can be written to ({error.strerror})")

    commit = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    versions = {"python": platform.python_version()}
    for package in ("torch", "gymnasium", "numpy", "procgen", "procgen-mirror"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    config = {
        "script": Path(__file__).name,
        "args": dataclasses.asdict(args) | {"resume": None},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "precision": "bfloat16" if bfloat16 else "float32",
        "processes": WORLD_SIZE,
        "git_commit": commit,
        "versions": versions,
    }
    try:
        if RANK == 0:
            with replacing(run_path / "config.json") as file:
                json.dump(config, file, indent=2)
            if rows:  # a crash can have left fewer than the checkpoint has, or more
                write_rows(run_path / "progress.csv", rows)
    except OSError as error:
        fail(f"{run_path}: expected a directory that can be written to ({error.strerror})")
    writer = None  # of TensorBoard, from the first row on
    track = args.track and RANK == 0
    if track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            group=f"{args.env_id}__{Path(__file__).stem}",  # the seeds of a grid side by side
            name=run_path.name,
            config=config.pop("args") | config,  # device and precision as they turned out
        )

    # One live line on a terminal; elsewhere a line a minute.
    live = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    progress = (tqdm if live else PlainProgress)(
        total=num_iterations * batch_size * WORLD_SIZE,
        initial=global_step,
        unit="step",
        unit_scale=True,
        smoothing=0,  # the time left follows the average over all phases, not the phase under way
        miniters=0,
        mininterval=0.2 if live else 60,
        dynamic_ncols=True,
        bar_format="{desc}: {n_fmt}/{total_fmt}, {rate_noinv_fmt}{postfix}, {remaining} left |{bar}|",
        file=sys.stdout,
        disable=RANK > 0,
    )
    # The first SIGINT or SIGTERM (Ctrl-C, a preempted job) asks for a stop at the end of the iteration or
    # auxiliary epoch under way, the second one stops at once.
    stop_signals = []

    def request_stop(signum, frame):
        if stop_signals:
            os._exit(128 + signum)
        stop_signals.append(signum)
        os.write(2, b"\nstopping at the next boundary, with a checkpoint; once more: at once, without one\n")

    def agreed_signal():
        """The signal that some process got, or None: all learn of it at the same boundary, and stop there together."""
        signals = [signum for of_process in gather(stop_signals) for signum in of_process]
        return signals[0] if signals else None

    handlers = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}

    def save_checkpoint():
        """Write everything that the rest of the run depends on; returns whether that worked."""
        checksums = gather(sum(parameter.double().sum().item() for parameter in agent.parameters()))
        if len(set(checksums)) > 1:
            sys.exit(f"iteration {iteration}: the processes' parameters differ (sums {checksums}); no checkpoint")

        process = {
            "envs": envs.unwrapped.get_state(),
            "next_obs": torch.from_numpy(next_obs),
            "next_starts": torch.from_numpy(next_starts),
            "episode_returns": torch.from_numpy(envs.episode_returns),
            "episode_lengths": torch.from_numpy(envs.episode_lengths),
            "return_queue": [float(episodic_return) for episodic_return in envs.return_queue],
            "length_queue": [int(episodic_length) for episodic_length in envs.length_queue],
            "episode_count": int(envs.episode_count),
            "rng": torch.get_rng_state(),
            "buffer": [],
            "aux_old_logits": [logits.cpu() for logits in aux_old_logits],
        }
        if device.type == "cuda":
            process["cuda_rng"] = torch.cuda.get_rng_state(device)
        processes = gather(process, everywhere=False)
        # The buffer's rollouts travel to the first process one by one, and only that needs room for all of them. In
        # an auxiliary phase the buffer is full, with `iteration` still at the last of them.
        for i in range(n_pi if in_auxiliary_phase else iteration % n_pi):
            rollout_of_each = gather((aux_obs[i].cpu(), aux_value_targets[i].cpu()), everywhere=False)
            for of_process, buffered_rollout in zip(processes, rollout_of_each):
                of_process["buffer"].append(buffered_rollout)

        checkpoint = {
            "format": CHECKPOINT_FORMAT,
            "iteration": iteration,
            "global_step": global_step,
            "rows": rows,
            "agent": agent.state_dict(),
            "policy_optimizer": policy_optimizer.state_dict(),
            "value_optimizer": value_optimizer.state_dict(),
            "aux_optimizer": aux_optimizer.state_dict(),
            "in_auxiliary_phase": in_auxiliary_phase,
            "aux_means": aux_means,
            "metrics": metrics,
            "reward_stats": reward_stats,
            "processes": processes,
        }
        written = True
        try:
            if RANK == 0:
                with replacing(run_path / "checkpoint.pt", "wb") as file:
                    torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch wraps the error of a full disk
            progress.write(f"the checkpoint could not be written, the one before it stays: {reason}", file=sys.stderr)
            written = False
        return all(gather(written))  # no process ends while the first one writes

    stop_signal, metrics_written, checkpoint_written = None, True, True
    start_time, start_step = time.time(), global_step

    while iteration < num_iterations and not stop_signal:
        # Policy phase: N_π iterations of PPO; the auxiliary value head does not train. (A run that was stopped in
        # an auxiliary phase has this iteration's rollout and update behind it.)
        phase_iteration = iteration % n_pi
        if not in_auxiliary_phase:
            # Rollout: num_steps steps in every environment with the current policy.
            progress.set_description_str(f"policy phase {phase_iteration + 1}/{n_pi}, rollout", refresh=False)
            for t in range(args.num_steps):
                obs[t].copy_(upload.copy_(torch.from_numpy(next_obs)), non_blocking=True)
                starts[t] = torch.from_numpy(next_starts)
                with torch.no_grad():
                    logits, values[t] = act(obs[t])
                if not logits.isfinite().all():
                    sys.exit(f"iteration {iteration + 1}: the policy's logits are not finite; stopped in the rollout")
                policy = Categorical(logits=logits)
                actions[t] = policy.sample()
                logprobs[t] = policy.log_prob(actions[t])

                next_obs, reward, next_starts, _, _ = envs.step(actions[t].cpu().numpy())
                rewards[t] = torch.from_numpy(reward)
                global_step += args.num_envs * WORLD_SIZE
                progress.update(args.num_envs * WORLD_SIZE)
            starts[args.num_steps] = torch.from_numpy(next_starts)
            with torch.no_grad():
                _, values[args.num_steps] = act(torch.from_numpy(next_obs).to(device))

            # Advantages and value targets, of normalized rewards; then the advantages are normalized over the rollout.
            # The rollouts of several processes count as one: each process normalizes with the statistics of all.
            own = slice(RANK * args.num_envs, (RANK + 1) * args.num_envs)
            all_rewards, all_starts = gather_envs(rewards), gather_envs(starts[:-1])
            normalized_rewards, reward_stats = normalize_rewards(all_rewards, all_starts, reward_stats)
            advantages = gae(normalized_rewards[:, own], values.cpu(), starts, args.gamma, args.gae_lambda)
            value_targets = advantages + values[:-1].cpu()
            all_advantages, all_value_targets = gather_envs(advantages), gather_envs(value_targets)
            advantages = (advantages - all_advantages.mean()) / (all_advantages.std(correction=0) + 1e-8)
            advantages, value_targets = advantages.to(device), value_targets.to(device)

            # What the auxiliary phase will learn from, segment by segment.
            aux_obs[phase_iteration].copy_(obs.transpose(0, 1))
            aux_value_targets[phase_iteration].copy_(value_targets.T)

            # Update, on minibatches of whole segments. With E_π = E_V each step improves policy and value function;
            # otherwise first the value function trains, then the policy, as in the authors' code.
            progress.set_description_str(f"policy phase {phase_iteration + 1}/{n_pi}, update", refresh=False)
            policy_sums, value_sum = torch.zeros(4, device=device), torch.zeros((), device=device)
            rollout = (obs, actions, logprobs, advantages, value_targets)
            if args.e_pi == args.e_v:
                epochs = [(True, True, policy_optimizer)] * args.e_pi
            else:
                epochs = [(False, True, value_optimizer)] * args.e_v + [(True, False, policy_optimizer)] * args.e_pi
            for train_policy, train_value, optimizer in epochs:
                for segments in torch.randperm(args.num_envs).split(args.num_envs // args.num_minibatches):
                    minibatch = (x[:, segments].flatten(0, 1) for x in rollout)
                    # Microbatches save memory and time: their weighted gradients add up to those of the minibatch.
                    microbatches = zip(*(x.split(microbatch_size) for x in minibatch))

                    optimizer.zero_grad()
                    for mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_value_targets in microbatches:
                        logits, new_values = agent(mb_obs, policy=train_policy, value=train_value)
                        weight = len(mb_obs) / minibatch_size
                        loss = torch.zeros((), device=device)

                        if train_policy:
                            policy = Categorical(logits=logits)
                            log_ratio = policy.log_prob(mb_actions) - mb_logprobs
                            policy_loss = policy_objective(log_ratio, mb_advantages, args.clip_coef, args.kl_coef)
                            entropy = policy.entropy().mean()
                            with torch.no_grad():
                                approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()
                                clipfrac = ((log_ratio.exp() - 1).abs() > (args.clip_coef or math.inf)).float().mean()
                                policy_sums += weight * torch.stack([policy_loss, entropy, approx_kl, clipfrac])
                            loss += policy_loss - args.ent_coef * entropy

                        if train_value:
                            value_loss = args.vf_coef * F.mse_loss(new_values, mb_value_targets)
                            value_sum += weight * value_loss.detach()
                            loss += value_loss

                        (loss * weight).backward()
                    average_gradients(agent)
                    stop_unless_finite(agent, iteration + 1, {"policy_loss": policy_sums[0], "value_loss": value_sum})
                    optimizer.step()
                    progress.update(0)  # redraw

            # Losses are means over the whole update: the last minibatch alone would be a biased sample.
            average([policy_sums, value_sum])
            policy_means = policy_sums / (args.e_pi * args.num_minibatches)
            policy_loss, entropy, approx_kl, clipfrac = policy_means.tolist()
            value_loss = value_sum.item() / (args.e_v * args.num_minibatches)
            explained_variance = 1 - all_advantages.var() / all_value_targets.var()  # V_targ − V is the advantage
            episodes = (list(envs.return_queue), list(envs.length_queue), int(envs.episode_count))
            returns, lengths, counts = zip(*gather(episodes))
            returns, lengths = np.concatenate(returns), np.concatenate(lengths)
            metrics = {
                "charts/episodic_return": float(returns.mean()) if len(returns) else math.nan,
                "charts/episodic_length": float(lengths.mean()) if len(lengths) else math.nan,
                "charts/episodes": sum(counts),
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropy,
                "losses/approx_kl": approx_kl,
                "losses/clipfrac": clipfrac,
                "losses/explained_variance": explained_variance.item(),
                # For the auxiliary phase to fill in: every row has the same columns.
                **{f"auxiliary/{name}_{epoch}": math.nan for epoch in ("first", "last") for name in AUX_LOSSES},
                "auxiliary/aux_epochs": 0,
            }

            in_auxiliary_phase = phase_iteration + 1 == n_pi and args.e_aux > 0

        # Auxiliary phase, after every N_π-th iteration (a policy phase that the end of training cuts short gets
        # none): the policy's encoder learns to predict the value targets of all its rollouts.
        if in_auxiliary_phase:
            # π_old(·|s) of all states, the policy as the policy phase left it: the first step below
            # already moves π, and the KL has to hold it to where it was. (A resumed run may have some already.)
            progress.set_description_str("auxiliary phase, π_old", refresh=False)
            for rollout_obs in aux_obs[len(aux_old_logits) :]:
                if agreed_signal():  # the check before the next epoch sees it too, and stops
                    break
                chunks = rollout_obs.flatten(0, 1).split(microbatch_size)
                with torch.no_grad():
                    logits = torch.cat([agent(chunk.to(device), value=False)[0] for chunk in chunks])
                aux_old_logits.append(logits.unflatten(0, segments_shape))
                progress.update(0)  # redraw

            for epoch in range(len(aux_means), args.e_aux):  # from 0, unless the run was stopped in this phase
                stop_signal = agreed_signal()
                if stop_signal:
                    break
                progress.set_description_str(f"auxiliary phase {epoch + 1}/{args.e_aux}", refresh=False)
                aux_sums = torch.zeros(3, device=device)
                for segments in torch.randperm(n_pi * args.num_envs).split(args.aux_minibatch_segments):
                    # A segment's number says which rollout it is of, and which environment.
                    pairs = [divmod(segment, args.num_envs) for segment in segments.tolist()]
                    minibatch = (
                        torch.cat([buffer[i][env].to(device, non_blocking=True) for i, env in pairs])
                        for buffer in (aux_obs, aux_value_targets, aux_old_logits)
                    )
                    microbatches = zip(*(x.split(microbatch_size) for x in minibatch))

                    aux_optimizer.zero_grad()
                    for mb_obs, mb_value_targets, mb_old_logits in microbatches:
                        # L_joint trains the policy's encoder with both its heads; the value loss trains the
                        # value head and its encoder.
                        logits, aux_values, new_values = agent.auxiliary(mb_obs)
                        joint_loss, aux_value_loss, kl = auxiliary_objective(
                            aux_values, mb_value_targets, logits, mb_old_logits, args.beta_clone
                        )
                        true_value_loss = 0.5 * F.mse_loss(new_values, mb_value_targets)

                        weight = len(mb_obs) / (len(segments) * args.num_steps)
                        ((joint_loss + true_value_loss) * weight).backward()
                        aux_sums += len(mb_obs) * torch.stack([aux_value_loss, kl, true_value_loss]).detach()
                    average_gradients(agent)
                    stop_unless_finite(agent, iteration + 1, dict(zip(AUX_LOSSES, aux_sums)))
                    aux_optimizer.step()
                    progress.update(0)  # redraw

                average([aux_sums])
                aux_means.append(dict(zip(AUX_LOSSES, (aux_sums / (n_pi * batch_size)).tolist())))
                if args.aux_kl_limit is not None and aux_means[-1]["aux_kl"] > args.aux_kl_limit:
                    break

            # Stopped on the way: the epochs so far go into the checkpoint, the iteration's row waits for the rest.
            if stop_signal:
                checkpoint_written = save_checkpoint()
                break

            for epoch, means in (("first", aux_means[0]), ("last", aux_means[-1])):
                metrics |= {f"auxiliary/{name}_{epoch}": mean for name, mean in means.items()}
            metrics["auxiliary/aux_epochs"] = len(aux_means)
            # The phase is over: the rollouts of the next one take the place of these in the buffer.
            in_auxiliary_phase, aux_old_logits, aux_means = False, [], []

        # Log, each row with all rows before it: a disk that was full for a while costs none.
        iteration += 1
        metrics["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
        rows.append({"global_step": global_step} | {name.split("/")[1]: value for name, value in metrics.items()})
        progress.set_postfix_str(f"return {metrics['charts/episodic_return']:.2f}", refresh=False)
        try:
            if RANK == 0:
                write_rows(run_path / "progress.csv", rows)
                writer = writer or SummaryWriter(run_path, purge_step=global_step)
                for name, value in metrics.items():
                    if not math.isnan(value):
                        writer.add_scalar(name, value, global_step)
            metrics_written = True
        except OSError as error:
            progress.write(f"the metrics could not be written, the next row tries again: {error}", file=sys.stderr)
            metrics_written = False
            writer = None  # its thread ends with its first error
        if track:
            wandb.log(metrics, step=global_step)

        stop_signal = agreed_signal()
        if stop_signal or iteration == num_iterations or iteration % (args.checkpoint_interval or args.n_pi) == 0:
            checkpoint_written = save_checkpoint()

    progress.close()
    with contextlib.suppress(OSError):
        if writer:
            writer.close()
    envs.close()
    if track:
        wandb.finish()
    gather(None)  # torchrun ends all processes when one ends: not before this one is done
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if stop_signal and iteration < num_iterations:
        launcher = ["python"] if WORLD_SIZE == 1 else ["torchrun", "--nproc-per-node", str(LOCAL_WORLD_SIZE)]
        if WORLD_SIZE > LOCAL_WORLD_SIZE:
            nodes = str(WORLD_SIZE // LOCAL_WORLD_SIZE)
            launcher += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        command = shlex.join([*launcher, os.path.relpath(__file__), "--resume", str(run_path)])
        where = "" if checkpoint_written else " from the checkpoint before, if there is one"
        if RANK == 0:
            print(f"stopped after {global_step} steps; to go on{where}: {command}", flush=True)
        sys.exit(128 + stop_signal)
    if RANK == 0:
        print(f"{run_path} has {global_step} steps", flush=True)
    if not (checkpoint_written and metrics_written):
        sys.exit(1)
    return run_path


if __name__ == "__main__":
    main(parse_args())
