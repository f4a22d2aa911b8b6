"""ZeRO-1 and -2: equal to the unsharded method, state in n parts, feedback, and mistakes."""

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import sharded_server
from jaxcomm.compression import compressed_memory
from jaxcomm.compression.feedback import diana, error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import nonzero, top_k
from tests.aggregation.runs import prepared, refuse, require_same
from tests.laws.test_wire import messages
from tests.slow import slow
from tests.workers import mesh_of


@pytest.fixture(autouse=True)
def _promotion_that_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


# No, one, and several of them are divisible by 2, 3, 5 and 8.
SHAPES = {
    "bias": (3,),
    "empty": (0, 3),
    "kernel": (8, 5),
    "none": (5, 0),
    "odd": (7, 3, 2),
    "s": (),
}
STEPS = 4


def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


# Products with powers of two are exact, so that a fused multiply-add rounds as two operations do.
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(
        optax.piecewise_constant_schedule(0.25, {2: 0.5}),
        b1=0.5,
        b2=0.5,
        weight_decay=0.25,
        mask=is_matrix,
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.125, b1=0.5, b2=0.5),
    "partition": lambda: optax.partition(
        {"a": optax.sgd(0.125, momentum=0.5), "b": optax.amsgrad(0.25, b1=0.5, b2=0.5)},
        lambda tree: {name: "a" if name < "k" else "b" for name in tree},
    ),
}


def start(dtype: Any = jnp.float32, shapes: Any = SHAPES) -> Any:
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.integers(-4, 5, s) / 4, dtype) for k, s in shapes.items()}


def gradients_of(
    workers: int, dtype: Any = jnp.float32, steps: int = STEPS, factor: int = 1
) -> list[Any]:
    """Small integers times a factor, whose sums are exact, [workers, ...]."""
    rng = np.random.default_rng(1)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(factor * rng.integers(-3, 4, (workers, *shape)), dtype)

    return [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(steps)]


def given(loss_fn: Any, params: Any, batch: Any) -> Any:
    """Gradients, and weights where there are any, are the batch."""
    del loss_fn, params
    gradient, *weight = batch if isinstance(batch, tuple) else (batch,)
    own = jax.tree.map(lambda x: x[0], (gradient, *weight))
    return jnp.zeros((), jnp.float32), *own


def trained(
    tx: Any, where: Any, gradients: list[Any], dtype: Any = jnp.float32, **options: Any
) -> tuple[Any, Any]:
    """Parameters and state after steps with these gradients."""
    params = start(dtype, {name: x.shape[1:] for name, x in gradients[0].items()})
    step, state = prepared(no_loss, tx, params, where, gradients=given, **options)
    for batch in gradients:
        params, state, _ = step(params, state, batch)
    return params, state


def no_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.zeros(())


def unsharded(optimizer: Any) -> Any:
    return optax.chain(jaxcomm.mean(), optimizer)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("adamw", 3),
        *(slow("adamw", workers) for workers in (1, 2, 5, 8)),
        *(slow(name, n) for name in OPTIMIZERS if name != "adamw" for n in (3, 8)),
    ],
)
def test_equals_the_unsharded_method(name: str, workers: int) -> None:
    """Bit for bit, if the quotient by the number of workers is exact.

    Otherwise, XLA may contract it with the operations of the optimizer, in one of the programs.
    """
    # The square of a mean must be exact too.
    batches, mesh = gradients_of(workers, factor=workers), mesh_of(workers)
    expected, _ = trained(unsharded(OPTIMIZERS[name]()), mesh, batches)
    found, _ = trained(sharded_server(OPTIMIZERS[name]()), mesh, batches)
    if workers in (1, 2, 8):
        require_same(found, expected)
    else:
        chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=2.0**-22)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_16_bit_leaves_are_sent_in_16_bits() -> None:
    """They are rounded once, as `mean` rounds them."""
    batches, tx = gradients_of(3, jnp.bfloat16), sharded_server(optax.sgd(0.125))
    expected, _ = trained(unsharded(optax.sgd(0.125)), mesh_of(3), batches, jnp.bfloat16)
    require_same(trained(tx, mesh_of(3), batches, jnp.bfloat16)[0], expected)
    assert sent_bytes(tx, jnp.bfloat16) == 2 * 2 * (2 * SLICES + 4)


