# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = [
#   "torch>=2.13", "gymnasium>=1.4,<2", "numpy>=1.24,<2", "filelock>=3.12", "psutil>=5.9", "tensorboard",
#   "tqdm>=4.66", "tyro>=1.0", "wandb", "gym-notices<0.1",
#   "procgen==0.10.7; python_version == '3.10'", "procgen-mirror==0.10.7; python_version > '3.10'",
# ]
# ///
"""Proximal Policy Optimization (PPO) on Procgen, in one file (Schulman et al. 2017, arXiv 1707.06347).

PPO alternates two steps: it plays `num_steps` steps in `num_envs` environments with the current policy;
then it improves policy and value function on what it saw, for a few epochs, while the clipped objective
keeps the new policy close to the one that played. This is the baseline of Phasic Policy Gradient
(Cobbe et al. 2020, arXiv 2009.04416), in its details, too: `diff ppo_procgen.py ppg_procgen.py` shows
what PPG adds.

    uv run ppo_procgen.py --env-id starpilot

To learn PPO, read to the end of `main`; what follows (processes, `microbatches`, `optimizer_step`, `Run`) only serves.
"""

import contextlib
import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, fields
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
import wandb
from filelock import FileLock
from procgen.env import ENV_NAMES, ProcgenGym3Env
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# torchrun starts several processes and numbers them; a script started alone is process 0 of 1.
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE, LOCAL_WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@dataclass
class ProblemArgs:
    env_id: Literal[tuple(ENV_NAMES)] = "starpilot"  # the Procgen game, one of 16
    seed: int = 1  # of the environments, the network and the sampling
    total_timesteps: int = 25_000_000  # steps of all environments together; rounded up to a whole rollout
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty of the levels
    num_levels: int = 0  # number of distinct training levels; 0 means no limit
    start_level: int = 0  # the first training level, with --num-levels
    num_envs: int = 64  # environments that step side by side, in each process
    num_steps: int = 256  # steps per environment in a rollout: a segment
    channels: tuple[int, int, int] = (16, 32, 32)  # of the encoder's stacks; 8 16 16 is 2 to 3 times faster on a CPU


@dataclass
class PPOArgs:
    update_epochs: int = 3  # epochs over each rollout
    num_minibatches: int = 8  # minibatches per epoch, in each process
    learning_rate: float = 5e-4  # Adam's step size
    gamma: float = 0.999  # γ, the discount
    gae_lambda: float = 0.95  # λ of generalized advantage estimation
    clip_coef: float = 0.2  # ε, how far the probability ratio may move before it is clipped; 0 turns clipping off
    ent_coef: float = 0.01  # β_S, weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the squared value error in `update`, the ½ in ½ (V − V_targ)²
    kl_coef: float = 0.0  # β, weight of the KL penalty ½ (log-ratio)²; 1 together with --clip-coef 0 is PPO-KL
    max_grad_norm: float = 0.0  # longer gradients are scaled down to this norm; 0 turns that off


@dataclass
class MachineArgs:
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU, or one for each process, if there is one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of the encoder; auto: bfloat16 if hardware has it
    microbatch_size: int | None = None  # samples per training pass; None: 64 on a CPU, a minibatch on a GPU
    compile: bool = False  # torch.compile the encoder, meant for GPUs: slow to start
    run_dir: str = "runs"  # directory that holds the runs
    run_name: str | None = None  # directory of this run in run_dir; None: <env_id>__<script>__<seed>__<time>
    resume: str | None = None  # directory of a run to go on with, from its last checkpoint and with its arguments
    checkpoint_interval: int = 10  # iterations between checkpoints
    track: bool = False  # mirror the metrics to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "ppg-procgen"  # the Weights & Biases project


