"""Stages take turns, remember one thing, and send what is theirs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.workers import MODE_ROWS, Mode, aggregator, initial, mesh_of


def top(k: int, axis_name: Any = "data", **options: Any) -> Any:
    return jaxcomm.all_gather_mean(error_feedback(top_k(k=k)), axis_name=axis_name, **options)


STAGES = [top(8), top(4), top(1)]
TX = jaxcomm.warmup(STAGES, every=2)
COUNTS = [8, 8, 4, 4, 1, 1, 1]


def given(workers: int, steps: int = len(COUNTS), size: int = 16) -> np.ndarray:
    return np.random.default_rng(workers).normal(size=(steps, workers, size)).astype(np.float32)


def by_hand(updates: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Top-k with error feedback, k as the steps go; the residual is never set back."""
    residual, means = np.zeros(updates.shape[1:]), []
    for count, step in zip(COUNTS, updates, strict=True):
        total = residual + step
        sent = np.zeros_like(total)
        for worker, row in enumerate(total):
            largest = np.argsort(-np.abs(row))[:count]
            sent[worker, largest] = row[largest]
        residual = total - sent
        means.append(sent.mean(axis=0))
    return means, residual


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODE_ROWS)
def test_stages_take_turns_and_memory_goes_on(mode: Mode) -> None:
    updates = given(3)
    run, state = aggregator(TX, 3, mode), initial(TX, jnp.asarray(updates[0]), mode)
    means, residual = by_hand(updates)
    for number, (step, expected) in enumerate(zip(updates, means, strict=True)):
        assert state.step == number
        results, state = run(jnp.asarray(step), state, jnp.ones(3))
        np.testing.assert_allclose(results, np.tile(expected, (3, 1)), atol=1e-6)
    kept = state.inner.own.per_worker["data"][0].kept
    np.testing.assert_allclose(kept, residual, atol=1e-6)


def test_each_stage_is_a_branch_and_the_heaviest_is_billed() -> None:
    updates = jnp.zeros((4, 64))
    run, state = aggregator(TX, 4, "checked"), initial(TX, updates, "checked")
    sent = jaxcomm.wire.account(run, updates, state, jnp.ones(4))
    branches = {path[-1] for path in (c.path for c in sent.collectives)}
    assert branches == {"cond 1/3", "cond 2/3", "cond 3/3"}
    of_branch = [
        sum(c.bytes_per_worker for c in sent.collectives if c.path[-1] == f"cond {i}/3")
        for i in (1, 2, 3)
    ]
    # 8 indices of 64 in a fixed 6 bits are 48 bits, by Elias and Fano 39: two words; then one.
    expected = [3 * (2 * 4 + 8 * 4 + 4), 3 * (4 + 4 * 4 + 4), 3 * (4 + 4 + 4)]
    assert of_branch == expected
    assert sent.bytes_per_worker == expected[0]


@pytest.mark.slow
def test_the_stage_of_a_late_step_sends_less() -> None:
    updates = jnp.zeros((4, 64))
    state = initial(TX, updates, "checked")
    run = aggregator(TX, 4, "checked")
    for step, stage in [(1, 0), (2, 1), (4, 2), (2**31 - 1, 2)]:
        at = state._replace(step=jnp.full_like(state.step, step))
        results, after = run(updates + jnp.arange(1.0, 65)[None], at, jnp.ones(4))
        assert np.count_nonzero(results[0]) == [8, 4, 1][stage]
        assert after.step == (step + 1 if step < 2**31 - 1 else 2**30)  # A full counter goes back.
    # In the compiled program too, gathers of the stages stand in branches of which one runs.
    text = run.lower(updates, state, jnp.ones(4)).compile().as_text()
    (branches,) = re.findall(r" conditional\(.*branch_computations=\{(.*?)\}", text)
    words = [
        sum(
            int(size)
            for size in re.findall(
                r"= [usf]32\[4,(\d+)\]\S* all-gather\(",
                re.search(rf"^{re.escape(name)} \(.*?^\}}", text, re.MULTILINE | re.DOTALL)[0],
            )
        )
        for name in branches.split(", ")
    ]
    assert words == [2 + 8 + 1, 1 + 4 + 1, 1 + 1 + 1]


