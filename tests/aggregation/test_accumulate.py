"""Gradients added up on the spot: the numbers of a big batch, and nothing sent in between."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import synchronization
from tests.slow import slow
from tests.workers import (
    MODE_ROWS,
    Mode,
    aggregator,
    flat,
    gradients,
    initial,
    mesh_of,
    of_one_worker,
)

WORKERS = 4


def chain(**options: Any) -> Any:
    return optax.chain(jaxcomm.mean(**options), optax.sgd(0.5, momentum=0.9))


SGD = jaxcomm.accumulate(chain(), 3)
QUANTIZED = jaxcomm.accumulate(optax.chain(jaxcomm.global_qsgd(), optax.sgd(1.0)), 3)


def momentum(means: list[np.ndarray]) -> list[np.ndarray]:
    """The updates of `chain()`, NumPy."""
    trace, updates = np.zeros_like(means[0]), []
    for mean in means:
        trace = mean + 0.9 * trace
        updates.append(-0.5 * trace)
    return updates


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_every_third_step_is_that_of_the_mean(mode: Mode) -> None:
    given = [gradients(WORKERS, seed) for seed in range(7)]
    run, state = aggregator(SGD, WORKERS, mode), initial(SGD, given[0], mode)
    means = [np.mean([flat(g) for g in given[i : i + 3]], axis=(0, 1)) for i in (0, 3)]
    expected = momentum(means)
    for count, updates in enumerate(given):
        results, state = run(updates, state, jnp.ones(WORKERS))
        assert state.mini_step == (count + 1) % 3
        if count % 3 == 2:
            np.testing.assert_allclose(
                flat(results), np.tile(expected[count // 3], (WORKERS, 1)), rtol=1e-5, atol=1e-6
            )
        else:
            assert (flat(results) == 0).all()
    own = state.own.per_worker["data"]
    np.testing.assert_allclose(flat(own["mean"]), flat(given[6]), rtol=1e-6)
    np.testing.assert_array_equal(own["weight"], np.ones(WORKERS))


def test_equal_to_multi_steps_where_that_runs() -> None:
    given = [gradients(WORKERS, seed) for seed in range(6)]
    multi = optax.MultiSteps(chain(), 3).gradient_transformation()
    mine, theirs = (jax.jit(jax.vmap(tx.update, axis_name="data")) for tx in (SGD, multi))
    state, other = (jax.vmap(tx.init, axis_name="data")(given[0]) for tx in (SGD, multi))
    for updates in given:
        results, state = mine(updates, state)
        with jax.numpy_dtype_promotion("standard"):  # As optax needs it.
            expected, other = theirs(updates, other)
        chex.assert_trees_all_close(results, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["checked", slow("unchecked")])
def test_nothing_is_sent_outside_of_the_last_mini_step(mode: Mode) -> None:
    updates = gradients(WORKERS)
    arguments = updates, initial(QUANTIZED, updates, mode), jnp.ones(WORKERS)
    run = aggregator(QUANTIZED, WORKERS, mode)
    sent = jaxcomm.wire.account(run, *arguments)
    assert sent.collectives and {c.path for c in sent.collectives} == {("cond 2/2",)}
    plain = jaxcomm.global_qsgd()
    alone = jaxcomm.wire.account(
        aggregator(plain, WORKERS, mode), updates, initial(plain, updates, mode), jnp.ones(WORKERS)
    )
    assert sent.bytes_per_worker == alone.bytes_per_worker
    text = run.lower(*arguments).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert " conditional(" in entry and " all-reduce(" not in entry


def test_a_simulated_step_sends_within_the_condition_but_for_the_loss() -> None:
    loss = lambda p, b: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)) * jnp.mean(b)  # noqa: E731
    params = of_one_worker(gradients(1))
    step = jaxcomm.simulate(loss, QUANTIZED, 8)
    sent = jaxcomm.wire.account(step, params, jaxcomm.init(QUANTIZED, params, 8), jnp.ones(8))
    (outside,) = [c for c in sent.collectives if not c.path]
    assert outside.shape == () and outside.dtype == np.float32


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_weights_count_over_mini_steps_and_workers(mode: Mode) -> None:
    tx = jaxcomm.accumulate(jaxcomm.mean(), 2)
    given = [gradients(WORKERS, seed) for seed in range(2)]
    weights = np.array([[1, 0, 2, 0], [3, 1, 0, 0]], np.float32)
    given[0]["kernel"] = given[0]["kernel"].at[1].set(jnp.nan)  # Of weight 0.
    run, state = aggregator(tx, WORKERS, mode, weighted=True), initial(tx, given[0], mode)
    for updates, weight in zip(given, weights, strict=True):
        results, state = run(updates, state, jnp.asarray(weight))
    every = np.nan_to_num(np.concatenate([flat(updates) for updates in given]))
    expected = np.average(every, axis=0, weights=weights.ravel())
    np.testing.assert_allclose(flat(results), np.tile(expected, (WORKERS, 1)), rtol=1e-5, atol=1e-6)


def test_no_weight_at_all_is_no_update() -> None:
    tx, updates = jaxcomm.accumulate(jaxcomm.mean(), 2), gradients(WORKERS)
    run = aggregator(tx, WORKERS, "vmap", weighted=True)
    state = initial(tx, updates, "vmap")
    for _ in range(2):
        results, state = run(updates, state, jnp.zeros(WORKERS))
    assert (flat(results) == 0).all()


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_a_nan_is_seen_once_and_forgotten(mode: Mode) -> None:
    given = gradients(WORKERS)
    bad = {**given, "scale": given["scale"].at[2].set(jnp.nan)}
    run, state = aggregator(QUANTIZED, WORKERS, mode), initial(QUANTIZED, given, mode)
    seen = []
    for updates in (given, bad, given, given, given, given):
        results, state = run(updates, state, jnp.ones(WORKERS))
        seen.append(flat(results))
    assert np.isnan(seen[2]).all() and np.isfinite(seen[5]).all()
    assert (np.array(seen)[[0, 1, 3, 4]] == 0).all()


def test_huge_gradients_do_not_overflow() -> None:
    given = jnp.full((2, 3), 3e38)
    run, state = aggregator(SGD, 2, "vmap"), initial(SGD, given / 3e38, "vmap")
    for _ in range(3):
        results, state = run(given, state, jnp.ones(2))
    # Two workers' sum overflows in `mean`; what was accumulated does not.
    del results
    own = jax.tree.leaves(state.own.per_worker["data"]["mean"])
    assert all(np.isfinite(x).all() for x in own)


def test_half_precision_is_added_in_float32() -> None:
    tx = jaxcomm.accumulate(jaxcomm.mean(), 256)
    given = jnp.full((2, 3), 1.0, jnp.bfloat16).at[0].set(1 + 2**-7)
    run, state = aggregator(tx, 2, "vmap"), initial(tx, given, "vmap")
    assert state.own.per_worker["data"]["mean"].dtype == jnp.float32

    def body(state: Any, _: None) -> Any:
        results, state = run(given, state, jnp.ones(2))
        return state, results

    _, results = jax.jit(lambda s: jax.lax.scan(body, s, None, length=256))(state)
    assert results.dtype == jnp.bfloat16
    np.testing.assert_array_equal(results[:-1].astype(jnp.float32), 0)
    expected = np.float32(jnp.bfloat16(1 + 2**-8))
    np.testing.assert_array_equal(results[-1].astype(jnp.float32), np.full((2, 3), expected))


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_the_last_window_is_flushed_with_its_weights(kind: str) -> None:
    def given_gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        gradient, weight = batch
        return jnp.float32(0), gradient[0], weight[0]

    workers: Any = mesh_of(WORKERS) if kind == "mesh" else WORKERS
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    tx, w = jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), 3), jnp.zeros(2)
    given = np.random.default_rng(0).normal(size=(5, WORKERS, 2)).astype(np.float32)
    weights = [[1, 0, 2, 0], [3, 1, 0, 0], [0, 0, 0, 1], [0, 2, 1, 0], [1, 1, 0, 4]]
    step = make(lambda w, x: 0.0, tx, workers, gradients=given_gradients)
    state = jaxcomm.init(tx, w, workers)
    for number, weight in enumerate(np.array(weights, np.float32)):
        w, state, _ = step(w, state, (given[number], weight), flush=number == 4)
    first, last = (
        np.average(given[part].reshape(-1, 2), axis=0, weights=np.ravel(weights[part]))
        for part in (slice(0, 3), slice(3, 5))
    )
    np.testing.assert_allclose(w, -first - last, rtol=1e-5)
    assert state.mini_step == 0 and not np.any(state.own.per_worker["data"]["mean"])


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mesh", slow("simulated")])
def test_steps_scanned_trained_and_compiled_once(kind: str) -> None:
    tx = jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.rmsprop(0.05)), 2)
    start = lambda: {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}  # noqa: E731
    batches = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 5)), jnp.float32)
    workers = mesh_of(WORKERS) if kind == "mesh" else WORKERS
    traced = []

    def counting(params: Any, batch: Any) -> jax.Array:
        traced.append(1)
        return loss_fn(params, batch)

    make = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    step = make(counting, tx, workers)
    params, state = start(), jaxcomm.init(tx, start(), workers)
    before = jax.eval_shape(lambda s: s, state)
    counts = []
    for batch in batches:
        params, state, _ = step(params, state, batch)
        counts.append(len(traced))
    assert len(set(counts)) == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(before, state)
    alone, one = start(), optax.rmsprop(0.05)
    alone_state = one.init(alone)
    for both in batches.reshape(3, 16, 5):
        updates, alone_state = one.update(jax.grad(loss_fn)(alone, both), alone_state)
        alone = optax.apply_updates(alone, updates)
    chex.assert_trees_all_close(params, alone, rtol=1e-4, atol=1e-5)
    if kind == "mesh":

        def body(carry: Any, batch: Any) -> Any:
            params, state, _ = step(*carry, batch)
            return (params, state), None

        initially = start(), jaxcomm.init(tx, start(), workers)
        (scanned, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, batches))(initially)
        chex.assert_trees_all_close(params, scanned, rtol=1e-5, atol=1e-6)


def test_one_is_the_transformation_itself() -> None:
    tx = chain()
    assert jaxcomm.accumulate(tx, 1) is optax.with_extra_args_support(tx)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None, jnp.int32(2)])
def test_every_must_be_a_positive_int(every: Any) -> None:
    with pytest.raises(ValueError, match=r"`every` must be a Python int(,| of at least 1)"):
        jaxcomm.accumulate(chain(), every)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"jaxcomm\.init\(tx, params, mesh\)"):
        SGD.init(jnp.zeros(3))
    updates = gradients(WORKERS)
    twice = optax.chain(jaxcomm.mean(), SGD)
    with pytest.raises(ValueError, match="summed already"):
        aggregator(twice, WORKERS, "checked")(
            updates, initial(twice, updates, "checked"), jnp.ones(WORKERS)
        )
    with pytest.raises(ValueError, match="`weight` must be a scalar"):
        jax.vmap(lambda x: SGD.update(x, SGD.init(x), weight=jnp.ones(2))[0], axis_name="data")(
            jnp.ones((2, 3))
        )
    inside = synchronization.diloco(jaxcomm.accumulate(optax.sgd(0.1), 2), optax.sgd(0.7), 4)
    params, mesh = jaxcomm.replicate(jnp.zeros(3), mesh_of(2)), mesh_of(2)
    step = jaxcomm.make_step(lambda w, x: jnp.mean((w[None] - x) ** 2), inside, mesh)
    with pytest.raises(ValueError, match=r"place `jaxcomm.accumulate`.* around `diloco`"):
        step(params, jaxcomm.init(inside, params, mesh), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="only floating-point"):
        jax.vmap(SGD.init, axis_name="data")(jnp.ones((2, 3), jnp.int32))


def test_float64_is_not_lost_to_a_share_of_float32() -> None:
    with jax.enable_x64(True):
        tx, given = jaxcomm.accumulate(jaxcomm.mean(), 3), jnp.array([[1.0, 2.0, 4.0]] * 2)

        def run(xs: jax.Array) -> jax.Array:
            state = tx.init(xs[0])
            for x in xs:
                update, state = tx.update(x, state)
            return update

        found = jax.vmap(run, axis_name="data")(given)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, 7 / 3, rtol=1e-15)


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_a_step_flushes_without_another_program_or_collective(kind: str) -> None:
    workers: Any = mesh_of(WORKERS) if kind == "mesh" else WORKERS
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    traced, tx = [], jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(0.1)), 3)

    def counting(w: Any, x: jax.Array) -> jax.Array:
        traced.append(1)
        return jnp.mean((x @ w - 1) ** 2)

    batches = np.random.default_rng(0).normal(size=(5, 8, 3)).astype(np.float32)
    step, w = make(counting, tx, workers, donate=False), jnp.ones(3)
    start = w, jaxcomm.init(tx, w, workers)
    plain = jaxcomm.wire.account(step, *start, batches[0])
    flushing = jaxcomm.wire.account(step, *start, batches[0], flush=False)
    assert str(plain) == str(flushing)
    state, counts = start[1], []
    for number, batch in enumerate(batches):
        w, state, _ = step(w, state, batch, flush=number == 4)
        counts.append(len(traced))
    assert len({*counts[1:]}) == 1
    # By hand, on one device.
    right = np.ones(3)
    for rows in (batches[:3].reshape(-1, 3), batches[3:].reshape(-1, 3)):
        right = right - 0.1 * 2 * (rows * (rows @ right - 1)[:, None]).mean(0)
    np.testing.assert_allclose(w, right, rtol=1e-5)
    # Of weight 0, the flush adds no gradient.
    w, state = start
    for batch in batches[:2]:
        w, state, _ = step(w, state, batch, flush=False, weight=1.0)
    w, state, _ = step(w, state, batches[4], flush=True, weight=0.0)
    rows = batches[:2].reshape(-1, 3)
    right = 1 - 0.1 * 2 * (rows * (rows @ np.ones(3) - 1)[:, None]).mean(0)
    np.testing.assert_allclose(w, right, rtol=1e-5)


def test_a_scan_flushes_at_its_end() -> None:
    tx = jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), 4)
    step = jaxcomm.simulate(lambda w, x: w * jnp.mean(x), tx, 2, donate=False)
    w = jnp.float32(0)

    def body(carry: Any, at: Any) -> Any:
        w, state, _ = step(*carry, at[0], flush=at[1])
        return (w, state), w

    xs = jnp.arange(12.0).reshape(6, 2), jnp.arange(6) == 5
    _, path = jax.lax.scan(body, (w, jaxcomm.init(tx, w, 2)), xs)
    np.testing.assert_allclose(path, [0, 0, 0, -3.5, -3.5, -3.5 - 9.5])


def test_a_state_of_a_larger_window_ends_it() -> None:
    def make(every: int) -> Any:
        return jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), every)

    w, x = jnp.float32(0), jnp.array([1.0, 3.0])
    state, step = jaxcomm.init(make(8), w, 2), jaxcomm.simulate(lambda w, x: w * x[0], make(8), 2)
    for _ in range(5):
        w, state, _ = step(w, state, x)
    assert w == 0
    w, state, _ = jaxcomm.simulate(lambda w, x: w * x[0], make(4), 2)(w, state, x)
    assert w == -2 and state.mini_step == 0
