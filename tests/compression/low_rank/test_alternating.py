"""ACP-SGD: one factor per step, against NumPy, in one collective, and with codecs of factors."""

import contextlib
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
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import projection
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import random_k
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices

WORKERS, STEPS, ROWS, COLUMNS, RANK = 3, 6, 12, 7, 2
FACTOR_CODECS: dict[str, Codec | None] = {
    "float32": None,
    "16 bits": dither(bits=16),
    "8 bits": blockwise(dither(bits=8), 4),
    "l2": dither(bits=16, norm="l2"),
    "random": scaled(random_k(ratio=0.5)),
}
EXAMPLES = "float32", "16 bits"


@functools.cache
def updates() -> np.ndarray:
    """A common part and local parts, [steps, workers, rows, columns]."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 1, ROWS, COLUMNS))
    return np.asarray(common + rng.normal(size=(STEPS, WORKERS, ROWS, COLUMNS)), np.float32)


def acp_sgd(given: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    """The means of ACP-SGD as published, in float64."""
    residuals, left, means = np.zeros(given.shape[1:]), np.empty(0), []
    for step, matrices in enumerate(given.astype(np.float64)):
        inputs = matrices + residuals
        if step % 2 == 0:
            basis, _ = np.linalg.qr(right)
            left = (inputs @ basis).mean(axis=0)
            means.append(left @ basis.T)
            residuals = inputs - inputs @ basis @ basis.T
        else:
            basis, _ = np.linalg.qr(left)
            right = (np.swapaxes(inputs, 1, 2) @ basis).mean(axis=0)
            means.append(basis @ right.T)
            residuals = inputs - basis @ (basis.T @ inputs)
    return means


def run(tx: Any, given: Any) -> tuple[Any, Any]:
    """The means of every step on every worker, and the last states."""

    def worker(steps: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], steps)
        return jax.lax.scan(lambda s, x: tx.update(x, s)[::-1], tx.init(first), steps)

    states, means = jax.jit(jax.vmap(worker, in_axes=1, out_axes=(0, 1), axis_name="data"))(given)
    return jax.tree.map(np.asarray, means), states


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "near"), [("float32", 1e-4), ("16 bits", 1e-2)])
def test_is_acp_sgd_without_drawn_columns(name: str, near: float) -> None:
    codecs = [
        projection(RANK, side, drawn=0, factor_codec=FACTOR_CODECS[name]).replace(
            claims=Claims(bounded=True)
        )
        for side in ("right", "left")
    ]
    stages = [jaxcomm.all_reduce_mean(error_feedback(codec)) for codec in codecs]
    tx = in_stages(stages, lambda step: step % 2, "power_sgd")
    start = codecs[0].init(jnp.zeros((ROWS, COLUMNS))).shared.right
    means, _ = run(tx, updates())
    for found, expected in zip(means, acp_sgd(updates(), np.asarray(start)), strict=True):
        np.testing.assert_allclose(found, np.tile(expected, (WORKERS, 1, 1)), atol=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "steps"),
    [
        *((name, jnp.float32, 5) for name in FACTOR_CODECS),
        ("float32", jnp.float32, 6),
        *((name, jnp.bfloat16, 6) for name in EXAMPLES),
    ],
)
def test_nothing_is_lost(name: str, dtype: Any, steps: int) -> None:
    given = jnp.asarray(updates()[:steps], dtype)
    tx = jaxcomm.power_sgd(rank=RANK, alternate=True, factor_codec=FACTOR_CODECS[name])
    means, states = run(tx, given)
    np.testing.assert_array_equal(means, np.broadcast_to(means[:, :1], means.shape))
    assert means.dtype == dtype
    (kept,) = jax.tree.leaves(states.inner.own)
    residual = np.asarray(kept, np.float64).reshape(WORKERS, ROWS, COLUMNS).mean(axis=0)
    sent = means[:, 0].astype(np.float64).sum(axis=0)
    total = np.asarray(given, np.float64).mean(axis=1).sum(axis=0)
    np.testing.assert_allclose(sent + residual, total, atol=1e-4 if dtype == jnp.float32 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), [("float32", 1e-5), ("16 bits", 1e-3)])
def test_a_single_worker_gets_the_projection_of_its_update(name: str, near: float) -> None:
    tx = jaxcomm.power_sgd(rank=RANK, alternate=True, factor_codec=FACTOR_CODECS[name])
    given = updates()[:1, :1]
    means, _ = run(tx, given)
    sent, left = means[0, 0], given[0, 0] - means[0, 0]
    assert np.linalg.matrix_rank(sent, tol=1e-3) == RANK + 1  # One column is drawn.
    np.testing.assert_allclose(left @ sent.T, 0, atol=near * np.sum(given**2))


@pytest.mark.slow
def test_matrices_of_the_rank_arrive_in_full_from_the_second_step_on() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, RANK)) @ rng.normal(size=(RANK, COLUMNS))
    given = np.asarray(np.broadcast_to(x, (8, WORKERS, ROWS, COLUMNS)), np.float32)
    means, _ = run(jaxcomm.power_sgd(rank=RANK, alternate=True), given)
    np.testing.assert_allclose(means.sum(axis=0)[0], 8 * x, atol=1e-3)


def step_of(tx: Any, params: Any) -> tuple[Any, Any]:
    """A step on four workers, and its arguments."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    tx = optax.chain(tx, optax.sgd(0.1))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(batch) * sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in params.values())

    step = jaxcomm.make_step(loss, tx, mesh, metrics="own")
    return step, (params, jaxcomm.init(tx, params, mesh), jnp.ones(4))


