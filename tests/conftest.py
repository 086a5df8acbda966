import multiprocessing.forkserver
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from gym3.libenv import CEnv

# The scripts lie beside tests/, those of benchmark/ in it, and neither is a package.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

# gym3 closes an environment that a test left open when it is garbage-collected. If that happens while cffi loads the
# library for the next one, both wait for the same lock, forever.
CEnv.__del__ = lambda self: None

# A shell's background jobs ignore SIGINT, and what they start would too: the tests' processes are to obey it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The networks of the tests are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forkserver():
    """Training processes that `training.start` starts fork from one that has loaded everything."""
    with pytest.MonkeyPatch.context() as patch:
        here = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here.parent), str(here)]))
        multiprocessing.forkserver.ensure_running()
        yield


@pytest.fixture
def small_agent_in_an_empty_directory(monkeypatch, tmp_path):
    from training import SCRIPTS, TinyEncoder

    monkeypatch.chdir(tmp_path)
    for script in SCRIPTS:
        monkeypatch.setattr(script, "Encoder", TinyEncoder)
