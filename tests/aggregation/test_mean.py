"""The mean of 16-bit updates: 16-bit words on the wire, sums in float32, one rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.aggregation import _mean
from tests.aggregation.runs import averaged, compiled, over, prepared, sent
from tests.laws.test_wire import messages
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregate

SHAPES = {"kernel": (6, 8), "bias": (5,), "scale": (), "empty": (0, 3)}
MEAN, AXES = jaxcomm.mean(), ("dcn", "ici")


def exact(workers: int, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Updates [workers, ...] whose sums in float32 are exact: few bits, exponents that are close.

    The first leaf begins with ties: means of two neighbors, below an even and an odd one.
    """
    rng, bits = np.random.default_rng(seed), 8 if dtype == "bfloat16" else 11
    updates = {}
    for name, shape in SHAPES.items():
        whole = rng.integers(-(2**bits) + 1, 2**bits, (workers, *shape))
        updates[name] = np.float32(whole) * 2.0 ** rng.integers(-4, 4, (workers, *shape))
    ulp = 2.0 ** (1 - bits)
    half = np.arange(workers) < workers // 2
    updates["kernel"][:, 0, 0] = np.where(half, 1, 1 + ulp)
    updates["kernel"][:, 0, 1] = np.where(half, 1 + ulp, 1 + 2 * ulp)
    return {name: x.astype(dtype) for name, x in updates.items()}