def all_reduces(text: str) -> list[str]:
    """The types of the all-reduces of a compiled program, such as `f32[24]`."""
    return sorted(re.findall(r"= (\w+\[\d*\])\S* all-reduce\(", text))


LEAVES = {
    "kernel": jnp.ones((ROWS, COLUMNS)),
    "same": jnp.ones((ROWS, COLUMNS)),
    "wide": jnp.ones((5, 40), jnp.bfloat16),
    "bias": jnp.ones(5),
    "scale": jnp.ones(()),
}
ENDS = {"right": (ROWS, 5), "left": (COLUMNS, 40)}  # The lengths of the factors of a step.
NUMBERS = [(2 * length + other) * (RANK + 1) for length, other in ENDS.values()]
EXACT = 6  # Numbers of the leaves that are sent exactly.


@pytest.mark.slow
def test_a_step_sends_one_factor_in_one_collective() -> None:
    step, arguments = step_of(jaxcomm.power_sgd(rank=RANK, alternate=True), LEAVES)
    account = jaxcomm.wire.account(step, *arguments)
    assert [each.primitive for each in account.collectives] == ["all_reduce"] * 2
    assert account.bytes_per_worker == 2 * 3 / 4 * 4 * (max(NUMBERS) + EXACT)
    text = jax.jit(step).lower(*arguments).compile().as_text()
    # One in each branch of the conditional, of which a step runs one.
    assert all_reduces(text) == sorted(f"f32[{each + EXACT}]" for each in NUMBERS)
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)


