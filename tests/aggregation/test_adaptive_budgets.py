"""Budgets that follow measured speeds: the rule in NumPy, and the bytes of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import adaptive_budgets, budgeted_mean, wire
from jaxcomm.aggregation._adaptive_budgets import AdaptiveBudgetsState, _next, link_bytes
from jaxcomm.aggregation._budgeted import plan_of
from jaxcomm.compression.quantizers import dither
from tests.workers import abstract, aggregator

WORKERS, SIZE = 4, 600
PLANS = [{}, {1: 2}, {0: 2, 1: 2}]


def bits(number: int) -> jaxcomm.Codec:
    return dither(levels=2 ** (number - 1) - 1)


def predicted(slow: dict[int, int]) -> np.ndarray:
    return link_bytes(plan_of(bits, 8, slow, WORKERS), bits(4), SIZE)


@pytest.mark.parametrize("slow", PLANS, ids=str)
def test_predicted_bytes_are_those_of_the_program(slow: dict[int, int]) -> None:
    updates = jnp.ones((WORKERS, SIZE))
    tx = budgeted_mean(bits, 8, slow=slow, mean_codec=bits(4))
    arguments = updates, abstract(tx, updates, "checked"), jnp.ones(WORKERS)
    found = wire.account(aggregator(tx, WORKERS, "checked"), *arguments)
    sent, received = predicted(slow)
    flag = 2 * 3 / 4 * 4
    for worker in range(WORKERS):
        assert found.bytes_sent(worker) == sent[worker] + flag
        assert found.bytes_received(worker) == received[worker] + flag


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


def speeds_of_a_run() -> np.ndarray:
    even, slow_1, both = [1e-4] * 4, [1e-4, 3e-4, 1e-4, 1e-4], [3e-4, 3e-4, 1e-4, 1e-4]
    hopeless, unknown = [1.0] * 4, [1e-4, np.nan, 1e-4, 1e-4]
    return np.array(
        [even, slow_1, even, slow_1, even, even, unknown, even, both, both, hopeless, *[even] * 4]
    )


def test_the_rule() -> None:
    """Without an aggregator: which plan follows from predicted seconds."""
    speeds, zero = speeds_of_a_run(), jnp.zeros((), jnp.int32)
    per_plan = np.stack([predicted(slow).max(axis=0) for slow in PLANS])
    seconds = np.max(per_plan[None] * speeds[:, None], axis=-1)

    def step(state: AdaptiveBudgetsState, seconds: jax.Array) -> tuple[object, jax.Array]:
        after = AdaptiveBudgetsState(*_next(state, seconds, 0.2, 3), ())
        return after, after.plan

    first = AdaptiveBudgetsState(zero, zero, ())
    _, found = jax.lax.scan(step, first, jnp.asarray(seconds, jnp.float32))
    assert [0, *found.tolist()] == plans_by_hand(speeds, 0.2, 3)
    assert {*found.tolist()} == {0, 1, 2}


@pytest.mark.slow
def test_the_plans_of_a_run() -> None:
    speeds = speeds_of_a_run()
    tx = adaptive_budgets(bits, 8, PLANS, target_seconds=0.2, patience=3, mean_codec=bits(4))

    def worker(x: jax.Array, speeds: jax.Array) -> jax.Array:
        def step(state: object, speed: jax.Array) -> tuple[object, jax.Array]:
            mean, state = tx.update(x, state, seconds_per_byte=speed)
            return state, (state.plan, mean[0])

        return jax.lax.scan(step, tx.init(x), speeds)[1]

    run = jax.jit(jax.vmap(worker, in_axes=(0, 1), axis_name="data"))
    found, means = run(jnp.ones((WORKERS, SIZE)), jnp.asarray(speeds, jnp.float32))
    assert np.ptp(found, axis=0).max() == 0
    assert [0, *found[0].tolist()] == plans_by_hand(speeds, 0.2, 3)
    assert {*found[0].tolist()} == {0, 1, 2}
    np.testing.assert_allclose(means, 1, rtol=1e-5)  # Equal numbers are exact in any plan.


@pytest.mark.slow
def test_on_a_mesh_each_plan_is_a_branch() -> None:
    tx, updates = (
        adaptive_budgets(bits, 8, PLANS, target_seconds=0.25),
        jnp.ones((WORKERS, SIZE)),
    )
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    spec = jax.sharding.PartitionSpec("data")

    def step(x: jax.Array, speed: jax.Array) -> jax.Array:
        mean, state = tx.update(x[0], tx.init(x[0]), seconds_per_byte=speed[0])
        return mean + state.plan.astype(jnp.float32) * 0

    whole = jax.sharding.PartitionSpec()
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=whole))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    given = jax.device_put((updates, jnp.full(WORKERS, 1e-4)), sharding)
    found = wire.account(run, *given)
    assert {path for each in found.collectives for path in each.path} == {
        "cond 1/3",
        "cond 2/3",
        "cond 3/3",
    }
    np.testing.assert_allclose(run(*given), 1, rtol=1e-5)


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"`target_seconds`.*got inf"):
        adaptive_budgets(bits, 8, PLANS, target_seconds=np.inf)


@pytest.mark.slow
def test_in_steps_with_the_speeds_of_all() -> None:
    aggregator = adaptive_budgets(
        bits, 8, PLANS[::2], target_seconds=0.2, patience=1, mean_codec=bits(4)
    )
    tx, params = optax.chain(aggregator, optax.sgd(0.1)), jnp.zeros(SIZE)
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    loss = lambda params, batch: jnp.mean((params[None] - batch) ** 2)  # noqa: E731
    both = jnp.array([3e-4, 3e-4, 1e-4, 1e-4])
    for laid_out in mesh, WORKERS:
        make = jaxcomm.simulate if laid_out == WORKERS else jaxcomm.make_step
        step, state = make(loss, tx, laid_out), jaxcomm.init(tx, params, laid_out)
        found, given = [], jnp.zeros(SIZE)
        for speeds in both, jnp.full(WORKERS, 1e-4), jnp.full(WORKERS, 1e-4):
            batch = jnp.ones((WORKERS, SIZE))
            given, state, _ = step(given, state, batch, seconds_per_byte=speeds)
            found.append(int(state[0].plan))
        assert found == [1, 0, 0]


@pytest.mark.parametrize("given", [None, jnp.ones(3)], ids=["missing", "vector"])
def test_a_speed_is_needed(given: object) -> None:
    tx = adaptive_budgets(bits, 8, PLANS, target_seconds=1.0)
    with pytest.raises(ValueError, match=r"seconds_per_byte=\)` must be a scalar"):
        jax.vmap(lambda x: tx.update(x, tx.init(x), seconds_per_byte=given)[0], axis_name="data")(
            jnp.ones((4, 8))
        )
