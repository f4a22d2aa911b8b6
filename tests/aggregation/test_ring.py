"""The explicit ring: its order of sums, its bytes, and a program that does not grow with n."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from tests.aggregation.runs import averaged, over, sent
from tests.slow import slow
from tests.workers import Mode, aggregate, flat

RING = jaxcomm.ring_mean()


def updates(workers: int, coordinates: int = 0) -> Any:
    rng = np.random.default_rng(workers)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(workers, *shape)), jnp.float32)  # noqa: E731
    if coordinates:
        return draw(coordinates)
    return {
        "bfloat16": draw(5, 2).astype(jnp.bfloat16),
        "empty": draw(0, 3),
        "float32": draw(7, 3),
        "scalar": draw(),
    }


def sums_by_hand(given: np.ndarray) -> np.ndarray:
    """Chunk c starts on worker c + 1 and is added to by each worker in turn, in float32."""
    workers, coordinates = given.shape
    width = -(-coordinates // workers)
    sums = np.empty(coordinates, np.float32)
    for c in range(workers):
        chunk = np.arange(coordinates)[c * width : (c + 1) * width]
        total = given[(c + 1) % workers, chunk].astype(np.float32)
        for hop in range(2, workers + 1):
            total = total + given[(c + hop) % workers, chunk].astype(np.float32)
        sums[chunk] = total
    return sums


def assert_in_order(results: Any, given: jax.Array) -> None:
    sums, workers = sums_by_hand(np.asarray(given)), np.float32(len(given))
    # XLA divides by a constant or multiplies by its reciprocal, which may differ in the last bit.
    means = np.stack([sums / workers, sums * (1 / workers)])
    replicas = np.asarray(results).reshape(-1, 1, sums.size)
    assert np.all(np.any(replicas == means, axis=1))


@pytest.mark.parametrize(
    ("workers", "mode"),
    [
        (5, "checked"),
        (16, "vmap"),
        *(slow(n, "checked") for n in (1, 2, 3, 8)),
        *(slow(n, "unchecked") for n in (3, 8)),
        slow(5, "vmap"),
    ],
)
def test_the_order_of_the_sums(workers: int, mode: Mode) -> None:
    given = updates(workers, 23)
    results = aggregate(RING, given, mode)
    assert_in_order(results, given)
    np.testing.assert_allclose(results[0], flat(given).mean(axis=0), rtol=0, atol=2.0**-22)


def test_two_axes_are_one_ring() -> None:
    given, axes = updates(8, 23), ("dcn", "ici")
    average = averaged(jaxcomm.ring_mean(axes))
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    assert_in_order(over(mesh, axes, average)(given), given)
    nested = jax.jit(jax.vmap(jax.vmap(average, axis_name="ici"), axis_name="dcn"))
    assert_in_order(nested(given.reshape(2, 4, 23)), given)


def test_the_program_does_not_grow_with_the_workers() -> None:
    account = sent(RING, updates(8, 1024))
    hops = [(c.times, c.shape) for c in account.collectives if c.kind == "ppermute"]
    assert hops == [(7, (128,))] and len(account.collectives) <= 2 and not account.unbounded


def test_empty_trees() -> None:
    nothing = jax.vmap(lambda x: RING.update({}, optax.EmptyState()), axis_name="data")
    assert nothing(jnp.ones(2)) == ({}, optax.EmptyState())
