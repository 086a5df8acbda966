"""Imported by the fork server of conftest.py, so that its processes start with everything slow to load in memory."""

import torch

import ppg_procgen
import ppo_procgen

torch.set_num_threads(1)
for script in (ppo_procgen, ppg_procgen):
    script.ProcgenVecEnv("coinrun", 1, num_threads=0).close()
torch.optim.Adam([torch.zeros(1)])  # the first optimizer imports torch's compiler
