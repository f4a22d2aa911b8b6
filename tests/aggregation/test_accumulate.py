"""Gradients added up on the spot: the numbers of a big batch, and nothing sent in between."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import accumulate, synchronization
from tests.aggregation.runs import WHERE, WORKERS, compiled, last, prepared, refuse, sent, steps
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, flat, gradients, mesh_of

CHAIN = optax.chain(jaxcomm.mean(), optax.sgd(0.5, momentum=0.9))
SGD = accumulate(CHAIN, 3)
QUANTIZED = accumulate(optax.chain(jaxcomm.global_qsgd(), optax.sgd(1.0)), 3)
PAIRS = accumulate(jaxcomm.mean(), 2)


@pytest.mark.parametrize("mode", ["checked", slow("unchecked")])
def test_nothing_is_sent_outside_of_the_last_mini_step(mode: Mode) -> None:
    updates = gradients(WORKERS)
    account = sent(QUANTIZED, updates, mode)
    assert account.collectives and {c.path for c in account.collectives} == {("cond 2/2",)}
    alone = sent(jaxcomm.global_qsgd(), updates, mode)
    assert account.bytes_per_worker == alone.bytes_per_worker
    assert {c.path for c in compiled(QUANTIZED, updates, mode).collectives} == {("cond 2/2",)}


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_weights_count_over_mini_steps_and_workers(mode: Mode) -> None:
    given = [gradients(WORKERS, seed) for seed in range(2)]
    weights = np.array([[1, 0, 2, 0], [3, 1, 0, 0]], np.float32)
    every = np.concatenate([flat(updates) for updates in given])
    given[0]["kernel"] = given[0]["kernel"].at[1].set(jnp.nan)  # Of weight 0.
    results, _ = last(PAIRS, given, mode, weights)
    expected = np.tile(np.average(every, axis=0, weights=weights.ravel()), (WORKERS, 1))
    np.testing.assert_allclose(flat(results), expected, rtol=1e-5, atol=1e-6)
    results, _ = last(PAIRS, given, mode, 0 * weights)
    assert (flat(results) == 0).all()


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_a_nan_is_counted_once(mode: Mode) -> None:
    given = gradients(WORKERS)
    bad = {**given, "scale": given["scale"].at[2].set(jnp.nan)}
    seen = [flat(x) for x, _ in steps(QUANTIZED, [given, bad, *[given] * 4], mode)]
    assert np.isnan(seen[2]).all() and np.isfinite(seen[5]).all()
    assert (np.array(seen)[[0, 1, 3, 4]] == 0).all()


def test_huge_gradients_do_not_overflow() -> None:
    """Two workers' sum does in `mean`; what was accumulated does not."""
    _, state = last(SGD, [jnp.full((2, 3), 3e38)] * 3)
    assert np.isfinite(state.own.per_worker["data"]["mean"]).all()


def test_half_precision_is_added_in_float32() -> None:
    tx = accumulate(jaxcomm.mean(), 256)

    def run(x: jax.Array) -> tuple[jax.Array, Any]:
        body = lambda state, _: tx.update(x, state)[::-1]  # noqa: E731
        state, results = jax.lax.scan(body, tx.init(x), None, length=256)
        return results, state.own.per_worker["data"]["mean"]

    given = jnp.full((2, 3), 1.0, jnp.bfloat16).at[0].set(1 + 2**-7)
    results, total = jax.jit(jax.vmap(run, axis_name="data"))(given)
    assert results.dtype == jnp.bfloat16 and total.dtype == jnp.float32
    results = np.asarray(results, np.float32)
    assert not results[:, :-1].any()
    np.testing.assert_array_equal(results[:, -1], np.float32(jnp.bfloat16(1 + 2**-8)))


@WHERE
def test_the_last_window_is_flushed_with_its_weights(where: Any) -> None:
    """Without another program or collective; of weight 0, a flush adds no gradient."""
    traced = []

    def given_gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        traced.append(1)
        gradient, weight = batch
        return jnp.float32(0), gradient[0], weight[0]

    sgd, w = optax.sgd(1.0, momentum=0.5), jnp.zeros(2)
    tx = accumulate(optax.chain(jaxcomm.mean(), sgd), 3)
    given = np.random.default_rng(0).normal(size=(5, WORKERS, 2)).astype(np.float32)
    weights = np.float32([[1, 0, 2, 0], [3, 1, 0, 0], [0, 0, 0, 1], [0, 2, 1, 0], [1, 1, 0, 4]])
    step, start = prepared(lambda w, x: 0.0, tx, w, where, gradients=given_gradients)
    plain, flushing = (
        jaxcomm.wire.account(step, w, start, (given[0], weights[0]), **options)
        for options in ({}, {"flush": False})
    )
    assert str(plain) == str(flushing)
    state, counts = start, []
    for number in range(5):
        w, state, _ = step(w, state, (given[number], weights[number]), flush=number == 4)
        counts.append(len(traced))
    assert len({*counts[1:]}) == 1
    mean = lambda part: np.average(  # noqa: E731
        given[part].reshape(-1, 2), axis=0, weights=weights[part].ravel()
    )
    np.testing.assert_allclose(w, -1.5 * mean(np.s_[:3]) - mean(np.s_[3:]), rtol=1e-5)
    assert state.mini_step == 0 and not np.any(state.own.per_worker["data"]["mean"])
    w, state = jnp.zeros(2), start
    for number, factor in enumerate((1, 1, 0)):
        batch = given[number], factor * weights[number]
        w, state, _ = step(w, state, batch, flush=number == 2)
    np.testing.assert_allclose(w, -mean(np.s_[:2]), rtol=1e-5)


@WHERE
def test_a_scan_flushes_at_its_end(where: Any) -> None:
    tx = accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), 4)
    w = jnp.float32(0)
    step, state = prepared(lambda w, x: w * jnp.mean(x), tx, w, where)

    def body(carry: Any, at: Any) -> Any:
        w, state, _ = step(*carry, at[0], flush=at[1])
        return (w, state), w

    xs = jnp.arange(24.0).reshape(6, 4), jnp.arange(6) == 5
    _, path = jax.jit(lambda carry: jax.lax.scan(body, carry, xs))((w, state))
    np.testing.assert_allclose(path, [0, 0, 0, -7.5, -7.5, -7.5 - 19.5])


def test_one_mini_step_equals_the_transformation() -> None:
    assert accumulate(CHAIN, 1) is optax.with_extra_args_support(CHAIN)


def test_windows_within_local_steps_are_refused() -> None:
    tx = synchronization.diloco(accumulate(optax.sgd(0.1), 2), optax.sgd(0.7), 4)
    params, mesh = jaxcomm.replicate(jnp.zeros(3), mesh_of(2)), mesh_of(2)
    step, state = prepared(lambda w, x: jnp.mean((w[None] - x) ** 2), tx, params, mesh)
    message = r"place `jaxcomm.accumulate`.* around `diloco`"
    refuse(message, lambda: step(params, state, jnp.ones((2, 3))))
