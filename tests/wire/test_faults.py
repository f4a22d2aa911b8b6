"""Faults of communication from public reports, each rebuilt as a small program and caught.

A budget says what was meant, in the words of a user, before anything is counted. It must break at
the line of the fault and keep for the corrected program. Facts are from the reports; the programs
are written for these tests. Everything is compiled for eight CPU devices.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from tests.training.places import mesh_of
from tests.wire.rings import (
    SCALAR,
    N,
    all_gather,
    all_reduce,
    all_to_all,
    array,
    marked,
    size_of,
)

MESH = mesh_of(AxisType.Auto, N)
EXPLICIT = mesh_of(AxisType.Explicit, N)
ROWS, WHOLE = P("data"), P()
HALF = jnp.bfloat16


def caught(
    mark: str,
    kinds: Collection[str],
    dtype: str,
    axes: Collection[str],
    program: Callable[..., Any],
    *args: Any,
    **budget: Any,
) -> wire.WireError:
    """The error of a program that breaks its budget, with what the report must say of it."""
    with pytest.raises(wire.WireError) as raised:
        wire.require(program, *args, **budget)
    error, lines = raised.value, marked(__file__, mark)
    assert {c.kind for c in error.collectives} == {*kinds}
    assert {str(c.dtype) for c in error.collectives} == {dtype}
    assert {axis for c in error.collectives for axis in c.axes} == {*axes}
    assert {c.source for c in error.collectives} <= lines
    assert any(line in str(error) for line in lines)
    return error


def kept(error: wire.WireError, program: Callable[..., Any], *args: Any, **budget: Any) -> None:
    """The corrected program keeps the budget, and the faulty one differs from its report."""
    report = wire.require(program, *args, **budget)
    with pytest.raises(wire.WireError, match=r"added|grew|changed"):
        wire.require(error.report, same_as=report)


LAYERS = {"in": array(EXPLICIT, WHOLE, 16, 32), "out": array(EXPLICIT, WHOLE, 32, 16)}
MICRO = array(EXPLICIT, P(None, "data"), 4, 16, 16)


def squared(w: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ w["in"])  # 5099
    return jnp.mean((hidden @ w["out"]) ** 2)  # 5099


def accumulated(w: Any, differentiated: Any, zeros: Any, micro: jax.Array) -> Any:
    """The sum of the gradients of micro-batches, and of their losses."""

    def add(total: Any, x: jax.Array) -> Any:
        found = jax.value_and_grad(squared)(differentiated, x)
        return jax.tree.map(jnp.add, total, found), None

    return lax.scan(add, (jnp.zeros(()), zeros), micro)[0]


def summed_each_time(w: Any, micro: jax.Array) -> Any:
    loss, gradient = accumulated(w, w, jax.tree.map(jnp.zeros_like, w), micro)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), loss


def summed_once(w: Any, micro: jax.Array) -> Any:
    """Gradients stay parts of a sum on each device until the loop has ended."""
    to = lambda tree, spec: jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)  # noqa: E731
    zeros = to(jax.tree.map(jnp.zeros_like, w), P(unreduced={"data"}))
    loss, parts = accumulated(w, to(w, P(reduced={"data"})), zeros, micro)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, to(parts, WHOLE)), loss


def test_an_all_reduce_of_every_micro_batch() -> None:
    """AI-Hypercomputer/maxtext, pull request 5099: gradients are summed once per micro-batch.

    Meant: one all-reduce of the gradient after the loop; within, at most the scalar of a loss. The
    report is of an engine that calls a program per micro-batch; here a loop is around it.
    """
    budget = {
        "bytes": all_reduce(size_of(LAYERS)) + 4 * all_reduce(SCALAR),
        "outside_loops": True,
        "above": 4 * all_reduce(SCALAR),
    }
    with jax.set_mesh(EXPLICIT):
        error = caught(
            "5099", {"all_reduce"}, "float32", {"data"}, summed_each_time, LAYERS, MICRO, **budget
        )
        kept(error, summed_once, LAYERS, MICRO, **budget)
    large = [c for c in error.collectives if c.shape]
    assert {(c.shape, c.times, c.path) for c in large} == {
        ((16, 32), 4, ("scan x4",)),
        ((32, 16), 4, ("scan x4",)),
    }


def pinned(x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions are computed in float32."""
    angles = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], 1)  # 23543


