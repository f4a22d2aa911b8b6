"""The mean of 16-bit updates: 16-bit words on the wire, sums in float32, one rounding."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm.aggregation import _mean
from jaxcomm.testing import AGGREGATOR_LAWS, AggregatorTrial
from tests.aggregation.test_shard_local import OVER_DATA
from tests.laws.test_wire import COLLECTIVE, compiled, compiled_collectives
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregate, aggregator, initial

SHAPES = {"kernel": (6, 8), "bias": (5,), "scale": (), "empty": (0, 3)}
MESH_OF_TWO = ("dcn", "ici")


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
    each = weights.reshape(-1, *[1] * (rows.ndim - 1))
    total = np.sum(np.where(each > 0, rows.astype(np.float64), 0) * each, axis=0)
    mean = total.astype(np.float32) / np.float32(weights.sum())
    if rows.dtype == np.float16:
        return mean.astype(np.float16)
    words = np.asarray(mean).view(np.uint32)
    words = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return words.astype(np.uint16).view(jnp.bfloat16)


def as_float(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def check(found: Any, updates: Any, weights: np.ndarray | None = None) -> None:
    """That every row of `found` is the oracle's, bit for bit."""
    for name, rows in updates.items():
        expected = oracle(rows, weights).astype(np.float64)
        np.testing.assert_array_equal(found[name], np.broadcast_to(expected, found[name].shape))


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("workers", [8, 2, slow(3), slow(5), slow(1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_float32_mean_rounded_once(dtype: str, workers: int, mode: Mode) -> None:
    updates = exact(workers, dtype)
    if workers % 2 == 0:
        ulp = 2.0 ** (-7 if dtype == "bfloat16" else -10)
        ties = oracle(updates["kernel"])[0, :2].astype(np.float64)
        np.testing.assert_array_equal(ties, [1, 1 + 2 * ulp])
    check(aggregate(jaxcomm.mean(), jax.tree.map(jnp.asarray, updates), mode), updates)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_large_leaves_in_place(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mean, "LARGE", 6)
    updates = exact(2, "bfloat16") | {"half": exact(2, "float16")["kernel"]}
    tx = jaxcomm.mean()
    check(aggregate(tx, jax.tree.map(jnp.asarray, updates), mode), updates)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_weights_are_applied_before_the_rounding(mode: Mode) -> None:
    updates, weights = exact(4, "bfloat16"), np.array([1.0, 4, 0, 3])
    updates["kernel"][2], updates["scale"][2] = np.nan, np.inf  # Of weight 0.
    given = jax.tree.map(jnp.asarray, updates)
    check(aggregate(jaxcomm.mean(), given, mode, weights), updates, weights)
    none = aggregate(jaxcomm.mean(), given, mode, np.zeros(4))
    assert all(np.all(x == 0) for x in none.values())
    mistaken = aggregate(jaxcomm.mean(), given, mode, [1, -1, 0, 3])
    assert all(np.all(np.isnan(x)) for x in mistaken.values())


def test_a_weight_that_is_none() -> None:
    tx = jaxcomm.mean()
    average = lambda x: tx.update(x, tx.init(x), weight=-1.0)[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"`weight` must be 0 or from .*, got -1"):
        jax.vmap(average, axis_name="data")(jnp.ones((2, 3), jnp.bfloat16))


def test_non_finite_values_reach_every_worker() -> None:
    leaves = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), exact(4, "bfloat16")
    )
    trial = AggregatorTrial(jaxcomm.mean(), 4, leaves=leaves, nonfinite="coordinate")
    AGGREGATOR_LAWS["nonfinite"](trial)


def test_the_largest_values_do_not_overflow() -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        most = float(jnp.finfo(dtype).max)
        result = aggregate(jaxcomm.mean(), jnp.full((3, 4), most, dtype))
        np.testing.assert_array_equal(result, most)


def traced(dtypes: dict[str, str], workers: int, size: int = 4096) -> tuple[Any, tuple[Any, ...]]:
    """A program of leaves of these dtypes, and its arguments."""
    updates = {name: jnp.ones((workers, size), dtype) for name, dtype in dtypes.items()}
    tx, ones = jaxcomm.mean(), jnp.ones(workers)
    return aggregator(tx, workers, "checked"), (updates, initial(tx, updates, "checked"), ones)


def kinds(text: str) -> Counter[str]:
    return Counter(kind for _, kind in COLLECTIVE.findall(text))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_bytes_in_words_of_16_bits(dtype: str) -> None:
    (narrow, arguments), (wide, others) = (traced({"x": d}, 8) for d in (dtype, "float32"))
    sent, before = (
        jaxcomm.wire.account(run, *each).bytes_per_worker
        for run, each in ((narrow, arguments), (wide, others))
    )
    assert sent == before / 2 == 2 * 7 / 8 * 2 * 4096
    text = compiled(narrow, arguments)
    assert set(compiled_collectives(text)) == {"u16"}
    assert kinds(text) == {"all-to-all": 1, "all-gather": 1}


def test_three_collectives_for_mixed_dtypes() -> None:
    dtypes = {"a": "bfloat16", "b": "float32", "c": "float16", "d": "bfloat16", "e": "float32"}
    run, arguments = traced(dtypes, 8)
    account = jaxcomm.wire.account(run, *arguments)
    assert account.bytes_per_worker == 2 * 7 / 8 * 4096 * (2 * 4 + 3 * 2)
    text = compiled(run, arguments)
    assert set(compiled_collectives(text)) == {"u16", "f32"}
    assert kinds(text) == {"all-reduce": 1, "all-to-all": 1, "all-gather": 1}
    assert len({each.group for each in account.collectives}) == 3


def test_a_weight_travels_with_the_rows() -> None:
    tx, updates = jaxcomm.mean(), {"x": jnp.ones((8, 4096), jnp.bfloat16)}
    arguments = updates, initial(tx, updates, "checked"), jnp.ones(8)
    run = aggregator(tx, 8, "checked", weighted=True)
    sent = jaxcomm.wire.account(run, *arguments)
    assert sent.bytes_per_worker == 2 * 7 / 8 * 2 * 4096 + 7 * 4
    assert kinds(compiled(run, arguments)) == {"all-to-all": 1, "all-gather": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_all_reduce_is_this_program(dtype: str) -> None:
    """Of float32 on a mesh; of 16 bits where an axis is automatic."""
    manual = {"data"} if dtype == "bfloat16" else {"data", "model"}
    tx, updates = jaxcomm.mean(), {"a": jnp.ones((4, 6), dtype), "b": jnp.ones((4, 5), dtype)}

    def ours(updates: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], updates), tx.init(updates))[0]

    def plain(updates: Any) -> Any:
        own = [x[0] for x in jax.tree.leaves(updates)]
        wide = [x.astype(jnp.float32) * 0.25 for x in own]
        totals = [lax.psum(x, "data") for x in wide]
        return dict(zip(updates, [x.astype(dtype) for x in totals], strict=True))

    def lowered(fn: Any) -> str:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        fn.__name__ = fn.__qualname__ = "step"
        run = jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            axis_names=manual,
        )
        return jax.jit(run).lower(updates).as_text()

    assert lowered(ours) == lowered(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_worker_sends_nothing(dtype: str) -> None:
    run, arguments = traced({"x": dtype}, 1)
    assert jaxcomm.wire.account(run, *arguments).bytes_per_worker == 0
    # XLA keeps an all-reduce of one device, which types the result as equal on all workers.
    assert set(kinds(compiled(run, arguments))) <= {"all-reduce"}


LEAVES = {"a": jnp.bfloat16, "b": jnp.float16, "c": jnp.float32}


def loss(params: Any, rows: jax.Array) -> jax.Array:
    """Its gradient is the worker's row, in the dtype of each leaf."""
    flat = jnp.concatenate([x.astype(jnp.float32) for x in jax.tree.leaves(params)])
    return jnp.mean(rows, axis=0) @ flat


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [8, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_steps_and_scans_as_simulated(kind: AxisType, workers: int) -> None:
    params = {name: jnp.zeros(5, dtype) for name, dtype in LEAVES.items()}
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    rows = np.concatenate([exact(workers, "bfloat16", seed)["bias"] for seed in range(3)], axis=1)
    mesh = jax.make_mesh((workers,), ("data",), (kind,), devices=jax.devices()[:workers])
    step = jaxcomm.make_step(loss, tx, mesh, donate=False)
    simulated = jaxcomm.simulate(loss, tx, workers, donate=False)
    batch = jnp.asarray(rows.astype(np.float32))
    here, _, _ = step(params, jaxcomm.init(tx, params, mesh), batch)
    there, _, _ = simulated(params, jaxcomm.init(tx, params, workers), batch)
    for number, (name, dtype) in enumerate(LEAVES.items()):
        own = rows[:, 5 * number : 5 * number + 5].astype(dtype)
        expected = oracle(own) if dtype != jnp.float32 else own.mean(axis=0)
        for found in (here, there):
            np.testing.assert_array_equal(
                -np.asarray(found[name], np.float64), expected.astype(float)
            )

    def body(carry: Any, batch: jax.Array) -> Any:
        params, state, _ = step(*carry, batch)
        return (params, state), None

    with jax.set_mesh(mesh):
        carry = params, jaxcomm.init(tx, params, mesh)
        carry = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), carry
        )
        (scanned, _), _ = jax.jit(lambda c, b: lax.scan(body, c, b))(carry, jnp.stack([batch] * 2))
    twice, _, _ = step(here, jaxcomm.init(tx, params, mesh), batch)
    jax.tree.map(
        np.testing.assert_array_equal, *(as_float(jax.device_get(x)) for x in (scanned, twice))
    )


