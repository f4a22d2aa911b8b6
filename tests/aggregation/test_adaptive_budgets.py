"""Budgets that follow measured speeds: the rule in NumPy, and the bytes of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import adaptive_budgets, budgeted_mean, wire
from jaxcomm.aggregation._adaptive_budgets import link_bytes
from jaxcomm.aggregation._budgeted import plan_of
from jaxcomm.compression.quantizers import dither
from tests.aggregation.runs import WHERE, WORKERS, prepared, refuse, sent, simulated

SIZE = 600
PLANS = [{}, {1: 2}, {0: 2, 1: 2}]


def bits(number: int) -> jaxcomm.Codec:
    return dither(levels=2 ** (number - 1) - 1)


def predicted(slow: dict[int, int]) -> np.ndarray:
    return link_bytes(plan_of(bits, 8, slow, WORKERS), bits(4), SIZE)


@pytest.mark.parametrize("slow", PLANS, ids=str)
def test_predicted_bytes_are_those_of_the_program(slow: dict[int, int]) -> None:
    tx = budgeted_mean(bits, 8, slow=slow, mean_codec=bits(4))
    found, flag = sent(tx, jnp.ones((WORKERS, SIZE))), 2 * 3 / 4 * 4
    here = [(found.bytes_sent(i), found.bytes_received(i)) for i in range(WORKERS)]
    np.testing.assert_array_equal(here, np.transpose(predicted(slow)) + flag)


def plans_by_hand(speeds: np.ndarray, target: float, patience: int) -> list[int]:
    """The plan of each step, and the one after the last."""
    plan, waited, found = 0, 0, [0]
    for of_step in speeds:
        if np.all(np.isfinite(of_step) & (of_step > 0)):
            seconds = [np.max(predicted(slow).max(axis=0) * of_step) for slow in PLANS]
            meeting = [number for number, each in enumerate(seconds) if each <= target]
            wanted = meeting[0] if meeting else int(np.argmin(seconds))
            waited = waited + 1 if wanted < plan else 0
            if wanted > plan or waited == patience:
                plan, waited = wanted, 0
        found.append(plan)
    return found


def test_the_plans_of_a_run() -> None:
    even, slow_1, both = [1e-4] * 4, [1e-4, 3e-4, 1e-4, 1e-4], [3e-4, 3e-4, 1e-4, 1e-4]
    hopeless, unknown = [1.0] * 4, [1e-4, np.nan, 1e-4, 1e-4]
    speeds = np.array(
        [even, slow_1, even, slow_1, even, even, unknown, even, both, both, hopeless, *[even] * 4]
    )
    tx = adaptive_budgets(bits, 8, PLANS, target_seconds=0.2, patience=3, mean_codec=bits(4))

    def worker(x: jax.Array, speeds: jax.Array) -> jax.Array:
        def step(state: object, speed: jax.Array) -> tuple[object, jax.Array]:
            mean, state = tx.update(x, state, seconds_per_byte=speed)
            return state, (state.plan, mean[0])

        return jax.lax.scan(step, tx.init(x), speeds)[1]

    run = jax.jit(jax.vmap(worker, in_axes=(0, 1), axis_name="data"))
    found, means = run(jnp.ones((WORKERS, SIZE)), jnp.asarray(speeds, jnp.float32))
    expected = plans_by_hand(speeds, 0.2, 3)[1:]
    np.testing.assert_array_equal(found, [expected] * WORKERS)
    assert {*expected} == {0, 1, 2}
    np.testing.assert_allclose(means, 1, rtol=1e-5)  # Equal numbers are exact in any plan.


@pytest.mark.slow
@WHERE
def test_plans_follow_the_speeds_of_all_workers(where: object) -> None:
    """Each plan is a branch of the program."""
    options = {"target_seconds": 0.2, "patience": 1, "mean_codec": bits(4)}
    tx, params = adaptive_budgets(bits, 8, PLANS[::2], **options), jnp.zeros(SIZE)
    loss = lambda params, batch: jnp.mean((params[None] - batch) ** 2)  # noqa: E731
    step, state = prepared(loss, tx, params, where)
    even, both, found = jnp.full(WORKERS, 1e-4), jnp.array([3e-4, 3e-4, 1e-4, 1e-4]), []
    batch = jnp.ones((WORKERS, SIZE))
    account = wire.account(step, params, state, batch, seconds_per_byte=both)
    assert {path for c in account.collectives for path in c.path} == {"cond 1/2", "cond 2/2"}
    for speeds in both, even, even:
        params, state, _ = step(params, state, batch, seconds_per_byte=speeds)
        found.append(int(state.plan))
    assert found == [1, 0, 0]


@pytest.mark.parametrize("given", [None, jnp.ones(3)], ids=["missing", "vector"])
def test_a_speed_is_needed(given: object) -> None:
    tx, updates = adaptive_budgets(bits, 8, PLANS, target_seconds=1.0), jnp.ones((4, 8))
    message = r"seconds_per_byte=\)` must be a scalar"
    refuse(message, lambda: simulated(tx, updates, seconds_per_byte=given))
