"""What ppo_procgen.py and ppg_procgen.py share is the same in both, to the letter and in the same order.

Then `diff ppo_procgen.py ppg_procgen.py` shows what PPG adds, and a test of one tests both.
"""

import ast
import re
from pathlib import Path

import ppg_procgen
import ppo_procgen

PPO_SOURCE, PPG_SOURCE = (Path(module.__file__).read_text() for module in (ppo_procgen, ppg_procgen))
REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"

# These differ because the algorithms do. MachineArgs, compared line by line, differs in one default; parse_args and
# Args in the list of groups.
OWN = {"MachineArgs", "PPOArgs", "Args", "Agent", "update", "main", "parse_args"}
PPG_ALONE = {"PPGArgs", "auxiliary_loss", "Buffer", "auxiliary_epoch"}


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
    if isinstance(node, ast.If):  # the call of main
        return ["if " + ast.unparse(node.test)]
    assert isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)), "nothing may escape the comparison"
    return []


def definitions(source):
    """{name: source} of what stands at the top level, but for the imports"""
    return {name: text for node, text in statements(source, ast.parse(source).body) for name in top_level_names(node)}


def members(source, class_name):
    """{name: source} of the fields and methods of a class; a field's comment belongs to it"""
    (body,) = (node.body for node in ast.parse(source).body if getattr(node, "name", None) == class_name)
    lines, fields = source.splitlines(), {}
    for node, text in statements(source, body):
        if isinstance(node, ast.AnnAssign):
            fields[node.target.id] = text + lines[node.end_lineno - 1][node.end_col_offset :]
        elif isinstance(node, ast.FunctionDef):
            fields[node.name] = text
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


def changed_lines(one, other):
    """The lines of two texts that are not in the other one, in order."""
    one, other = one.splitlines(), other.splitlines()
    return [line.strip() for line in one if line not in other], [line.strip() for line in other if line not in one]


def metadata(source):
    """A script's own metadata, as PEP 723 has it read."""
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$", source)
    table = "".join(line[2:] + "\n" for line in block.splitlines()).replace("requires-python", "requires_python")
    # Strings and lists of them are written in TOML as in Python, and Python 3.10 cannot read TOML.
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(table).body}


def without_spaces(requirement):
    """package and version specifier, marker ('' without one)"""
    requirement, _, marker = requirement.partition(";")
    return requirement.replace(" ", ""), marker.strip()


# Definitions


def test_shared_definitions_are_identical_and_in_the_same_order():
    assert set(drift(definitions(PPO_SOURCE), definitions(PPG_SOURCE))) == OWN


def test_everything_that_ppo_defines_is_in_ppg_too_and_ppg_adds_four_things():
    ppo, ppg = definitions(PPO_SOURCE), definitions(PPG_SOURCE)
    assert set(ppo) - set(ppg) == set()
    assert set(ppg) - set(ppo) == PPG_ALONE
    assert [name for name in ppg if name in ppo] == list(ppo)


def test_what_is_tested_of_both_scripts_is_compared_here():
    shared = set(definitions(PPO_SOURCE)) - OWN
    pieces = "normalize_weights ResidualBlock Encoder RewardNormalizer gae policy_loss ProcgenVecEnv play targets"
    around = "ProblemArgs start_process gather average microbatches optimizer_step replace Run fail"
    assert shared >= set(pieces.split()) | set(around.split())


def test_shared_arguments_are_identical_but_for_the_checkpoint_interval():
    for group, differing in (("ProblemArgs", []), ("PPOArgs", []), ("MachineArgs", ["checkpoint_interval"])):
        assert drift(members(PPO_SOURCE, group), members(PPG_SOURCE, group)) == differing
    assert ppo_procgen.Args().checkpoint_interval != ppg_procgen.Args().checkpoint_interval


def test_ppo_has_no_argument_of_its_own_but_its_epochs():
    ppo, ppg = vars(ppo_procgen.Args()).keys(), vars(ppg_procgen.Args()).keys()
    assert ppo - ppg == {"update_epochs"}
    assert ppg - ppo == members(PPG_SOURCE, "PPGArgs").keys()
    shared = [name for name in members(PPG_SOURCE, "PPOArgs")]
    assert [name for name in members(PPO_SOURCE, "PPOArgs") if name != "update_epochs"] == shared