def attention(w: jax.Array, x: jax.Array, before: P | None = None) -> jax.Array:
    """Each device attends from its part of the sequence to all of it."""
    keys = rotated(x @ w).astype(HALF)  # 23543
    if before is not None:
        keys = pinned(keys, before)
    keys = pinned(keys, WHOLE)
    scores = jax.nn.softmax((x @ keys.T).astype(jnp.float32), axis=-1)
    return scores.astype(HALF) @ keys


def test_a_float32_gather_where_bfloat16_was_meant() -> None:
    """jax-ml/jax, issue 23543: keys are gathered before they are converted to bfloat16.

    Meant: after it, in half the bytes. The report is of GPUs. Here the partitioner does the same
    for the same reason: the gathered layout reaches back through the conversion.
    """
    w, x = array(MESH, WHOLE, 16, 16, dtype=HALF), array(MESH, ROWS, 64, 16, dtype=HALF)
    budget = {"bytes": all_gather(64 / N * 16 * 2), "bits": 16}
    error = caught("23543", {"all_gather"}, "float32", {"data"}, attention, w, x, **budget)
    kept(error, lambda w, x: attention(w, x, before=ROWS), w, x, **budget)


def mixed(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w.astype(HALF)).astype(jnp.float32) ** 2)  # 27496


def descended(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(mixed)(w, x)


def descended_in_float32(w: jax.Array, x: jax.Array) -> jax.Array:
    """Each device converts its own gradient, and then all are summed."""

    def summed(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean(jax.grad(mixed)(lax.pcast(w, "data", to="varying"), x), "data")

    gradient = jax.shard_map(summed, mesh=MESH, in_specs=(WHOLE, ROWS), out_specs=WHOLE)
    return w - 0.1 * gradient(w, x)


def test_a_sum_in_bfloat16_where_float32_was_meant() -> None:
    """jax-ml/jax, issue 27496: gradients are reduced before they are converted to float32.

    Meant: parameters and sums in float32, products in bfloat16. XLA for CPUs adds this sum in
    float32, and marks that the program asks for bfloat16, which is what other devices send.
    """
    w, x = array(MESH, WHOLE, 16, 16), array(MESH, ROWS, 64, 16, dtype=HALF)
    budget = {"bytes": all_reduce(16 * 16 * 4), "dtypes": "float32"}
    error = caught("27496", {"all_reduce"}, "bfloat16", {"data"}, descended, w, x, **budget)
    kept(error, descended_in_float32, w, x, **budget)


EXPERTS, DEPTH = 384, 3
ROUTERS, TOKENS = array(MESH, WHOLE, DEPTH, 32, EXPERTS), array(MESH, ROWS, 64, 32)


def routed(x: jax.Array, w: jax.Array, largest: Callable[[jax.Array], jax.Array]) -> Any:
    """A layer, and statistics of its router: nothing in the layer reads them."""
    logits = x @ w
    chosen = jax.nn.one_hot(jnp.argmax(logits, -1), EXPERTS)
    statistics = {
        "bias": largest(logits),
        "counts": jnp.mean(chosen, 0),  # 8370
        "shares": jnp.mean(jax.nn.softmax(logits, axis=-1), 0),  # 8370
        "z": jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),  # 8370
    }
    return x + jnp.tanh(chosen @ w.T), statistics


def averaged(logits: jax.Array) -> jax.Array:
    return lax.pmean(jnp.max(logits, 0), "data")  # 8370


def in_every_layer(ws: jax.Array, x: jax.Array) -> Any:
    largest = jax.shard_map(averaged, mesh=MESH, in_specs=ROWS, out_specs=WHOLE)
    return lax.scan(lambda x, w: routed(x, w, largest), x, ws)


def after_all_layers(ws: jax.Array, x: jax.Array) -> Any:
    """Each device keeps the statistics of its own tokens until the loop has ended."""

    def local(ws: jax.Array, x: jax.Array) -> Any:
        x, statistics = lax.scan(lambda x, w: routed(x, w, lambda y: jnp.max(y, 0)), x, ws)
        return x, lax.pmean(statistics, "data")

    specs: Any = {"in_specs": (WHOLE, ROWS), "out_specs": (ROWS, WHOLE), "check_vma": False}
    return jax.shard_map(local, mesh=MESH, **specs)(ws, x)


def test_small_collectives_in_a_loop_over_layers() -> None:
    """marin-community/marin, pull request 8370: a message of 4,612 bytes in every layer.

    Meant: one message after the loop, since the statistics are only logged or read in the next
    step. The report counts 48 exposed messages per step. XLA for CPUs has no messages that
    overlap, so this shows that they are in the loop, not that they are exposed.
    """
    args = (ROUTERS, TOKENS)
    budget = {"outside_loops": True, "collectives": {"all_reduce": 1}}
    error = caught("8370", {"all_reduce"}, "float32", {"data"}, in_every_layer, *args, **budget)
    assert {(c.times, c.path) for c in error.collectives} == {(DEPTH, (f"scan x{DEPTH}",))}
    assert sum(math.prod(c.shape) * c.dtype.itemsize for c in error.collectives) == 4612
    assert [c.combined for c in error.collectives] == [4] * 4
    kept(error, after_all_layers, *args, **budget)


NAMES = [f"layer {number}" for number in range(N)]
SHARDED = {name: array(MESH, P(None, "data"), 32, 16) for name in NAMES}


def begun(tx: Any, params: Any, spec: P) -> Any:
    """The state of an optimizer, whose moments are sharded as `spec`."""
    place = lambda x: array(MESH, spec if x.ndim > 1 else WHOLE, *x.shape, dtype=x.dtype)  # noqa: E731
    return jax.tree.map(place, jax.eval_shape(tx.init, params))


def orthogonalized(gradients: Any, state: Any) -> Any:
    return optax.contrib.muon(0.1).update(gradients, state, gradients)  # 978


DIMENSIONS = {"stack": optax.contrib.MuonDimensionNumbers(1, 2)}


def orthogonalized_in_stacks(gradients: Any, state: Any) -> Any:
    """Each device has whole matrices: those of its part of the stack."""
    stack = {"stack": pinned(jnp.stack([gradients[name] for name in NAMES]), ROWS)}
    muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=DIMENSIONS)
    updates, state = muon.update(stack, state, stack)
    # Without the first layout, XLA moves two terms of each update, and adds them afterwards.
    unstacked = pinned(pinned(updates["stack"], ROWS), P(None, None, "data"))
    return {name: unstacked[i] for i, name in enumerate(NAMES)}, state


