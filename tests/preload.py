"""Imported by the fork server of conftest.py, so that its processes start with Procgen's images loaded."""

import torch

import ppg_procgen
import ppo_procgen

torch.set_num_threads(1)
for script in (ppo_procgen, ppg_procgen):
    script.ProcgenVecEnv("coinrun", 1, num_threads=0).close()
