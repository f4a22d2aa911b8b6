"""Needs one GPU; `make test-gpu` finds a Python whose JAX sees it."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def _enough_devices() -> None:
    """One will do, in place of the eight that other tests need."""
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.exit("JAX sees no GPU: see `make test-gpu`.", 4)


@pytest.fixture
def gpu() -> jax.Device:
    return jax.devices("cuda")[0]


@pytest.fixture
def cpu() -> jax.Device:
    return jax.devices("cpu")[0]
