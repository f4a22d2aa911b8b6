"""The account against bytes counted by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import wire
from jaxcomm.wire._account import Account
from tests.training.places import begun, mesh_of

N = 8


def on(mesh: Mesh, fn: Callable[..., Any], *in_specs: P) -> Callable[..., Any]:
    """A function of whole arrays, or of arrays with these specs, on the devices of a mesh."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs or P(), out_specs=P(), check_vma=False)


def data(kind: AxisType = AxisType.Auto, workers: int = N) -> Mesh:
    return mesh_of(kind, workers)


def sent(
    fn: Callable[..., Any], shape: tuple[int, ...] = (6,), dtype: Any = jnp.float32
) -> Account:
    """The account of a worker's function of one array of `shape`."""
    return wire.account(on(data(), fn), jax.ShapeDtypeStruct(shape, dtype))


def summed(x: jax.Array) -> jax.Array:
    return lax.psum(x, "data")


RING = [(i, (i + 1) % N) for i in range(N)]
BY_HAND = {
    "psum": (summed, "all_reduce", 2 * 7 / 8 * 64, 14),
    "pmax": (lambda x: lax.pmax(x, "data"), "all_reduce", 2 * 7 / 8 * 64, 14),
    "all_gather": (lambda x: lax.all_gather(x, "data"), "all_gather", 7 * 64, 7),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "data"), "reduce_scatter", 7 / 8 * 64, 7),
    "all_to_all": (lambda x: lax.all_to_all(x, "data", 0, 0), "all_to_all", 7 / 8 * 64, 7),
    "ppermute": (lambda x: lax.ppermute(x, "data", RING), "ppermute", 64, 1),
    "pbroadcast": (lambda x: lax.pbroadcast(x, ("data",), 0), "broadcast", 64, 7),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_and_messages(name: str) -> None:
    fn, primitive, expected, messages = BY_HAND[name]
    account = sent(fn, shape=(8, 2))
    (collective,) = account.collectives
    assert collective.kind == primitive and collective.workers == N
    assert account.bytes_per_worker == pytest.approx(expected)
    assert account.bytes_by_axis == pytest.approx({"data": expected})
    assert account.seconds(100.0, 0.5) == pytest.approx(expected / 100 + 0.5 * messages)


@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.int4, 1), (jnp.int8, 1), (jnp.bfloat16, 2), (jnp.uint32, 4)]
)
def test_bytes_follow_the_dtype(dtype: Any, size: int) -> None:
    """Four bits that are not packed count as a byte."""
    assert sent(summed, (8,), dtype).bytes_per_worker == 14 * size


def test_sums_of_parts() -> None:
    """Of arrays that are typed as unreduced, in `jax.shard_map` and outside."""

    def both(x: jax.Array) -> Any:
        part = lax.pcast(x, "data", to="unreduced")
        return summed(part), lax.psum_scatter(part, "data", tiled=True)

    run = jax.shard_map(both, mesh=data(), in_specs=P("data"), out_specs=(P(), P("data")))
    account = wire.account(run, jnp.zeros((64, 2)))
    assert [c.kind for c in account.collectives] == ["all_reduce", "reduce_scatter"]
    assert account.bytes_per_worker == pytest.approx((14 + 7) / 8 * 64)

    part = NamedSharding(data(AxisType.Explicit), P(unreduced={"data"}))
    with jax.set_mesh(part.mesh):
        x = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=part)
        kept = wire.account(lambda x: x + x, x)
        account = wire.account(lambda x: jax.sharding.reshard(x, P()), x)
    assert kept.bytes_per_worker == 0 and account.bytes_per_worker == 14 / 8 * 64


def test_collectives_of_unknown_kinds_are_not_counted_as_zero() -> None:
    def bound(name: str) -> Callable[..., Any]:
        primitive = jax.extend.core.Primitive(name)
        primitive.def_effectful_abstract_eval(lambda x, axis_name: (x, effects))
        return lambda x: primitive.bind(x, axis_name=("data",))

    run = on(data(), summed)
    (mapped,) = jax.make_jaxpr(run)(jnp.zeros(6)).eqns
    effects = mapped.params["jaxpr"].eqns[0].effects
    assert sent(bound("psum_start"), (8,)).bytes_per_worker == 14 / 8 * 32
    with pytest.raises(ValueError, match=r"unknown kind: .*psum_twice"):
        sent(bound("psum_twice"))
    assert sent(lambda x: x * jnp.float32(lax.axis_index("data"))).bytes_per_worker == 0


def in_loops(x: jax.Array) -> jax.Array:
    shift = lambda x: lax.ppermute(x, "data", RING)  # noqa: E731
    return lax.scan(lambda x, _: (lax.fori_loop(0, 3, lambda _, x: shift(x), x), None), x, None, 5)[
        0
    ]


