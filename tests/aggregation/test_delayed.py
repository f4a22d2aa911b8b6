"""The gradients of an earlier step, whose payload depends on the state only."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.workers import Mode, aggregator, initial, of_one_worker

MODES = pytest.mark.parametrize("mode", ["vmap", slow("checked"), slow("unchecked")])
WORKERS, STEPS = 4, 6


def given(steps: int = STEPS) -> Any:
    """Integers, of which sums are exact; [steps, workers, ...]."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-8, 8, (steps, WORKERS, *shape))  # noqa: E731
    return {
        "wide": jnp.asarray(draw(3, 2), jnp.float32),
        "narrow": jnp.asarray(draw(5), jnp.bfloat16),
    }


def at(tree: Any, step: int) -> Any:
    return jax.tree.map(lambda x: x[step], tree)


def results_of(
    tx: Any, updates: Any, mode: Mode = "vmap", weights: Any = None
) -> tuple[list[Any], Any]:
    """The results of all steps on all workers, and the last state; weights are [steps, workers]."""
    steps = len(jax.tree.leaves(updates)[0])
    run = aggregator(tx, WORKERS, mode, weighted=weights is not None)
    state, results = initial(tx, at(updates, 0), mode), []
    for step in range(steps):
        weight = np.ones(WORKERS, np.float32) if weights is None else weights[step]
        result, state = run(at(updates, step), state, weight)
        results.append(result)
    return results, state


@MODES
@pytest.mark.parametrize("staleness", [slow(1), 3])
def test_it_is_the_mean_of_an_earlier_step(staleness: int, mode: Mode) -> None:
    updates = given()
    results, state = results_of(jaxcomm.delayed(jaxcomm.mean(), staleness), updates, mode)
    for step, result in enumerate(results):
        for name, x in updates.items():
            earlier = np.asarray(x.astype(jnp.float32))[max(step - staleness, 0)]
            mean = jnp.asarray(earlier.mean(axis=0) * (step >= staleness)).astype(x.dtype)
            assert result[name].dtype == x.dtype
            np.testing.assert_array_equal(result[name], np.broadcast_to(mean, x.shape[1:]))
    assert state.own.per_worker["data"]["mean"]["wide"].shape == (WORKERS, staleness, 3, 2)
    assert state.oldest == STEPS % staleness


def test_two_delays_add_up() -> None:
    twice, _ = results_of(jaxcomm.delayed(jaxcomm.delayed(jaxcomm.mean(), 2), 1), given())
    once, _ = results_of(jaxcomm.delayed(jaxcomm.mean(), 3), given())
    chex.assert_trees_all_equal(twice, once)


def test_with_memory_it_is_the_aggregator_of_an_earlier_step() -> None:
    """The residual is that of the same gradients, which come later."""
    inner, updates = jaxcomm.all_gather_mean(error_feedback(top_k(k=2))), given()
    late, state = results_of(jaxcomm.delayed(inner, 2), updates)
    # The inner aggregator runs for the zeros of the first two steps as well.
    zeros = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]]), updates)
    alone, expected = results_of(inner, zeros)
    for found, result in zip(late, alone, strict=True):
        chex.assert_trees_all_equal(found, result)
    chex.assert_trees_all_equal(state.inner.own, expected.own)


def test_a_weight_goes_with_its_gradient() -> None:
    """Also that of a worker without samples, whose mean is NaN."""
    weights = np.random.default_rng(1).integers(0, 3, (STEPS, WORKERS)).astype(np.float32)
    weights[:, 0] = 1
    weights[2, 1] = 0
    updates = {"wide": given()["wide"].at[2, 1].set(jnp.nan)}
    results, state = results_of(jaxcomm.delayed(jaxcomm.mean()), updates, weights=weights)
    given_values = np.nan_to_num(np.asarray(updates["wide"], np.float64))
    for step in range(1, STEPS):
        shares = weights[step - 1] / weights[step - 1].sum()
        mean = np.tensordot(shares, given_values[step - 1], 1)
        np.testing.assert_allclose(results[step]["wide"][0], mean, rtol=0, atol=1e-5)
    ring = state.own.per_worker["data"]
    np.testing.assert_array_equal(ring["weight"][:, 0], weights[-1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ring))


