"""The account against bytes counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import wire
from jaxcomm.wire._account import Account

N = 8


def sent(
    fn: Callable[..., Any], shape: tuple[int, ...] = (6,), dtype: Any = jnp.float32
) -> Account:
    """The account of a worker's function of one array of `shape`."""
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return wire.account(mapped, jax.ShapeDtypeStruct(shape, dtype))


RING = [(i, (i + 1) % N) for i in range(N)]
BY_HAND = {
    "psum": (lambda x: lax.psum(x, "data"), "all_reduce", 2 * 7 / 8 * 64, 14),
    "pmax": (lambda x: lax.pmax(x, "data"), "all_reduce", 2 * 7 / 8 * 64, 14),
    "pmean": (lambda x: lax.pmean(x, "data"), "all_reduce", 2 * 7 / 8 * 64, 14),
    "all_gather": (lambda x: lax.all_gather(x, "data"), "all_gather", 7 * 64, 7),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "data"), "reduce_scatter", 7 / 8 * 64, 7),
    "all_to_all": (lambda x: lax.all_to_all(x, "data", 0, 0), "all_to_all", 7 / 8 * 64, 7),
    "ppermute": (lambda x: lax.ppermute(x, "data", RING), "ppermute", 64, 1),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_and_messages(name: str) -> None:
    fn, primitive, expected, messages = BY_HAND[name]
    account = sent(fn, shape=(8, 2))
    (collective,) = account.collectives
    assert collective.primitive == primitive and collective.workers == N
    assert account.bytes_per_worker == pytest.approx(expected)
    assert account.bytes_by_axis == pytest.approx({"data": expected})
    assert account.seconds(100.0, 0.5) == pytest.approx(expected / 100 + 0.5 * messages)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.int8, 1), (jnp.bfloat16, 2), (jnp.uint32, 4)])
def test_bytes_follow_the_dtype(dtype: Any, size: int) -> None:
    assert sent(lambda x: lax.psum(x, "data"), (8,), dtype).bytes_per_worker == 14 * size


def test_four_bits_that_are_not_packed_are_billed_a_byte() -> None:
    assert sent(lambda x: lax.psum(x, "data"), (8,), jnp.int4).bytes_per_worker == 14


def test_loops_are_multiplied() -> None:
    def loops(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.fori_loop(0, 3, lambda _, x: lax.ppermute(x, "data", RING), x), None

        return lax.scan(inner, x, None, length=5)[0]

    account = sent(loops)
    assert account.bytes_per_worker == 15 * 24
    assert account.collectives[0].times == 15
    assert account.collectives[0].path == ("scan x5", "scan x3")


def test_conditionals_are_reported_by_branch_and_billed_at_the_heaviest() -> None:
    def traced(x: jax.Array) -> jax.Array:
        return lax.switch(
            jnp.int32(x[0] > 0),
            [lambda x: x, lambda x: lax.psum(x, "data"), lambda x: lax.ppermute(x, "data", RING)],
            x,
        )

    account = sent(traced)
    assert [c.path for c in account.collectives] == [("cond 2/3",), ("cond 3/3",)]
    assert account.bytes_per_worker == pytest.approx(14 / 8 * 24)
    # On a fast link the all-reduce's 14 messages decide, on a slow one its bytes do: both heavier.
    assert account.seconds(1e9, 1.0) == pytest.approx(14, rel=1e-3)


def test_unbounded_loops_are_flagged() -> None:
    def unbounded(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0] < 9, lambda x: lax.psum(x, "data") + 1, x)

    account = sent(unbounded)
    assert account.unbounded and account.collectives[0].unbounded
    assert "at least" in str(account) and ">=1" in str(account)
    with pytest.raises(ValueError, match="A loop of unknown length sends each time"):
        account.seconds(1e9)


