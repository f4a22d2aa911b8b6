"""Stages take turns, remember one thing, and send what is theirs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import warmup
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import last, over, refuse, sent, steps
from tests.slow import slow
from tests.workers import initial, mesh_of


def top(k: int, axis_name: Any = "data", **options: Any) -> Any:
    return jaxcomm.all_gather_mean(error_feedback(top_k(k=k)), axis_name=axis_name, **options)


STAGES = [top(8), top(4), top(1)]
TX = warmup(STAGES, every=2)


def test_stages_are_branches_and_the_largest_is_counted() -> None:
    account = sent(TX, jnp.zeros((4, 64)))
    found: dict[str, float] = {}
    for c in account.collectives:
        found[c.path[-1]] = found.get(c.path[-1], 0) + c.bytes_per_worker
    # 8 indices of 64 in a fixed 6 bits are 48 bits, by Elias and Fano 39: two words; then one.
    expected = [3 * (2 * 4 + 8 * 4 + 4), 3 * (4 + 4 * 4 + 4), 3 * (4 + 4 + 4)]
    assert found == {f"cond {i + 1}/3": each for i, each in enumerate(expected)}
    assert account.bytes_per_worker == expected[0]


def test_the_stage_of_a_late_step_sends_less() -> None:
    updates = jnp.zeros((4, 64)) + jnp.arange(1.0, 65)[None]
    state = initial(TX, updates, "vmap")
    for step, stage in [(1, 0), (2, 1), (4, 2), (2**31 - 1, 2)]:
        at = state._replace(step=jnp.full_like(state.step, step))
        results, after = last(TX, [updates], state=at)
        assert np.count_nonzero(results[0]) == [8, 4, 1][stage]
        assert after.step == (step + 1 if step < 2**31 - 1 else 2**30)  # A full counter goes back.


def test_exact_first_steps_are_weighted() -> None:
    tx = warmup([jaxcomm.mean(), top(1)], every=1)
    ((results, _),) = steps(tx, [np.array([[1, 2], [5, 10.0]])], weights=[[1, 3]])
    np.testing.assert_array_equal(results, [[4, 8]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, slow(8)])
@pytest.mark.parametrize("method", [top(1), jaxcomm.power_sgd(rank=1, alternate=True)])
def test_exact_steps_first(method: Any, workers: int) -> None:
    """Exact means, then the method as if it began then: its state waits."""
    tx, mesh = warmup([jaxcomm.mean(), method], every=2), mesh_of(workers)
    draw = np.random.default_rng(0).normal(size=(workers, 4, 6, 5))
    gradients = jnp.asarray(draw, jnp.float32)

    def run(tx: Any, gradients: jax.Array) -> Any:
        body = lambda state, x: tx.update(x, state)[::-1]  # noqa: E731
        scanned = lambda own: jax.lax.scan(body, tx.init(own[0]), own)[1]  # noqa: E731
        return over(mesh, "data", scanned)(gradients)

    found, expected = run(tx, gradients), run(method, gradients[:, 2:])
    np.testing.assert_allclose(found[:2], draw[:, :2].mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[2:], expected, rtol=1e-5, atol=1e-6)


def test_stages_over_other_axes_are_refused() -> None:
    stages = [top(1), top(1, "other")]
    refuse("over the same axes, got", lambda: warmup(stages, 1))


def test_within_a_hierarchy() -> None:
    """The second step is exact, the first by 8 bits."""
    tx = jaxcomm.hierarchical(
        jaxcomm.mean("ici"),
        warmup([jaxcomm.global_qsgd("dcn", bits=8), jaxcomm.mean("dcn")], every=1),
    )

    def two_steps(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, state = tx.update(x, tx.init(x))
        return first, tx.update(x, state)[0]

    run = jax.jit(jax.vmap(jax.vmap(two_steps, axis_name="ici"), axis_name="dcn"))
    updates = np.random.default_rng(2).normal(size=(2, 2, 50)).astype(np.float32)
    mean = updates.mean(axis=(0, 1))
    coarse, exact = (np.abs(np.asarray(x) - mean).max() for x in run(updates))
    assert exact < 1e-6 < coarse < 0.2


def test_the_learning_rate_rises_to_its_schedule() -> None:
    schedule = jaxcomm.warmup_schedule(optax.exponential_decay(0.8, 10, 0.5), 4, 8)
    for step in range(12):
        rising = 1 / 8 + (1 - 1 / 8) * min(step / 4, 1)
        np.testing.assert_allclose(schedule(step), rising * 0.8 * 0.5 ** (step / 10), rtol=1e-6)
    constant = jaxcomm.warmup_schedule(0.5, 3, 1)
    np.testing.assert_allclose([constant(step) for step in range(5)], 0.5)