def normalize_weights(layer, norm):
    """Rescale each output unit's weights to L2 norm `norm`, zero the biases. Source: the PPG authors' release."""
    with torch.no_grad():
        scale = norm / layer.weight.flatten(1).norm(dim=1)
        layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias.zero_()
    return layer


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), shape unchanged. Source: Espeholt et al. 2018 (IMPALA), figure 3."""

    def __init__(self, channels):
        super().__init__()
        # 3 stacks of 2 blocks each add to the features: a block's gain is 1/√3/√2, so that the sum does
        # not grow. Its two convolutions' gains multiply, so each gets the square root.
        norm = math.sqrt(1 / math.sqrt(3) / math.sqrt(2))
        self.conv1 = normalize_weights(nn.Conv2d(channels, channels, 3, padding=1), norm)
        self.conv2 = normalize_weights(nn.Conv2d(channels, channels, 3, padding=1), norm)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Encoder(nn.Module):
    """uint8 pixels [batch, 64, 64, 3] → float32 features [batch, features], as in Espeholt et al. 2018 (IMPALA),
    arXiv 1802.01561, figure 3 (right), without the LSTM. Parameters and gradients are float32."""

    def __init__(self, channels=(16, 32, 32), features=256, bfloat16=False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.stacks = nn.Sequential()
        for in_channels, out_channels in zip((3, *channels), channels):
            self.stacks.append(normalize_weights(nn.Conv2d(in_channels, out_channels, 3, padding=1), 1.0))
            self.stacks.append(nn.MaxPool2d(3, stride=2, padding=1))
            self.stacks.extend([ResidualBlock(out_channels), ResidualBlock(out_channels)])
        side = 64 // 2 ** len(channels)
        self.dense = normalize_weights(nn.Linear(channels[-1] * side * side, features), 1.4)
        self.to(memory_format=torch.channels_last)  # as Procgen's images are: nothing has to be rearranged

    def forward(self, observations):
        with torch.autocast(observations.device.type, torch.bfloat16, enabled=self.bfloat16):
            x = observations.permute(0, 3, 1, 2).float() / 255
            x = F.relu(self.stacks(x).flatten(1))
            return F.relu(self.dense(x)).float()


class Agent(nn.Module):
    """Policy and value function on one encoder."""

    def __init__(self, num_actions, **encoder_options):
        super().__init__()
        self.encoder = Encoder(**encoder_options)
        features = self.encoder.dense.out_features
        self.policy_head = normalize_weights(nn.Linear(features, num_actions), 0.1)
        self.value_head = normalize_weights(nn.Linear(features, 1), 0.1)

    def forward(self, observations):
        """uint8 [batch, 64, 64, 3] → logits [batch, num_actions], values [batch]"""
        features = self.encoder(observations)
        return self.policy_head(features), self.value_head(features).squeeze(1)


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of a discounted return, and clips them to ±10.

    The return runs forward in time and on from rollout to rollout, G_t = r_t + 0.99 · (1 − start_t) · G_{t−1}; its
    discount is not γ. Source: the PPG authors' release; moments merged as in Chan et al. 1979.
    """

    def __init__(self, num_envs):
        super().__init__()
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        for name, first_guess in (("mean", 0.0), ("variance", 1.0), ("count", 1e-4)):
            self.register_buffer(name, torch.tensor(first_guess, dtype=torch.float64))

    def forward(self, rewards, starts):
        """Both [num_steps, num_envs]; starts is 1 where observation t begins an episode. The whole rollout enters
        the statistics before any of its rewards is divided."""
        rewards, starts = rewards.double(), starts.double()
        returns = torch.zeros_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self.returns = rewards[t] + 0.99 * (1 - starts[t]) * self.returns

        count = self.count + returns.numel()
        delta = returns.mean() - self.mean
        sum_of_squares = self.variance * self.count + returns.var(correction=0) * returns.numel()
        self.variance = (sum_of_squares + delta**2 * self.count * returns.numel() / count) / count
        self.mean = self.mean + delta * returns.numel() / count
        self.count = count
        return (rewards / torch.sqrt(self.variance + 1e-8)).clamp(-10, 10).float()