def unused_in_a_loop(x: jax.Array) -> jax.Array:
    """In a loop, of which only the shifts are read."""

    def body(carry: Any, _: None) -> Any:
        x, unused = carry
        return (lax.ppermute(x, "data", RING), summed(unused)), summed(x)

    return lax.scan(body, (x, x), None, length=5)[0][0]


def wasteful(x: jax.Array) -> jax.Array:
    summed(x * 2)  # Its result is not used.
    first, second = summed(x + 1), summed(x + 1)
    return first + jax.jit(lambda x: (x, lax.pmax(x, "data")))(second)[0]


def of_a_callback(x: jax.Array) -> jax.Array:
    draw = lambda: jax.experimental.io_callback(np.sin, x, x)  # noqa: E731
    return summed(draw()) + summed(draw())  # Another value each time.


def solved(x: jax.Array) -> jax.Array:
    solve = lambda _, b: summed(b) / 64  # noqa: E731
    return lax.custom_linear_solve(lambda y: y * 8.0, x, solve, symmetric=True)


def ragged(x: jax.Array) -> jax.Array:
    """A number of each worker to each worker."""
    ones, places = jnp.ones(N, jnp.int32), jnp.arange(N, dtype=jnp.int32)
    own = ones * lax.axis_index("data")
    return lax.ragged_all_to_all(x, x, places, ones, own, ones, axis_name="data")


GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7]]
COUNTED: dict[str, Any] = {
    "loops are multiplied": (in_loops, 15 * 32),
    "what a loop sends and does not use": (unused_in_a_loop, 5 * 32),
    "dead and equal ones": (wasteful, 14 / 8 * 32),
    "callbacks": (of_a_callback, 2 * 14 / 8 * 32),
    "the solution of a linear solve": (solved, 14 / 8 * 32),
    "rows of a ragged exchange": (ragged, 7 / 8 * 32),
    "groups": (lambda x: lax.all_gather(x, "data", axis_index_groups=GROUPS), 32),
    "what stays": (lambda x: lax.ppermute(x, "data", [(i, i) for i in range(N)]), 0),
    "one of a permutation": (lambda x: lax.ppermute(x, "data", [(0, 1)]), 32),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counted_bytes(name: str) -> None:
    fn, expected = COUNTED[name]
    account = sent(fn, (N,))
    assert account.bytes_per_worker == pytest.approx(expected)
    assert len(account.collectives) == (2 if name == "callbacks" else expected > 0)
    if name == "loops are multiplied":
        assert account.collectives[0].times == 15
        assert account.collectives[0].path == ("scan x5", "scan x3")


def test_conditionals_count_their_largest_branch() -> None:
    branches = [lambda x: x, summed, lambda x: lax.ppermute(x, "data", RING)]
    account = sent(lambda x: lax.switch(jnp.int32(x[0] > 0), branches, x))
    assert [c.path for c in account.collectives] == [("cond 2/3",), ("cond 3/3",)]
    assert account.bytes_per_worker == pytest.approx(14 / 8 * 24)
    # On a fast link the all-reduce's 14 messages decide, on a slow one its bytes do: both heavier.
    assert account.seconds(1e9, 1.0) == pytest.approx(14, rel=1e-3)


def test_unbounded_loops_are_flagged() -> None:
    account = sent(lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: summed(x) + 1, x))
    assert account.unbounded and account.collectives[0].unbounded
    assert "at least" in str(account) and ">=1" in str(account)
    with pytest.raises(ValueError, match="A loop of unknown length sends each time"):
        account.seconds(1e9)


def test_collectives_of_autodiff_are_counted() -> None:
    gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    run = jax.shard_map(gradient, mesh=data(), in_specs=(P(), P("data")), out_specs=P())
    account = wire.account(run, jnp.zeros(5), jnp.zeros((16, 5)))
    assert account.bytes_per_worker == pytest.approx(14 / 8 * 20)


@pytest.mark.parametrize(("prevents", "times"), [(True, 2), (False, 1)])
def test_what_a_checkpoint_gathers_again_counts_again(prevents: bool, times: int) -> None:
    """Without `prevent_cse`, XLA may use the first result."""

    @functools.partial(jax.checkpoint, prevent_cse=prevents)
    def layer(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(lax.all_gather(x, "data")))

    program = jax.jit(on(data(), lambda x: lax.psum(jax.value_and_grad(layer)(x), "data")))
    shape = jax.ShapeDtypeStruct((6,), jnp.float32)
    gathers = [c for c in wire.account(program, shape).collectives if c.kind == "all_gather"]
    assert len(gathers) == times
    assert ("optimization_barrier" in program.lower(shape).as_text()) == prevents