@pytest.mark.slow
def test_a_coded_factor_takes_half_of_the_bytes() -> None:
    tx = jaxcomm.power_sgd(rank=RANK, alternate=True, factor_codec=dither(bits=16))
    step, arguments = step_of(tx, LEAVES)
    words = {
        side: 2 * -(-ends[0] * (RANK + 1) // 2) + -(-ends[1] * (RANK + 1) // 2)
        for side, ends in ENDS.items()
    }
    flags = 4  # The largest magnitude of each matrix, and the finite flag.
    account = jaxcomm.wire.account(step, *arguments)
    assert account.bytes_per_worker == 2 * 3 / 4 * 4 * (max(words.values()) + EXACT + flags)
    text = jax.jit(step).lower(*arguments).compile().as_text()
    expected = [f"u32[{each}]" for each in words.values()]
    assert all_reduces(text) == sorted([*expected, *[f"f32[{EXACT}]", f"f32[{flags}]"] * 2])


@pytest.mark.quick(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", ["w", "b"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_one_worker_that_is_not_finite(bad: float, leaf: str, name: str) -> None:
    tx = jaxcomm.power_sgd(rank=RANK, alternate=True, factor_codec=FACTOR_CODECS[name])
    given = {"w": updates().copy(), "b": np.ones((STEPS, WORKERS, 5), np.float32)}
    for step in (2, 3):  # One step of each side.
        given[leaf][step, 1].flat[3] = bad
    means, states = run(tx, given)
    for name in given:
        assert np.isnan(means[name][2:4]).all()
        assert np.isfinite(means[name][[0, 1, 4, 5]]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states.inner.shared))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_keeps_the_laws_of_codecs(side: Any, name: str) -> None:
    codec = projection(RANK, side, factor_codec=FACTOR_CODECS[name])
    check_codec(of_matrices(codec, columns=6))
    check_codec(codec)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"memory_rank": 2, "alternate": True}, "`memory_rank` cannot be combined"),
        ({"factor_codec": dither()}, "`factor_codec` needs `alternate`=True"),
        ({"factor_codec": "bfloat16", "alternate": True}, "must be a codec, such as"),
        ({"factor_codec": cast("bfloat16"), "alternate": True}, "payloads can be summed"),
    ],
)
def test_options_out_of_range_are_errors(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        jaxcomm.power_sgd(rank=1, **options)


def test_sides_out_of_range_are_errors() -> None:
    with pytest.raises(ValueError, match="`side` must be one of"):
        projection(1, "top")  # type: ignore[arg-type]


def test_units_do_not_share_a_basis() -> None:
    with pytest.raises(ValueError, match="statistic of a single array"):
        jaxcomm.all_reduce_mean(projection(1, "right"), scope="tree")


def test_a_coarse_factor_codec_is_an_error() -> None:
    tx = jaxcomm.power_sgd(rank=1, alternate=True, factor_codec=dither(levels=1))
    with pytest.raises(
        ValueError, match="for a factor of 24 numbers, of a leaf of 84, on 3 workers"
    ):
        run(tx, updates())
    unclaimed = dither(bits=16).replace(claims=Claims())
    with pytest.raises(ValueError, match="no bound is known"):
        run(jaxcomm.power_sgd(rank=1, alternate=True, factor_codec=unclaimed), updates())


@pytest.mark.parametrize(
    ("codec", "workers", "accepted"),
    [
        (dither(bits=16), 32, True),
        (dither(bits=16), 64, False),
        (blockwise(dither(bits=16), 64), 128, True),
    ],
)
def test_the_limits_of_the_docstring(codec: Codec, workers: int, accepted: bool) -> None:
    tx, x = jaxcomm.power_sgd(rank=4, alternate=True, factor_codec=codec), jnp.zeros((1024, 1024))
    average = jax.vmap(
        lambda x: tx.update(x, tx.init(x))[0], axis_name="data", axis_size=workers, in_axes=None
    )
    with (
        contextlib.nullcontext()
        if accepted
        else pytest.raises(ValueError, match=r"blockwise\(dither\(bits=16\), 64\)")
    ):
        jax.eval_shape(average, x)


def test_a_leaf_with_a_large_factor_is_exact() -> None:
    codec, x = projection(2, "right"), jnp.ones((3, 40))
    assert codec.init(x).shared == ()
    payload, _ = codec.encode(Context.of(x), x)
    np.testing.assert_array_equal(payload.values, x)


@pytest.mark.slow
def test_skip_nonfinite_leaves_parameters_and_state() -> None:
    tx = jaxcomm.skip_nonfinite(jaxcomm.power_sgd(rank=RANK, alternate=True))
    given = updates().copy()
    given[2, 1, 0, 0] = np.nan
    means, _ = run(tx, given)
    assert not means[2].any()
    assert np.isfinite(means).all()


@pytest.mark.slow
def test_the_last_stage_of_a_hierarchy_may_alternate() -> None:
    rng = np.random.default_rng(4)
    given = (rng.normal(size=(12, 1)) @ rng.normal(size=(2, 3, 1, 7))).astype(np.float32)
    slow = jaxcomm.power_sgd("dcn", rank=1, alternate=True)
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), slow)

    def total(x: jax.Array) -> jax.Array:
        _, means = jax.lax.scan(lambda s, _: tx.update(x, s)[::-1], tx.init(x), None, length=12)
        return jnp.sum(means, axis=0)

    totals = jax.vmap(jax.vmap(total, axis_name="ici"), axis_name="dcn")(given)
    expected = np.broadcast_to(12 * given.mean(axis=(0, 1)), given.shape)
    np.testing.assert_allclose(totals, expected, atol=1e-3)


@functools.cache
def loss_after(tx: Any, steps: int = 400) -> float:
    """The loss of linear regression, as in the test of `power_sgd`."""
    rng = np.random.default_rng(7)
    inputs = jnp.asarray(rng.normal(size=(64, 40)), jnp.float32)
    targets = inputs @ jnp.asarray(rng.normal(size=(40, 24)), jnp.float32)
    params = {"w": jnp.zeros((40, 24)), "b": jnp.zeros(24)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)

    tx = optax.chain(tx, optax.sgd(1.0))
    state, step = jaxcomm.init(tx, params, 4), jaxcomm.simulate(loss, tx, 4)
    for _ in range(steps):
        params, state, metrics = step(params, state, (inputs, targets))
    return float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "16 bits", "8 bits"])
def test_it_trains_as_the_mean_does(name: str) -> None:
    tx = jaxcomm.power_sgd(rank=2, alternate=True, factor_codec=FACTOR_CODECS[name])
    assert loss_after(tx) <= 1.1 * loss_after(jaxcomm.mean())
