"""Steps that all workers leave out together, where one alone has a NaN."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.sparsifiers import nonzero
from tests.aggregation.test_memory import remainders
from tests.laws.test_wire import COLLECTIVE
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregator, flat, gradients, initial, mesh_of

WORKERS = 4
INNER = optax.chain(jaxcomm.all_reduce_mean(remainders()), optax.sgd(0.5, momentum=0.9))
TX = jaxcomm.skip_nonfinite(INNER)


def poisoned(updates: Any, value: float = np.nan, worker: int = 2) -> Any:
    return {**updates, "kernel": updates["kernel"].at[worker, 1, 1].set(value)}


def bits(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("mode", MODE_ROWS)
def test_as_if_the_step_had_not_been(mode: Mode, value: float) -> None:
    given = [jax.tree.map(lambda x: 3 * x, gradients(WORKERS, seed)) for seed in range(3)]
    run, plain = aggregator(TX, WORKERS, mode), aggregator(INNER, WORKERS, mode)
    state, without = initial(TX, given[0], mode), initial(INNER, given[0], mode)
    for count, updates in enumerate(given):
        results, state = run(updates, state, jnp.ones(WORKERS))
        expected, without = plain(updates, without, jnp.ones(WORKERS))
        np.testing.assert_array_equal(flat(results), flat(expected))
        assert np.abs(flat(results)).max() > 0
        skipped, after = run(poisoned(updates, value, count), state, jnp.ones(WORKERS))
        assert (flat(skipped) == 0).all()
        for x, y in zip(bits(after.inner), bits(state.inner), strict=True):
            np.testing.assert_array_equal(x, y)
        state = after
        assert state.skipped_steps == count + 1 and state.skipped_steps.dtype == jnp.int32
    for x, y in zip(bits(state.inner), bits(without), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_a_worker_of_weight_0_is_not_asked(mode: Mode) -> None:
    tx, updates = jaxcomm.skip_nonfinite(jaxcomm.mean()), gradients(WORKERS)
    run = aggregator(tx, WORKERS, mode, weighted=True)
    state = initial(tx, updates, mode)
    results, state = run(poisoned(updates), state, jnp.array([1.0, 2.0, 0.0, 1.0]))
    assert state.skipped_steps == 0
    expected = np.average(flat(updates), axis=0, weights=[1, 2, 0, 1])
    np.testing.assert_allclose(flat(results), np.tile(expected, (WORKERS, 1)), rtol=1e-5, atol=1e-6)
    results, state = run(updates, state, jnp.array([1.0, jnp.nan, 0.0, 1.0]))
    assert state.skipped_steps == 1 and (flat(results) == 0).all()


@pytest.mark.parametrize("mode", ["checked", "unchecked"])
def test_one_flag_is_sent_and_the_rest_within_the_condition(mode: Mode) -> None:
    updates = gradients(WORKERS)
    run, arguments = (
        aggregator(TX, WORKERS, mode),
        (updates, initial(TX, updates, mode), jnp.ones(WORKERS)),
    )
    sent = jaxcomm.wire.account(run, *arguments)
    (flag,) = [c for c in sent.collectives if not c.path]
    assert flag.shape == () and flag.dtype == np.float32
    assert {c.path for c in sent.collectives if c is not flag} == {("cond 2/2",)}
    alone = jaxcomm.wire.account(
        aggregator(INNER, WORKERS, mode), updates, initial(INNER, updates, mode), jnp.ones(WORKERS)
    )
    flags = 1 if mode == "checked" else 2  # Types tell that the result is equal on all.
    assert sent.bytes_per_worker == alone.bytes_per_worker + flags * 2 * 3 / 4 * 4
    text = run.lower(*arguments).compile().as_text()
    assert len(COLLECTIVE.findall(text[text.index("ENTRY") :])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checked", slow("vmap")])
def test_a_mean_that_found_no_room_is_left_out(mode: Mode) -> None:
    sparse = {"a": jnp.zeros((WORKERS, 8)).at[:, 1].set(1.0)}
    full, finds_no_room = (
        {"a": jnp.ones((WORKERS, 8))},
        nonzero(density=0.25, granularity="element"),
    )
    inner = optax.chain(jaxcomm.all_gather_mean(finds_no_room), optax.sgd(1.0, momentum=0.5))
    tx = jaxcomm.skip_nonfinite(inner)
    run, state = aggregator(tx, WORKERS, mode), initial(tx, sparse, mode)
    _, state = run(sparse, state, jnp.ones(WORKERS))
    result, after = run(full, state, jnp.ones(WORKERS))
    assert (
        (flat(result) == 0).all()
        and after.skipped_steps == 1
        and after.diagnostics["skipped_steps"] == 1
    )
    for x, y in zip(bits(after.inner), bits(state.inner), strict=True):
        np.testing.assert_array_equal(x, y)
    result, _ = run(sparse, after, jnp.ones(WORKERS))
    np.testing.assert_allclose(flat(result), -1.5 * flat(sparse))


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mesh", slow("simulated")])
def test_training_goes_on(kind: str) -> None:
    tx = jaxcomm.skip_nonfinite(optax.chain(jaxcomm.global_qsgd(), optax.rmsprop(0.1)))
    workers = mesh_of(WORKERS) if kind == "mesh" else WORKERS
    make = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    traced = []

    def counting(params: Any, batch: jax.Array) -> jax.Array:
        traced.append(1)
        return loss_fn(params, batch)

    step = make(counting, tx, workers)
    start = lambda: {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}  # noqa: E731
    batches = np.random.default_rng(0).normal(size=(12, 8, 5)).astype(np.float32)
    batches[::3, 5, 2] = np.nan
    params, state = start(), jaxcomm.init(tx, start(), workers)
    before, counts = jax.eval_shape(lambda s: s, state), []
    for batch in batches:
        params, state, _ = step(params, state, batch)
        counts.append(len(traced))
    chex.assert_trees_all_equal_shapes_and_dtypes(before, state)
    assert state.skipped_steps == 4 and state.inner[0].step == 8 and len(set(counts)) == 1
    clean = make(loss_fn, tx, workers)
    expected, other = start(), jaxcomm.init(tx, start(), workers)
    for batch in batches[np.arange(12) % 3 > 0]:
        expected, other, _ = clean(expected, other, batch)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    if kind == "mesh":

        def body(carry: Any, batch: Any) -> Any:
            params, state, _ = step(*carry, batch)
            return (params, state), None

        initially = start(), jaxcomm.init(tx, start(), workers)
        (scanned, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, batches))(initially)
        chex.assert_trees_all_close(params, scanned, rtol=1e-5, atol=1e-6)


def test_around_and_within_accumulate() -> None:
    updates = gradients(WORKERS)
    inner = optax.chain(jaxcomm.mean(), optax.scale(-1.0))
    around = jaxcomm.skip_nonfinite(jaxcomm.accumulate(inner, 2))
    within = jaxcomm.accumulate(jaxcomm.skip_nonfinite(inner), 2)
    for tx, zeros in ((around, [0, 1]), (within, [0, 1, 2])):
        run, state = aggregator(tx, WORKERS, "checked"), initial(tx, updates, "checked")
        seen = []
        for given in (updates, poisoned(updates), updates):
            results, state = run(given, state, jnp.ones(WORKERS))
            seen.append((flat(results) == 0).all())
        assert [i for i, zero in enumerate(seen) if zero] == zeros


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
@pytest.mark.parametrize("wait_free", [False, True])
def test_no_more_than_so_many_steps_in_a_row(kind: str, wait_free: bool) -> None:
    workers: Any = mesh_of(WORKERS) if kind == "mesh" else WORKERS
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    mean: Any = jaxcomm.scheduling.wait_free(jaxcomm.mean()) if wait_free else jaxcomm.mean()
    chain = optax.chain(mean, optax.sgd(1.0))
    good, bad = jnp.ones(WORKERS), jnp.ones(WORKERS).at[1].set(jnp.nan)
    for most, batches in ((2, "bbgbbbbg"), (None, "bbgbbbbg"), (0, "gb")):
        tx = jaxcomm.skip_nonfinite(chain, max_consecutive_errors=most)
        step, w = make(lambda w, x: w * jnp.mean(x), tx, workers, donate=False), jnp.float32(0)
        reference = optax.apply_if_finite(optax.sgd(1.0), 10**9 if most is None else most)
        one, state, alone = w, jaxcomm.init(tx, w, workers), reference.init(w)
        for which in batches:
            batch = good if which == "g" else bad
            w, state, metrics = step(w, state, batch)
            update, alone = reference.update(jnp.mean(batch), alone)
            one = optax.apply_updates(one, update)
            np.testing.assert_array_equal(w, one)
            if np.isnan(w):  # What follows depends on how the loss uses the parameters.
                break
            assert state.consecutive_errors == alone.notfinite_count
            assert int(metrics["diagnostics/consecutive_errors"]) == alone.notfinite_count
        assert np.isnan(w) == (most is not None)


@pytest.mark.parametrize("most", [-1, 2.0, True])
def test_limits_out_of_range(most: Any) -> None:
    with pytest.raises(ValueError, match="`max_consecutive_errors` must be a Python int of at"):
        jaxcomm.skip_nonfinite(jaxcomm.mean(), max_consecutive_errors=most)


def test_mistakes() -> None:
    updates = gradients(WORKERS)
    twice = optax.chain(jaxcomm.mean(), jaxcomm.skip_nonfinite(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="summed already"):
        aggregator(twice, WORKERS, "checked")(
            updates, initial(twice, updates, "checked"), jnp.ones(WORKERS)
        )
    with pytest.raises(ValueError, match="is not bound here"):
        tx = jaxcomm.skip_nonfinite(jaxcomm.mean())
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