def test_checks_of_arguments_are_identical():
    assert list(members(PPO_SOURCE, "Args")) == ["__post_init__", "check"]
    assert changed_lines(*(definitions(source)["Args"] for source in (PPO_SOURCE, PPG_SOURCE))) == (
        ["class Args(MachineArgs, PPOArgs, ProblemArgs):"],
        ["class Args(MachineArgs, PPGArgs, PPOArgs, ProblemArgs):"],
    )


def test_the_command_line_is_read_alike_but_for_ppgs_own_group():
    difference = changed_lines(*(definitions(source)["parse_args"] for source in (PPO_SOURCE, PPG_SOURCE)))
    assert difference == (
        [
            "def grouped(problem: ProblemArgs, ppo: PPOArgs, machine: MachineArgs):",
            "return Args(**vars(problem), **vars(ppo), **vars(machine))",
        ],
        [
            "def grouped(problem: ProblemArgs, ppo: PPOArgs, ppg: PPGArgs, machine: MachineArgs):",
            "return Args(**vars(problem), **vars(ppo), **vars(ppg), **vars(machine))",
        ],
    )


def test_ppg_imports_kl_divergence_and_otherwise_what_ppo_imports():
    assert ("torch.distributions", "kl_divergence", None) in imports(PPG_SOURCE)
    assert [x for x in imports(PPG_SOURCE) if x[1] != "kl_divergence"] == imports(PPO_SOURCE)


# Requirements


def test_both_scripts_carry_the_same_metadata():
    assert metadata(PPO_SOURCE) == metadata(PPG_SOURCE)
    assert metadata(PPO_SOURCE).keys() == {"requires_python", "dependencies"}


def test_the_metadata_and_requirements_txt_name_the_same_packages_and_versions():
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    wanted, carried = ([without_spaces(x)[0] for x in xs] for xs in (lines, metadata(PPG_SOURCE)["dependencies"]))
    assert sorted(wanted) == sorted(carried) and len(set(carried)) == len(carried) > 5


def test_requirements_txt_asks_for_nothing_on_a_python_that_the_metadata_refuses():
    assert metadata(PPG_SOURCE)["requires_python"] == ">=3.10,<3.13"
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    whole = 'python_version >= "3.10" and python_version < "3.13"'
    special = {"procgen": 'python_version == "3.10"'}
    special["procgen-mirror"] = 'python_version == "3.11" or python_version == "3.12"'
    for requirement, marker in map(without_spaces, lines):
        assert marker == special.get(requirement.split("==")[0], whole), requirement


# The comparison itself can fail

PAIR = '''
LIMIT = 1  # of something

# Why f is needed.
def f(x):
    return x + 1  # one more

class Args:
    """All of them."""

    gamma: float = 0.9  # the discount
    seed: int = 1  # the seed

    def check(self):
        return 2
'''


def test_comparison_finds_a_changed_line_and_a_changed_comment():
    assert list(definitions(PAIR)) == ["LIMIT", "f", "Args"]
    for old, new, expected in (
        ("x + 1", "x + 2", ["f"]),
        ("one more", "plus one", ["f"]),
        ("Why f", "Why g", ["f"]),
        ("of something", "of nothing", ["LIMIT"]),
        ("LIMIT = 1", "LIMIT = 2", ["LIMIT"]),
        ("All of", "Some of", ["Args"]),
    ):
        assert old in PAIR
        assert drift(definitions(PAIR), definitions(PAIR.replace(old, new))) == expected


def test_comparison_finds_definitions_in_another_order():
    function = PAIR[PAIR.index("# Why") : PAIR.index("class")]
    assert drift(definitions(PAIR), definitions(function + PAIR.replace(function, ""))) == ["order"]


def test_comparison_finds_a_changed_annotation_default_or_comment():
    assert list(members(PAIR, "Args")) == ["gamma", "seed", "check"]
    for old, new in (("gamma: float", "gamma: int"), ("0.9", "0.8"), ("the discount", "a discount")):
        assert drift(members(PAIR, "Args"), members(PAIR.replace(old, new), "Args")) == ["gamma"]


def test_comparison_finds_another_import():
    assert imports("import math") != imports("import cmath") != imports("from math import cmath")


def test_metadata_is_read_as_a_table():
    assert metadata('# /// script\n# dependencies = ["a>1"]\n# ///\nx = 1\n') == {"dependencies": ["a>1"]}
