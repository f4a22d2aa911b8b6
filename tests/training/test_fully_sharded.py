"""ZeRO-3: gradients of weights in slices, equal to those of whole weights; codecs, and mistakes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.aggregation import secondary_partition, weight_gather
from jaxcomm.compression import rotated
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.training import fully_sharded_value_and_grad, slice_specs
from tests.slow import slow
from tests.training import places
from tests.training.places import normal

MESHES = {
    "one": ((1,), AxisType.Auto),
    "eight": ((8,), AxisType.Auto),
    "explicit": ((8,), AxisType.Explicit),
    "two_levels": ((2, 4), AxisType.Auto),
    "odd": ((2, 3), AxisType.Explicit),
}
IN, HIDDEN, OUT = 5, 48, 3
RNG = np.random.default_rng(0)
SHAPES: dict[str, Any] = {
    "bias": (HIDDEN,),
    "in": (IN, HIDDEN),
    "out": (HIDDEN, OUT),
    "scale": (),
}
START = {k: jnp.asarray(RNG.integers(-4, 5, s) / 8, jnp.float32) for k, s in SHAPES.items()}
ROWS = jnp.asarray(RNG.integers(-2, 3, (48, IN)), jnp.float32)
KEY = jax.random.key(0)


def mesh_named(name: str) -> Mesh:
    sizes, kind = MESHES[name]
    return places.mesh_of(kind, *sizes, names=("data",) if len(sizes) == 1 else ("node", "device"))


def entry_of(mesh: Mesh) -> Any:
    return mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.maximum(x @ params["in"] + params["bias"][None], 0)
    return jnp.mean((hidden @ params["out"] * params["scale"]) ** 2)


def placed(params: Any, mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)


def prepared(name: str, loss_fn: Any = loss, start: Any = START, **options: Any) -> Any:
    """The function, the slices, and their specs."""
    mesh = mesh_named(name)
    entry = entry_of(mesh)
    specs = {"bias": P(), "in": P(None, entry), "out": P(entry), "scale": P()}
    run = fully_sharded_value_and_grad(loss_fn, mesh, specs, axis_name=mesh.axis_names, **options)
    return run, placed(start, mesh, specs), specs


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    compare = lambda x, y: np.testing.assert_allclose(  # noqa: E731
        np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance
    )
    jax.tree.map(compare, found, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("eight", jnp.float32),
        slow("odd", jnp.bfloat16),
        *(slow(name, jnp.float32) for name in ("one", "explicit", "two_levels", "odd")),
        *(slow(name, jnp.bfloat16) for name in ("eight", "two_levels")),
    ],
)
def test_equals_the_gradient_of_whole_weights(name: str, dtype: Any) -> None:
    """Called, and in a step under jit that needs no mesh that is set."""
    wide = lambda p, x: loss(jax.tree.map(lambda w: w.astype(jnp.float32), p), x)  # noqa: E731
    narrow = jax.tree.map(lambda x: x.astype(dtype), START)
    run, params, specs = prepared(name, wide, narrow)
    expected = jax.jit(jax.value_and_grad(loss))(START, ROWS)
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2

    def descended(params: Any, x: jax.Array) -> Any:
        found = run(params, x)
        return found, jax.tree.map(lambda w, g: w - g, params, found[1])

    found, after = jax.jit(descended)(params, ROWS)
    close(after, jax.tree.map(lambda w, g: w - g, START, expected[1]), tolerance)
    for value, gradient in (run(params, ROWS), found):
        close((value, gradient), expected, tolerance)
        for leaf, spec in zip(*map(jax.tree.leaves, (gradient, specs)), strict=True):
            assert leaf.dtype == dtype
            sharding = NamedSharding(mesh_named(name), spec)
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_loss_that_averages_over_workers_itself_has_the_same_gradient() -> None:
    run, params, _ = prepared("eight", lambda p, x: jax.lax.pmean(loss(p, x), "data"))
    close(run(params, ROWS)[1], jax.grad(loss)(START, ROWS))


@pytest.mark.slow
def test_weights_are_sent_in_their_codec() -> None:
    """A gradient at weights in bfloat16; the whole leaves do not travel, and stay float32."""
    fine = jax.tree.map(lambda x: x + x / 1000, START)
    run, params, _ = prepared("eight", start=fine, pull=cast("bfloat16"))
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), fine)
    rounded = {**fine, "in": coarse["in"], "out": coarse["out"]}
    expected = jax.value_and_grad(loss)(rounded, ROWS)
    close(run(params, ROWS, KEY), expected)
    assert not np.allclose(expected[1]["in"], jax.grad(loss)(fine, ROWS)["in"], 1e-5)


def bits_of(name: str) -> Any:
    """8 bits within a node, 4 with a rotation between nodes."""
    if len(MESHES[name][0]) == 1:
        return dither(bits=8)
    return {"device": dither(bits=8), "node": rotated(dither(bits=4))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", "two_levels", "odd", "explicit", "one"])
def test_compressed_gradients_have_the_right_mean(name: str) -> None:
    """The mean over many keys of unbiased gradients, for a linear loss; each draw differs."""
    slopes = {k: jnp.asarray(normal(i, *x.shape)) for i, (k, x) in enumerate(START.items())}

    def linear(params: Any, x: jax.Array) -> jax.Array:
        sums = [jnp.sum(params[k] * slope) for k, slope in slopes.items()]
        return sum(total * jnp.mean(x[:, i]) for i, total in enumerate(sums))

    run, params, _ = prepared(name, linear, push=bits_of(name))
    x, draws = jnp.asarray(normal(9, 48, IN)), 64
    exact, keys = jax.grad(linear)(START, x), jax.random.split(jax.random.key(3), draws)
    found = jax.jit(lambda p: jax.lax.map(lambda key: run(p, x, key)[1], keys))(params)
    for leaf in ("in", "out"):
        drawn, whole = np.asarray(found[leaf], np.float64), np.asarray(exact[leaf])
        spread = np.std(drawn, axis=0).max() + 1e-7
        assert np.abs(drawn.mean(axis=0) - whole).max() < 6 * spread / draws**0.5
        assert np.any(drawn[0] != drawn[1])
        largest = np.abs(x.reshape(mesh_named(name).size, -1, IN).mean(axis=1)).max()
        assert 0 < spread < largest * np.abs(slopes[leaf]).max() / 7  # 4 bits have 7 levels.


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "push", "pull"])
def test_nonfinite_gradients_reach_all_slices(codec: str) -> None:
    """One worker's NaN, or an infinite weight that a codec would hide."""
    x, start, options = ROWS, START, {} if codec == "none" else {codec: dither(bits=8)}
    if codec == "pull":
        start = {**START, "out": START["out"].at[3, 1].set(jnp.inf)}
    else:
        x = ROWS.at[7, 0].set(jnp.nan)
    run, params, _ = prepared("eight", start=start, **options)
    value, gradient = run(params, x, KEY)
    assert np.isnan(value) and np.all(np.isnan(gradient["in"]))
    assert codec == "pull" or np.all(np.isnan(gradient["out"]))