def gae(rewards, values, starts, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16).

    δ_t = r_t + γ V(s_{t+1}) − V(s_t);  Â_t = δ_t + γλ Â_{t+1}; both cut where an episode ends.

    Args: rewards [num_steps, num_envs]; values, starts [num_steps + 1, num_envs]. Step t ends an episode if
        starts[t + 1]. Returns: advantages [num_steps, num_envs]
    """
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        not_done = 1 - starts[t + 1]
        delta = rewards[t] + gamma * not_done * values[t + 1] - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * not_done * advantage
    return advantages


def policy_loss(log_ratio, advantages, clip_coef, kl_coef):
    """PPO's policy loss, to be minimized, as a scalar: −L^CLIP + kl_coef · mean ½ (log-ratio)².

    Args: log_ratio [batch], log π(a|s) − log π_played(a|s); advantages [batch]; clip_coef, ε, or 0 for no clipping
    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; the penalty: Cobbe et al. 2020, section 3.5.
    """
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    if clip_coef > 0:
        surrogate = torch.min(surrogate, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    return kl_coef * 0.5 * (log_ratio**2).mean() - surrogate.mean()


class ProcgenVecEnv(gym.vector.VectorEnv):
    """Procgen's batched C++ environment (Cobbe et al. 2019, arXiv 1912.01588) as a Gymnasium vector environment.

    Observations are uint8 [num_envs, 64, 64, 3], actions 0 to 14, rewards float32 [num_envs]. The step that ends
    an episode shows the first observation of the next one: Procgen keeps the last one to itself, and does not
    tell a time-out from any other end, so every end is a termination.
    """

    metadata = {"render_modes": [], "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, env_id, num_envs, seed=0, distribution_mode="easy", num_levels=0, start_level=0, **options):
        """`seed` (0 to 2³¹ − 1) picks the sequence of levels; `options` go to ProcgenGym3Env."""
        self.options = dict(env_name=env_id, distribution_mode=distribution_mode, num_threads=min(4, os.cpu_count()))
        self.options |= dict(num=num_envs, num_levels=num_levels, start_level=start_level) | options
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.observation_space = gym.spaces.Box(0, 255, (num_envs, 64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)
        self.action_space = gym.spaces.MultiDiscrete([15] * num_envs)
        self.num_episodes, self.last_episodes = 0, deque(maxlen=math.ceil(100 / WORLD_SIZE))  # (return, length)
        self.reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        """Begin a new episode everywhere; with a seed, from the first level of that seed's sequence."""
        super().reset(seed=seed)
        if seed is not None:
            self.procgen = ProcgenGym3Env(rand_seed=seed, **self.options)
        elif not self.starts.all():
            self.procgen.act(np.full(self.num_envs, -1))  # −1 is Procgen's way to abandon an episode
        _, observations, self.starts = self.procgen.observe()
        self.observations = observations["rgb"]
        self.episode_returns, self.episode_lengths = np.zeros((2, self.num_envs))
        return self.observations, {}

    def step(self, actions):
        """Act in every environment; `terminations[i]` says that `observations[i]` begins a new episode."""
        self.procgen.act(np.asarray(actions))
        rewards, observations, self.starts = self.procgen.observe()
        self.observations = observations["rgb"]
        self.episode_returns += rewards
        self.episode_lengths += 1
        self.last_episodes.extend(zip(self.episode_returns[self.starts], self.episode_lengths[self.starts]))
        self.num_episodes += int(self.starts.sum())
        self.episode_returns[self.starts] = self.episode_lengths[self.starts] = 0
        return self.observations, rewards, self.starts, np.zeros_like(self.starts), {}

    def state_dict(self):
        """The games with what they showed last, which Procgen would forget, and the episode statistics."""
        names = ("observations", "starts", "episode_returns", "episode_lengths", "last_episodes")
        state = {name: torch.from_numpy(np.array(vars(self)[name])) for name in names}
        return state | {"games": self.procgen.get_state(), "num_episodes": self.num_episodes}

    def load_state_dict(self, state):
        state = {name: np.array(x) if torch.is_tensor(x) else x for name, x in state.items()}
        self.procgen.set_state(state.pop("games"))
        self.last_episodes = deque(state.pop("last_episodes"), maxlen=self.last_episodes.maxlen)
        vars(self).update(state)

    def close_extras(self, **kwargs):
        self.procgen.close()