def test_what_autodiff_inserts_is_seen() -> None:
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    mapped = jax.shard_map(
        gradient,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    account = wire.account(mapped, jnp.zeros(5), jnp.zeros((16, 5)))
    assert account.bytes_per_worker == pytest.approx(14 / 8 * 20)


def test_axes_are_told_apart() -> None:
    mesh = jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x: lax.psum(lax.psum(lax.psum(x, "ici"), "dcn"), ("dcn", "ici")),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    account = wire.account(mapped, jnp.zeros(6))
    assert account.bytes_by_axis == pytest.approx(
        {"ici": 2 * 3 / 4 * 24, "dcn": 24, "dcn,ici": 2 * 7 / 8 * 24}
    )


def test_groups_are_counted_by_their_size() -> None:
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    account = sent(lambda x: lax.all_gather(x, "data", axis_index_groups=groups))
    assert account.bytes_per_worker == 24


def test_one_worker_sends_nothing() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    both = lambda x: (lax.psum(x, "data"), lax.ppermute(x, "data", [(0, 0)]))  # noqa: E731
    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    assert wire.account(mapped, jnp.zeros(6)).bytes_per_worker == 0


def test_nothing_to_report() -> None:
    account = wire.account(lambda x: x + 1, jnp.zeros(3))
    assert account.collectives == () and account.bytes_per_worker == 0
    assert "bytes sent per worker: 0" in str(account)


def test_a_link_says_what_compression_saves() -> None:
    x = jnp.zeros((N, 100_000))
    bill = {}
    for name, tx in {"exact": jaxcomm.mean(), "coded": jaxcomm.global_qsgd()}.items():
        step = jaxcomm.simulate(lambda w, b: jnp.mean((b[0] - w) ** 2), tx, N)
        account = wire.account(step, x[0], jaxcomm.init(tx, x[0], N), x)
        bill[name] = account.seconds(125e6, 50e-6)
    assert 0.25 < bill["coded"] / bill["exact"] < 0.6


def test_what_is_combined_is_one_message() -> None:
    def both(tree: list[jax.Array]) -> Any:
        sums = [lax.psum(x, "data") for x in tree]
        peaks = [lax.pmax(x, "data") for x in tree]
        after = [lax.psum(x + peak, "data") for x, peak in zip(tree, peaks, strict=True)]
        return sums, after, lax.psum(after[0], "data")

    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    tree = [jnp.zeros(3 + i) for i in range(5)]
    account = wire.account(mapped, tree)
    text = jax.jit(mapped).lower(tree).compile().as_text()
    # A group of sums and one of maxima; those that wait for the maxima join the sums; the last.
    assert len({c.group for c in account.collectives}) == text.count(" all-reduce(") == 3
    assert account.messages == 3 * 14
    assert account.seconds(1e15, 1.0) == pytest.approx(3 * 14)


def test_dead_and_equal_collectives_are_not_billed() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        lax.psum(x * 2, "data")  # Nobody reads it.
        first, second = lax.psum(x + 1, "data"), lax.psum(x + 1, "data")
        return first + jax.jit(lambda x: (x, lax.pmax(x, "data")))(second)[0]

    account = sent(wasteful)
    (collective,) = account.collectives
    assert collective.primitive == "all_reduce" and account.messages == 14


def test_permutations_that_stay_are_free() -> None:
    stay = [(i, i) for i in range(N)]
    assert sent(lambda x: lax.ppermute(x, "data", stay)).collectives == ()
    assert sent(lambda x: lax.ppermute(x, "data", [])).collectives == ()
    assert sent(lambda x: lax.ppermute(x, "data", [(0, 1)])).bytes_per_worker == 24


def test_of_a_ragged_exchange_the_rows_are_billed() -> None:
    def exchange(x: jax.Array) -> jax.Array:
        ones, places = jnp.ones(N, jnp.int32), jnp.arange(N, dtype=jnp.int32)
        return lax.ragged_all_to_all(
            x, jnp.zeros(N), places, ones, ones * lax.axis_index("data"), ones, axis_name="data"
        )

    assert sent(exchange, (N,)).bytes_per_worker == 7 / 8 * 32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_unit_whatever_other_axes_shard(kind: AxisType) -> None:
    layout = {"w": PartitionSpec(None, "model")}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, kind))
    params = {"w": jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, layout["w"]))}

    def program(tx: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            gradient = jax.tree.map(lambda w: w * jnp.sum(batch), params)
            return tx.update(gradient, tx.init(gradient))[0]

        specs = (PartitionSpec(), PartitionSpec("data"))
        return jax.shard_map(
            step, mesh=mesh, axis_names={"data"}, in_specs=specs, out_specs=PartitionSpec()
        )

    batch = jnp.ones((64, 32))
    with jax.set_mesh(mesh):
        whole = program(jaxcomm.mean())
        if kind == AxisType.Auto:
            with pytest.warns(
                UserWarning, match=r"argument at \[0\]\['w'\] is sharded over \['model'\]"
            ):
                account = wire.account(whole, params, batch)
            assert account.at_most and account.bytes_per_worker == 8192
            assert "at most 8,192" in str(account) and "<=8,192" in str(account)
        else:
            account = wire.account(whole, params, batch)
            assert not account.at_most and account.bytes_per_worker == 2048
        account = wire.account(program(jaxcomm.shard_local(jaxcomm.mean(), layout)), params, batch)
        assert not account.at_most and account.bytes_per_worker == 2048


def test_many_leaves_do_not_make_the_mean_slow() -> None:
    params = {i: jnp.ones((8, 8)) for i in range(30)}
    loss = lambda p, b: sum(jnp.mean((b @ w) ** 2) for w in p.values())  # noqa: E731
    seconds = {}
    for name, tx in {"mean": jaxcomm.mean(), "coded": jaxcomm.global_qsgd()}.items():
        step = jaxcomm.simulate(loss, tx, N)
        account = wire.account(step, params, jaxcomm.init(tx, params, N), jnp.ones((64, 8)))
        seconds[name] = account.seconds(125e6, 50e-6)
        assert account.messages == (14 if name == "mean" else 3 * 14)
    assert seconds["mean"] == pytest.approx(14 * 50e-6 + 14 / 8 * (30 * 256 + 4) / 125e6)
    assert seconds["coded"] > seconds["mean"]  # Few bytes, and two messages more.


def test_what_is_cut_otherwise_is_another_value() -> None:
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))

    def both(x: jax.Array) -> Any:
        def run(spec: PartitionSpec) -> jax.Array:
            return jax.shard_map(
                lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
            )(x)

        return run(PartitionSpec("data")), run(PartitionSpec(None, "data"))

    assert wire.account(both, jnp.ones((8, 8))).bytes_per_worker == 2 * 14 / 8 * 32