def over_two_axes(tx: Any, updates: Any) -> tuple[Any, Any]:
    """The results of 2 x 4 workers, and the account."""
    mesh = jax.make_mesh((2, 4), MESH_OF_TWO, axis_types=(AxisType.Auto,) * 2)
    run = jax.jit(
        jax.shard_map(
            lambda x: tx.update(jax.tree.map(lambda leaf: leaf[0], x), tx.init(x))[0],
            mesh=mesh,
            in_specs=PartitionSpec(MESH_OF_TWO),
            out_specs=PartitionSpec(),
        )
    )
    return as_float(run(updates)), jaxcomm.wire.account(run, updates)


def test_several_axes_and_several_stages() -> None:
    updates = exact(8, "bfloat16")
    given, size = jax.tree.map(jnp.asarray, updates), 2 * (48 + 5 + 1)
    found, account = over_two_axes(jaxcomm.mean(MESH_OF_TWO), given)
    check(found, updates)
    assert account.bytes_per_worker == 2 * 7 * 2 * -(-54 // 8)
    nested, account = over_two_axes(
        jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn")), given
    )
    assert account.bytes_by_axis == {"ici": 2 * 3 * 2 * -(-54 // 4), "dcn": size}
    grouped = {name: x.reshape(2, 4, *x.shape[1:]) for name, x in updates.items()}
    check(nested, {name: np.stack([oracle(x) for x in rows]) for name, rows in grouped.items()})


def test_the_devices_of_one_worker() -> None:
    """A worker's gradient is the mean over its devices, rounded once, before the aggregator."""
    mesh = jax.make_mesh((2, 4), MESH_OF_TWO, axis_types=(AxisType.Auto,) * 2)
    rows = exact(8, "bfloat16")["bias"]
    params = jnp.zeros(5, jnp.bfloat16)
    tx = optax.chain(jaxcomm.mean("dcn"), optax.sgd(1.0))
    step = jaxcomm.make_step(lambda w, x: loss([w], x), tx, mesh, axis_name="dcn", donate=False)
    new, _, _ = step(params, jaxcomm.init(tx, params, mesh), jnp.asarray(rows.astype(np.float32)))
    workers = np.stack([oracle(x) for x in rows.reshape(2, 4, 5)])
    np.testing.assert_array_equal(-np.asarray(new, np.float64), oracle(workers).astype(float))


@pytest.mark.parametrize("automatic", [True, False])
def test_shards(automatic: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"kernel": PartitionSpec(None, "model")}
    updates = {"kernel": exact(2, "bfloat16")["kernel"]}
    # Without `shard_local` an all-reduce of float32 leaves the shards where they are.
    tx = jaxcomm.mean() if automatic else jaxcomm.shard_local(jaxcomm.mean(), specs)
    average = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    placed = jax.device_put(
        jax.tree.map(jnp.asarray, updates),
        NamedSharding(mesh, PartitionSpec("data", None, "model")),
    )
    run = jax.jit(
        jax.shard_map(
            lambda x: average(jax.tree.map(lambda leaf: leaf[0], x)),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            axis_names={"data"},
        )
    )
    result = run(placed)
    check(as_float(result), updates)
    assert result["kernel"].sharding.spec == specs["kernel"]
    text = compiled(run, (placed,))
    expected = {"all-reduce"} if automatic else {"all-to-all", "all-gather"}
    assert set(kinds(text)) == expected
    sends = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    assert all(any(groups in line for groups in OVER_DATA) for line in sends)
    if not automatic:
        assert jaxcomm.wire.account(run, placed).bytes_per_worker == 2 * 2 * 48 // 4 // 2


def test_only_empty_leaves() -> None:
    found = aggregate(jaxcomm.mean(), {"a": jnp.zeros((3, 0, 2), jnp.bfloat16)}, "checked")
    assert found["a"].shape == (3, 0, 2)