def oracle(rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The float32 mean over the first axis, rounded to nearest; of ties, to the even one."""
    weights = np.ones(len(rows)) if weights is None else weights
    counted = np.where(weights > 0, np.moveaxis(rows.astype(np.float64), 0, -1), 0)
    return np.asarray((counted @ weights).astype(np.float32) / np.float32(weights.sum())).astype(
        rows.dtype
    )


def as_float(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def check(found: Any, updates: Any, weights: np.ndarray | None = None) -> None:
    """That every row of `found` is the oracle's, bit for bit."""
    for name, rows in updates.items():
        expected = oracle(rows, weights).astype(np.float64)
        np.testing.assert_array_equal(found[name], np.broadcast_to(expected, found[name].shape))


@pytest.mark.parametrize(
    ("dtype", "workers", "mode"),
    [
        ("bfloat16", 5, "checked"),
        slow("float16", 8, "checked"),
        *(slow("bfloat16", n, "checked") for n in (1, 2, 3, 8)),
        *(slow(dtype, 3, "unchecked") for dtype in ("bfloat16", "float16")),
        *(slow(dtype, n, "vmap") for dtype in ("bfloat16", "float16") for n in (2, 5)),
    ],
)
def test_the_float32_mean_rounded_once(dtype: str, workers: int, mode: Mode) -> None:
    updates = exact(workers, dtype)
    if workers % 2 == 0:
        ulp = 2.0 ** (-7 if dtype == "bfloat16" else -10)
        ties = oracle(updates["kernel"])[0, :2].astype(np.float64)
        np.testing.assert_array_equal(ties, [1, 1 + 2 * ulp])
    check(aggregate(MEAN, jax.tree.map(jnp.asarray, updates), mode), updates)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_large_leaves_in_place(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mean, "LARGE", 6)
    updates = exact(2, "bfloat16") | {"half": exact(2, "float16")["kernel"]}
    check(aggregate(jaxcomm.mean(), jax.tree.map(jnp.asarray, updates), mode), updates)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_weights_are_applied_before_the_rounding(mode: Mode) -> None:
    updates, weights = exact(4, "bfloat16"), np.array([1.0, 4, 0, 3])
    updates["kernel"][2], updates["scale"][2] = np.nan, np.inf  # Of weight 0.
    given = jax.tree.map(jnp.asarray, updates)
    check(aggregate(MEAN, given, mode, weights), updates, weights)
    assert not any(x.any() for x in aggregate(MEAN, given, mode, np.zeros(4)).values())
    mistaken = aggregate(MEAN, given, mode, [1, -1, 0, 3])
    assert all(np.isnan(x).all() for x in mistaken.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_largest_values_do_not_overflow(dtype: Any) -> None:
    most = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(aggregate(MEAN, jnp.full((3, 4), most, dtype)), most)


def test_only_empty_leaves() -> None:
    assert aggregate(MEAN, jnp.zeros((3, 0, 2), jnp.bfloat16), "checked").shape == (3, 0, 2)


SHORT = {"all_to_all": 1, "all_gather": 1}


@pytest.mark.parametrize(
    ("dtypes", "weighted", "each", "kinds"),
    [
        (["bfloat16"], False, 2, SHORT),
        (["float16"], False, 2, SHORT),
        # A weight travels with the rows.
        (["bfloat16"], True, 2 + 2 / 512, SHORT),
        (
            ["bfloat16", "float32", "float16", "bfloat16", "float32"],
            False,
            2 * 4 + 3 * 2,
            {"all_reduce": 1, **SHORT},
        ),
    ],
)
def test_words_of_16_bits(
    dtypes: list[str], weighted: bool, each: float, kinds: dict[str, int]
) -> None:
    updates = {str(i): jnp.ones((8, 4096), dtype) for i, dtype in enumerate(dtypes)}
    account = sent(MEAN, updates, weighted=weighted)
    assert account.bytes_per_worker == 2 * 7 / 8 * 4096 * each
    found = compiled(MEAN, updates, weighted=weighted).collectives
    assert messages(found) == kinds
    if not weighted:
        expected = {"uint16", *["float32"] * ("float32" in dtypes)}
        assert {(c.widened or c.dtype).name for c in found} == expected


def mesh_of_two(*axes: str) -> Any:
    return jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)


def loss(params: Any, rows: jax.Array) -> jax.Array:
    """Its gradient is the worker's row, in the dtype of the leaf."""
    return jnp.mean(rows, axis=0) @ params.astype(jnp.float32)


def test_several_axes_and_several_stages() -> None:
    updates = exact(8, "bfloat16")
    given, size = jax.tree.map(jnp.asarray, updates), 48 + 5 + 1
    grouped = {name: x.reshape(2, 4, *x.shape[1:]) for name, x in updates.items()}
    of_groups = {name: np.stack([oracle(x) for x in rows]) for name, rows in grouped.items()}
    stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    for tx, rows, expected in (
        (jaxcomm.mean(AXES), updates, {"dcn,ici": 2 * 7 * 2 * -(-size // 8)}),
        (stages, of_groups, {"ici": 2 * 3 * 2 * -(-size // 4), "dcn": 2 * size}),
    ):
        run = over(mesh_of_two(*AXES), AXES, averaged(tx))
        check(as_float(run(given)), rows)
        assert jaxcomm.wire.account(run, given).bytes_by_axis == expected


def test_the_devices_of_one_worker() -> None:
    """A worker's gradient is the mean over its devices, rounded once, before the aggregator."""
    rows, params = exact(8, "bfloat16")["bias"], jnp.zeros(5, jnp.bfloat16)
    tx = optax.chain(jaxcomm.mean("dcn"), optax.sgd(1.0))
    step, state = prepared(loss, tx, params, mesh_of_two(*AXES), axis_name="dcn")
    new, _, _ = step(params, state, rows.astype(np.float32))
    workers = np.stack([oracle(x) for x in rows.reshape(2, 4, 5)])
    np.testing.assert_array_equal(as_float(-new), as_float(oracle(workers)))


@pytest.mark.parametrize("automatic", [True, False])
def test_shards(automatic: bool) -> None:
    specs, updates = {"kernel": P(None, "model")}, {"kernel": exact(2, "bfloat16")["kernel"]}
    # Without `shard_local` an all-reduce of float32 leaves the shards where they are.
    tx = MEAN if automatic else jaxcomm.shard_local(MEAN, specs)
    mesh = mesh_of_two("data", "model")
    sharding = NamedSharding(mesh, P("data", None, "model"))
    placed = jax.device_put(jax.tree.map(jnp.asarray, updates), sharding)
    run = over(mesh, "data", averaged(tx), axis_names={"data"})
    result = run(placed)
    check(as_float(result), updates)
    assert result["kernel"].sharding.spec == specs["kernel"]
    found = jaxcomm.wire.account(run.lower(placed)).collectives
    expected = {"all_reduce"} if automatic else {"all_to_all", "all_gather"}
    assert {c.kind for c in found} == expected and {c.axes for c in found} == {("data",)}
    if not automatic:
        assert jaxcomm.wire.account(run, placed).bytes_per_worker == 2 * 2 * 48 // 4 // 2
