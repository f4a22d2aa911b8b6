"""Low-rank codecs and PowerSGD, against NumPy and against the paper's promises."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import Claims, Codec, Context
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import power_iteration
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices, power_sgd

WORKERS, STEPS = 3, 5
SHAPES = [(12, 7), (2, 6, 7), (2, 3, 2, 7)]


@functools.cache
def updates(shape: tuple[int, ...], steps: int = STEPS) -> np.ndarray:
    """A common part and local parts, [steps, workers, *shape]."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 1, *shape))
    return np.asarray(common + rng.normal(size=(steps, WORKERS, *shape)), np.float32)


def without_claims(codec: Codec) -> Codec:
    """The codec as published, which feedback refuses, with a claim that feedback accepts."""
    return error_feedback(codec.replace(claims=Claims(bounded=True)))


def run_traced(tx: Any, given: Any) -> tuple[Any, Any]:
    """The means of every step on every worker, [steps, workers, ...], and the last states."""

    def worker(steps: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], steps)
        return jax.lax.scan(lambda s, x: tx.update(x, s)[::-1], tx.init(first), steps)

    states, means = jax.vmap(worker, in_axes=1, out_axes=(0, 1), axis_name="data")(given)
    return means, states


def run(tx: Any, given: Any) -> tuple[Any, Any]:
    """`run_traced`, compiled."""
    means, states = jax.jit(functools.partial(run_traced, tx))(given)
    return jax.tree.map(np.asarray, means), states


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_is_power_sgd(feedback: bool, shape: tuple[int, ...]) -> None:
    plain = power_iteration(2, drawn=0)
    start = np.asarray(plain.init(jnp.zeros(shape)).shared, np.float64)
    matrices = updates(shape).reshape(STEPS, WORKERS, -1, shape[-1]).astype(np.float64)
    expected = power_sgd(matrices, start, feedback=feedback)
    tx = jaxcomm.all_reduce_mean(without_claims(plain) if feedback else plain)
    means, _ = run(tx, updates(shape))
    for step, mean in zip(means, expected, strict=True):
        np.testing.assert_allclose(
            step,
            np.tile(mean.reshape(shape), (WORKERS, *[1] * len(shape))).reshape(step.shape),
            atol=1e-4,
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize("drawn", [1, 3])
def test_the_basis_spans_the_left_factors_and_the_drawn_columns(drawn: int) -> None:
    codec, x = power_iteration(2, drawn=drawn), jnp.asarray(updates((12, 7))[0, 0])
    context = Context.of(x, memory=codec.init(x))
    context = context.replace(statistics=codec.measure(context, x))
    columns = jax.random.normal(context.coins.public, (12, drawn))
    left = np.concatenate([context.statistics.values, columns], axis=1).astype(np.float64)
    basis, _ = np.linalg.qr(left)
    payload, _ = codec.encode(context, x)
    assert payload.values.shape == (7, 2 + drawn)
    found = codec.decode(context.received(), payload)
    np.testing.assert_allclose(found, basis @ (basis.T @ np.asarray(x)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_mean_of_that_rank_is_exact(rank: int) -> None:
    rng = np.random.default_rng(rank)
    left, right = rng.normal(size=(20, rank)), rng.normal(size=(rank, 15))
    parts = rng.normal(size=(WORKERS, 20, 15))
    matrices = (left @ right + parts - parts.mean(axis=0)).astype(np.float32)
    for drawn in (0, 1):
        tx = jaxcomm.all_reduce_mean(power_iteration(rank, drawn=drawn))
        means, _ = run(tx, matrices[None])
        np.testing.assert_allclose(means[0, 0], left @ right, atol=2e-5)


def test_the_power_iteration_finds_the_best_approximation() -> None:
    given = np.repeat(updates((12, 7))[:1], 60, axis=0)
    means, _ = run(jaxcomm.all_reduce_mean(power_iteration(2, drawn=0)), given)
    u, s, vt = np.linalg.svd(given[0].mean(axis=0).astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(means[-1, 0], (u[:, :2] * s[:2]) @ vt[:2], atol=1e-3)


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


def tree_updates(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {name: jnp.asarray(updates(shape), dtype) for name, shape in TREE.items()}


def numbers(rank: int, drawn: int) -> int:
    """The numbers of all payloads and statistics of the tree, by hand."""
    kernels = 2 * (rank * 12 + (rank + drawn) * 7)
    return kernels + rank * 18 + (rank + drawn) * 8 + rank * 20 + (rank + drawn) * 6 + 7 + 1 + 9


@pytest.mark.slow
def test_nothing_is_lost_and_replicas_are_equal() -> None:
    given = tree_updates()
    means, states = run(jaxcomm.power_sgd(rank=1), given)
    for shared in jax.tree.leaves(states.shared):
        np.testing.assert_array_equal(shared, shared[:1].repeat(WORKERS, 0))
    (memories,) = states.own.per_worker.values()
    kept = [np.asarray(memory.kept, np.float64) for memory in memories]
    shapes = [x.shape[2:] for x in kept]
    for name, shape in TREE.items():
        mean = means[name].astype(np.float64)
        np.testing.assert_array_equal(mean, mean[:, :1].repeat(WORKERS, 1))
        total = np.asarray(given[name], np.float64).mean(axis=1).sum(axis=0)
        exact = len(shape) < 2 or shape[0] == 1 or not math.prod(shape)
        if exact:
            np.testing.assert_allclose(mean[:, 0].sum(axis=0), total, atol=2e-5)
            continue
        if name in ("kernel", "stacked"):
            (number,) = (i for i, shape in enumerate(shapes) if shape == (2, 12, 7))
            residual = kept[number][:, 0, ["kernel", "stacked"].index(name)]
        else:
            (number,) = (i for i, each in enumerate(shapes) if each == shape)
            residual = kept[number][:, 0]
        assert np.abs(residual).max() > 0.1
        found = mean[:, 0].sum(axis=0) + residual.mean(axis=0)
        np.testing.assert_allclose(found, total, atol=5e-5)


@functools.cache
def step(rank: int, kind: AxisType = AxisType.Auto, workers: int = 2) -> Any:
    """A compiled update of the tree on a mesh, and its account."""
    mesh = jax.make_mesh((workers,), ("data",), (kind,), devices=jax.devices()[:workers])
    tx = jaxcomm.power_sgd(rank=rank)
    given = {name: jnp.zeros((workers, *shape)) for name, shape in TREE.items()}
    state = jaxcomm.init(tx, jax.tree.map(lambda x: x[0], given), mesh)
    specs, local = jaxcomm.state_specs(state), PartitionSpec("data")

    def update(x: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], x), state)

    sharded = jax.jit(
        jax.shard_map(
            update, mesh=mesh, in_specs=(local, specs), out_specs=(PartitionSpec(), specs)
        )
    )
    text = sharded.lower(given, state).compile().as_text()
    return text, jaxcomm.wire.account(sharded, given, state)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_a_tree_takes_two_all_reduces_and_one_orthogonalization_per_shape(rank: int) -> None:
    text, sent = step(rank)
    assert sent.bytes_per_worker == 2 * (2 - 1) / 2 * 4 * (numbers(rank, 1) + 1)
    assert len(sent.collectives) >= 2 and len({c.group for c in sent.collectives}) == 2
    assert len(re.findall(r" all-reduce\(", text)) == 2
    assert not re.findall(r" (all-gather|all-to-all|collective-permute)\(", text)
    assert len(re.findall(r'custom_call_target="lapack_sgeqrf', text)) == 3  # Shapes of matrices.


@pytest.mark.slow
def test_neither_the_corrected_gradient_nor_the_mean_is_written() -> None:
    """The only temporary as large as the gradients is the gradients themselves."""
    side, leaves = 300, 3
    params = {f"w{i}": jnp.zeros((side, side)) for i in range(leaves)}
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    tx = optax.chain(jaxcomm.power_sgd(rank=1), optax.sgd(0.1))
    state = jaxcomm.init(tx, params, mesh)
    specs, local = jaxcomm.state_specs(state), PartitionSpec("data")

    def train(params: Any, state: Any, x: jax.Array) -> Any:
        given = jax.tree.map(lambda w: jnp.sin(x[0]) * (1 + w), jaxcomm.local_params(params))
        updates, state = tx.update(given, state, params)
        return optax.apply_updates(params, updates), state

    whole = PartitionSpec()
    sharded = jax.shard_map(
        train, mesh=mesh, in_specs=(whole, specs, local), out_specs=(whole, specs)
    )
    compiled = jax.jit(sharded, donate_argnums=(0, 1)).lower(
        params, state, jnp.ones((1, side, side))
    )
    gradients = leaves * 4 * side**2
    assert compiled.compile().memory_analysis().temp_size_in_bytes < 1.5 * gradients


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"decay": 0.5}, {"residual_dtype": "bfloat16"}], ids=str)
def test_terms_are_encoded_as_their_sum_is(options: Any) -> None:
    codec = power_iteration(2)
    plain = codec.replace(
        encode=lambda context, x: codec.encode(context, x),
        measure=lambda context, x: codec.measure(context, x),
    )
    by_terms, by_sum = (
        run(jaxcomm.all_reduce_mean(error_feedback(each, **options)), updates((12, 7)))[0]
        for each in (codec, plain)
    )
    narrow = "residual_dtype" in options
    np.testing.assert_allclose(by_terms, by_sum, atol=3e-2 if narrow else 1e-4)