@MODES
def test_a_nan_is_seen_in_its_own_step_and_changes_nothing(mode: Mode) -> None:
    """Training then goes on as if this step had not been."""
    tx = jaxcomm.delayed(jaxcomm.all_gather_mean(error_feedback(top_k(k=2))), 2)
    run, updates = aggregator(tx, WORKERS, mode), {"wide": given()["wide"]}
    ones, state = np.ones(WORKERS, np.float32), initial(tx, at(updates, 0), mode)
    for step in range(4):
        _, state = run(at(updates, step), state, ones)
    spoiled = {"wide": updates["wide"][4].at[1, 0, 0].set(jnp.nan)}
    results, after = run(spoiled, state, ones)
    assert np.isnan(results["wide"]).all()
    words = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    chex.assert_trees_all_equal(words(after), words(state))
    follows = run(at(updates, 4), after, ones)[0]
    chex.assert_trees_all_equal(follows, run(at(updates, 4), state, ones)[0])


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


def test_what_is_sent_does_not_depend_on_the_gradients_of_the_step() -> None:
    """Only the flag does, so that the rest may be sent beside the whole backward pass."""
    assert tainted_sums(jaxcomm.mean()) == [(64, True)]
    assert sorted(tainted_sums(jaxcomm.delayed(jaxcomm.mean()))) == [(1, True), (64, False)]


def test_without_delay_it_is_the_aggregator() -> None:
    tx = jaxcomm.mean()
    assert jaxcomm.delayed(tx, 0) is tx


def test_a_ring_takes_its_weighted_mean() -> None:
    """The mean of the gradients that are still to come is the same for other workers."""
    weights = np.array([[1, 2, 3, 0], [2, 2, 0, 1]], np.float32)
    updates = {"wide": given(2)["wide"]}
    tx = jaxcomm.delayed(jaxcomm.mean(), 2)
    _, state = results_of(tx, updates, weights=weights)
    resized, _ = jaxcomm.resize_workers(tx, state, of_one_worker(at(updates, 0)), 3)
    ring = resized.own.per_worker["data"]
    for slot in range(2):
        shares = weights[slot] / weights[slot].sum()
        mean = np.tensordot(shares, np.asarray(updates["wide"][slot]), 1)
        np.testing.assert_allclose(ring["mean"]["wide"][:, slot], np.stack([mean] * 3), rtol=1e-6)
        np.testing.assert_allclose(ring["weight"][:, slot], weights[slot].mean(), rtol=1e-6)


def test_it_is_the_last_stage_of_a_hierarchy_only() -> None:
    x = jnp.arange(4.0).reshape(2, 2)

    def two_steps(tx: Any) -> jax.Array:
        def steps(g: jax.Array) -> jax.Array:
            state = tx.update(g, tx.init(g))[1]
            result: jax.Array = tx.update(g, state)[0]
            return result

        return jax.vmap(jax.vmap(steps, axis_name="ici"), axis_name="dcn")(x)

    last = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.delayed(jaxcomm.mean("dcn")))
    np.testing.assert_array_equal(two_steps(last), np.full((2, 2), 1.5))
    first = jaxcomm.hierarchical(jaxcomm.delayed(jaxcomm.mean("ici")), jaxcomm.mean("dcn"))
    with pytest.raises(ValueError, match="Only the last stage of `hierarchical` may keep memory"):
        two_steps(first)


@pytest.mark.parametrize("staleness", [-1, 1.0, True, None])
def test_a_staleness_that_is_none_is_an_error(staleness: Any) -> None:
    with pytest.raises(ValueError, match="`staleness` must be a Python int of at least 0"):
        jaxcomm.delayed(jaxcomm.mean(), staleness)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="`delayed` takes aggregators"):
        jaxcomm.delayed(optax.chain(jaxcomm.mean(), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"`axis_name`=.*is not bound here"):
        jaxcomm.delayed(jaxcomm.mean()).init(jnp.zeros(3))
