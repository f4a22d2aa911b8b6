"""FetchSGD: momentum SGD where nothing collides, heavy hitters where much does, cells emptied."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.steps import steps
from tests.workers import aggregate, aggregator, flat, initial

WORKERS, SIZE = 4, 12


def wide(**options: Any) -> Any:
    """So many cells that no coordinates share one in most of five rows."""
    return jaxcomm.fetch_sgd(sketch_ratio=2000.0, hashing="elements", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "masking", "reseed_every"),
    [(3, True, 2), (3, True, None), (3, False, 1), (SIZE, False, None), (SIZE, True, 1)],
)
def test_dropped_coordinates_return_with_momentum(
    k: int, masking: bool, reseed_every: int | None
) -> None:
    """Against top-k with error feedback and momentum on the mean itself, whatever the hashes."""
    given = np.random.default_rng(2).normal(size=(WORKERS, SIZE)).astype(np.float32)
    tx = wide(k=k, momentum=0.5, momentum_masking=masking, reseed_every=reseed_every)
    results, _ = steps(tx, np.stack([given] * 6))
    velocity, error = np.zeros(SIZE), np.zeros(SIZE)
    for update in results:
        velocity = 0.5 * velocity + given.mean(axis=0)
        error = error + velocity
        chosen = np.argsort(-np.abs(error))[:k]
        expected = np.zeros(SIZE)
        expected[chosen] = error[chosen]
        error[chosen] = 0
        if masking:
            velocity[chosen] = 0
        np.testing.assert_array_equal(update, np.tile(update[0], (WORKERS, 1)))
        np.testing.assert_allclose(update[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_heavy_hitters_are_found_in_a_table_of_200_columns() -> None:
    size = 1000
    given = np.random.default_rng(3).normal(size=(WORKERS, size)) * 0.01
    heavy = np.arange(5) * 190
    given[:, heavy] += np.array([3.0, -2.0, 2.5, -4.0, 2.0])
    # 200 columns: another coordinate meets one of five in four of seven rows once in 70000.
    tx = jaxcomm.fetch_sgd(sketch_ratio=1.4, rows=7, k=5, momentum=0.0, hashing="elements")
    found = aggregate(tx, jnp.asarray(given, jnp.float32))[0]
    assert set(np.flatnonzero(found)) == set(heavy)
    np.testing.assert_allclose(found[heavy], given[:, heavy].mean(axis=0), atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("reseed_every", [2, None])
def test_tables_move_to_new_hashes(reseed_every: int | None) -> None:
    """One coordinate is dropped in all steps; its cell shows the hashes."""
    given = jnp.zeros((6, WORKERS, SIZE)).at[:, :, 4].set(1.0).at[:, :, 7].set(0.1)
    tx = wide(rows=1, k=1, momentum=0.0, reseed_every=reseed_every)
    (memory,) = steps(tx, given)[1].shared
    memory = jax.tree.map(lambda x: np.asarray(x)[:, 0], memory)
    counts = memory.since.ravel() + (reseed_every or 0) * memory.epoch.ravel()
    np.testing.assert_array_equal(counts, np.arange(1, 7))
    tables = memory.error.reshape(6, -1)
    (steps_, cells) = np.nonzero(tables)
    np.testing.assert_array_equal(steps_, np.arange(6))
    np.testing.assert_allclose(np.abs(tables[steps_, cells]), 0.1 * counts, rtol=1e-5)
    changes = np.diff(cells) != 0
    assert changes.tolist() == [False, reseed_every == 2] * 2 + [False]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, None), (None, 2)])
def test_tables_rehash_after_resuming_and_at_full_counters(
    before: int | None, after: int | None
) -> None:
    """Without collisions, updates do not depend on the hashes, only on what is kept of the past."""
    given = jnp.asarray(np.random.default_rng(4).normal(size=(WORKERS, SIZE)), jnp.float32)
    first, second = (wide(k=3, momentum=0.5, reseed_every=each) for each in (before, after))
    fresh, found = initial(first, given, "vmap"), []
    for later, count in ((first, 0), (second, 0), (first, 2**32 - 3)):
        (memory,) = fresh.shared
        full = jnp.asarray(np.uint32(count))
        state = fresh._replace(shared=[memory._replace(epoch=full, since=full)])
        found.append([])
        for step in range(8):
            run = aggregator(later if step >= 5 else first, WORKERS, "vmap")
            result, state = run(given, state, jnp.ones(WORKERS))
            found[-1].append(flat(result))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)