SLICES = sum(-(-int(np.prod(shape)) // 3) for shape in SHAPES.values())


def sent_bytes(tx: Any, dtype: Any = jnp.float32) -> float:
    """Of one of three workers."""
    params = start(dtype)
    step, state = prepared(no_loss, tx, params, mesh_of(3), gradients=given, metrics="own")
    sent = jaxcomm.wire.account(step, params, state, gradients_of(3, dtype)[0])
    assert len(sent.collectives) == 2
    return sent.bytes_per_worker


def test_push_and_pull_bytes_are_independent() -> None:
    exact, short, codes = 4 * SLICES + 4, 2 * SLICES + 4, SLICES + 4 + 4
    for push, pull, expected in [
        (None, cast("bfloat16"), exact + short),
        (dither(bits=8), None, codes + exact),
    ]:
        assert sent_bytes(sharded_server(optax.adam(0.1), push, pull)) == 2 * expected


@pytest.mark.parametrize("workers", [4, slow(2), slow(8)])
def test_optimizer_memory_shrinks_as_1_over_n(workers: int) -> None:
    """Of the compiled program, per device: parameters, a gradient, and two moments.

    It gathers once and exchanges once, and no gradient is summed in an all-reduce.
    """
    tx, mesh = sharded_server(optax.adam(0.1)), mesh_of(workers)
    params = {"w": jnp.zeros((256, 256)), "b": jnp.zeros(24)}
    step, state = prepared(no_loss, tx, params, mesh, gradients=given)
    rows = jax.tree.map(lambda x: jnp.zeros((workers, *x.shape)), params)
    batch = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    compiled = jax.jit(step).lower(params, state, batch).compile()
    found = compiled.memory_analysis().argument_size_in_bytes
    assert found == pytest.approx((2 + 2 / workers) * 4 * (256 * 256 + 24), abs=100)
    sent = jaxcomm.wire.account(compiled).collectives
    assert all(np.prod(c.shape) < 10 for c in sent if c.kind == "all_reduce")
    assert {"all_gather": 1, "all_to_all": 1}.items() <= messages(sent).items()


def test_memory_of_another_shape_than_its_slices() -> None:
    """Two leaves are a stack, with a scale for each; the third has its own."""
    codec = compressed_memory(error_feedback(top_k(ratio=0.5)), dither(bits=8))
    tx = sharded_server(optax.sgd(0.25), codec, scope="leaf")
    batch = {k: jnp.ones((3, size)) for k, size in {"a": 12, "b": 12, "c": 5}.items()}
    _, state = trained(tx, 3, [batch])
    memories = [x.kept.statistics.max_abs for x in state.push.per_worker["data"]]
    assert [x.shape for x in memories] == [(3, 3, 2), (3, 3)]


def test_an_update_that_overflows_changes_no_state() -> None:
    """All workers have the large number, so that their mean is finite but not its update."""
    tx = sharded_server(optax.sgd(16.0, momentum=0.5))
    first, second = gradients_of(3, steps=2)
    params, state = trained(tx, 3, [first])
    second["kernel"] = second["kernel"].at[:, 4, 1].set(3e38)
    step, _ = prepared(no_loss, tx, params, 3, gradients=given)
    after, kept, _ = step(params, state, second)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(after))
    require_same(kept._replace(step=state.step), state)
    assert kept.step == state.step + 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["push", "pull"])
def test_push_or_pull_overflow_is_nan_on_all_workers(end: str) -> None:
    few = nonzero(density=0.2, granularity="element")
    tx = sharded_server(optax.sgd(0.5, momentum=0.5), **{end: few})
    params, state = trained(tx, 2, [{"w": jnp.ones((2, 20))}])
    assert np.isnan(params["w"]).all()
    assert not np.any(np.asarray(state.inner[0].trace["w"].per_worker["data"]))
    params, _ = trained(tx, 2, [{"w": jnp.zeros((2, 20)).at[:, 3].set(1.0)}])
    expected = np.asarray(start(shapes={"w": (20,)})["w"]) - 0.5 * np.eye(20)[3]
    np.testing.assert_allclose(params["w"], expected, rtol=1e-6)


