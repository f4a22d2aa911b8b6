"""ACP-SGD: one factor per step, against NumPy, in one collective, and with codecs of factors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Claims, Codec, Context
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import projection
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import random_k
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices, updates
from tests.steps import last, steps
from tests.workers import aggregator, initial

WORKERS, ROWS, COLUMNS, RANK = 3, 12, 7, 2
UPDATES = updates((ROWS, COLUMNS), 6)
FACTOR_CODECS: dict[str, Codec | None] = {
    "float32": None,
    "16 bits": dither(bits=16),
    "8 bits": blockwise(dither(bits=8), 4),
    "l2": dither(bits=16, norm="l2"),
    "random": scaled(random_k(ratio=0.5)),
}


@functools.cache
def method(name: str) -> Any:
    return jaxcomm.power_sgd(rank=RANK, alternate=True, factor_codec=FACTOR_CODECS[name])


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), [("float32", 1e-4), ("16 bits", 1e-2)])
def test_matches_acp_sgd_without_drawn_columns(name: str, near: float) -> None:
    codecs = [
        projection(RANK, side, drawn=0, factor_codec=FACTOR_CODECS[name]).replace(
            claims=Claims(bounded=True)
        )
        for side in ("right", "left")
    ]
    stages = [jaxcomm.all_reduce_mean(error_feedback(codec)) for codec in codecs]
    tx = in_stages(stages, lambda step: step % 2, "power_sgd")
    start = codecs[0].init(jnp.zeros((ROWS, COLUMNS))).shared.right
    means, _ = steps(tx, UPDATES)
    for found, expected in zip(means, acp_sgd(UPDATES, np.asarray(start)), strict=True):
        np.testing.assert_allclose(found, np.tile(expected, (WORKERS, 1, 1)), atol=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("float32", jnp.float32, 5),
        ("8 bits", jnp.float32, 6),
        ("l2", jnp.float32, 5),
        ("random", jnp.float32, 5),
        ("16 bits", jnp.bfloat16, 6),
    ],
)
def test_no_update_is_lost(name: str, dtype: Any, count: int) -> None:
    given = jnp.asarray(UPDATES[:count], dtype)
    means, states = steps(method(name), given)
    np.testing.assert_array_equal(means, np.broadcast_to(means[:, :1], means.shape))
    assert means.dtype == dtype
    (kept,) = jax.tree.leaves(last(states).inner.own)
    residual = np.asarray(kept, np.float64).reshape(WORKERS, ROWS, COLUMNS).mean(axis=0)
    sent = means[:, 0].astype(np.float64).sum(axis=0)
    total = np.asarray(given, np.float64).mean(axis=1).sum(axis=0)
    np.testing.assert_allclose(sent + residual, total, atol=1e-4 if dtype == jnp.float32 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), [("float32", 1e-5), ("16 bits", 1e-3)])
def test_a_single_worker_gets_the_projection_of_its_update(name: str, near: float) -> None:
    given = UPDATES[:1, :1]
    means, _ = steps(method(name), given)
    sent, left = means[0, 0], given[0, 0] - means[0, 0]
    assert np.linalg.matrix_rank(sent, tol=1e-3) == RANK + 1  # One column is drawn.
    np.testing.assert_allclose(left @ sent.T, 0, atol=near * np.sum(given**2))


LEAVES = {
    "kernel": jnp.ones((ROWS, COLUMNS)),
    "same": jnp.ones((ROWS, COLUMNS)),
    "wide": jnp.ones((5, 40), jnp.bfloat16),
    "bias": jnp.ones(5),
    "scale": jnp.ones(()),
}
EXACT = 6  # Numbers of the leaves that are sent exactly.
# Of the steps of the right and of the left side: the lengths of the factors, of three columns.
FACTORS = [[3 * x for x in (ROWS, ROWS, 5)], [3 * x for x in (COLUMNS, COLUMNS, 40)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "16 bits"])
def test_a_step_sends_one_factor_in_one_collective(name: str) -> None:
    """Of 16 bits in half of the bytes, beside the exact numbers and four flags."""
    if name == "float32":
        words = [sum(numbers) + EXACT for numbers in FACTORS]
        expected, most = [("float32", each) for each in words], max(words)
    else:
        words = [sum(-(-count // 2) for count in numbers) for numbers in FACTORS]
        expected = [("uint32", each) for each in words] + [("float32", EXACT), ("float32", 4)] * 2
        most = max(words) + EXACT + 4
    given = {name: jnp.broadcast_to(leaf, (4, *leaf.shape)) for name, leaf in LEAVES.items()}
    run = aggregator(method(name), 4, "checked")
    arguments = given, initial(method(name), given, "checked"), jnp.ones(4)
    account = jaxcomm.wire.account(run, *arguments)
    assert {each.kind for each in account.collectives} == {"all_reduce"}
    assert account.bytes_per_worker == 2 * 3 / 4 * 4 * most
    compiled = jaxcomm.wire.account(run.lower(*arguments)).collectives
    # One of each in each branch of the conditional, of which a step runs one.
    sent = [((each.widened or each.dtype).name, each.shape[0]) for each in compiled]
    assert sorted(sent) == sorted(expected)
    assert {each.kind for each in compiled} == {"all_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "16 bits"])
def test_the_left_side_satisfies_the_codec_laws(name: str) -> None:
    """Rows of the laws are of the right side."""
    codec = projection(RANK, "left", factor_codec=FACTOR_CODECS[name])
    check_codec(of_matrices(codec, columns=6))


def test_a_leaf_with_a_large_factor_is_exact() -> None:
    codec, x = projection(2, "right"), jnp.ones((3, 40))
    assert codec.init(x).shared == ()
    payload, _ = codec.encode(Context.of(x), x)
    np.testing.assert_array_equal(payload.values, x)


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