@torch.no_grad()
def play(agent, envs, num_steps):
    """Play a rollout: `num_steps` steps in every environment, with actions sampled from the policy. Values and starts
    also cover the observation after the last step."""
    shape, device = (num_steps, envs.num_envs), agent.policy_head.weight.device
    obs = torch.zeros(*shape, 64, 64, 3, dtype=torch.uint8, device=device)
    actions, logprobs, rewards = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape)
    values, starts = torch.zeros(num_steps + 1, envs.num_envs), torch.zeros(num_steps + 1, envs.num_envs)

    for t in range(num_steps):
        obs[t], starts[t] = torch.from_numpy(envs.observations), torch.from_numpy(envs.starts)
        logits, values[t] = agent(obs[t])
        policy = Categorical(logits=logits)
        action = policy.sample()
        actions[t], logprobs[t] = action, policy.log_prob(action)
        rewards[t] = torch.from_numpy(envs.step(action.cpu().numpy())[1])

    starts[num_steps] = torch.from_numpy(envs.starts)
    _, values[num_steps] = agent(torch.from_numpy(envs.observations).to(device))
    return obs, actions, logprobs, rewards, values, starts


def targets(rewards, values, starts, normalizer, args):
    """Normalized advantages and value targets [num_steps, num_envs] of a rollout, and the explained variance of its
    values, 1 − Var(V_targ − V) / Var(V_targ). The rollouts of several processes, which `gather` lists, count as one."""
    all_rewards, all_starts = torch.cat(gather(torch.stack([rewards, starts[:-1]])), dim=2)  # over environments
    rewards = normalizer(all_rewards, all_starts)[:, RANK * args.num_envs : (RANK + 1) * args.num_envs]
    advantages = gae(rewards, values, starts, args.gamma, args.gae_lambda)
    value_targets = advantages + values[:-1]

    all_advantages, all_value_targets = torch.cat(gather(torch.stack([advantages, value_targets])), dim=2)
    advantages = (advantages - all_advantages.mean()) / (all_advantages.std(correction=0) + 1e-8)
    explained_variance = 1 - all_advantages.var() / all_value_targets.var()  # V_targ − V is Â, before normalization
    return advantages, value_targets, explained_variance.item()