def test_axes_are_distinguished() -> None:
    mesh = mesh_of(AxisType.Auto, 2, 4, names=("dcn", "ici"))
    each = lambda x: lax.psum(lax.psum(lax.psum(x, "ici"), "dcn"), ("dcn", "ici"))  # noqa: E731
    assert wire.account(on(mesh, each), jnp.zeros(6)).bytes_by_axis == pytest.approx(
        {"ici": 2 * 3 / 4 * 24, "dcn": 24, "dcn,ici": 2 * 7 / 8 * 24}
    )


def test_one_worker_sends_nothing() -> None:
    both = lambda x: (summed(x), lax.ppermute(x, "data", [(0, 0)]))  # noqa: E731
    account = wire.account(on(data(workers=1), both), jnp.zeros(6))
    assert account.bytes_per_worker == 0 and "in rings: 0" in str(account)


def test_combined_arrays_are_one_message() -> None:
    def both(tree: list[jax.Array]) -> Any:
        sums = [summed(x) for x in tree]
        peaks = [lax.pmax(x, "data") for x in tree]
        after = [summed(x + peak) for x, peak in zip(tree, peaks, strict=True)]
        return sums, after, summed(after[0])

    tree, run = [jnp.zeros(3 + i) for i in range(5)], on(data(), both)
    account = wire.account(run, tree)
    text = jax.jit(run).lower(tree).compile().as_text()
    # A group of sums and one of maxima; those that wait for the maxima join the sums; the last.
    assert len({c.group for c in account.collectives}) == text.count(" all-reduce(") == 3
    assert account.messages == 3 * 14
    assert account.seconds(1e15, 1.0) == pytest.approx(3 * 14)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_unit_whatever_other_axes_shard(kind: AxisType) -> None:
    layout = {"w": P(None, "model")}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, kind))
    params = {"w": jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, layout["w"]))}

    def account_of(tx: Any) -> Account:
        def step(params: Any, batch: Any) -> Any:
            gradient = jax.tree.map(lambda w: w * jnp.sum(batch), params)
            return tx.update(gradient, tx.init(gradient))[0]

        specs: Any = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
        return wire.account(jax.shard_map(step, mesh=mesh, **specs), params, jnp.ones((64, 32)))

    with jax.set_mesh(mesh):
        if kind == AxisType.Auto:
            message = r"argument at \[0\]\['w'\] is sharded over \['model'\]"
            with pytest.warns(UserWarning, match=message):
                account = account_of(jaxcomm.mean())
            assert account.at_most and account.bytes_per_worker == 8192
            assert "at most 8,192" in str(account) and "<=8,192" in str(account)
        else:
            account = account_of(jaxcomm.mean())
            assert not account.at_most and account.bytes_per_worker == 2048
        account = account_of(jaxcomm.shard_local(jaxcomm.mean(), layout))
        assert not account.at_most and account.bytes_per_worker == 2048


def test_differently_sharded_arrays_are_different_values() -> None:
    both = lambda x: [on(data(), summed, spec)(x) for spec in (P("data"), P(None, "data"))]  # noqa: E731
    assert wire.account(both, jnp.ones((8, 8))).bytes_per_worker == 2 * 14 / 8 * 32


def test_a_nested_simulated_step_is_not_counted_as_zero() -> None:
    loss, x = lambda w, b: jnp.mean((w - b[0]) ** 2), jnp.zeros(100)
    step, state = begun(loss, jaxcomm.global_qsgd(), N, x)
    args = (x, state, jnp.ones((N, 100)))
    assert wire.account(step, *args).bytes_per_worker > 0
    message = r"contains a step of `jaxcomm\.simulate`.*account for the step"
    with pytest.raises(ValueError, match=message):
        wire.account(jax.jit(lambda *args: step(*args)), *args)


def sharded(kind: AxisType = AxisType.Auto) -> tuple[jax.Array, jax.Array]:
    """Weights that are replicated, and rows that are sharded."""
    on = lambda spec: NamedSharding(data(kind), spec)  # noqa: E731
    whole = jax.device_put(jnp.ones((8, 8)), on(P()))
    return whole, jax.device_put(jnp.ones((16, 8)), on(P("data")))


