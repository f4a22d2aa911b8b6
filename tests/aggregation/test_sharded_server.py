"""ZeRO-1 and -2: equal to the unsharded method, state in n parts, feedback, and mistakes."""

import functools
import re
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
from jaxcomm.compression import compressed_memory, rotated
from jaxcomm.compression.feedback import diana, error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import nonzero, top_k
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
    "sgd": lambda: optax.sgd(0.125),
    "nesterov": lambda: optax.sgd(0.125, momentum=0.5, nesterov=True),
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
    tx: Any, workers: Any, gradients: list[Any], dtype: Any = jnp.float32, **options: Any
) -> tuple[Any, Any]:
    """Parameters and state after steps with these gradients."""
    make = jaxcomm.simulate if isinstance(workers, int | dict) else jaxcomm.make_step
    step = make(lambda p, b: jnp.zeros(()), tx, workers, gradients=given, **options)
    shapes = {name: x.shape[1:] for name, x in gradients[0].items()}
    params = start(dtype, shapes)
    axis = {"axis_name": options["axis_name"]} if "axis_name" in options else {}
    state = jaxcomm.init(tx, params, workers, **axis)
    for batch in gradients:
        params, state, _ = step(params, state, batch)
    return params, state


def require_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [3, 8, slow(1), slow(2), slow(5)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_unsharded_method(name: str, workers: int) -> None:
    """Bit for bit, if the quotient by the number of workers is exact.

    Otherwise, XLA may contract it with the operations of the optimizer, in one of the programs.
    """
    # The square of a mean must be exact too.
    batches = gradients_of(workers, factor=1 if name in ("sgd", "nesterov") else workers)
    mesh = mesh_of(workers)
    expected, _ = trained(optax.chain(jaxcomm.mean(), OPTIMIZERS[name]()), mesh, batches)
    found, _ = trained(jaxcomm.sharded_server(OPTIMIZERS[name]()), mesh, batches)
    if workers in (1, 2, 8):
        require_equal(found, expected)
    else:
        chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=2.0**-22)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(found))


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [3, 8, slow(1), slow(2), slow(5)])
def test_the_mean_is_that_of_the_unsharded_method_bit_for_bit(workers: int) -> None:
    mesh, batch = mesh_of(workers), gradients_of(workers, steps=1)[0]

    def average(tx: Any) -> Any:
        state = jaxcomm.init(tx, start(), mesh)
        specs = jaxcomm.state_specs(state)
        return jax.jit(
            jax.shard_map(
                lambda rows, state: tx.update(jax.tree.map(lambda x: x[0], rows), state, start())[
                    0
                ],
                mesh=mesh,
                in_specs=(PartitionSpec("data"), specs),
                out_specs=PartitionSpec(),
            )
        )(batch, state)

    require_equal(average(jaxcomm.sharded_server(optax.identity())), average(jaxcomm.mean()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, slow(8)])
def test_explicit_axes_simulation_and_scan_give_the_same(workers: int) -> None:
    tx = jaxcomm.sharded_server(OPTIMIZERS["adamw"]())
    batches = gradients_of(workers, factor=workers)
    expected, state = trained(tx, mesh_of(workers), batches)
    explicit = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
    for where in (explicit, workers):
        found, after = trained(tx, where, batches)
        require_equal((found, after.inner), (expected, state.inner))
    step = jaxcomm.make_step(lambda p, b: jnp.zeros(()), tx, mesh_of(workers), gradients=given)

    def body(carry: Any, batch: Any) -> Any:
        return step(*carry, batch)[:2], ()

    carry = start(), jaxcomm.init(tx, start(), mesh_of(workers))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    (scanned, _), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, stacked))(carry)
    require_equal(scanned, expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, slow(8)])
