"""What ppo_procgen.py and ppg_procgen.py share is the same in both, to the letter and in the same order.

Then `diff ppo_procgen.py ppg_procgen.py` shows what PPG adds, and a test of one tests both.
"""

import ast
from pathlib import Path

import ppg_procgen
import ppo_procgen

PPO_SOURCE, PPG_SOURCE = (Path(module.__file__).read_text() for module in (ppo_procgen, ppg_procgen))

# These differ because the algorithms do.
OWN = {"Args", "LIMITS", "Agent", "main"}


def statements(source, body):
    """Each statement of `body` with its source, as whole lines; comments and decorators above belong to it."""
    lines, end = source.splitlines(), body[0].lineno - 1
    for node in body:
        yield node, "\n".join(lines[end : node.end_lineno]).strip("\n")
        end = node.end_lineno


def top_level_names(node):
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    if isinstance(node, ast.If):  # the check of the Python version, and the call of main
        return ["if " + ast.unparse(node.test)]
    assert isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)), "nothing may escape the comparison"
    return []


def definitions(source):
    """{name: source} of what stands at the top level, but for the imports and OWN"""
    named = (
        (name, text) for node, text in statements(source, ast.parse(source).body) for name in top_level_names(node)
    )
    return {name: text for name, text in named if name not in OWN}


def arguments(source):
    """{field of Args: its source and its docstring's}"""
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args")
    fields = {}
    for node, text in statements(source, body):
        if isinstance(node, ast.AnnAssign):
            fields[node.target.id] = text
        else:  # the docstring of the field before it
            fields[list(fields)[-1]] += "\n" + text
    return fields


def imports(source):
    """Every name that is imported, with the module that it is from, in order."""
    return [
        (getattr(node, "module", None), alias.name, alias.asname)
        for node in ast.parse(source).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]


def drift(one, other):
    """Names that both mappings have, with different text; or "order", when their order differs."""
    shared = [name for name in one if name in other]
    if shared != [name for name in other if name in one]:
        return ["order"]
    return [name for name in shared if one[name] != other[name]]


def test_shared_definitions_are_identical_and_in_the_same_order():
    assert drift(definitions(PPO_SOURCE), definitions(PPG_SOURCE)) == []


def test_everything_that_ppo_defines_is_in_ppg_too():
    ppo, ppg = definitions(PPO_SOURCE), definitions(PPG_SOURCE)
    assert set(ppo) - set(ppg) == set()
    assert set(ppg) - set(ppo) == {"auxiliary_objective", "AUX_LOSSES"}
    assert set(ppo) >= {
        "ProcgenVecEnv",
        "normalize_weights",
        "ResidualBlock",
        "Encoder",
        "initial_reward_stats",
        "normalize_rewards",
        "gae",
        "policy_objective",
        "has_bfloat16",
        "parse_args",
        "check_args",
        "fail",
        "RESUME_MAY_CHANGE",
        "GAMES_WITH_MODE",
    }


def test_shared_arguments_are_identical_but_for_the_checkpoint_interval():
    ppo, ppg = arguments(PPO_SOURCE), arguments(PPG_SOURCE)
    assert drift(ppo, ppg) == ["checkpoint_interval"]
    assert ppo_procgen.Args().checkpoint_interval != ppg_procgen.Args().checkpoint_interval


def test_ppo_has_no_argument_of_its_own_but_its_epochs():
    ppo, ppg = arguments(PPO_SOURCE), arguments(PPG_SOURCE)
    assert set(ppo) - set(ppg) == {"update_epochs"}
    assert set(ppo) & set(ppg) >= {"env_id", "num_envs", "gamma", "clip_coef", "kl_coef", "learning_rate", "resume"}


def test_shared_arguments_have_the_same_limits():
    # Values, in place of text: one line of LIMITS names many arguments.
    shared = vars(ppo_procgen.Args()).keys() & vars(ppg_procgen.Args()).keys()
    limits = [{name: x for name, x in m.LIMITS.items() if name in shared} for m in (ppo_procgen, ppg_procgen)]
    assert limits[0] == limits[1]
    assert "gamma" in limits[0]


def test_ppg_imports_kl_divergence_and_otherwise_what_ppo_imports():
    assert ("torch.distributions", "kl_divergence", None) in imports(PPG_SOURCE)
    assert [x for x in imports(PPG_SOURCE) if x[1] != "kl_divergence"] == imports(PPO_SOURCE)


# The comparison itself can fail

PAIR = '''
LIMIT = 1  # of something

# Why f is needed.
def f(x):
    return x + 1  # one more

class Args:
    gamma: float = 0.9
    """the discount"""
    seed: int = 1
    """the seed"""
'''


def test_comparison_finds_a_changed_line_and_a_changed_comment():
    assert list(definitions(PAIR)) == ["LIMIT", "f"]
    for old, new, expected in (
        ("x + 1", "x + 2", ["f"]),
        ("one more", "plus one", ["f"]),
        ("Why f", "Why g", ["f"]),
        ("of something", "of nothing", ["LIMIT"]),
        ("LIMIT = 1", "LIMIT = 2", ["LIMIT"]),
        ("gamma", "lambda_", []),  # inside Args, which arguments() compares
    ):
        assert old in PAIR
        assert drift(definitions(PAIR), definitions(PAIR.replace(old, new))) == expected


def test_comparison_finds_definitions_in_another_order():
    function = PAIR[PAIR.index("# Why") : PAIR.index("class")]
    assert drift(definitions(PAIR), definitions(function + PAIR.replace(function, ""))) == ["order"]


def test_comparison_finds_a_changed_annotation_default_or_docstring():
    assert list(arguments(PAIR)) == ["gamma", "seed"]
    for old, new in (("gamma: float", "gamma: int"), ("0.9", "0.8"), ("the discount", "a discount")):
        assert drift(arguments(PAIR), arguments(PAIR.replace(old, new))) == ["gamma"]


def test_comparison_finds_another_import():
    assert imports("import math") != imports("import cmath") != imports("from math import cmath")
