"""What `import jaxcomm` loads: JAX, optax and its own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomm

PROGRAM = """
import json, sys
import jax, optax
before = set(sys.modules)
import jaxcomm
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""
# Of the standard library, of what JAX has not loaded: pure Python that costs a millisecond each.
SMALL = {"statistics", "_statistics", "fractions"}


@pytest.fixture(scope="module")
def loaded() -> tuple[list[str], list[str]]:
    """The modules that `import jax, optax` loads, and those that `import jaxcomm` adds."""
    root = str(Path(jaxcomm.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": root},
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
def test_what_only_some_need_is_not_loaded(loaded: tuple[list[str], list[str]], name: str) -> None:
    assert not [m for m in loaded[1] if m == name or m.startswith(name + ".")]