def test_a_mean_close_to_the_largest_float_is_kept_though_its_bound_is_not_finite() -> None:
    codec = power_iteration(1)
    start = np.asarray(codec.init(jnp.zeros((12, 7))).shared)[:, 0]
    given = np.zeros((1, 1, 12, 7), np.float32)
    given[..., 3, np.argmin(np.abs(start))] = 3e38
    means, states = run(jaxcomm.all_reduce_mean(error_feedback(codec)), given)
    np.testing.assert_allclose(means, given, rtol=1e-5, atol=1e33)
    (shared,) = states.shared
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
    means, states = jax.jit(jax.vmap(functools.partial(run_traced, tx)))(given)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states.own))
    assert np.isfinite(means[:, 2:]).all()


def test_a_finalized_mean_that_overflows_does_not_change_the_memory() -> None:
    inner = power_iteration(1)

    def finalize(context: Context, payload: Any, mean: jax.Array) -> Any:
        return 3e38 * mean, inner.finalize(context, payload, mean)[1]

    tx = jaxcomm.all_reduce_mean(inner.replace(finalize=finalize))
    means, states = run(tx, 100 * updates((12, 7)))
    assert not np.isfinite(means).all(axis=(1, 2, 3)).any()
    (shared,) = states.shared
    np.testing.assert_array_equal(shared[0], inner.init(jnp.zeros((12, 7))).shared)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_the_left_factor_exposes_one_coordinate(value: float) -> None:
    codec, x = power_iteration(1), np.zeros((12, 7), np.float32)
    zero_column = codec.init(x)._replace(shared=jnp.zeros((7, 1)))  # 0 * inf is NaN.
    for memory in (codec.init(x), zero_column):
        for worker in range(2):
            given = np.stack([x, x])
            given[worker, 5, 2] = value
            measured = [codec.measure(Context.of(x, memory=memory), each) for each in given]
            assert not np.isfinite(measured[0].values + measured[1].values).all()


