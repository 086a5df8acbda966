"""What the commands in this directory share."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fail(message):
    """Report bad input in one line on standard error and exit with code 2, as argument parsers do."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def load_script(path, flag, names):
    """Import a training script, from its file and under a name of its own: no module of that name is replaced.

    Fails, naming `flag`, if there is no such file, if it cannot be imported, or if it lacks one of `names`.
    """
    if not path.is_file() or path.suffix != ".py":
        fail(f"{flag} {path}: expected a training script, a Python file, and there is none")
    name = f"training_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the types of their fields
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        fail(f"{flag} {path}: expected a training script that can be imported ({reason})")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        fail(f"{flag} {path}: expected ppo_procgen.py, ppg_procgen.py or a copy; this file has no {missing[0]}")
    return module
