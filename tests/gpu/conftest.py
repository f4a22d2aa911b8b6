"""Needs one GPU; `make test-gpu` finds a Python whose JAX sees it.

With JAXCOMM_REHEARSE=1 the same tests run on a CPU, with the kernels for GPU in JAX's interpreter.
"""

import os
from collections.abc import Iterator

import jax
import pytest

from pallas_kernels import _dispatch

REHEARSE = bool(os.environ.get("JAXCOMM_REHEARSE"))


@pytest.fixture(scope="session", autouse=True)
def _enough_devices() -> None:
    """One will do, in place of the eight that other tests need."""
    try:
        jax.devices("cpu" if REHEARSE else "cuda")
    except RuntimeError:
        pytest.exit("JAX sees no GPU: see `make test-gpu`.", 4)


@pytest.fixture(autouse=True)
def _rehearsal() -> Iterator[None]:
    if REHEARSE:
        with _dispatch.rehearsal():
            yield
    else:
        yield


@pytest.fixture
def gpu() -> jax.Device:
    return jax.devices("cpu" if REHEARSE else "cuda")[0]


@pytest.fixture
def cpu() -> jax.Device:
    return jax.devices("cpu")[0]