def test_16_bit_leaves_travel_in_16_bits(workers: int) -> None:
    """They are rounded once, as `mean` rounds them."""
    batches, mesh = gradients_of(workers, jnp.bfloat16), mesh_of(workers)
    expected, _ = trained(
        optax.chain(jaxcomm.mean(), optax.sgd(0.125)), mesh, batches, jnp.bfloat16
    )
    tx = jaxcomm.sharded_server(optax.sgd(0.125))
    found, _ = trained(tx, mesh, batches, jnp.bfloat16)
    require_equal(found, expected)
    assert sent_bytes(tx, workers, jnp.bfloat16) == 2 * (workers - 1) * (
        2 * slice_size(workers) + 4
    )


def slice_size(workers: int) -> int:
    return sum(-(-int(np.prod(shape)) // workers) for shape in SHAPES.values())


def sent_bytes(tx: Any, workers: int, dtype: Any = jnp.float32) -> float:
    step = jaxcomm.make_step(
        lambda p, b: jnp.zeros(()), tx, mesh_of(workers), gradients=given, metrics="own"
    )
    params = start(dtype)
    state = jaxcomm.init(tx, params, mesh_of(workers))
    sent = jaxcomm.wire.account(step, params, state, gradients_of(workers, dtype)[0])
    assert len(sent.collectives) == 2
    return sent.bytes_per_worker


@pytest.mark.slow
def test_bytes_of_both_ends_do_not_depend_on_each_other() -> None:
    n, size = 3, slice_size(3)
    exact, short, codes = 4 * size + 4, 2 * size + 4, size + 4 + 4
    for push, pull, expected in [
        (None, None, exact + exact),
        (None, cast("bfloat16"), exact + short),
        (dither(bits=8), None, codes + exact),
        (dither(bits=8), cast("bfloat16"), codes + short),
    ]:
        tx = jaxcomm.sharded_server(optax.adam(0.1), push, pull)
        assert sent_bytes(tx, n) == (n - 1) * expected


@functools.cache
def compiled(workers: int, sharded: bool) -> Any:
    """A step with Adam for 2^16 coordinates and some more."""
    tx = (
        jaxcomm.sharded_server(optax.adam(0.1))
        if sharded
        else optax.chain(jaxcomm.mean(), optax.adam(0.1))
    )
    mesh, params = mesh_of(workers), {"w": jnp.zeros((256, 256)), "b": jnp.zeros(24)}
    state = jax.eval_shape(lambda p: jaxcomm.init(tx, p, mesh), params)
    step = jaxcomm.make_step(lambda p, b: jnp.zeros(()), tx, mesh, gradients=given)
    batch = jax.tree.map(lambda x: jnp.zeros((workers, *x.shape)), params)

    def placed(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    args = (
        jax.tree.map(lambda x: placed(x, PartitionSpec()), params),
        jax.tree.map(placed, state, jaxcomm.state_specs(state)),
        jax.tree.map(lambda x: placed(x, PartitionSpec("data")), batch),
    )
    return jax.jit(step).lower(*args).compile()


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_memory_of_the_optimizer_falls_as_1_over_n(workers: int) -> None:
    """Of the compiled program, per device: parameters, a gradient, and two moments."""
    parameters = 4 * (256 * 256 + 24)
    found = compiled(workers, True).memory_analysis().argument_size_in_bytes
    whole = compiled(workers, False).memory_analysis().argument_size_in_bytes
    assert whole == pytest.approx(4 * parameters, abs=100)
    assert found == pytest.approx((2 + 2 / workers) * parameters, abs=100)


def test_no_gradient_is_summed_in_an_all_reduce() -> None:
    text = compiled(4, True).as_text()
    sums = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    assert not [shape for shape in sums if re.search(r"\[\d{2,}", shape)]
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["leaf", "bucket"])
def test_feedback_at_both_ends_loses_nothing(scope: str) -> None:
    """The updates, the residuals of the owners and those of the senders add up to all gradients."""
    n, rate, codec = 3, 0.25, error_feedback(top_k(ratio=0.25))
    tx = jaxcomm.sharded_server(optax.sgd(rate), codec, codec, scope=scope)
    shapes = {"a": (5, 2), "b": (7,), "c": (10,), "d": (7,)}  # In `"leaf"`, two are a stack.
    rng = np.random.default_rng(2)
    batches = [
        {k: jnp.asarray(rng.normal(size=(n, *s)), jnp.float32) for k, s in shapes.items()}
        for _ in range(12)
    ]
    params, state = trained(tx, n, batches)
    total = {
        k: np.sum([np.asarray(b[k], np.float64).mean(axis=0) for b in batches], 0) for k in shapes
    }
    moved = {k: np.asarray(params[k], np.float64) - start(shapes=shapes)[k] for k in shapes}
    # [senders, units, ..., owners, ...] and [owners, units, ...]: sums over all coordinates.
    kept = [
        sum(float(np.sum(np.asarray(x, np.float64))) for x in jax.tree.leaves(part))
        for part in (state.push, state.pull)
    ]
    sums = [sum(float(x.sum()) for x in tree.values()) for tree in (moved, total)]
    np.testing.assert_allclose(sums[0] + kept[1], -rate * (sums[1] - kept[0] / n), atol=1e-4)
    assert min(map(abs, kept)) > 1e-2
    if scope == "bucket":  # One unit: slices of the leaves, in their order.
        senders, owners = (
            np.asarray(jax.tree.leaves(part)[0], np.float64) for part in (state.push, state.pull)
        )
        together = -rate * senders.mean(axis=0) + owners  # [owners, slices]
        position = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            m = -(-size // n)
            late = together[:, position : position + m].ravel()[:size].reshape(shape)
            expected = -rate * total[name]
            np.testing.assert_allclose(moved[name] + late, expected, atol=1e-4)
            position += m


def test_memory_of_another_shape_than_its_slices() -> None:
    """Two leaves are a stack, with a scale for each; the third has its own."""
    codec = compressed_memory(error_feedback(top_k(ratio=0.5)), dither(bits=8))
    tx = jaxcomm.sharded_server(optax.sgd(0.25), codec, scope="leaf")
    shapes = {"a": (12,), "b": (12,), "c": (5,)}
    rng = np.random.default_rng(2)
    batch = {k: jnp.asarray(rng.normal(size=(3, *s)), jnp.float32) for k, s in shapes.items()}
    _, state = trained(tx, 3, [batch] * 2)
    memories = [x.kept.statistics.max_abs for x in state.push.per_worker["data"]]
    assert [x.shape for x in memories] == [(3, 3, 2), (3, 3)]


def loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch[:, :-1], batch[:, -1]
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "8 bits, feedback at both ends"])
def test_loss_beside_mean(name: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 6))
    rows = jnp.asarray(np.concatenate([x, np.sin(x[:, :1] + x[:, 1:2])], axis=1), jnp.float32)
    codec = None if name == "exact" else error_feedback(jaxcomm.compression.scaled(dither(bits=8)))
    found = []
    for tx in (
        optax.chain(jaxcomm.mean(), optax.adam(0.05)),
        jaxcomm.sharded_server(optax.adam(0.05), codec, codec),
    ):
        params = {
            "w": jnp.asarray(np.random.default_rng(4).normal(size=(6, 9)), jnp.float32),
            "v": jnp.zeros(9),
        }
        step = jaxcomm.simulate(loss, tx, 4)
        state, losses = jaxcomm.init(tx, params, 4), []
        for _ in range(60):
            params, state, metrics = step(params, state, rows)
            losses.append(float(metrics["loss"]))
        found.append(losses)
    # Adam amplifies the last bits of its first steps.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4 if name == "exact" else 0.1)
    assert found[1][-1] < found[1][0] / 4


