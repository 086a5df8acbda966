import sys
from pathlib import Path

import torch

# The scripts lie beside tests/, and are no package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The networks of the tests are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)
