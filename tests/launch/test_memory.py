"""Freed memory is kept on CPUs: a step does not fault in the pages of its temporaries again."""

import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcomm.launch._environment import TUNABLES, environments_of, memory_environment

PROGRAM = """
import resource
import jax
import jax.numpy as jnp
import optax
import jaxcomm

mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
step = jaxcomm.make_step(
    lambda params, x: jnp.mean((x @ params["a"] + x @ params["b"]) ** 2), tx, mesh
)
params = {name: jnp.ones((2048, 2560)) for name in "ab"}  # 20 MB each; the message has 40 MB.
state, batch = jaxcomm.init(tx, params, mesh), jnp.ones((2, 2048))
for number in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    params, state, metrics = jax.block_until_ready(step(params, state, batch))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_a_step(**environment: str) -> float:
    """The median, since the heap grows in those steps whose threads overlap as never before."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return statistics.median(map(int, done.stdout.split()))


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="not Linux: the allocator of glibc is set"
)
def test_temporaries_keep_their_pages() -> None:
    cpu = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
    kept = faults_of_a_step(**cpu, **memory_environment(cpu))
    assert kept < faults_of_a_step(**cpu) / 4


def test_the_choice_of_the_user_and_other_devices_keep_theirs() -> None:
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert memory_environment(cpu)
    assert not memory_environment(cpu | {"GLIBC_TUNABLES": ""})
    assert not memory_environment(cpu | {"MALLOC_ARENA_MAX": "2"})
    assert not memory_environment({"JAX_PLATFORMS": "cuda,cpu"})
    (environment,) = environments_of([0], 1, cpu)
    assert environment.items() >= memory_environment(cpu).items()
    assert environments_of([0], 1, cpu | {TUNABLES: "x"})[0][TUNABLES] == "x"