def descended(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def compressed(w: jax.Array, x: jax.Array) -> jax.Array:
    tx = jaxcomm.global_qsgd()
    update = on(data(), lambda g: tx.update(g, tx.init(g))[0])
    return w - update(w - descended(w, x))


def gathered(w: jax.Array, x: jax.Array) -> jax.Array:
    return on(data(), lambda w, x: x @ w)(w, x)


INSERTED: dict[str, Any] = {
    "whole step": (descended, {("all_reduce", (8, 8), 1)}),
    "beside what is sent": (
        compressed,
        {("all_reduce", (8, 8), 1), ("all_reduce", (2,), 1)},
    ),
    "before what is mapped": (gathered, {("all_gather", (2, 8), 1)}),
    "a scalar alone": (lambda w, x: jnp.mean(x), {("all_reduce", (), 1)}),
}


@pytest.mark.parametrize("name", INSERTED)
def test_collectives_inserted_by_xla_are_read_from_the_compiled_program(name: str) -> None:
    fn, expected = INSERTED[name]
    account = wire.account(fn, *sharded())
    assert {(c.kind, c.shape, c.times) for c in account.collectives} == expected
    assert account.bytes_by_axis.keys() == {"data"}
    floats = [c for c in account.collectives if c.shape != (2,) and c.dtype == jnp.float32]
    assert all("test_account.py:" in c.source for c in floats)


def test_arguments_that_are_no_arrays() -> None:
    """They may be static in a jitted function; and another may read numbers beside them."""

    def fn(w: jax.Array, x: jax.Array, power: int, activation: Callable[..., Any]) -> Any:
        loss = lambda w: jnp.mean(activation(x @ w) ** power)  # noqa: E731
        return (jax.grad(loss)(w), activation) if power else None

    w, x = sharded()
    expected = 14 / 8 * 256
    assert wire.account(fn, w, x, 2, jnp.tanh).bytes_per_worker == expected
    assert wire.account(fn, w, x, 0, jnp.tanh).bytes_per_worker == 0
    static = jax.jit(lambda *args: fn(*args)[0], static_argnums=(2, 3))
    assert wire.account(static, w, x, 2, jnp.tanh).bytes_per_worker == expected
    scaled = lambda w, x, factor: descended(w, x) * factor  # noqa: E731
    for run in (scaled, jax.jit(scaled)):
        assert wire.account(run, w, x, 0.5).bytes_per_worker == expected


def test_what_xla_inserts_in_a_loop_counts_each_time() -> None:
    body = lambda x: lambda w, _: (descended(w, x), None)  # noqa: E731
    account = wire.account(lambda w, x: lax.scan(body(x), w, None, length=5)[0], *sharded())
    (found,) = account.collectives
    assert found.path == ("scan x5",) and found.times == 5
    assert account.bytes_per_worker == 5 * 14 / 8 * 256


def test_collectives_inserted_for_explicit_axes_and_by_placement() -> None:
    expected = 14 / 8 * 256
    arrays = sharded(AxisType.Explicit)
    with jax.set_mesh(data(AxisType.Explicit)):
        assert wire.account(descended, *arrays).bytes_per_worker == expected
    arrays = sharded()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]
    assert wire.account(descended, *shapes).bytes_per_worker == expected
    placed = jax.jit(descended, in_shardings=tuple(x.sharding for x in arrays))
    ones = jnp.ones((8, 8)), jnp.ones((16, 8))
    assert wire.account(placed, *ones).bytes_per_worker == expected
    assert wire.account(placed.lower(*ones)).bytes_per_worker == expected
    assert wire.account(placed.lower(*ones).compile()).bytes_per_worker == expected
    moved = jax.jit(lambda w, x: x, out_shardings=arrays[0].sharding)
    assert wire.account(moved, *arrays).bytes_per_worker == 7 * 64


def test_a_step_that_places_its_arguments_is_counted_whatever_their_sharding() -> None:
    w, x = sharded()
    step, state = begun(lambda w, x: jnp.mean((x @ w) ** 2), jaxcomm.mean(), data(), w)
    columns = jax.device_put(x, NamedSharding(data(), P(None, "data")))
    found = [wire.account(step, w, state, rows).bytes_per_worker for rows in (x, columns)]
    assert found == [14 / 8 * (256 + 4)] * 2
    moved = wire.account(jax.jit(lambda *given: step(*given)), w, state, columns)
    assert [c.kind for c in moved.collectives if c not in found] != []


def test_sharded_arrays_of_which_nothing_or_a_scalar_is_sent() -> None:
    w, x = sharded()
    assert wire.account(lambda w, x: jnp.sin(x @ w), w, x).bytes_per_worker == 0
    assert wire.account(descended, w, w).bytes_per_worker == 0
    mean = on(data(), lambda x: lax.pmean(x, "data"), P("data"))
    account = wire.account(lambda x: mean(x) / jnp.sqrt(jnp.sum(x**2)), x)
    assert account.bytes_per_worker == 14 / 8 * (64 + 4)
