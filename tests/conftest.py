"""Lets every test `import ppo_procgen` and `import ppg_procgen`, whatever directory pytest starts in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