def test_bytes_by_axis() -> None:
    """One collective per axis and direction, and the exact mean of the leaves that stay whole."""
    sliced = (IN * HIDDEN + HIDDEN * OUT) // 8
    rest = 2 * (HIDDEN + 1 + 1) * 4  # With the loss; an all-reduce of n workers, (n - 1) / n.

    def bytes_of(**codecs: Any) -> Any:
        run, params, _ = prepared("two_levels", **codecs)
        return jaxcomm.wire.account(run, params, ROWS, KEY)

    expected = 7 * 4 * sliced + 7 * (4 * sliced + 4) + rest * 7 / 8
    assert bytes_of().bytes_per_worker == pytest.approx(expected)
    sent = bytes_of(push=bits_of("two_levels"), pull={"node": dither(bits=8)}).bytes_by_axis
    assert sent["node"] < (sliced + 4 + 4) + (sliced // 2 + 64) + 64
    assert sent["device"] > 3 * 2 * 4 * sliced


def compiled(by_layer: bool) -> Any:
    """A step with Adam of 8 layers of 2^14 coordinates, gathered layer by layer or at once."""
    layers, width, mesh, tx = 8, 128, mesh_named("eight"), optax.adam(0.1)
    gather = weight_gather(P("data")) if by_layer else lambda w: w

    def model(weights: jax.Array, x: jax.Array, key: Any = None) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ gather(w)), None))
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    run = fully_sharded_value_and_grad(model, mesh, P(None, "data"), gather=not by_layer)

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        value, gradient = run(w, x)
        updates, state = tx.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    def given(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    weights = given(jnp.zeros((layers, width, width)), P(None, "data"))
    state = jax.tree.map(
        lambda x: given(x, P(None, "data") if x.ndim else P()), jax.eval_shape(tx.init, weights)
    )
    with jax.numpy_dtype_promotion("standard"):
        rows = given(jnp.zeros((8, width)), P("data"))
        return jax.jit(step).lower(weights, state, rows).compile()


@pytest.mark.slow
def test_memory_shrinks_as_1_over_n() -> None:
    """Weights and two moments, per device; layer by layer, no whole model is ever in memory."""
    whole = 4 * 8 * 128 * 128
    at_once, by_layer = compiled(False).memory_analysis(), compiled(True)
    assert at_once.argument_size_in_bytes == pytest.approx(3 * whole / 8, abs=5000)
    assert at_once.temp_size_in_bytes > whole
    assert by_layer.memory_analysis().temp_size_in_bytes < 0.7 * whole
    sent = jaxcomm.wire.account(by_layer).collectives
    gathered = [c for c in sent if c.kind == "all_gather" and c.dtype == np.uint32]
    assert gathered and all(8 * np.prod(c.shape) <= 128 * 128 for c in gathered)


def test_specs_slice_the_largest_dimension() -> None:
    mesh, axes = mesh_named("two_levels"), ("node", "device")
    params = {"a": jnp.zeros((16, 800)), "b": jnp.zeros((1601,)), "c": jnp.zeros((8, 4))}
    found = slice_specs(params, mesh, axis_name=axes)
    assert found == {"a": P(None, axes), "b": P(), "c": P()}
    assert slice_specs(params, mesh, axis_name=axes, least=1)["c"] == P(axes)


def traced(key: Any = KEY, **options: Any) -> None:
    run, params, _ = prepared("eight", **options)
    jax.eval_shape(run, params, ROWS, key)


def second_derivative() -> None:
    """It would be 0: messages of words have no derivative."""
    _, params, specs = prepared("eight")
    gather = weight_gather(specs)
    of_gradient = lambda slices, x: jnp.sum(  # noqa: E731
        jax.grad(lambda p: loss(gather(p), x))(slices)["in"]
    )
    jax.shard_map(
        jax.grad(of_gradient),
        mesh=mesh_named("eight"),
        in_specs=(specs, P("data")),
        out_specs=specs,
    )(params, ROWS)


MISTAKES: list[Any] = [
    (lambda: traced(push=error_feedback(top_k(k=1))), "takes codecs without memory"),
    (lambda: traced(None, pull=dither()), "needs a key that is new in each step"),
    (lambda: traced(gather=False, push=dither()), r"\['push'\] would have no effect here"),
    (
        lambda: fully_sharded_value_and_grad(
            loss, mesh_named("two_levels"), P(), axis_name="device"
        ),
        "also has the axes",
    ),
    (second_derivative, "has no derivative"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){message}"):
        call()


@pytest.mark.slow
def test_calls_over_different_lists_draw_independently() -> None:
    """As calls over different dicts do: the keys come from the paths of all leaves of a call."""
    gather, weights = weight_gather(P("data"), pull=dither(bits=4)), jnp.asarray(normal(0, 2, 64))

    def first(slices: list[jax.Array]) -> jax.Array:
        return jax.vmap(lambda slices: gather(slices, KEY)[0], axis_name="data")(slices)

    alone, beside = first([weights]), first([weights, weights[:, :32]])
    assert np.array_equal(alone, first([weights]))
    assert not np.array_equal(alone, beside)


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [{}, {"push": dither(bits=8), "pull": cast("float32")}])
def test_empty_leaves(codecs: Any) -> None:
    """Sliced or whole, they send nothing and have empty gradients."""
    _, params, specs = prepared("odd")
    mesh = mesh_named("odd")
    specs |= {"none": specs["in"], "nothing": P()}
    empty = {"none": jnp.zeros((0, HIDDEN)), "nothing": jnp.zeros(0)}
    run = fully_sharded_value_and_grad(loss, mesh, specs, axis_name=mesh.axis_names, **codecs)
    _, gradient = run(params | empty, ROWS, KEY)
    assert {k: gradient[k].shape for k in empty} == {k: x.shape for k, x in empty.items()}
    close(gradient["bias"], jax.grad(loss)(START, ROWS)["bias"])


def layers_of(specs: Any, axes: tuple[str, ...], policy: Any) -> Any:
    """A loss of two layers, each of which gathers its weights in its passes."""
    options = {"axis_name": axes, "pull": {}}
    gather = {name: weight_gather(spec, **options) for name, spec in specs.items()}

    def layer(slices: Any, x: jax.Array, name: str) -> jax.Array:
        return jnp.tanh(x @ gather[name](slices))

    layer = jax.checkpoint(layer, static_argnums=2, policy=policy)

    def loss_fn(slices: Any, x: jax.Array, key: Any) -> jax.Array:
        scale, bias = (gather[name](slices[name]) for name in ("scale", "bias"))
        hidden = layer(slices["in"], x, "in") + bias[None]
        return jnp.mean((layer(slices["out"], hidden, "out") * scale) ** 2)

    return loss_fn


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("name", ["two_levels", slow("odd")])
def test_the_secondary_partition_sends_nothing_between_nodes_backward(
    name: str, dtype: str
) -> None:
    """And its gradient is bit-equal. In issues of DeepSpeed, 4852 and 6926, it is wrong or 0."""
    start, rows = optax.tree.cast((START, ROWS), dtype)
    mesh = mesh_named(name)
    specs = prepared(name)[2]
    found = {}
    for kept, policy in (("node", secondary_partition("node")), ("nothing", None)):
        loss_fn = layers_of(specs, mesh.axis_names, policy)
        run = jax.jit(
            fully_sharded_value_and_grad(
                loss_fn, mesh, specs, axis_name=mesh.axis_names, gather=False
            )
        )
        slices = placed(start, mesh, specs)
        sent = jaxcomm.wire.account(run, slices, rows)
        gathers = [c.axes for c in sent.collectives if c.kind == "all_gather"]
        found[kept] = (*jax.device_get(run(slices, rows)), gathers)
    (loss, gradients, few), (expected, others, many) = found["node"], found["nothing"]
    assert few.count(("node",)) == 2 and many.count(("node",)) == 4
    assert few.count(("device",)) == many.count(("device",)) == 4
    assert loss == expected and optax.tree.norm(gradients) > 0
    jax.tree.map(np.testing.assert_array_equal, gradients, others)
