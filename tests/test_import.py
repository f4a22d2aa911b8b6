"""`import jaxcomm` loads only JAX, optax and jaxcomm."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxcomm
from tests.imports import imported

pytestmark = pytest.mark.xdist_group("import")  # One process loads it for all.

ROOT = Path(jaxcomm.__file__).parents[1]

PROGRAM = """
import json, sys
import jax, optax
before = set(sys.modules)
import jaxcomm
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""
# Standard modules that JAX has not loaded: pure Python that costs a millisecond each.
SMALL = {"statistics", "_statistics", "fractions"}


@pytest.fixture(scope="module")
def loaded() -> tuple[list[str], list[str]]:
    """The modules that `import jax, optax` loads, and those that `import jaxcomm` adds."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def test_nothing_is_loaded_but_jax_optax_and_ours(loaded: tuple[list[str], list[str]]) -> None:
    ours = {"jaxcomm", "pallas_kernels", "jax"} | SMALL
    assert [name for name in loaded[1] if name.partition(".")[0] not in ours] == []


@pytest.mark.parametrize(
    "name",
    [
        "chex",
        "cvxpy",
        "experiments",
        "flax",
        "jax.experimental.pallas",
        "jaxcomm.launch",
        "jaxcomm.catalogue",
        "jaxcomm.testing",
        "jaxlib.mosaic",
        "matplotlib",
        "networkx",
        "orbax",
        "pallas_kernels.quantize.mosaic_gpu",
        "pallas_kernels.quantize.mosaic_tpu",
        "scipy",
        "sklearn",
    ],
)
def test_optional_modules_are_not_loaded(loaded: tuple[list[str], list[str]], name: str) -> None:
    assert not [m for m in loaded[1] if m == name or m.startswith(name + ".")]


# Packages whose installed name is not the imported one.
IMPORTED_AS = {
    "dm-haiku": "haiku",
    "ml-dtypes": "ml_dtypes",
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}


def declared(*extras: str) -> set[str]:
    """The packages that the wheel and its extras install, by their imported names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set()
    for line in sum((project["optional-dependencies"][e] for e in extras), project["dependencies"]):
        name = re.match(r"[\w-]+", line)[0]
        own = re.match(r"jaxcomm\[(\w+)\]", line)
        found |= declared(own[1]) if own else {IMPORTED_AS.get(name, name)}
    return found


def third_party(*folders: str) -> set[str]:
    """The packages that the code of some folders imports, without the standard ones and ours."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = {name.partition(".")[0] for path in paths for name in imported(path.read_text())}
    return names - sys.stdlib_module_names - {"jaxcomm", "pallas_kernels", "experiments", "tests"}


@pytest.mark.slow
def test_extras_install_what_their_part_imports() -> None:
    # matplotlib is for `gossip.draw` alone, whose error names it.
    own = third_party("jaxcomm", "pallas_kernels")
    assert own <= declared("gossip", "checkpoint") | {"matplotlib"}
    assert third_party("experiments") <= declared("experiments", "peers")
    tools = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert third_party("tests") - tools <= declared("experiments", "peers", "test", "browser")
    assert "networkx" not in declared() and "networkx" in declared("experiments")