def test_what_a_callback_returns_is_another_value_each_time() -> None:
    def twice(x: jax.Array) -> jax.Array:
        draw = lambda: jax.experimental.io_callback(np.sin, x, x)  # noqa: E731
        return lax.psum(draw(), "data") + lax.psum(draw(), "data")

    assert sent(twice).bytes_per_worker == 2 * 14 / 8 * 24


def test_what_a_loop_sends_for_nobody_is_not_billed() -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(carry: Any, _: None) -> Any:
            x, unused = carry
            return (lax.ppermute(x, "data", RING), lax.psum(unused, "data")), lax.psum(x, "data")

        return lax.scan(body, (x, x), None, length=5)[0][0]

    account = sent(loop)
    assert [c.primitive for c in account.collectives] == ["ppermute"]
    assert account.bytes_per_worker == 5 * 24


def test_of_a_linear_solve_the_solution_is_billed() -> None:
    def solve(x: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda y: y * 8.0, x, lambda _, b: lax.psum(b, "data") / 64, symmetric=True
        )

    assert sent(solve).bytes_per_worker == 14 / 8 * 24


def test_a_simulated_step_inside_of_a_program_is_not_accounted_as_nothing() -> None:
    tx = jaxcomm.global_qsgd()
    step = jaxcomm.simulate(lambda w, b: jnp.mean((w - b[0]) ** 2), tx, N, donate=False)
    x, state, rows = jnp.zeros(100), jaxcomm.init(tx, jnp.zeros(100), N), jnp.ones((N, 100))
    assert wire.account(step, x, state, rows).bytes_per_worker > 0
    with pytest.raises(
        ValueError, match=r"contains a step of `jaxcomm\.simulate`.*account for the step"
    ):
        wire.account(jax.jit(lambda *args: step(*args)), x, state, rows)


def _mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((N,), ("data",), axis_types=(kind,))


