"""Low-rank codecs and PowerSGD, against NumPy and against the paper's promises."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import Claims, Codec, Context
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import power_iteration
from tests.laws.test_wire import messages
from tests.low_rank import power_sgd, updates
from tests.slow import slow
from tests.steps import last, memory_of, steps, traced
from tests.workers import aggregator, initial

WORKERS, STEPS, ONES = 3, 5, np.ones(2, np.float32)


def without_claims(codec: Codec) -> Codec:
    """The codec as published, which feedback refuses, with a claim that feedback accepts."""
    return error_feedback(codec.replace(claims=Claims(bounded=True)))


@pytest.mark.parametrize(("feedback", "shape"), [(True, (2, 6, 7)), slow(False, (12, 7))], ids=str)
def test_matches_power_sgd(feedback: bool, shape: tuple[int, ...]) -> None:
    """Of two leaves of one shape, which share their first basis."""
    plain, given = power_iteration(2, drawn=0), {"a": updates(shape), "b": 2 * updates(shape)[::-1]}
    start = np.asarray(plain.init(jnp.zeros(shape)).shared, np.float64)
    codec = without_claims(plain) if feedback else plain
    means, _ = steps(jaxcomm.all_reduce_mean(codec), given)
    for name, each in given.items():
        matrices = each.reshape(STEPS, WORKERS, -1, shape[-1]).astype(np.float64)
        expected = np.stack(power_sgd(matrices, start, feedback=feedback))
        for worker in range(WORKERS):
            found = means[name][:, worker].reshape(expected.shape)
            np.testing.assert_allclose(found, expected, atol=2e-4)


def test_the_basis_spans_the_left_factors_and_the_drawn_columns() -> None:
    codec, x = power_iteration(2, drawn=3), jnp.asarray(updates((12, 7))[0, 0])
    context = Context.of(x, memory=codec.init(x))
    context = context.replace(statistics=codec.measure(context, x))
    columns = jax.random.normal(context.keys.shared, (12, 3))
    left = np.concatenate([context.statistics.values, columns], axis=1).astype(np.float64)
    basis, _ = np.linalg.qr(left)
    payload, _ = codec.encode(context, x)
    assert payload.values.shape == (7, 2 + 3)
    found = codec.decode(context.received(), payload)
    np.testing.assert_allclose(found, basis @ (basis.T @ np.asarray(x)), atol=1e-5)


TREE = {
    "kernel": (12, 7),
    "stacked": (12, 7),
    "convolution": (3, 3, 2, 8),
    "heads": (4, 5, 6),
    "bias": (7,),
    "scale": (),
    "one row": (1, 9),
    "empty": (0, 4),
    "no columns": (4, 0),
}
"""Two shapes are equal. The last five are sent exactly."""
MATRICES = ("kernel", "stacked"), ("convolution",), ("heads",)


def tree_updates() -> dict[str, np.ndarray]:
    """The updates of two leaves of one shape differ."""
    given = {name: updates(shape) for name, shape in TREE.items()}
    return given | {"stacked": 2 * given["kernel"][::-1]}


def require_nothing_lost(given: dict[str, np.ndarray], means: Any, states: Any) -> None:
    """The sum of all means and the mean of the residuals are the sum of the updates."""
    (memories,) = last(states).own.per_worker.values()
    kept = {x.kept.shape[2:]: np.asarray(x.kept, np.float64)[:, 0].mean(axis=0) for x in memories}
    total = lambda x: np.asarray(x, np.float64).mean(axis=1).sum(axis=0)  # noqa: E731
    for names in MATRICES:
        shape = TREE[names[0]]
        residual = kept[(2, *shape) if len(names) == 2 else shape].reshape(-1, *shape)
        assert np.abs(residual).max() > 0.1
        for name, own in zip(names, residual, strict=True):
            np.testing.assert_allclose(total(means[name]) + own, total(given[name]), atol=1e-4)
    for name in TREE.keys() - {"kernel", "stacked", "convolution", "heads"}:
        np.testing.assert_allclose(total(means[name]), total(given[name]), atol=2e-5)


@pytest.mark.slow
def test_no_update_is_lost_and_replicas_are_equal() -> None:
    means, states = steps(jaxcomm.power_sgd(rank=1), tree_updates())
    for each in (
        *jax.tree.leaves(last(states).shared),
        *(m.swapaxes(0, 1) for m in means.values()),
    ):
        np.testing.assert_array_equal(each, each[:1].repeat(WORKERS, 0))
    require_nothing_lost(tree_updates(), means, states)


@pytest.mark.slow
def test_ranks_are_stages_of_a_warmup() -> None:
    stages = [jaxcomm.power_sgd(rank=rank, memory_rank=4) for rank in (4, 1)]
    given = tree_updates()  # Five steps: two of rank 4, and three of rank 1.
    means, states = steps(jaxcomm.warmup(stages, every=2), given)
    whole, first = steps(stages[0], given)
    for name in TREE:
        np.testing.assert_allclose(means[name][:2], whole[name][:2], atol=1e-5)
    assert not np.allclose(means["kernel"][2:], whole["kernel"][2:], atol=1e-2)
    require_nothing_lost(given, means, states.inner)
    stored = [x for x in jax.tree.leaves(states.inner.shared) if x.size]
    earlier = [x for x in jax.tree.leaves(first.shared) if x.size]
    for mine, other in zip(stored, earlier, strict=True):  # Columns beyond the rank are as before.
        assert mine.shape == other.shape and mine.shape[-1] == 4
        np.testing.assert_allclose(mine[-1, ..., 1:], other[1, ..., 1:], atol=1e-5)


@pytest.mark.slow
def test_a_tree_takes_two_all_reduces_and_one_orthogonalization_per_shape() -> None:
    rank, drawn, tx = 2, 1, jaxcomm.power_sgd(rank=2)
    given = {name: jnp.zeros((2, *shape)) for name, shape in TREE.items()}
    update, arguments = aggregator(tx, 2, "checked"), (given, initial(tx, given, "checked"), ONES)
    sent, compiled = jaxcomm.wire.account(update, *arguments), update.lower(*arguments).compile()
    ends = [(12, 7), (12, 7), (18, 8), (20, 6)]
    numbers = sum(rank * rows + (rank + drawn) * columns for rows, columns in ends) + 7 + 1 + 9
    assert sent.bytes_per_worker == 2 * (2 - 1) / 2 * 4 * (numbers + 1)
    for account in (sent, jaxcomm.wire.account(compiled)):
        assert messages(account.collectives) == {"all_reduce": 2}
    targets = re.findall(r'custom_call_target="lapack_sgeqrf', compiled.as_text())
    assert len(targets) == 3  # Shapes of matrices.


@pytest.mark.slow
def test_neither_the_corrected_gradient_nor_the_mean_is_written() -> None:
    """The only temporary as large as the gradients is the gradients themselves."""
    side, leaves = 300, 3
    params = {f"w{i}": jnp.zeros((side, side)) for i in range(leaves)}
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    tx = optax.chain(jaxcomm.power_sgd(rank=1), optax.sgd(0.1))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(x[0] + i) * w) for i, w in enumerate(params.values()))

    step = jax.jit(jaxcomm.make_step(loss, tx, mesh), donate_argnums=(0, 1))
    given = params, jaxcomm.init(tx, params, mesh), jnp.ones((1, side, side))
    compiled = step.lower(*given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * leaves * 4 * side**2


@pytest.mark.slow
def test_a_mean_close_to_the_largest_float_is_kept_though_its_bound_is_not_finite() -> None:
    codec = power_iteration(1)
    start = np.asarray(codec.init(jnp.zeros((12, 7))).shared)[:, 0]
    given = np.zeros((1, 1, 12, 7), np.float32)
    given[..., 3, np.argmin(np.abs(start))] = 3e38
    means, states = steps(jaxcomm.all_reduce_mean(error_feedback(codec)), given)
    np.testing.assert_allclose(means, given, rtol=1e-5, atol=1e33)
    (shared,) = last(states).shared
    assert np.isfinite(shared).all() and not np.array_equal(shared[0, :, 0], start)


@pytest.mark.slow
def test_a_sum_of_terms_that_overflows_does_not_enter_the_residual() -> None:
    """The terms have finite factors, which cancel over workers."""
    codec = power_iteration(1)
    column = np.argmin(np.abs(codec.init(jnp.zeros((12, 7))).shared))
    given = np.zeros((12, 4, 2, 12, 7), np.float32)  # One trial per row.
    given[np.arange(12), :2, 0, np.arange(12), column] = 3e38
    given[:, :, 1] = -given[:, :, 0]
    tx = jaxcomm.power_sgd(rank=1)
    means, states = jax.jit(jax.vmap(functools.partial(traced, tx)))(given)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states.own))
    assert np.isfinite(means[:, 2:]).all()


@pytest.mark.slow
def test_a_finalized_mean_that_overflows_does_not_change_the_memory() -> None:
    inner = power_iteration(1)

    def finalize(context: Context, payload: Any, mean: jax.Array) -> Any:
        return 3e38 * mean, inner.finalize(context, payload, mean)[1]

    tx = jaxcomm.all_reduce_mean(inner.replace(finalize=finalize))
    means, states = steps(tx, 100 * updates((12, 7)))
    assert not np.isfinite(means).all(axis=(1, 2, 3)).any()
    (shared,) = last(states).shared
    np.testing.assert_array_equal(shared[0], inner.init(jnp.zeros((12, 7))).shared)


def cancelling() -> np.ndarray:
    """Two workers whose matrices add up to 0, [workers, rows, columns]."""
    x = updates((6, 4))[0, 0]
    return np.stack([x, -x])


@pytest.mark.slow
def test_the_drawn_columns_bound_the_residual() -> None:
    count = 100
    given = np.broadcast_to(cancelling(), (count, 2, 6, 4))
    norms = {}
    for codec in (error_feedback(power_iteration(1)), without_claims(power_iteration(1, drawn=0))):
        _, states = steps(jaxcomm.all_reduce_mean(codec), given)
        kept = memory_of(last(states)).kept[0]
        norms[codec] = np.linalg.norm(kept) / np.linalg.norm(given[0, 0])
    drawn, published = norms.values()
    assert drawn < 20 and published > 0.8 * count


def test_small_units_are_exact() -> None:
    given = {str(s): updates(s) for s in [(), (5,), (1, 4), (4, 1), (4, 4), (0, 3), (3, 0)]}
    means, _ = steps(jaxcomm.power_sgd(rank=2), given)
    for shape, x in given.items():
        expected = x.mean(axis=1, keepdims=True).repeat(WORKERS, 1)
        np.testing.assert_allclose(means[shape], expected, rtol=1e-5, atol=1e-6)


def test_gathered_matrices_have_a_basis_per_worker() -> None:
    rng = np.random.default_rng(6)
    given = rng.normal(size=(WORKERS, 12, 1)) @ rng.normal(size=(WORKERS, 1, 7))
    given = given.astype(np.float32)
    means, _ = steps(jaxcomm.all_gather_mean(power_iteration(1)), given[None])
    np.testing.assert_allclose(means[0, 0], given.mean(axis=0), atol=1e-5)