BAD = {"nan": np.nan, "inf": np.inf, "overflow of the update": 3e38}


@pytest.mark.slow
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_a_step_that_is_not_finite_changes_nothing(bad: str, coded: bool) -> None:
    codec = error_feedback(top_k(ratio=0.5)) if coded else None
    tx = jaxcomm.sharded_server(optax.sgd(16.0, momentum=0.5), codec, codec)
    first, second = gradients_of(3, steps=2)
    step = jaxcomm.make_step(
        lambda p, b: jnp.zeros(()), tx, mesh_of(3), gradients=given, donate=False
    )
    params = start()
    params, state, _ = step(params, jaxcomm.init(tx, params, mesh_of(3)), first)
    # All workers have the large number, so that their mean is finite but not its update.
    where = np.s_[:, 4, 1] if bad.startswith("overflow") else np.s_[1, 4, 1]
    spoilt = {**second, "kernel": second["kernel"].at[where].set(BAD[bad])}
    after, kept, _ = step(params, state, spoilt)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(after))
    for part in ("push", "inner", "pull"):
        require_equal(getattr(kept, part), getattr(state, part))
    assert kept.step == state.step + 1
    skipping = jaxcomm.skip_nonfinite(tx)
    first_of = jaxcomm.init(skipping, params, mesh_of(3))
    one = jaxcomm.make_step(
        lambda p, b: jnp.zeros(()), skipping, mesh_of(3), gradients=given, donate=False
    )
    same, skipped, metrics = one(params, first_of, spoilt)
    require_equal(same, params)
    assert skipped.skipped_steps == 1 and metrics["diagnostics/skipped_steps"] == 1