def _sharded(kind: AxisType = AxisType.Auto) -> tuple[jax.Array, jax.Array]:
    """Weights that are replicated, and rows that are sharded."""
    on = lambda spec: NamedSharding(_mesh(kind), spec)  # noqa: E731
    whole = jax.device_put(jnp.ones((8, 8)), on(PartitionSpec()))
    return whole, jax.device_put(jnp.ones((16, 8)), on(PartitionSpec("data")))


def _descend(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def _constrained(w: jax.Array, x: jax.Array) -> jax.Array:
    sharding = NamedSharding(_mesh(), PartitionSpec("data"))
    return _descend(w, lax.with_sharding_constraint(x, sharding))


def _compressed(w: jax.Array, x: jax.Array) -> jax.Array:
    tx = jaxcomm.global_qsgd()
    update = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=_mesh(),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return w - update(w - _descend(w, x))


def _gathered(w: jax.Array, x: jax.Array) -> jax.Array:
    spec = PartitionSpec()
    return jax.shard_map(lambda w, x: x @ w, mesh=_mesh(), in_specs=spec, out_specs=spec)(w, x)


INSERTED = {
    "whole step": (_descend, r"all-reduce f32\[8,8\]"),
    "with a constraint": (_constrained, r"all-reduce f32\[8,8\]"),
    "beside what is sent": (_compressed, r"all-reduce f32\[8,8\]"),
    "before what is mapped": (_gathered, r"all-gather f32\[16,8\]"),
    "a scalar alone": (lambda w, x: jnp.mean(x), r"all-reduce f32\[\]"),
    "in a loop": (lambda w, x: lax.scan(lambda w, x: (w + x, None), w[0], x)[0], "all-"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", INSERTED)
def test_what_xla_inserts_is_not_accounted_as_nothing(name: str, jit: bool) -> None:
    fn, found = INSERTED[name]
    message = f"XLA partitions this program and inserts collectives .*{found}"
    with pytest.raises(ValueError, match=message):
        wire.account(jax.jit(fn) if jit else fn, *_sharded())


def test_what_xla_inserts_over_explicit_axes_or_for_shapes_is_not_nothing_either() -> None:
    arrays = _sharded(AxisType.Explicit)
    with jax.set_mesh(_mesh(AxisType.Explicit)), pytest.raises(ValueError, match="all-reduce"):
        wire.account(_descend, *arrays)
    arrays = _sharded()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]
    with pytest.raises(ValueError, match="all-reduce"):
        wire.account(_descend, *shapes)
    placed = jax.jit(_descend, in_shardings=tuple(x.sharding for x in arrays))
    with pytest.raises(ValueError, match="all-reduce"):
        wire.account(placed, jnp.ones((8, 8)), jnp.ones((16, 8)))
    moved = jax.jit(lambda w, x: x, out_shardings=arrays[0].sharding)
    with pytest.raises(ValueError, match="all-gather"):
        wire.account(moved, *arrays)


def test_a_step_that_places_its_arguments_is_counted_whatever_their_sharding() -> None:
    w, x = _sharded()
    tx = jaxcomm.mean()
    step = jaxcomm.make_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, _mesh())
    state = jaxcomm.init(tx, w, _mesh())
    columns = jax.device_put(x, NamedSharding(_mesh(), PartitionSpec(None, "data")))
    found = [wire.account(step, w, state, rows).bytes_per_worker for rows in (x, columns)]
    assert found == [14 / 8 * (256 + 4)] * 2
    with pytest.raises(ValueError, match="all-to-all"):
        wire.account(jax.jit(lambda *given: step(*given)), w, state, columns)


def test_sharded_arrays_of_which_nothing_is_sent_are_nothing() -> None:
    w, x = _sharded()
    assert wire.account(lambda w, x: jnp.sin(x @ w), w, x).bytes_per_worker == 0
    assert wire.account(_descend, w, w).bytes_per_worker == 0


def test_a_scalar_beside_what_is_sent_is_nothing() -> None:
    _, x = _sharded()
    mean = jax.shard_map(
        lambda x: lax.pmean(x, "data"),
        mesh=_mesh(),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    account = wire.account(lambda x: mean(x) / jnp.sqrt(jnp.sum(x**2)), x)
    assert account.bytes_per_worker == 14 / 8 * 64
