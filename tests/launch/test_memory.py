"""Freed memory is kept on CPUs: a step does not fault in the pages of its temporaries again."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcomm.launch._address import Address
from jaxcomm.launch._environment import Cluster, environment_of
from jaxcomm.launch._memory import TUNABLES, memory_environment

PROGRAM = """
import resource
import jax
import jax.numpy as jnp

@jax.jit
def step(x, w):
    return jnp.sum(jnp.tanh(x @ w) @ w)  # Both products are temporaries of 64 MB.

x, w = jnp.ones((2**17, 128)), jnp.ones((128, 128))
for _ in range(2):
    step(x, w).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step(x, w).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 4)
"""
PAGES = 64 * 2**20 / os.sysconf("SC_PAGE_SIZE")


def faults(**environment: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is set")
def test_temporaries_keep_their_pages() -> None:
    cpu = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    assert faults(**cpu) > PAGES / 2
    assert faults(**cpu, **memory_environment(cpu)) < PAGES / 10


def test_the_choice_of_the_user_and_other_devices_keep_theirs() -> None:
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert memory_environment(cpu)
    assert not memory_environment(cpu | {"GLIBC_TUNABLES": ""})
    assert not memory_environment(cpu | {"MALLOC_ARENA_MAX": "2"})
    assert not memory_environment({"JAX_PLATFORMS": "cuda,cpu"})
    cluster = Cluster(Address("127.0.0.1", 1), 2, 0, None)
    assert environment_of(cluster, 1, "", cpu).items() >= memory_environment(cpu).items()
    assert environment_of(cluster, 1, "", cpu | {TUNABLES: "x"})[TUNABLES] == "x"