def test_an_exact_step_first_is_weighted() -> None:
    tx = jaxcomm.warmup([jaxcomm.mean(), top(1)], every=1)
    x, weights = jnp.float32([[1, 2], [5, 10]]), jnp.float32([1, 3])

    def first(x: jax.Array, weight: jax.Array) -> jax.Array:
        return tx.update(x, tx.init(x), weight=weight)[0]

    for update in jax.vmap(first, axis_name="data")(x, weights):
        np.testing.assert_array_equal(update, [4, 8])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize(
    "method",
    [top(1), jaxcomm.power_sgd(rank=1), jaxcomm.power_sgd(rank=1, alternate=True)],
    ids=["top_k", "power_sgd", "acp_sgd"],
)
def test_exact_steps_first(method: Any, workers: int) -> None:
    """Exact means, then the method as if it began then: its state waits."""
    tx = jaxcomm.warmup([jaxcomm.mean(), method], every=2)
    rng = np.random.default_rng(0)
    gradients = jnp.asarray(rng.normal(size=(4, workers, 6, 5)), jnp.float32)
    mesh = mesh_of(workers)

    def run(tx: Any, gradients: jax.Array) -> Any:
        state = jaxcomm.init(tx, gradients[0, 0], mesh)
        specs = jaxcomm.state_specs(state)

        def body(state: Any, rows: jax.Array) -> Any:
            update, state = tx.update(rows[0], state)
            return state, update

        worker = lambda state, rows: jax.lax.scan(body, state, rows)  # noqa: E731
        return jax.jit(
            jax.shard_map(
                worker,
                mesh=mesh,
                in_specs=(specs, PartitionSpec(None, "data")),
                out_specs=(specs, PartitionSpec()),
            )
        )(state, gradients)

    state, found = run(tx, gradients)
    alone, expected = run(method, gradients[2:])
    np.testing.assert_allclose(found[:2], gradients[:2].mean(axis=1), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found[2:], expected, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 4
    assert jax.tree.structure(state.inner) == jax.tree.structure(alone)


@pytest.mark.parametrize(
    ("stages", "every", "message"),
    [
        (STAGES, jnp.int32(2), r"static_args=\('every',\)"),
        ([], 1, "`warmup` takes one or more stages"),
        ([top(1), top(1, "other")], 1, "over the same axes, got"),
        ([optax.sgd(1.0)], 1, "`warmup` takes aggregators"),
    ],
    ids=["traced", "none", "axes", "optimizer"],
)
def test_bad_options(stages: list, every: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.warmup(stages, every)


@pytest.mark.slow
def test_within_a_hierarchy_and_with_weights() -> None:
    stages = [jaxcomm.global_qsgd("dcn", bits=bits) for bits in (16, 8)]
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.warmup(stages, every=1))

    def two_steps(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, state = tx.update(x, tx.init(x), weight=weight)
        return first, tx.update(x, state, weight=weight)[0]

    run = jax.jit(jax.vmap(jax.vmap(two_steps, axis_name="ici"), axis_name="dcn"))
    rng = np.random.default_rng(2)
    updates, weights = rng.normal(size=(2, 2, 50)), np.array([[1.0, 2.0], [3.0, 0.0]])
    exact = np.average(updates.reshape(4, 50), axis=0, weights=weights.ravel())
    fine, coarse = run(jnp.asarray(updates, jnp.float32), jnp.asarray(weights, jnp.float32))
    errors = [np.abs(np.asarray(x)[0, 0] - exact).max() for x in (fine, coarse)]
    assert errors[0] < 1e-3 < errors[1] < 0.2


def test_the_learning_rate_goes_up_to_its_schedule() -> None:
    schedule = jaxcomm.warmup_schedule(optax.exponential_decay(0.8, 10, 0.5), 4, 8)
    for step in range(12):
        rising = 1 / 8 + (1 - 1 / 8) * min(step / 4, 1)
        np.testing.assert_allclose(schedule(step), rising * 0.8 * 0.5 ** (step / 10), rtol=1e-6)
    constant = jaxcomm.warmup_schedule(0.5, 3, 1)
    np.testing.assert_allclose([constant(step) for step in range(5)], 0.5)
    for options in ({"steps": 0, "workers": 2}, {"steps": 2, "workers": 0}):
        with pytest.raises(ValueError, match="must be a Python int of at least 1, got 0"):
            jaxcomm.warmup_schedule(0.1, **options)
