"""The derivative of an update is that of what is sent, or an error says that there is none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.gossip import workers as gossip_workers
from tests.workers import aggregator, initial

WORKERS, SMALL = 2, 1e-3
# The others round, or draw by probabilities that depend on the update.
DIFFERENTIABLE = {
    *("mean", "ring_mean", "mean_bfloat16", "sharded_server", "delayed", "lazy"),
    *(
        "top_k_sgd",
        "top_k_bfloat16",
        "top_k_blocks",
        "top_k_sampled",
        "top_k_two_stage",
        "threshold",
    ),
    *("gtop_k", "golomb_rice_top_k", "sharded_server_top_k", "warmup", "adaptive_ratio"),
    *("random_k", "random_k_feedback", "block_coordinate", "block_coordinate_random"),
    *("block_coordinate_southwell", "block_coordinate_alone", "demo", "nonzero", "nonzero_union"),
    *("sparcml", "parallax", "s2_reducer", "s2_reducer_median", "s2_reducer_peel"),
    *("power_sgd", "power_sgd_alternate", "power_iteration", "dion", "ef21", "local_clip"),
    *("deep_gradient_compression", "momentum_correction", "zeroth_order", "zeroth_order_gaussian"),
}
# The derivative of a cast is 1, as JAX has it: that of the row without it.
NARROW = {"mean_bfloat16": "mean", "top_k_bfloat16": "top_k_sgd"}
REFUSED = "gradient|derivative|custom_vjp"


def spread(seed: int) -> Any:
    """Updates whose magnitudes differ, so that small changes select the same coordinates."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        size = WORKERS * int(np.prod(shape))
        magnitudes = 2.0 ** (rng.permutation(size) * (4 / size) - 2)
        signs = rng.choice([-1.0, 1.0], size=size)
        return jnp.asarray((signs * magnitudes).reshape(WORKERS, *shape), jnp.float32)

    return {"bias": draw(3), "kernel": draw(5, 2)}


def floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def along(run: Any, given: Any, direction: Any) -> Any:
    """`t -> run(given + t direction)`, whose floats are concatenated."""

    def of(t: jax.Array | float) -> jax.Array:
        moved = jax.tree.map(lambda x, d: x + (t * d).astype(x.dtype), given, direction)
        return jnp.concatenate([x.astype(jnp.float32).ravel() for x in floats(run(moved))])

    return of


def close(found: Any, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def directional(of: Any) -> tuple[Any, Any]:
    """The derivative at 0, in forward mode, and finite differences."""
    zero = jnp.float32(0)
    return jax.jvp(of, (zero,), (jnp.ones_like(zero),))[1], (of(SMALL) - of(-SMALL)) / (2 * SMALL)


def of_step(case: Case, mode: Any, given: Any, direction: Any) -> Any:
    step, state = aggregator(case.make(), WORKERS, mode), initial(case.make(), given, mode)
    return along(lambda x: step(x, state, jnp.ones(WORKERS)), given, direction)


@pytest.mark.parametrize("mode", ["checked", pytest.param("vmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_derivatives_of_updates_and_state(case: Case, mode: Any) -> None:
    given, direction = spread(0), jax.tree.map(lambda x: 0.3 * x, spread(1))
    of = of_step(case, mode, given, direction)
    if case.name not in DIFFERENTIABLE:
        with pytest.raises(TypeError, match=REFUSED):
            directional(of)
        return
    found, expected = directional(of)
    if case.name in NARROW:
        (exact,) = (other for other in CASES if other.name == NARROW[case.name])
        expected, _ = directional(of_step(exact, mode, given, direction))
    close(found, expected, 1e-2 if case.name in NARROW else 2e-3)


@pytest.mark.parametrize("mode", ["checked", "unchecked", "vmap"])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in DIFFERENTIABLE - {"s2_reducer_peel"}],
    ids=repr,
)
def test_reverse_mode_is_the_transpose_of_forward_mode(case: Case, mode: Any) -> None:
    given, direction, tx = spread(0), spread(1), case.make()
    step, state = aggregator(tx, WORKERS, mode), initial(tx, given, mode)
    run = lambda x: floats(step(x, state, jnp.ones(WORKERS)))  # noqa: E731
    result, slope = jax.jvp(run, (given,), (direction,))
    rng = np.random.default_rng(2)
    cotangent = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in result]
    (pulled,) = jax.vjp(run, given)[1](cotangent)
    dot = lambda a, b: sum(  # noqa: E731
        float(np.vdot(np.float64(x), np.float64(y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    tolerance = 2e-2 if case.name in NARROW else 1e-4
    assert dot(pulled, direction) == pytest.approx(dot(cotangent, slope), rel=tolerance, abs=1e-4)


@pytest.mark.parametrize("case", GOSSIP, ids=repr)
def test_derivatives_of_gossip(case: GossipCase) -> None:
    tx = case.make(4)
    x, update = gossip_workers.start(4), gossip_workers.steps(1, 4)[0]
    state = gossip_workers.initial(tx, x, on_mesh=True)
    step = gossip_workers.on_mesh(tx, 4)
    direction = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)
    run = lambda x: step(x, state, jnp.asarray(update))[0]  # noqa: E731
    found, expected = directional(along(run, jnp.asarray(x), jnp.asarray(direction)))
    close(found, expected, 5e-3)


def test_derivatives_of_gossip_in_16_bits() -> None:
    """Forward and reverse, those of float32; the mixing of a ring is symmetric."""
    (case,) = (row for row in GOSSIP if row.name == "dpsgd")
    tx, direction = case.make(4), np.random.default_rng(3).normal(size=(4, 12))

    def derivatives(dtype: Any) -> Any:
        x = jnp.asarray(gossip_workers.start(4), dtype)
        state = gossip_workers.initial(tx, x, on_mesh=True)
        run = lambda x: gossip_workers.on_mesh(tx, 4)(x, state, jnp.zeros_like(x))[0]  # noqa: E731
        along = jnp.asarray(direction, dtype)
        return jax.jvp(run, (x,), (along,))[1], *jax.vjp(run, x)[1](along)

    forward, reverse = derivatives(jnp.float32)
    np.testing.assert_allclose(forward, case.mixing(4).matrices[0] @ direction, atol=1e-5)
    np.testing.assert_allclose(reverse, forward, atol=1e-5)
    for narrow in derivatives(jnp.bfloat16):
        np.testing.assert_allclose(narrow.astype(jnp.float32), forward, atol=0.03)
