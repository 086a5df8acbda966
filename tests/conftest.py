import sys
from pathlib import Path

import torch

# The scripts lie beside tests/, those of benchmark/ in it, and neither is a package.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

# The networks of the tests are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)