@pytest.mark.slow
def test_several_axes_and_inner_devices() -> None:
    """Over two axes a slice is for each of their devices; over one, for each of its workers."""
    axes, devices = ("dcn", "ici"), jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2, devices=devices)
    batches = gradients_of(4, factor=4)
    expected, _ = trained(unsharded(OPTIMIZERS["adamw"]()), mesh_of(4), batches)

    def server(axis: Any) -> Any:
        return sharded_server(OPTIMIZERS["adamw"](), axis_name=axis)

    for over, workers in ((axes, 4), (axes[::-1], 4), ("dcn", 2)):
        found, state = trained(server(over), mesh, batches, axis_name=over)
        require_same(found, expected)
        (moment,) = state.inner[0].mu["kernel"].per_worker.values()
        assert moment.shape[0] == workers and moment.size == 40
    in_stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), server("dcn"))
    for tx, where in ((server(axes), {"dcn": 2, "ici": 2}), (in_stages, mesh)):
        require_same(trained(tx, where, batches, axis_name=axes)[0], expected)
    first = jaxcomm.hierarchical(server("ici"), jaxcomm.mean("dcn"))
    message = "it must be the last stage of `hierarchical`"
    refuse(message, lambda: trained(first, mesh, batches, axis_name=axes))


@pytest.mark.slow
def test_inside_of_wrappers() -> None:
    """`accumulate`, and `optax.partition` of the leaves."""
    whole, sharded = unsharded(optax.sgd(0.5)), sharded_server(optax.sgd(0.5))
    of_leaves = {name: "sharded" if name < "k" else "whole" for name in SHAPES}
    for wrap in (
        lambda tx: jaxcomm.accumulate(tx, 2),
        lambda tx: optax.partition({"sharded": tx, "whole": whole}, of_leaves),
    ):
        expected, found = (trained(wrap(tx), 2, gradients_of(2))[0] for tx in (whole, sharded))
        require_same(found, expected)


SGD = optax.sgd(1.0)
MISTAKES = {
    "an aggregator inside": (
        lambda: sharded_server(unsharded(SGD)),
        r"must not communicate, but it applies `psum.*` over the axis \('data',\)",
    ),
    "accumulate inside": (
        lambda: sharded_server(jaxcomm.accumulate(SGD, 2)),
        "Place `jaxcomm.accumulate` around `sharded_server`",
    ),
    "shared memory": (
        lambda: sharded_server(SGD, diana(dither())),
        "`sharded_server` takes codecs whose memory is each worker's own",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    refuse(message, lambda: trained(make(), mesh_of(2), gradients_of(2, steps=1)))


@pytest.mark.parametrize("workers", [2, mesh_of(2)], ids=["simulated", "mesh"])
def test_parameters_that_differ_by_worker_are_refused(workers: Any) -> None:
    differ = jaxcomm.replicate(start(), workers)
    message = "needs parameters that are equal on all workers"
    refuse(message, lambda: jaxcomm.init(sharded_server(SGD), differ, workers))


def test_an_inactive_clip_changes_nothing() -> None:
    """One that is not: tests/test_clips.py."""
    optimizer = optax.adam(0.1)
    server, whole = sharded_server(optimizer, max_norm=1e6), unsharded(optimizer)
    found, expected = (trained(tx, mesh_of(3), gradients_of(3))[0] for tx in (server, whole))
    chex.assert_trees_all_close(found, expected, atol=1e-5)


def test_an_overflowing_norm_is_nan_and_not_zero() -> None:
    huge = {name: np.full_like(x, 1e30) for name, x in gradients_of(3)[0].items()}
    params, _ = trained(sharded_server(SGD, max_norm=1.0), 3, [huge])
    assert all(np.isnan(x).all() for x in jax.tree.leaves(params))