@pytest.mark.slow
def test_overflow_at_either_end_is_nan_on_all_workers() -> None:
    few = nonzero(density=0.2, granularity="element")
    for ends in ({"push": few}, {"pull": few}):
        tx = jaxcomm.sharded_server(optax.sgd(0.5, momentum=0.5), **ends)
        batch = {"w": jnp.ones((2, 20))}
        params, state = trained(tx, 2, [batch])
        assert np.isnan(params["w"]).all()
        assert not np.any(np.asarray(state.inner[0].trace["w"].per_worker["data"]))
        sparse = {"w": jnp.zeros((2, 20)).at[:, 3].set(1.0)}
        params, _ = trained(tx, 2, [sparse])
        expected = np.asarray(start(shapes={"w": (20,)})["w"]) - 0.5 * np.eye(20)[3]
        np.testing.assert_allclose(params["w"], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("coded", [False, True])
def test_weights_are_those_of_the_mean(coded: bool) -> None:
    """A worker of weight 0 does not count, even if its gradient is NaN."""
    weights = np.array([1, 0, 3, 2], np.float32)
    batch = gradients_of(4)[0]
    spoilt = jax.tree.map(lambda x: x.at[1].set(jnp.nan) if x.size else x, batch)
    tx = jaxcomm.sharded_server(optax.sgd(1.0), cast("bfloat16") if coded else None)
    step = jaxcomm.simulate(lambda p, b: jnp.zeros(()), tx, 4, gradients=given)
    params = start()
    after, _, _ = step(params, jaxcomm.init(tx, params, 4), (spoilt, weights))
    for name, x in batch.items():
        share = np.asarray(x, np.float64) * (weights / 6).reshape(-1, *[1] * (x.ndim - 1))
        expected = np.asarray(start()[name]) - share.sum(axis=0)
        np.testing.assert_allclose(after[name], expected, atol=0.02 if coded else 1e-6)
    bad, _, _ = step(start(), jaxcomm.init(tx, start(), 4), (batch, np.float32([1, -1, 1, 1])))
    assert all(np.isnan(x).all() for x in jax.tree.leaves(bad))


@pytest.mark.slow
def test_several_axes_and_inner_devices() -> None:
    """Over two axes a slice is for each of their devices; over one, for each of its workers."""
    mesh = jax.make_mesh(
        (2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    batches = gradients_of(4, factor=4)
    expected, _ = trained(optax.chain(jaxcomm.mean(), OPTIMIZERS["adamw"]()), mesh_of(4), batches)
    for axes, workers in ((("dcn", "ici"), 4), (("ici", "dcn"), 4), ("dcn", 2)):
        tx = jaxcomm.sharded_server(OPTIMIZERS["adamw"](), axis_name=axes)
        found, state = trained(tx, mesh, batches, axis_name=axes)
        require_equal(found, expected)
        (moment,) = state.inner[0].mu["kernel"].per_worker.values()
        assert moment.shape[0] == workers and moment.size == 40
    tx = jaxcomm.sharded_server(OPTIMIZERS["adamw"](), axis_name=("dcn", "ici"))
    simulated, _ = trained(tx, {"dcn": 2, "ici": 2}, batches, axis_name=("dcn", "ici"))
    require_equal(simulated, expected)


@pytest.mark.slow
def test_inside_of_wrappers() -> None:
    """`accumulate`, and `optax.partition` of the leaves."""
    batches = gradients_of(2)
    unsharded = optax.chain(jaxcomm.mean(), optax.sgd(0.5))
    sharded = jaxcomm.sharded_server(optax.sgd(0.5))
    expected, _ = trained(jaxcomm.accumulate(unsharded, 2), mesh_of(2), batches)
    found, _ = trained(jaxcomm.accumulate(sharded, 2), mesh_of(2), batches)
    require_equal(found, expected)
    of_leaves = {name: "sharded" if name < "k" else "whole" for name in SHAPES}
    parted = optax.partition({"sharded": sharded, "whole": unsharded}, of_leaves)
    found, _ = trained(parted, mesh_of(2), batches)
    expected, _ = trained(unsharded, mesh_of(2), batches)
    require_equal(found, expected)


def test_extra_arguments_reach_the_optimizer() -> None:
    tx = jaxcomm.sharded_server(
        optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    )
    step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x[0]) ** 2), tx, 2, donate=False)
    params = jnp.ones(4)
    state = jaxcomm.init(tx, params, 2)
    for _ in range(4):
        _, state, _ = step(params, state, jnp.ones(2), value=jnp.float32(1))
    scales = np.asarray(state.inner[1].scale)
    assert scales.shape == () and scales < 1