@pytest.mark.usefixtures("loose")
def test_an_optimizer_that_gathers_every_matrix() -> None:
    """goodfire-ai/spd, pull request 978: Muon on sharded matrices moves them in every iteration.

    Meant: one exchange that brings whole matrices together, and one that returns the updates.
    """
    budget = {"bytes": 2 * all_to_all(size_of(SHARDED) / N), "collectives": {"all_to_all": 2}}
    state = begun(optax.contrib.muon(0.1), SHARDED, P(None, "data"))
    kinds = {"all_gather", "all_reduce"}
    error = caught("978", kinds, "float32", {"data"}, orthogonalized, SHARDED, state, **budget)
    assert error.report.bytes_per_worker > 10 * budget["bytes"]
    assert all(kind in str(error) for kind in kinds)
    muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=DIMENSIONS)
    whole = begun(muon, {"stack": jnp.zeros((N, 32, 16))}, ROWS)
    kept(error, orthogonalized_in_stacks, SHARDED, whole, **budget)


def factors(x: jax.Array) -> jax.Array:
    """A foreign function: XLA does not know that its first dimension is a batch."""
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", shapes)
    return call(x, uplo=np.uint8(ord("L")))[0]  # 32098


def test_a_foreign_function_that_gathers_its_batch() -> None:
    """jax-ml/jax, issue 32098, and marin-community/marin, issue 6470: operands are gathered.

    Meant: nothing is sent, since the function is of each row. The second report is of an attention
    kernel for GPUs; this is the function of LAPACK that all CPUs have.
    """
    x = array(MESH, ROWS, 64, 4, 4)
    error = caught("32098", {"all_gather"}, "float32", {"data"}, factors, x, collectives=0)
    assert error.report.bytes_per_worker == all_gather(size_of(x) / N)
    mapped = jax.shard_map(factors, mesh=MESH, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    kept(error, mapped, x, collectives=0)


SERVING = mesh_of(AxisType.Explicit, 4, 2, names=("data", "tensor"))


def embedded(table: jax.Array, w: jax.Array, tokens: jax.Array, spec: P) -> jax.Array:
    x = table.at[tokens].get(out_sharding=spec)  # 1083
    return jax.sharding.reshard(x, P("data", None)) @ w


def test_an_embedding_that_gathers_over_the_wrong_axis() -> None:
    """sgl-project/sglang-jax, pull request 1083: a lookup gives up the sharding of its batch.

    Meant: a sum over the axis of the vocabulary, and nothing over that of the batch.
    """
    table, w = array(SERVING, P("tensor"), 64, 16), array(SERVING, P(None, "tensor"), 16, 32)
    tokens = array(SERVING, P("data"), 32, dtype=jnp.int32)
    args = (table, w, tokens)
    budget = {"bytes": all_reduce(32 / 4 * 16 * 4, devices=2), "only_axes": "tensor"}
    with jax.set_mesh(SERVING):
        faulty = lambda *args: embedded(*args, P(None, None))  # noqa: E731
        error = caught(
            "1083",
            {"all_gather", "all_reduce"},
            "float32",
            {"data", "tensor"},
            faulty,
            *args,
            **budget,
        )
        (over_data,) = (c for c in error.collectives if "data" in c.axes)
        assert over_data.kind == "all_gather" and over_data.workers == 4
        kept(error, lambda *args: embedded(*args, P("data", None)), *args, **budget)


def in_parts(parts: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A gradient per micro-batch of 16 rows, which `parts` makes of a batch."""

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
        body = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None)  # noqa: E731
        return lax.scan(body, w, parts(batch))[0]  # 13306

    return step


def test_micro_batches_that_move_rows_between_devices() -> None:
    """openxla/xla, issue 13306, and pull request 19166: a reshape splits the sharding of a batch.

    Meant: rows stay where they are, and each of four gradients is summed. The reports see
    all-to-alls and permutes; the partitioner of JAX for CPUs gathers the micro-batches instead.
    """
    w, batch = array(MESH, WHOLE, 16, 16), array(MESH, ROWS, 64, 16)
    budget = {"bytes": 4 * all_reduce(size_of(w)), "collectives": {"all_reduce": 4}}
    consecutive = in_parts(lambda batch: batch.reshape(4, 16, 16))
    strided = in_parts(lambda batch: batch.reshape(16, 4, 16).swapaxes(0, 1))
    error = caught("13306", {"all_gather"}, "float32", {"data"}, consecutive, w, batch, **budget)
    kept(error, strided, w, batch, **budget)


def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)  # 15895


def test_random_bits_that_devices_exchange() -> None:
    """jax-ml/jax, issue 15895: dropout makes data-parallel training slower than one device.

    Meant: nothing is sent, as each row has its own bits. The older generator computes the bits of
    two halves together; the newer one, now the default, is partitionable.
    """
    key, x = array(MESH, WHOLE, dtype=jax.random.key(0).dtype), array(MESH, ROWS, 64, 32)
    with jax.threefry_partitionable(False):
        error = caught(
            "15895", {"all_gather", "ppermute"}, "uint32", {"data"}, dropped, key, x, collectives=0
        )
    with jax.threefry_partitionable(True):
        kept(error, dropped, key, x, collectives=0)


def right(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.float32(jnp.argmax(x @ w, -1) == y))


def evaluated(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    def share(xy: Any) -> jax.Array:
        return lax.pmean(right(w, *xy), "batch")  # jax3d

    return lax.map(share, (x, y))


def evaluated_locally(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.map(lambda xy: right(w, *xy), (x, y))


def test_metrics_that_every_evaluation_batch_averages() -> None:
    """google-research/jax3d, issue 2: the accuracy of each batch is averaged on all devices.

    Meant: each device returns its own, and the host averages them. Here a loop is over batches.
    """
    args = jnp.ones((N, 16, 10)), jnp.ones((N, 5, 2, 16)), jnp.zeros((N, 5, 2), jnp.int32)
    faulty = jax.pmap(evaluated, axis_name="batch")
    error = caught("jax3d", {"all_reduce"}, "float32", {"batch"}, faulty, *args, collectives=0)
    assert [(c.shape, c.times) for c in error.collectives] == [((), 5)]
    kept(error, jax.pmap(evaluated_locally, axis_name="batch"), *args, collectives=0)