def update(agent, optimizer, rollout, args):
    """Train policy and value function on a rollout (obs, actions, logprobs, advantages, value_targets, each
    [num_steps, num_envs, ...]). Returns: the losses, as means over all minibatches."""
    samples = [x.flatten(0, 1) for x in rollout]  # single steps are shuffled, over time and environments
    policy_sums = value_sum = norm_sum = 0
    for epoch in range(args.update_epochs):
        for indices in torch.randperm(len(samples[0])).split(len(samples[0]) // args.num_minibatches):
            for weight, part in microbatches([x[indices] for x in samples], agent, args):  # gradients add up
                mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_value_targets = part
                logits, values = agent(mb_obs)
                policy = Categorical(logits=logits)
                log_ratio = policy.log_prob(mb_actions) - mb_logprobs
                surrogate_loss = policy_loss(log_ratio, mb_advantages, args.clip_coef, args.kl_coef)
                entropy = policy.entropy().mean()
                value_loss = args.vf_coef * F.mse_loss(values, mb_value_targets)
                ((surrogate_loss - args.ent_coef * entropy + value_loss) * weight).backward()

                with torch.no_grad():
                    approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()
                    clipfrac = ((log_ratio.exp() - 1).abs() > (args.clip_coef or math.inf)).float().mean()
                    sums = weight * torch.stack([surrogate_loss, entropy, approx_kl, clipfrac])
                    policy_sums += sums
                    value_sum += weight * value_loss
            norm_sum += optimizer_step(agent, optimizer, args.max_grad_norm)  # Adam, on the sum of their gradients

    average([policy_sums, value_sum])
    names = ("losses/policy_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac")
    means = dict(zip(names, (policy_sums / (args.update_epochs * args.num_minibatches)).tolist()))
    means["losses/value_loss"] = value_sum.item() / (args.update_epochs * args.num_minibatches)
    return means | {"losses/grad_norm": float(norm_sum) / (args.update_epochs * args.num_minibatches)}


def main(args):
    """Train as `args` say; returns the directory of the run."""
    device, bfloat16 = start_process(args, num_rollouts=2)  # to fit in memory

    # Every process begins with the same parameters, but has environments and random numbers of its own.
    torch.manual_seed(args.seed)
    agent = Agent(15, channels=args.channels, bfloat16=bfloat16).to(device)
    process_seed = (args.seed + 1_000_003 * RANK) % 2**31
    torch.manual_seed(process_seed)
    levels = (args.distribution_mode, args.num_levels, args.start_level)
    envs = ProcgenVecEnv(args.env_id, args.num_envs, process_seed, *levels)
    if args.compile:
        agent.apply(lambda module: isinstance(module, Encoder) and module.compile(dynamic=False))

    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-8)
    normalizer = RewardNormalizer(args.num_envs * WORLD_SIZE)

    # What training changes, shared or of each process, is saved with random states; a resumed run loads it in `Run`.
    shared = dict(agent=agent, optimizer=optimizer, normalizer=normalizer)
    run = Run(args, bfloat16, shared, own=dict(envs=envs))

    while run.iteration < run.num_iterations:
        run.checkpoint(interval=args.checkpoint_interval)  # if due; stops here if a signal says so

        run.progress.set_description(f"iteration {run.iteration + 1}/{run.num_iterations}")
        obs, actions, logprobs, rewards, values, starts = play(agent, envs, args.num_steps)
        advantages, value_targets, explained_variance = targets(rewards, values, starts, normalizer, args)
        losses = update(agent, optimizer, (obs, actions, logprobs, advantages, value_targets), args)
        run.iteration += 1
        run.log_iteration(envs, losses | {"losses/explained_variance": explained_variance})

    return run.checkpoint(finished=True)


# Around the algorithm: processes, files, arguments. The same in both scripts, but for PPG's own flags.


