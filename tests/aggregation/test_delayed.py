"""The gradients of an earlier step, whose payload depends on the state only."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import delayed
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import last, refuse, steps
from tests.slow import slow
from tests.workers import Mode, of_one_worker

WORKERS, STEPS = 4, 6
LATE = delayed(jaxcomm.mean())


def given(steps: int = STEPS) -> list[Any]:
    """Integers, of which sums are exact, for each step."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-8, 8, (steps, WORKERS, *shape))  # noqa: E731
    wide, narrow = draw(3, 2).astype(np.float32), draw(5).astype(jnp.bfloat16)
    return [{"wide": x, "narrow": y} for x, y in zip(wide, narrow, strict=True)]


@pytest.mark.parametrize("mode", ["vmap", slow("checked"), slow("unchecked")])
@pytest.mark.parametrize("staleness", [slow(1), 3])
def test_equals_the_mean_of_an_earlier_step(staleness: int, mode: Mode) -> None:
    updates = given()
    tx = delayed(jaxcomm.mean(), staleness)
    found = [*steps(tx, updates, mode)]
    for step, (results, _) in enumerate(found):
        earlier = jax.tree.map(lambda x: 0 * x, updates[0])
        earlier = updates[step - staleness] if step >= staleness else earlier
        for name, x in earlier.items():
            mean = x.astype(np.float32).mean(axis=0).astype(x.dtype)
            assert results[name].dtype == x.dtype
            np.testing.assert_array_equal(results[name], np.broadcast_to(mean, x.shape))
    state = found[-1][1]
    assert state.own.per_worker["data"]["mean"]["wide"].shape == (WORKERS, staleness, 3, 2)
    assert state.oldest == STEPS % staleness


def test_with_memory_it_equals_an_earlier_aggregation() -> None:
    """The residual is that of the same gradients, which come later."""
    inner, updates = jaxcomm.all_gather_mean(error_feedback(top_k(k=2))), given()
    # The inner aggregator runs for the zeros of the first two steps as well.
    zeros = jax.tree.map(lambda x: 0 * x, updates[:2])
    late, alone = (
        [*steps(delayed(inner, 2), updates)],
        [*steps(inner, zeros + updates[:-2])],
    )
    chex.assert_trees_all_equal([x for x, _ in late], [x for x, _ in alone])
    chex.assert_trees_all_equal(late[-1][1].inner.own, alone[-1][1].own)


def test_a_weight_is_delayed_with_its_gradient() -> None:
    """Also that of a worker without samples, whose mean is NaN."""
    weights = np.random.default_rng(1).integers(0, 3, (STEPS, WORKERS)).astype(np.float32)
    weights[:, 0] = 1
    weights[2, 1] = 0
    values = np.array([each["wide"] for each in given()])
    spoiled = values.copy()
    spoiled[2, 1] = np.nan
    found = [*steps(LATE, spoiled, weights=weights)]
    for step in range(1, STEPS):
        mean = np.average(values[step - 1], axis=0, weights=weights[step - 1])
        np.testing.assert_allclose(found[step][0][0], mean, rtol=0, atol=1e-5)
    ring = found[-1][1].own.per_worker["data"]
    np.testing.assert_array_equal(ring["weight"][:, 0], weights[-1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ring))


def tainted_sums(tx: Any) -> list[tuple[int, bool]]:
    """Of each all-reduce its coordinates, and whether it depends on the gradients of the step."""
    updates = jnp.ones(64)
    state = jax.eval_shape(lambda x: jax.vmap(tx.init, axis_name="data")(x[None]), updates)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), state)
    traced = jax.make_jaxpr(tx.update, axis_env=[("data", WORKERS)])(updates, state)
    late, found = {traced.jaxpr.invars[0]}, []
    for equation in traced.jaxpr.eqns:
        depends = any(x in late for x in equation.invars if not hasattr(x, "val"))
        late |= {*equation.outvars} if depends else set()
        if equation.primitive.name.startswith(("psum", "pmax")):
            found.append((sum(x.aval.size for x in equation.outvars), depends))
    return found


def test_payloads_do_not_depend_on_the_current_gradients() -> None:
    """Only the flag does, so that the rest may be sent beside the whole backward pass."""
    assert tainted_sums(jaxcomm.mean()) == [(64, True)]
    assert sorted(tainted_sums(LATE)) == [(1, True), (64, False)]


def test_without_delay_it_equals_the_aggregator() -> None:
    tx = jaxcomm.mean()
    assert delayed(tx, 0) is tx


def test_a_ring_takes_its_weighted_mean() -> None:
    """The mean of the gradients that are still to come is the same for other workers."""
    weights = np.array([[1, 2, 3, 0], [2, 2, 0, 1]], np.float32)
    updates, tx = [each["wide"] for each in given(2)], delayed(jaxcomm.mean(), 2)
    _, state = last(tx, updates, weights=weights)
    resized, _ = jaxcomm.resize_workers(tx, state, of_one_worker(updates[0]), 3)
    ring = resized.own.per_worker["data"]
    for slot, (x, weight) in enumerate(zip(updates, weights, strict=True)):
        mean = np.average(x, axis=0, weights=weight)
        np.testing.assert_allclose(ring["mean"][:, slot], np.stack([mean] * 3), rtol=1e-6)
        np.testing.assert_allclose(ring["weight"][:, slot], weight.mean(), rtol=1e-6)


def test_it_must_be_the_last_stage_of_a_hierarchy() -> None:
    def two_steps(*stages: Any) -> jax.Array:
        tx = jaxcomm.hierarchical(*stages)

        def steps(g: jax.Array) -> jax.Array:
            result: jax.Array = tx.update(g, tx.update(g, tx.init(g))[1])[0]
            return result

        over_dcn = jax.vmap(jax.vmap(steps, axis_name="ici"), axis_name="dcn")
        return over_dcn(jnp.arange(4.0).reshape(2, 2))

    late = two_steps(jaxcomm.mean("ici"), delayed(jaxcomm.mean("dcn")))
    np.testing.assert_array_equal(late, np.full((2, 2), 1.5))
    refuse(
        "Only the last stage of `hierarchical` may keep memory",
        lambda: two_steps(delayed(jaxcomm.mean("ici")), jaxcomm.mean("dcn")),
    )