@pytest.mark.slow
def test_ranks_are_stages_of_a_warmup() -> None:
    given = tree_updates()  # Five steps: two of rank 4, two of rank 1, one more of rank 1.
    stages = [jaxcomm.power_sgd(rank=rank, memory_rank=4) for rank in (4, 1)]
    means, states = run(jaxcomm.warmup(stages, every=2), given)
    first, before = run(stages[0], jax.tree.map(lambda x: x[:2], given))
    whole, after = run(stages[0], given)
    for name in TREE:
        np.testing.assert_allclose(means[name][:2], first[name], atol=1e-5)
    assert not np.allclose(means["kernel"][2:], whole["kernel"][2:], atol=1e-2)
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]  # noqa: E731
    assert shapes(states.inner.shared) == shapes(after.shared)
    stored = [x for x in jax.tree.leaves(states.inner.shared) if x.size]
    earlier = [x for x in jax.tree.leaves(before.shared) if x.size]
    for last, second in zip(stored, earlier, strict=True):
        assert last.shape[-1] == 4
        np.testing.assert_allclose(last[..., 1:], second[..., 1:], atol=1e-5)
    (memories,) = states.inner.own.per_worker.values()
    total = {name: np.asarray(x, np.float64).mean(axis=1).sum(axis=0) for name, x in given.items()}
    kept = {x.kept.shape[2:]: np.asarray(x.kept, np.float64)[:, 0].mean(axis=0) for x in memories}
    for name in ("convolution", "heads"):
        found = means[name].astype(np.float64)[:, 0].sum(axis=0) + kept[TREE[name]]
        np.testing.assert_allclose(found, total[name], atol=1e-4)


