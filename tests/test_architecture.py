"""Imports point downwards, and the public surface is documented and complete."""

import inspect
import math
import pathlib
import sys
from types import ModuleType
from typing import get_origin

import pytest

import jaxcomm
from jaxcomm import (
    asynchronous,
    catalogue,
    checkpoint,
    gossip,
    launch,
    methods,
    scheduling,
    testing,
)
from tests.cases import CASES
from tests.imports import imported

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
    {"checkpoint"},
    {"asynchronous"},  # Which nothing of the package imports.
    {"experiments"},
]


def _package(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "jaxcomm" else parts[0]


def _imported(source: str) -> set[str]:
    """The packages, and of jaxcomm its parts."""
    names = [name.split(".") for name in imported(source)]
    parts = {(name[1:] or ["__init__"])[0] for name in names if name[0] == "jaxcomm"}
    return parts | {name[0] for name in names} & {"pallas_kernels", "experiments"}


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
    of_files = {str(p): violations(_package(p), _imported(p.read_text())) for p in SOURCES}
    assert {path: found for path, found in of_files.items() if found} == {}


@pytest.mark.parametrize(
    ("package", "source", "number"),
    [
        ("compression", "from jaxcomm.aggregation import mean\nimport jaxcomm", 2),
        ("wire", "from jaxcomm import _contract", 1),
        ("_noise", "from pallas_kernels import _hash", 0),
        ("pallas_kernels", "import jaxcomm, experiments", 2),
    ],
)
def test_the_rule_detects_a_violation(package: str, source: str, number: int) -> None:
    assert len(violations(package, _imported(source))) == number


# Parts of the experiments may import from strictly lower rows, and from themselves.
EXPERIMENTS = [
    {"errors"},
    {"cluster"},
    {"timing", "networks", "study", "tasks"},
    {"methods"},
    {"sparse_methods"},
    {"trainer"},
    {"lab", "bench", "gpu"},
    {"studies"},
    {"__main__"},
]
MODULES = sorted((ROOT / "experiments").rglob("*.py"))


def _parts_imported(source: str) -> set[str]:
    """The parts of `experiments` that a module imports."""
    return {name.split(".")[1] for name in imported(source) if name.startswith("experiments.")}


def _imported_upwards(path: pathlib.Path, imported: set[str]) -> set[str]:
    part = path.relative_to(ROOT / "experiments").with_suffix("").parts[0]
    rows = {name: row for row, names in enumerate(EXPERIMENTS) for name in names}
    return {other for other in imported - {part} if rows.get(other, math.inf) >= rows.get(part, -1)}


def test_imports_of_the_experiments_point_downwards() -> None:
    upwards = {
        str(path.relative_to(ROOT / "experiments")): _imported_upwards(
            path, _parts_imported(path.read_text())
        )
        for path in MODULES
        if path != ROOT / "experiments" / "__init__.py"
    }
    assert {path: found for path, found in upwards.items() if found} == {}


def test_the_rule_of_the_experiments_detects_a_violation() -> None:
    source = "from experiments import studies\nfrom experiments.study.run import Study\n"
    source += "def late():\n    from experiments.trainer import train"
    parts = _parts_imported(source)
    assert parts == {"studies", "study", "trainer"}
    path = ROOT / "experiments" / "tasks" / "task.py"
    assert _imported_upwards(path, parts) == {"studies", "study", "trainer"}
    assert _imported_upwards(path.parents[1] / "__main__.py", parts) == set()


def _roots(path: pathlib.Path) -> set[str]:
    """The packages that a file imports; for jaxcomm, its parts."""
    names = [name.split(".") for name in imported(path.read_text())]
    return {".".join(name[: 2 if name[0] == "jaxcomm" else 1]) for name in names}


def test_launch_imports_only_jax() -> None:
    found = set().union(*map(_roots, (ROOT / "jaxcomm" / "launch").glob("*.py")))
    assert found - sys.stdlib_module_names == {"jax", "jaxcomm.launch"}
    assert _roots(ROOT / "jaxcomm" / "launch" / "_tied.py") <= sys.stdlib_module_names


def test_files_are_short() -> None:
    lines = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: number for path, number in lines.items() if number > 500} == {}


PUBLIC = (
    jaxcomm,
    asynchronous,
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


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_documented(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if get_origin(value) is not None:
            continue  # The text of an alias follows it, and only a page shows it.
        documentation = inspect.getdoc(value)
        assert documentation and not documentation.startswith(f"{name}("), name
        if inspect.isfunction(value):
            for argument in {*inspect.signature(value).parameters} - {"args", "kwargs"}:
                assert argument in documentation, f"{name} does not explain `{argument}`"


def test_every_recipe_has_a_row() -> None:
    public = set(methods.__all__)
    assert public <= set(jaxcomm.__all__) and public <= {case.name for case in CASES}