def traced(tx: Any, workers: int = 2, **options: Any) -> None:
    params = start()
    state = jax.eval_shape(lambda p: jaxcomm.init(tx, p, mesh_of(workers)), params)
    step = jaxcomm.make_step(
        lambda p, b: jnp.zeros(()), tx, mesh_of(workers), gradients=given, **options
    )
    jax.eval_shape(step, params, state, gradients_of(workers)[0])


AGGREGATOR = "must not communicate, but it applies `psum.*` over the axis \\('data',\\)"
MISTAKES = {
    "an axis twice": (
        lambda: jaxcomm.sharded_server(optax.sgd(1.0), axis_name=("data", "data")),
        r"`axis_name` must be .* distinct axes, got \('data', 'data'\)",
    ),
    "an aggregator inside": (
        lambda: jaxcomm.sharded_server(optax.chain(jaxcomm.mean(), optax.sgd(1.0))),
        AGGREGATOR,
    ),
    "an aggregator before": (
        lambda: optax.chain(jaxcomm.mean(), jaxcomm.sharded_server(optax.sgd(1.0))),
        "has been summed already",
    ),
    "itself inside": (
        lambda: jaxcomm.sharded_server(jaxcomm.sharded_server(optax.sgd(1.0))),
        "equal on all workers: do not nest it",
    ),
    "MultiSteps": (
        lambda: jaxcomm.sharded_server(optax.MultiSteps(optax.sgd(1.0), 2)),
        "use `jaxcomm.accumulate",
    ),
    "MultiSteps as a transformation": (
        lambda: jaxcomm.sharded_server(
            optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
        ),
        "`jaxcomm.accumulate` around `sharded_server`, also in place of `optax.MultiSteps`",
    ),
    "accumulate inside": (
        lambda: jaxcomm.sharded_server(jaxcomm.accumulate(optax.sgd(1.0), 2)),
        "Place `jaxcomm.accumulate` around `sharded_server`",
    ),
    "shared memory": (
        lambda: jaxcomm.sharded_server(optax.sgd(1.0), diana(dither())),
        "`sharded_server` takes codecs whose memory is each worker's own",
    ),
    "no codec": (
        lambda: jaxcomm.sharded_server(optax.sgd(1.0), pull=jaxcomm.mean()),
        "`pull` must be a codec, ",
    ),
    "no transformation": (
        lambda: jaxcomm.sharded_server(dither()),
        "must be an optax transformation, got a `Codec`",
    ),
    "no scope": (
        lambda: jaxcomm.sharded_server(optax.sgd(1.0), dither(), scope="all"),
        "`scope` must be one of",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        traced(make())


def test_state_of_another_number_of_workers_or_of_other_leaves() -> None:
    tx = jaxcomm.sharded_server(optax.adam(0.1), error_feedback(top_k(k=1)))
    step = jaxcomm.simulate(lambda p, b: jnp.zeros(()), tx, 3, gradients=given)
    state = jaxcomm.init(tx, start(), 2)
    with pytest.raises(ValueError, match="is for 2 workers, but there are 3"):
        step(start(), state, gradients_of(3)[0])
    with pytest.raises(ValueError, match="is not bound here"):
        tx.init(start())
    other = jaxcomm.init(tx, {"w": jnp.zeros(5)}, 3)
    with pytest.raises(ValueError, match=r"does not belong to this `tx`|made for other parameters"):
        step(start(), other, gradients_of(3)[0])
    with pytest.raises(ValueError, match="only floating-point leaves"):
        trained(jaxcomm.sharded_server(optax.sgd(1.0)), 2, [{"w": jnp.ones((2, 3), jnp.int32)}])


def test_parameters_that_differ_by_worker_are_refused() -> None:
    tx = jaxcomm.sharded_server(optax.sgd(0.1))
    for workers in (2, mesh_of(2)):
        with pytest.raises(ValueError, match="needs parameters that are equal on all workers"):
            jaxcomm.init(tx, jaxcomm.replicate(start(), workers), workers)


def test_a_clip_of_each_worker_before_it() -> None:
    clip = jaxcomm.per_worker(optax.clip_by_global_norm(1.0))
    tx = optax.chain(clip, jaxcomm.sharded_server(optax.sgd(0.5)))
    batch = gradients_of(3)[0]
    params, _ = trained(tx, mesh_of(3), [batch])
    norms = np.sqrt(sum(np.square(x).reshape(3, -1).sum(axis=1) for x in batch.values()))
    for name, x in batch.items():
        clipped = np.asarray(x) / np.maximum(norms, 1).reshape(-1, *[1] * (x.ndim - 1))
        expected = np.asarray(start()[name]) - 0.5 * clipped.mean(axis=0)
        np.testing.assert_allclose(params[name], expected, atol=1e-6)


@pytest.mark.parametrize("workers", [3, "mesh"])
def test_the_clip_of_the_mean(workers: Any) -> None:
    workers = mesh_of(3) if workers == "mesh" else workers
    batches = gradients_of(3)
    for max_norm in (0.5, 1e6):
        optimizer = optax.adam(0.1)
        whole = optax.chain(jaxcomm.mean(), optax.clip_by_global_norm(max_norm), optimizer)
        server = jaxcomm.sharded_server(optimizer, max_norm=max_norm)
        chex.assert_trees_all_close(
            trained(server, workers, batches)[0], trained(whole, workers, batches)[0], atol=1e-5
        )


def test_a_norm_that_overflows_is_nan_and_not_zero() -> None:
    huge = {name: np.full_like(x, 1e30) for name, x in gradients_of(3)[0].items()}
    params, _ = trained(jaxcomm.sharded_server(optax.sgd(1.0), max_norm=1.0), 3, [huge])
    assert all(np.isnan(x).all() for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_the_number_of_collectives_does_not_depend_on_the_number_of_leaves() -> None:
    codec = error_feedback(top_k(k=1))
    for codecs in ((None, None), (codec, codec)):
        tx = jaxcomm.sharded_server(optax.adam(0.1), *codecs, scope="leaf")
        params = {str(i): jnp.ones((3, 1 + i % 3)) for i in range(60)}
        state = jax.eval_shape(lambda p, tx=tx: jaxcomm.init(tx, p, 2), params)
        loss_fn = lambda p, b: sum(jnp.sum(x) for x in p.values()) * jnp.mean(b)  # noqa: E731
        step = jaxcomm.simulate(loss_fn, tx, 2, metrics="own")
        sent = jaxcomm.wire.account(step, params, state, jnp.ones(2))
        assert len(sent.collectives) == 2


@pytest.mark.parametrize("coded", [False, True])
def test_trees_without_coordinates_send_nothing(coded: bool) -> None:
    codec = error_feedback(top_k(k=1)) if coded else None
    tx = jaxcomm.sharded_server(optax.adam(0.1), codec, codec)
    for shapes in ({}, {"a": (0, 3), "b": (5, 0)}):
        params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        step = jaxcomm.make_step(
            lambda p, b: jnp.mean(b), tx, mesh_of(2), metrics="own", donate=False
        )
        state = jaxcomm.init(tx, params, mesh_of(2))
        after, state, _ = step(params, state, jnp.ones(2))
        require_equal(after, params)
        assert state.step == 1 and state.inner[0].count == 1
        assert not jaxcomm.wire.account(step, params, state, jnp.ones(2)).bytes_per_worker


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), slow((2, 4))], ids=str)
def test_two_levels_by_composition(shape: tuple[int, int]) -> None:
    """8 bits within a node, 4 rotated bits between nodes, and differences of 8 bits with feedback.

    The optimizer state is divided over nodes. Groups of any size are possible.
    """
    axes, devices = ("node", "device"), jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, axes, devices=devices, axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    inputs = jnp.asarray(rng.normal(size=(24, 20)), jnp.float32)
    labels = inputs @ jnp.asarray(rng.normal(size=(20, 3)), jnp.float32)

    def loss(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)

    def train(tx: Any) -> tuple[float, Any, Any]:
        step = jaxcomm.make_step(loss, tx, mesh, axis_name=axes)
        w = jnp.zeros((20, 3))
        state = jaxcomm.init(tx, w, mesh)
        sent = jaxcomm.wire.account(step, w, state, (inputs, labels)).bytes_by_axis
        for _ in range(60):
            w, state, metrics = step(w, state, (inputs, labels))
        return float(metrics["loss"]), state, sent

    inner = jaxcomm.all_reduce_mean(dither(bits=8), axis_name="device")
    server = jaxcomm.sharded_server(
        optax.sgd(0.2, momentum=0.5),
        rotated(dither(bits=4)),
        error_feedback(dither(bits=8)),
        axis_name="node",
    )
    exact, *_ = train(
        optax.chain(jaxcomm.mean(axes), optax.sgd(0.2, momentum=0.5)),
    )
    found, state, sent = train(jaxcomm.hierarchical(inner, server))
    assert found < exact + 1e-2
    with pytest.raises(ValueError, match="it must be the last stage of `hierarchical`"):
        train(jaxcomm.hierarchical(server._replace(), jaxcomm.mean("device")))
    moments = state[1].inner[0].trace.per_worker["node"]
    assert moments.shape[0] == shape[0] and moments.size == 60
    assert set(sent) >= {"node", "device"} and sent["node"] < 4 * 60