def test_ranks_without_a_common_memory_rank_are_no_stages() -> None:
    stages = [jaxcomm.power_sgd(rank=rank) for rank in (4, 1)]
    with pytest.raises(ValueError, match="This state has memory of shapes"):
        run(jaxcomm.warmup(stages, every=2), tree_updates())


@pytest.mark.slow
def test_equal_shapes_are_encoded_as_if_each_were_alone() -> None:
    tx = jaxcomm.all_reduce_mean(without_claims(power_iteration(2, drawn=0)))
    several, _ = run(tx, {"a": updates((12, 7)), "b": 2 * updates((12, 7))[::-1]})
    for name, given in (("a", updates((12, 7))), ("b", 2 * updates((12, 7))[::-1])):
        alone, _ = run(tx, given)
        np.testing.assert_allclose(several[name], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_weights() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.normal(size=(12, 1)), rng.normal(size=(WORKERS, 1, 7))
    given, weights = (left @ right).astype(np.float32), np.array([1.0, 0.0, 3.0], np.float32)
    tx = jaxcomm.power_sgd(rank=1)
    means = jax.vmap(lambda x, w: tx.update(x, tx.init(x), weight=w)[0], axis_name="data")(
        given, weights
    )
    expected = np.tensordot(weights / weights.sum(), given, 1)
    np.testing.assert_allclose(means, np.stack([expected] * WORKERS), atol=1e-5)


@pytest.mark.slow
def test_a_nan_on_one_worker_leaves_memory_unchanged() -> None:
    given = tree_updates()
    tx = jaxcomm.power_sgd(rank=1)
    _, before = run(tx, given)
    given["kernel"] = given["kernel"].at[-1, 1, 0, 0].set(jnp.nan)
    broken, after = run(tx, given)
    assert all(np.isnan(mean[-1]).all() for mean in broken.values())
    earlier, _ = run(tx, jax.tree.map(lambda x: x[:-1], given))
    for name in TREE:
        np.testing.assert_array_equal(broken[name][:-1], earlier[name])
    _, kept = run(tx, jax.tree.map(lambda x: x[:-1], given))
    for own, shared in ((after.own, after.shared), (before.own, before.shared)):
        same = [
            np.array_equal(x, y)
            for x, y in zip(
                jax.tree.leaves((own, shared)),
                jax.tree.leaves((kept.own, kept.shared)),
                strict=True,
            )
            if x.size
        ]
        assert all(same) == (own is after.own) and same


@pytest.mark.slow
def test_bfloat16_gradients() -> None:
    narrow = tree_updates(jnp.bfloat16)
    tx = jaxcomm.power_sgd(rank=1)
    found, _ = run(tx, narrow)
    wide, _ = run(tx, jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
    for name in TREE:
        assert found[name].dtype == jnp.bfloat16
        expected = jnp.asarray(wide[name]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(found[name], np.asarray(expected))


@pytest.mark.slow
def test_wide_numbers_change_nothing() -> None:
    given = updates((12, 7))
    tx = jaxcomm.power_sgd(rank=2)
    narrow, _ = run(tx, given)
    with jax.enable_x64(True):
        for dtype in (np.float32, np.float64):
            wide, states = run(tx, given.astype(dtype))
            assert wide.dtype == dtype
            assert {x.dtype for x in jax.tree.leaves(states.shared)} == {jnp.dtype("float32")}
            np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-5)


def test_residuals_in_bfloat16() -> None:
    _, states = run(jaxcomm.power_sgd(rank=1, residual_dtype="bfloat16"), updates((12, 7)))
    (memory,) = states.own.per_worker["data"]
    assert memory.kept.dtype == jnp.bfloat16


@pytest.mark.slow
def test_the_last_stage_of_a_hierarchy_may_have_memory() -> None:
    rng = np.random.default_rng(4)
    given = (rng.normal(size=(12, 1)) @ rng.normal(size=(2, 3, 1, 7))).astype(np.float32)

    def means(tx: Any) -> jax.Array:
        average = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
        return jax.vmap(jax.vmap(average, axis_name="ici"), axis_name="dcn")(given)

    slow = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.power_sgd("dcn", rank=1))
    expected = np.broadcast_to(given.mean(axis=(0, 1)), given.shape)
    np.testing.assert_allclose(means(slow), expected, atol=1e-5)
    with pytest.raises(ValueError, match="Only the last stage of `hierarchical`"):
        means(jaxcomm.hierarchical(jaxcomm.power_sgd("ici", rank=1), jaxcomm.mean("dcn")))


def cancelling() -> np.ndarray:
    """Two workers whose matrices add up to 0, [workers, rows, columns]."""
    x = updates((6, 4))[0, 0]
    return np.stack([x, -x])


def test_each_worker_keeps_the_part_that_is_claimed_though_matrices_cancel() -> None:
    codec, matrices = power_iteration(1), jnp.asarray(cancelling())

    def compression_error(key: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            context = Context.of(x, memory=codec.init(x)).replace(workers=2)
            zeros = jax.tree.map(jnp.zeros_like, codec.measure(context, x))
            coins = context.coins._replace(public=key)
            context = context.replace(statistics=zeros, coins=coins)
            payload, _ = codec.encode(context, x)
            return jnp.sum((codec.decode(context.received(), payload) - x) ** 2)

        return jnp.sum(jax.vmap(one)(matrices)) / jnp.sum(matrices**2)

    keys = jax.random.split(jax.random.key(1), 3000)
    lost = np.asarray(jax.jit(jax.vmap(compression_error))(keys))
    deviation = lost.std() / len(lost) ** 0.5
    assert lost.mean() + 5 * deviation <= 1 - codec.claims.contraction(24, 2)
    # The drawn column is uniform in the five dimensions beside the arbitrary first one.
    assert lost.mean() - 5 * deviation <= 1 - 1 / 6


@pytest.mark.slow
def test_the_drawn_columns_bound_the_residual() -> None:
    steps = 100
    given = np.broadcast_to(cancelling(), (steps, 2, 6, 4))
    norm = np.linalg.norm(given[0, 0])

    def residual(codec: Codec) -> float:
        _, states = run(jaxcomm.all_reduce_mean(codec), given)
        (memory,) = states.own.per_worker["data"]
        return float(np.linalg.norm(memory.kept[0]) / norm)

    assert residual(error_feedback(power_iteration(1))) < 20
    assert residual(without_claims(power_iteration(1, drawn=0))) > 0.8 * steps


@pytest.mark.parametrize("shape", [(), (5,), (1, 4), (4, 1), (2, 2), (0, 3), (3, 0)], ids=str)
def test_small_units_are_exact(shape: tuple[int, ...]) -> None:
    means, _ = run(jaxcomm.power_sgd(rank=2), updates(shape))
    expected = updates(shape).mean(axis=1, keepdims=True).repeat(WORKERS, 1)
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_keeps_the_laws_of_codecs() -> None:
    check_codec(of_matrices(power_iteration(2), columns=6))
    check_codec(power_iteration(2))


def test_gathered_matrices_have_a_basis_per_worker() -> None:
    rng = np.random.default_rng(6)
    given = rng.normal(size=(WORKERS, 12, 1)) @ rng.normal(size=(WORKERS, 1, 7))
    given = given.astype(np.float32)
    means, _ = run(jaxcomm.all_gather_mean(power_iteration(1)), given[None])
    np.testing.assert_allclose(means[0, 0], given.mean(axis=0), atol=1e-5)


@pytest.mark.slow
def test_it_trains_in_a_chain() -> None:
    rng = np.random.default_rng(7)
    inputs = jnp.asarray(rng.normal(size=(64, 40)), jnp.float32)
    targets = inputs @ jnp.asarray(rng.normal(size=(40, 24)), jnp.float32)
    params = {"w": jnp.zeros((40, 24)), "b": jnp.zeros(24)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)

    tx = optax.chain(jaxcomm.power_sgd(rank=2), optax.sgd(2.0))
    state, step = jaxcomm.init(tx, params, 4), jaxcomm.simulate(loss, tx, 4)
    for _ in range(200):
        params, state, metrics = step(params, state, (inputs, targets))
    assert metrics["loss"] < 0.01


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 2, "memory_rank": 1}, "`memory_rank` must be at least `rank`=2, got 1"),
        ({"rank": 1, "scope": "bucket"}, "`scope` must be 'leaf', got 'bucket'"),
        ({"rank": 1, "residual_dtype": "int8"}, "`residual_dtype` must be"),
    ],
)
def test_options_out_of_range_are_errors(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        jaxcomm.power_sgd(**options)


def test_feedback_refuses_power_sgd_as_published() -> None:
    with pytest.raises(ValueError, match="no bound is known"):
        run(
            jaxcomm.all_reduce_mean(error_feedback(power_iteration(2, drawn=0))),
            updates((12, 7)),
        )