def start_process(args, num_rollouts):
    """Join the other processes and check that they have memory for `num_rollouts` rollouts; returns the device, and
    whether the encoder computes in bfloat16: in all processes or in none."""
    gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.device_count() >= LOCAL_WORLD_SIZE)
    device = torch.device(f"cuda:{LOCAL_RANK}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # the same command gives the same numbers, as far as cuDNN can
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if WORLD_SIZE > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")

    # Most memory goes to observations; what passes through the network at once comes on top.
    needed = num_rollouts * args.num_envs * args.num_steps * 64 * 64 * 3 / 1e9
    on_gpu = gpu and getattr(args, "buffer_device", "auto") == "auto"
    available = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available / LOCAL_WORLD_SIZE
    available = min(gather(available)) / 1e9
    if needed > available:
        fail(f"--num-envs {args.num_envs}: its observations take {needed:.3g} GB, expected {available:.3g} GB at most")

    cpu = torch.cpu.get_capabilities()
    has_bfloat16 = torch.cuda.is_bf16_supported(False) if gpu else cpu.get("amx_bf16") or cpu.get("avx512_bf16")
    return device, args.precision == "bfloat16" or (args.precision == "auto" and all(gather(has_bfloat16)))


def gather(x, everywhere=True):
    """What each process has for x, as a list in their order; if not `everywhere`, only the first process gets it."""
    xs = [x] * WORLD_SIZE
    if WORLD_SIZE > 1 and everywhere:
        dist.all_gather_object(xs, x)
    elif WORLD_SIZE > 1:
        dist.gather_object(x, xs if RANK == 0 else None)
    return xs


def average(tensors):
    """Replace each tensor by its mean over the processes."""
    for x in tensors if WORLD_SIZE > 1 else []:
        dist.all_reduce(x)
        x /= WORLD_SIZE


def microbatches(minibatch, agent, args):
    """Split a minibatch, [batch, ...] each, into what passes through the network at once; yields the weight of each
    part's gradient, its share of the batch, and the part. (Small parts are faster on a CPU, whose cache holds them.)"""
    device, batch = agent.policy_head.weight.device, len(minibatch[0])
    size = args.microbatch_size or (64 if device.type == "cpu" else batch)
    for part in zip(*(x.split(size) for x in minibatch)):
        yield len(part[0]) / batch, [x.to(device) for x in part]


def optimizer_step(agent, optimizer, max_grad_norm):
    """Step on the gradients' mean over the processes, and clear them; returns its norm. If that is not finite, a
    RuntimeError comes before the step."""
    average([parameter.grad for parameter in agent.parameters() if parameter.grad is not None])
    norm = nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm or math.inf, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def replace(path, save):
    """Have `save` write a file, and put it in the place of `path` once it is whole."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        save(file)
        file.flush()
        os.fsync(file)
    os.replace(file.name, path)


class Run:
    """A run's directory with its tables and checkpoint, the progress line, and when to stop. `shared` and `own` name
    what to save, each with a `state_dict`: what is equal in all processes, and what each process has for itself."""

    def __init__(self, args, bfloat16, shared, own):
        self.shared, self.own, self.iteration, self.stop_signal = shared, own, 0, 0
        self.tables = {"progress": "", "auxiliary": ""}  # the text of the files
        self.exits = contextlib.ExitStack()  # what `close` puts an end to, the latest first
        self.rollout_steps = args.num_envs * args.num_steps * WORLD_SIZE
        self.num_iterations = math.ceil(args.total_timesteps / self.rollout_steps)
        name = args.run_name or f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
        self.path = Path(args.resume or Path(args.run_dir, name))
        try:
            if RANK == 0:
                if args.track and os.environ.get("WANDB_MODE", "online") == "online":
                    wandb.login()
                self.path.mkdir(parents=True, exist_ok=args.resume is not None)
                self.exits.enter_context(FileLock(self.path / ".lock", timeout=0))  # a killed writer leaves no lock
        except wandb.Error as error:
            fail(f"--track: expected a login to Weights & Biases, or WANDB_MODE=offline ({error})")
        except OSError as error:  # filelock's Timeout is one, too
            flag = f"--resume {args.resume}" if args.resume else f"--run-dir {args.run_dir} --run-name {name}"
            fail(f"{flag}: expected a new directory, or one to resume that no process writes to ({error})")

        # config.json tells how the run was started and, in `parts`, of each start and resumption.
        config = {"script": Path(__file__).name, "processes": WORLD_SIZE, "wandb_id": os.urandom(4).hex(), "parts": []}
        if args.resume:
            self.load()
            config = json.loads((self.path / "config.json").read_text())
        status, commit = subprocess.getstatusoutput(f"git -C '{Path(__file__).resolve().parent}' rev-parse HEAD")
        part = {"device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"}
        part |= {"precision": "bfloat16" if bfloat16 else "float32", "global_step": self.iteration * self.rollout_steps}
        part["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__, "gymnasium": gym.__version__}
        part["git_commit"] = None if status else commit
        config = part | config | {"args": vars(args) | {"resume": None}, "parts": [*config["parts"], part]}

        for signum in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
                self.exits.callback(signal.signal, signum, signal.signal(signum, self.on_signal))

        if RANK == 0:
            replace(self.path / "config.json", lambda file: file.write(json.dumps(config, indent=2).encode()))
            self.write_tables()  # without the rows that came after the checkpoint
            self.writer = self.exits.enter_context(SummaryWriter(self.path, purge_step=part["global_step"] + 1))
            if args.track:
                place = dict(project=args.wandb_project_name, name=self.path.name, id=config["wandb_id"])
                self.exits.enter_context(wandb.init(**place, resume="allow", config=config))
                wandb.define_metric("*", step_metric="global_step")  # W&B's own step cannot go back after a crash

        terminal = RANK == 0 and sys.stderr and sys.stderr.isatty()
        steps = dict(initial=part["global_step"], total=self.num_iterations * self.rollout_steps)
        self.progress = self.exits.enter_context(tqdm(**steps, unit="step", unit_scale=True, disable=not terminal))
        self.start_time, self.start = time.time(), self.iteration

    def load(self):
        try:  # weights_only: a checkpoint from a stranger runs no code
            state = torch.load(self.path / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
            state = copy.deepcopy(state | state.pop("processes")[RANK])  # the other processes' stay on the disk
            for name, part in (self.shared | self.own).items():
                part.load_state_dict(state[name])
            for rng_state, set_rng_state in zip(state["rng"], (torch.set_rng_state, torch.cuda.set_rng_state)):
                set_rng_state(rng_state)
            self.iteration, self.tables = state["global_step"] // self.rollout_steps, state["tables"]
        except Exception as error:
            problem = str(error).split("\n")[0] or type(error).__name__
            fail(f"--resume {self.path}: expected a whole checkpoint.pt of this script there ({problem})")

    def checkpoint(self, interval=math.inf, finished=False):
        """Save at every interval-th iteration, and at the end. If a signal asked any process to stop: save and exit."""
        signum, steps = max(gather(self.stop_signal)), self.iteration * self.rollout_steps
        if finished or signum or self.iteration % interval == 0:
            own = {name: part.state_dict() for name, part in self.own.items()}
            own["rng"] = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
            state = {name: part.state_dict() for name, part in self.shared.items()}
            state |= {"global_step": steps, "tables": self.tables, "processes": gather(own, everywhere=False)}
            if RANK == 0:
                replace(self.path / "checkpoint.pt", lambda file: torch.save(state, file))
        if finished:
            return self.close(f"{self.path} has {steps} steps")
        if signum:
            command = f"{'python' if WORLD_SIZE == 1 else 'torchrun ...'} {sys.argv[0]} --resume {self.path}"
            self.close(f"stopped after {steps} steps; to go on: {command}")
            sys.exit(128 + signum)

    def on_signal(self, signum, frame):
        if not self.stop_signal:
            self.stop_signal, self.stop_time = signum, time.monotonic()
            with contextlib.suppress(OSError):  # where standard error is gone
                os.write(2, b"\nstopping at the next boundary, with a checkpoint; once more: at once, without one\n")
        elif time.monotonic() > self.stop_time + 2:  # a stopped job's signal can come twice, torchrun's too
            os._exit(128 + signum)

    def log_iteration(self, envs, losses):
        """A row of progress.csv: the mean of the last 100 episodes, the losses, and the speed since the start."""
        episodes, counts = zip(*gather((list(envs.last_episodes), envs.num_episodes)))
        mean_return, mean_length = np.mean([x for xs in episodes for x in xs] or [[math.nan] * 2], axis=0).tolist()
        charts = {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
        speed = (self.iteration - self.start) * self.rollout_steps / (time.time() - self.start_time)
        self.log("progress", charts | {"charts/episodes": sum(counts)} | losses | {"charts/SPS": speed})
        self.progress.n = self.iteration * self.rollout_steps
        self.progress.set_postfix_str(f"return {mean_return:.2f}", refresh=False)

    def log(self, table, metrics):
        """Add a row to a table, and to TensorBoard and Weights & Biases."""
        global_step = self.iteration * self.rollout_steps
        row = {"global_step": global_step} | {name.split("/")[1]: x for name, x in metrics.items()}
        self.tables[table] = self.tables[table] or ",".join(row) + "\n"
        self.tables[table] += ",".join(map(str, row.values())) + "\n"
        metrics = {name: x for name, x in metrics.items() if math.isfinite(x)}
        if RANK == 0:
            self.write_tables()
            for name, x in metrics.items():
                self.writer.add_scalar(name, x, global_step)
            self.writer.flush()
        if wandb.run:
            wandb.log(metrics | {"global_step": global_step})

    def write_tables(self):
        for table, text in self.tables.items():
            if text or (self.path / f"{table}.csv").exists():
                replace(self.path / f"{table}.csv", lambda file, text=text: file.write(text.encode()))

    def close(self, message):
        self.exits.close()
        if RANK == 0:
            try:
                print(message, flush=True)
            except OSError:  # standard output is full or gone
                sys.stdout = open(os.devnull, "w")
        gather(None)  # torchrun ends all processes when one ends: not before the first one has written
        if WORLD_SIZE > 1:
            dist.destroy_process_group()
        return self.path


def fail(message):
    """Report bad input in one line, once a machine, and exit with code 2 as argument parsers do."""
    if LOCAL_RANK == 0:
        print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Args(MachineArgs, PPOArgs, ProblemArgs):
    """All arguments, checked: a ValueError names the flag, its value and what is expected."""

    def __post_init__(self):
        self.channels = tuple(self.channels)  # in config.json it is a list
        for field in fields(self):
            whole, value = field.type in (int, int | None), getattr(self, field.name)
            self.check(field.name, value != "", "a path or a name")
            if value is not None and (whole or field.type in (float, float | None)):
                low = int(whole and field.name not in ("seed", "num_levels", "start_level", "e_aux"))
                high = 1 if field.name in ("gamma", "gae_lambda") else 2**31 - 1
                self.check(field.name, low <= value <= high, f"a number from {low} to {high}")

        rollout, gpus = self.num_envs * self.num_steps, torch.cuda.device_count()
        enough = self.resume or self.total_timesteps >= rollout * WORLD_SIZE
        self.check("total_timesteps", enough, f"at least {rollout * WORLD_SIZE}, a rollout")
        self.check("channels", min(self.channels) > 0, "three positive numbers")
        self.check("start_level", self.num_levels or not self.start_level, "--num-levels beside it, not 0: all levels")
        self.check("start_level", self.start_level + self.num_levels < 2**31, f"levels up to {2**31 - 1}")
        self.check("num_minibatches", rollout % self.num_minibatches == 0, f"a divisor of {rollout}, a rollout")
        self.check("device", self.device != "cuda" or gpus >= LOCAL_WORLD_SIZE, f"a GPU a process, there are {gpus}")
        self.check("run_name", self.run_name in (None, Path(self.run_name or "").name), "the name of a directory")

    def check(self, name, holds, expected):
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {expected}")


def parse_args():
    """Arguments from the command line. A resumed run has those of its config.json, and few of them may change."""

    def grouped(problem: ProblemArgs, ppo: PPOArgs, machine: MachineArgs):
        return Args(**vars(problem), **vars(ppo), **vars(machine))

    options = dict(description=__doc__.split("\n")[0], console_outputs=LOCAL_RANK == 0)
    try:
        args = tyro.cli(grouped, config=[tyro.conf.OmitArgPrefixes], **options)
        if args.resume is None:
            return args
        config = json.loads(Path(args.resume, "config.json").read_text())
        now, before = (Path(__file__).name, WORLD_SIZE), (config["script"], config["processes"])
        args.check("resume", now == before, f"the script and the number of processes {before}, these are {now}")
        here = {"resume": args.resume} | ({} if args.device == "auto" else {"device": args.device})
        stored = Args(**config["args"] | here)
        args = tyro.cli(Args, default=stored, **options)
        free = ("total_timesteps", "device", "buffer_device", "checkpoint_interval", "track", "wandb_project_name")
        for name, value in vars(stored).items():
            args.check(name, name in free or getattr(args, name) == value, f"{value}, as the run was started with")
        less = stored.total_timesteps
        args.check("total_timesteps", args.total_timesteps >= less, f"{less} or more, as the run was started with")
        return args
    except (OSError, KeyError, TypeError, ValueError) as error:
        checked = str(error).startswith("--")
        fail(error if checked else f"--resume {args.resume}: expected the directory of a run, not this ({error})")


if __name__ == "__main__":
    main(parse_args())
