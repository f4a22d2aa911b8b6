"""FetchSGD: momentum SGD where nothing collides, heavy hitters where much does, cells emptied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow
from tests.workers import aggregate, aggregator, flat, initial

WORKERS, SIZE = 4, 12
WIDE = 2000.0  # Cells a coordinate: so many that none share a cell in most of five rows.


def steps_of(tx, given: np.ndarray, steps: int) -> list[np.ndarray]:
    """Updates from the same gradients."""
    updates = jnp.asarray(given, jnp.float32)
    run, state = aggregator(tx, len(given), "vmap"), initial(tx, updates, "vmap")
    found = []
    for _ in range(steps):
        results, state = run(updates, state, jnp.ones(len(given)))
        replicas = np.asarray(results)
        assert (replicas == replicas[0]).all()
        found.append(replicas[0])
    return found


@pytest.mark.slow
def test_without_collisions_or_masking_it_is_momentum_sgd() -> None:
    given = np.random.default_rng(0).normal(size=(WORKERS, SIZE))
    tx = jaxcomm.fetch_sgd(
        sketch_ratio=WIDE, k=SIZE, momentum=0.9, momentum_masking=False, hashing="elements"
    )
    velocity = np.zeros(SIZE)
    for update in steps_of(tx, given, 4):
        velocity = 0.9 * velocity + given.mean(axis=0)
        np.testing.assert_allclose(update, velocity, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_masking_forgets_the_momentum_of_what_was_updated() -> None:
    given = np.random.default_rng(1).normal(size=(WORKERS, SIZE))
    tx = jaxcomm.fetch_sgd(sketch_ratio=WIDE, k=SIZE, momentum=0.9, hashing="elements")
    for update in steps_of(tx, given, 3):
        np.testing.assert_allclose(update, given.mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reseed_every", [None, 1, 2])
@pytest.mark.parametrize("masking", [True, slow(False)])
def test_what_was_left_out_comes_back_with_its_momentum(
    masking: bool, reseed_every: int | None
) -> None:
    """Against top-k with error feedback and momentum on the mean itself, whatever the hashes."""
    given = np.random.default_rng(2).normal(size=(WORKERS, SIZE))
    tx = jaxcomm.fetch_sgd(
        sketch_ratio=WIDE,
        k=3,
        momentum=0.5,
        momentum_masking=masking,
        reseed_every=reseed_every,
        hashing="elements",
    )
    velocity, error = np.zeros(SIZE), np.zeros(SIZE)
    for update in steps_of(tx, given, 6):
        velocity = 0.5 * velocity + given.mean(axis=0)
        error = error + velocity
        chosen = np.argsort(-np.abs(error))[:3]
        expected = np.zeros(SIZE)
        expected[chosen] = error[chosen]
        error[chosen] = 0
        if masking:
            velocity[chosen] = 0
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5)


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
def test_tables_move_to_new_hashes() -> None:
    """One coordinate is left out in all steps; its cell shows the hashes."""
    given = jnp.zeros((WORKERS, SIZE)).at[:, 4].set(1.0).at[:, 7].set(0.1)
    cells = {}
    for reseed_every in (2, None):
        tx = jaxcomm.fetch_sgd(
            sketch_ratio=WIDE,
            rows=1,
            k=1,
            momentum=0.0,
            reseed_every=reseed_every,
            hashing="elements",
        )
        run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, given, "vmap")
        cells[reseed_every] = []
        for step in range(1, 7):
            _, state = run(given, state, jnp.ones(WORKERS))
            (memory,) = state.shared
            count = int(memory.since) + (reseed_every or 0) * int(memory.epoch)
            assert count == step
            (cell,) = np.flatnonzero(memory.error)
            np.testing.assert_allclose(np.abs(memory.error.ravel()[cell]), 0.1 * step, rtol=1e-5)
            cells[reseed_every].append(int(cell))
    assert len({*cells[None]}) == 1
    assert cells[2][::2] == cells[2][1::2] and len({*cells[2]}) == 3


def test_workers_remember_nothing_of_their_own() -> None:
    state = jaxcomm.init(jaxcomm.fetch_sgd(sketch_ratio=1.0, k=1), jnp.zeros(5), WORKERS)
    assert not jax.tree.leaves(state.own)


@pytest.mark.slow
def test_cells_that_an_update_hits_are_emptied() -> None:
    given = jnp.zeros((WORKERS, SIZE)).at[:, 4].set(2.0).at[:, 7].set(1.0)
    tx = jaxcomm.fetch_sgd(sketch_ratio=WIDE, k=1, momentum=0.5, hashing="elements")
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, given, "vmap")
    _, state = run(given, state, jnp.ones(WORKERS))
    (memory,) = state.shared
    for table in memory[:2]:
        # One coordinate is left, of magnitude 1, in a cell of each row.
        np.testing.assert_array_equal((np.abs(table) == 1).sum(axis=1), 1)
        np.testing.assert_array_equal((table != 0).sum(axis=1), 1)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"k": 3, "ratio": 0.1}, "Pass exactly one of `ratio` and `k`"),
    ],
)
def test_impossible_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.fetch_sgd(sketch_ratio=1.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("before,after", [(3, 2), (2, 3), (2, None), (None, 2)])
def test_tables_move_on_with_another_period_and_when_counts_are_full(
    before: int | None, after: int | None
) -> None:
    """Without collisions, updates do not depend on the hashes, only on what is kept of the past."""
    given = jnp.asarray(np.random.default_rng(4).normal(size=(WORKERS, SIZE)), jnp.float32)
    settings = {"sketch_ratio": WIDE, "k": 3, "momentum": 0.5, "hashing": "elements"}
    first, second = (jaxcomm.fetch_sgd(reseed_every=each, **settings) for each in (before, after))
    fresh, found = initial(first, given, "vmap"), []
    for methods, count in (((first,), 0), ((first, second), 0), ((first,), 2**32 - 3)):
        (memory,) = fresh.shared
        full = jnp.asarray(np.uint32(count))
        state = fresh._replace(shared=[memory._replace(epoch=full, since=full)])
        found.append([])
        for step in range(8):
            run = aggregator(methods[-1] if step >= 5 else first, WORKERS, "vmap")
            result, state = run(given, state, jnp.ones(WORKERS))
            found[-1].append(flat(result))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)
