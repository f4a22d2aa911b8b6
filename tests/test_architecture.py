"""Imports point downwards, and the public surface is documented and complete."""

import ast
import inspect
import pathlib
import sys
from typing import get_origin

import jaxcomm
from jaxcomm import catalogue, checkpoint, gossip, launch, methods, scheduling, testing
from tests.cases import CASES

ROOT = pathlib.Path(__file__).parent.parent

# The core, in which a module imports from earlier ones only.
CORE = [
    "_contract",
    "_axis",
    "metrics",
    "_gradients",
    "_require",
    "_mesh",
    "_units",
    "_collectives",
    "collectives",
    "_noise",
    "_workers",
    "_resize",
]

# Packages may import from strictly lower rows, and from themselves.
ROWS = [
    {"pallas_kernels"},
    {
        *CORE,
        "wire",
    },
    {"compression"},
    {"aggregation", "gossip"},
    {"synchronization", "scheduling"},
    {"methods", "training"},
    {"perf"},  # Traces whole steps.
    {"advise"},
    {"__init__"},
    {"catalogue", "testing"},  # Which nothing of the package imports.
    {"launch"},  # Which imports nothing of ours.
    {"checkpoint"},  # Which nothing of the package imports.
    {"experiments"},
]


def _package(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "jaxcomm" else parts[0]


def _imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            top, *rest = node.module.split(".")
            if top == "jaxcomm":
                found |= {rest[0]} if rest else {alias.name for alias in node.names}
            elif top in ("pallas_kernels", "experiments"):
                found.add(top)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top, *rest = alias.name.split(".")
                if top == "jaxcomm":
                    found.add(rest[0] if rest else "__init__")
                elif top in ("pallas_kernels", "experiments"):
                    found.add(top)
    return found


def _row(package: str) -> int:
    (row,) = (i for i, packages in enumerate(ROWS) if package in packages)
    return row


def violations(package: str, imported: set[str]) -> list[str]:
    wrong = []
    for other in imported - {package}:
        core = package in CORE and other in CORE and CORE.index(other) < CORE.index(package)
        if not core and _row(other) >= _row(package):
            wrong.append(f"{package} imports {other}")
    return wrong


SOURCES = sorted(
    path for package in ("jaxcomm", "pallas_kernels") for path in (ROOT / package).rglob("*.py")
)


def test_imports_point_downwards() -> None:
    of_files = {p: violations(_package(p), _imported(ast.parse(p.read_text()))) for p in SOURCES}
    assert {str(path): found for path, found in of_files.items() if found} == {}


def test_the_rule_sees_a_violation() -> None:
    tree = ast.parse("from jaxcomm.aggregation import mean\nimport jaxcomm")
    assert len(violations("compression", _imported(tree))) == 2
    assert violations("wire", _imported(ast.parse("from jaxcomm import _contract"))) == [
        "wire imports _contract"
    ]
    assert violations("_noise", _imported(ast.parse("from pallas_kernels import _hash"))) == []
    assert (
        len(violations("pallas_kernels", _imported(ast.parse("import jaxcomm, experiments")))) == 2
    )


# Packages of the experiments may import from strictly lower rows, and from themselves.
EXPERIMENTS = [
    {"cli"},
    {"tasks"},
    {"methods"},
    {"lab"},
    {"training"},
    {"study"},
    {"report"},
    {"studies", "bench", "gpu"},
    {"train"},
    {"__main__"},
]
# Commands, which are not part of a study, and why they import upwards.
COMMANDS_ABOVE = {
    "cli/configs/profile.py": {"lab"},  # Isolates the process before JAX starts threads.
    "cli/launch.py": {"studies"},  # Parses the options of the command that it starts.
    "report/command.py": {"studies"},  # Finds the study of a record.
    "study/command.py": {"report"},  # Writes the report of a record.
    "study/figures.py": {"studies"},  # Finds the study of a record.
    "study/records.py": {"studies"},  # Runs all studies.
}
MODULES = sorted((ROOT / "experiments").rglob("*.py"))


def _parts_imported(tree: ast.AST) -> set[str]:
    """The parts of `experiments` that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "experiments":
            names |= {f"experiments.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("experiments.")}


def _imported_upwards(path: pathlib.Path, imported: set[str]) -> set[str]:
    part = path.relative_to(ROOT / "experiments").with_suffix("").parts[0]
    rows = {name: row for row, names in enumerate(EXPERIMENTS) for name in names}
    return {other for other in imported - {part} if rows[other] >= rows[part]}


def test_imports_of_the_experiments_point_downwards() -> None:
    upwards = {
        str(path.relative_to(ROOT / "experiments")): _imported_upwards(
            path, _parts_imported(ast.parse(path.read_text()))
        )
        for path in MODULES
        if path != ROOT / "experiments" / "__init__.py"
    }
    assert {path: found for path, found in upwards.items() if found} == COMMANDS_ABOVE


def test_the_rule_of_the_experiments_sees_a_violation() -> None:
    source = "from experiments import studies\nfrom experiments.cli import options\n"
    source += "def late():\n    from experiments.training.train import train"
    imported = _parts_imported(ast.parse(source))
    assert imported == {"studies", "cli", "training"}
    path = ROOT / "experiments" / "methods" / "rates.py"
    assert _imported_upwards(path, imported) == {"studies", "training"}
    assert _imported_upwards(path.parents[1] / "__main__.py", imported) == set()


def _roots(path: pathlib.Path) -> set[str]:
    """The packages that a file imports; for jaxcomm, its parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {".".join(n.split(".")[: 2 if n.startswith("jaxcomm") else 1]) for n in names}


def test_launch_needs_jax_and_no_more() -> None:
    found = set().union(*map(_roots, (ROOT / "jaxcomm" / "launch").glob("*.py")))
    assert found - sys.stdlib_module_names == {"jax", "jaxcomm.launch"}
    assert _roots(ROOT / "jaxcomm" / "launch" / "_tied.py") <= sys.stdlib_module_names


def test_files_are_short() -> None:
    lines = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: number for path, number in lines.items() if number > 500} == {}


FUNCTIONS = sorted(
    name
    for module in (
        jaxcomm,
        jaxcomm.aggregation,
        jaxcomm.compression,
        jaxcomm.compression.feedback,
        jaxcomm.compression.quantizers,
        jaxcomm.compression.sketches,
        jaxcomm.compression.sparsifiers,
        gossip,
        scheduling,
        jaxcomm.synchronization,
        jaxcomm.synchronization.events,
        jaxcomm.wire,
        jaxcomm.perf,
        launch,
        catalogue,
        checkpoint,
        testing,
    )
    for name in (f"{module.__name__}.{n}" for n in module.__all__)
)


def _resolve(name: str) -> object:
    value: object = jaxcomm
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_public_names_are_documented() -> None:
    for name in FUNCTIONS:
        value = _resolve(name)
        if get_origin(value) is not None:
            continue  # The text of an alias follows it, and only a page shows it.
        documentation = inspect.getdoc(value)
        assert documentation and not documentation.startswith(f"{name.rsplit('.')[-1]}("), name
        if inspect.isfunction(value):
            for argument in {*inspect.signature(value).parameters} - {"args", "kwargs"}:
                assert argument in documentation, f"{name} does not explain `{argument}`"


def test_every_recipe_has_a_row() -> None:
    public = set(methods.__all__)
    assert public <= set(jaxcomm.__all__) and public <= {case.name for case in CASES}


def test_public_names_are_in_the_docs() -> None:
    documents = "".join(p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [name for name in jaxcomm.__all__ if name not in documents] == []
