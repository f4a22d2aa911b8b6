"""ZeRO-3: gradients of weights in slices, equal to those of whole weights; codecs, and mistakes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcomm
from jaxcomm.aggregation import weight_gather
from jaxcomm.compression import blockwise, rotated
from jaxcomm.compression.feedback import ef21, error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.training import fully_sharded_value_and_grad, slice_specs
from tests.slow import slow

MESHES = {
    "one": ((1,), ("data",), AxisType.Auto),
    "eight": ((8,), ("data",), AxisType.Auto),
    "explicit": ((8,), ("data",), AxisType.Explicit),
    "two_levels": ((2, 4), ("node", "device"), AxisType.Auto),
    "odd": ((2, 3), ("node", "device"), AxisType.Explicit),
}
IN, HIDDEN, OUT = 5, 48, 3


def mesh_named(name: str) -> jax.sharding.Mesh:
    sizes, axes, kind = MESHES[name]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, devices=devices, axis_types=(kind,) * len(axes))


def start(dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"bias": (HIDDEN,), "in": (IN, HIDDEN), "out": (HIDDEN, OUT), "scale": ()}
    return {k: jnp.asarray(rng.integers(-4, 5, s) / 8, dtype) for k, s in shapes.items()}


def specs_of(axes: tuple[str, ...]) -> Any:
    entry = axes if len(axes) > 1 else axes[0]
    return {"bias": P(), "in": P(None, entry), "out": P(entry), "scale": P()}


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.maximum(x @ params["in"] + params["bias"][None], 0)
    return jnp.mean((hidden @ params["out"] * params["scale"]) ** 2)


def batch_of(rows: int = 48) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(-2, 3, (rows, IN)), jnp.float32)


def placed(params: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)


def prepared(name: str, dtype: Any = jnp.float32) -> Any:
    mesh = mesh_named(name)
    specs = specs_of(mesh.axis_names)
    return mesh, specs, placed(start(dtype), mesh, specs)


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        np.testing.assert_allclose(
            np.asarray(other, np.float32), np.asarray(x, np.float32), tolerance, tolerance
        )


def test_a_loss_that_averages_over_workers_itself_has_the_same_gradient() -> None:
    mesh, specs, params = prepared("eight")
    averaged = lambda params, x: jax.lax.pmean(loss(params, x), "data")  # noqa: E731
    _, gradients = fully_sharded_value_and_grad(averaged, mesh, specs)(params, batch_of())
    close(gradients, jax.grad(loss)(start(), batch_of()))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MESHES)
def test_equals_the_gradient_of_whole_weights(name: str) -> None:
    mesh, specs, params = prepared(name)
    expected = jax.jit(jax.value_and_grad(loss))(start(), batch_of())
    function = fully_sharded_value_and_grad(loss, mesh, specs, axis_name=mesh.axis_names)
    for run in (function, jax.jit(function)):
        value, gradient = run(params, batch_of())
        close((value, gradient), expected)
        for leaf, spec in zip(*map(jax.tree.leaves, (gradient, specs)), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", "odd"])
def test_training_in_a_scan_equals_that_of_whole_weights(name: str) -> None:
    mesh, specs, params = prepared(name)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    function = fully_sharded_value_and_grad(
        lambda p, x: (loss(p, x), {"rows": jnp.mean(x)}),
        mesh, specs, axis_name=mesh.axis_names, has_aux=True,
    )  # fmt: skip

    def train(value_and_grad: Any, params: Any) -> Any:
        def body(carry: Any, x: jax.Array) -> Any:
            (value, aux), gradient = value_and_grad(carry[0], x)
            updates, state = tx.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), (value, aux["rows"])

        batches = jnp.stack([batch_of() + i for i in range(3)])
        return jax.lax.scan(body, (params, tx.init(params)), batches)

    def whole(params: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return (value, {"rows": jnp.mean(x)}), gradient

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(lambda p: train(whole, p))(start())
        if AxisType.Explicit in mesh.axis_types:
            with jax.set_mesh(mesh):
                found = jax.jit(lambda p: train(function, p))(params)
        else:
            found = jax.jit(lambda p: train(function, p))(params)
    close(found, expected, 2e-5)


@pytest.mark.slow
def test_weights_travel_as_their_codec_says() -> None:
    """A gradient at weights in bfloat16; the whole leaves do not travel, and stay float32."""
    mesh, specs, _ = prepared("eight")
    function = fully_sharded_value_and_grad(loss, mesh, specs, pull=cast("bfloat16"))
    fine = jax.tree.map(lambda x: x + x / 1000, start())
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), fine)
    rounded = {**fine, "in": coarse["in"], "out": coarse["out"]}
    expected = jax.value_and_grad(loss)(rounded, batch_of())
    close(function(placed(fine, mesh, specs), batch_of(), jax.random.key(0)), expected)
    assert not np.allclose(expected[1]["in"], jax.grad(loss)(fine, batch_of())["in"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", "two_levels", "odd"])
def test_16_bit_weights_travel_in_16_bits(name: str) -> None:
    mesh, specs, params = prepared(name, jnp.bfloat16)
    function = fully_sharded_value_and_grad(
        lambda p, x: loss(jax.tree.map(lambda w: w.astype(jnp.float32), p), x),
        mesh, specs, axis_name=mesh.axis_names,
    )  # fmt: skip
    _, gradient = function(params, batch_of())
    close(gradient, jax.grad(loss)(start(), batch_of()), 2e-2)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(gradient))


def bits_of(mesh: jax.sharding.Mesh) -> Any:
    """8 bits within a node, 4 with a rotation between nodes."""
    if len(mesh.axis_names) == 1:
        return dither(bits=8)
    return {"device": dither(bits=8), "node": rotated(dither(bits=4))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", "two_levels", "odd", slow("explicit"), slow("one")])
def test_compressed_gradients_have_the_right_mean(name: str) -> None:
    """The mean over many keys of unbiased gradients, for a linear loss; each draw differs."""
    mesh, specs, params = prepared(name)

    rng = np.random.default_rng(2)
    slopes = {k: jnp.asarray(rng.normal(size=x.shape), jnp.float32) for k, x in start().items()}

    def linear(params: Any, x: jax.Array) -> jax.Array:
        sums = [jnp.sum(params[k] * slope) for k, slope in slopes.items()]
        return sum(total * jnp.mean(x[:, i]) for i, total in enumerate(sums))

    function = fully_sharded_value_and_grad(
        linear, mesh, specs, axis_name=mesh.axis_names, push=bits_of(mesh)
    )
    x = jnp.asarray(rng.normal(size=(48, IN)), jnp.float32)
    exact = jax.grad(linear)(start(), x)
    draws = 64
    keys = jax.random.split(jax.random.key(3), draws)
    found = jax.jit(lambda p: jax.lax.map(lambda key: function(p, x, key)[1], keys))(params)
    for leaf in ("in", "out"):
        drawn, whole = np.asarray(found[leaf], np.float64), np.asarray(exact[leaf])
        spread = np.std(drawn, axis=0).max() + 1e-7
        assert np.abs(drawn.mean(axis=0) - whole).max() < 6 * spread / draws**0.5
        assert np.any(drawn[0] != drawn[1])
        largest = np.abs(x.reshape(mesh.size, -1, IN).mean(axis=1)).max()
        assert 0 < spread < largest * np.abs(slopes[leaf]).max() / 7  # 4 bits have 7 levels.


@pytest.mark.slow
@pytest.mark.parametrize("push", [None, dither(bits=8)], ids=["exact", "8_bits"])
def test_one_workers_nan_reaches_all_slices(push: Any) -> None:
    mesh, specs, params = prepared("eight")
    x = batch_of().at[7, 0].set(jnp.nan)
    function = fully_sharded_value_and_grad(loss, mesh, specs, push=push)
    value, gradient = function(params, x, jax.random.key(0))
    assert np.isnan(value)
    for leaf in ("in", "out"):
        assert np.all(np.isnan(gradient[leaf]))


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_not_hidden() -> None:
    mesh, specs, _ = prepared("eight")
    broken = {**start(), "out": start()["out"].at[3, 1].set(jnp.inf)}
    function = fully_sharded_value_and_grad(loss, mesh, specs, pull=dither(bits=8))
    value, gradient = function(placed(broken, mesh, specs), batch_of(), jax.random.key(0))
    assert np.isnan(value) and np.all(np.isnan(gradient["in"]))


def test_bytes_by_axis() -> None:
    """One collective per axis and direction, and the exact mean of the leaves that stay whole."""
    mesh, specs, params = prepared("two_levels")
    sliced = (IN * HIDDEN + HIDDEN * OUT) // 8
    rest = 2 * (HIDDEN + 1 + 1) * 4  # With the loss; an all-reduce of n workers, (n - 1) / n.

    def bytes_of(**codecs: Any) -> Any:
        function = fully_sharded_value_and_grad(
            loss, mesh, specs, axis_name=mesh.axis_names, **codecs
        )
        return jaxcomm.wire.account(function, params, batch_of(), jax.random.key(0))

    exact = bytes_of()
    assert exact.bytes_per_worker == pytest.approx(
        7 * 4 * sliced + 7 * (4 * sliced + 4) + rest * 7 / 8
    )
    split = bytes_of(push=bits_of(mesh), pull={"node": dither(bits=8)})
    sent = split.bytes_by_axis
    node = (sliced + 4 + 4) + (sliced // 2 + 64)
    assert sent["node"] < node + 64
    assert sent["device"] > 3 * 2 * 4 * sliced


def compiled(name: str, **options: Any) -> Any:
    """A step with Adam of 8 layers of 2^14 coordinates, gathered layer by layer or at once."""
    layers, width = 8, 128
    mesh = mesh_named(name)
    axes = mesh.axis_names
    entry = axes if len(axes) > 1 else axes[0]
    gather = weight_gather(P(entry), axis_name=axes)

    def model(weights: jax.Array, x: jax.Array, of_layer: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x @ of_layer(w)), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    if options.get("layers"):
        function = fully_sharded_value_and_grad(
            lambda w, x, key: model(w, x, gather), mesh, P(None, entry), axis_name=axes,
            gather=False,
        )  # fmt: skip
    else:
        function = fully_sharded_value_and_grad(
            lambda w, x: model(w, x, lambda w: w), mesh, P(None, entry), axis_name=axes
        )
    tx = optax.adam(0.1)

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        value, gradient = function(w, x)
        updates, state = tx.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    weights = jax.ShapeDtypeStruct(
        (layers, width, width), jnp.float32, sharding=NamedSharding(mesh, P(None, entry))
    )
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, entry) if x.ndim else P())
        ),
        jax.eval_shape(tx.init, weights),
    )
    rows = jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=NamedSharding(mesh, P(axes)))
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(step).lower(weights, state, rows).compile()


@pytest.mark.slow
def test_memory_falls_as_1_over_n() -> None:
    """Weights and two moments, per device; layer by layer, no whole model is ever in memory."""
    whole = 4 * 8 * 128 * 128
    found = {name: compiled(name).memory_analysis() for name in ("one", "eight")}
    for name, n in (("one", 1), ("eight", 8)):
        assert found[name].argument_size_in_bytes == pytest.approx(3 * whole / n, abs=5000)
    assert found["eight"].temp_size_in_bytes > whole
    by_layer = compiled("eight", layers=True)
    assert by_layer.memory_analysis().temp_size_in_bytes < 0.7 * whole
    gathered = re.findall(r"= u32\[([\d,]+)\]\S* all-gather", by_layer.as_text())
    assert gathered
    assert all(np.prod([*map(int, shape.split(","))]) <= 128 * 128 for shape in gathered)


def test_specs_slice_the_largest_dimension() -> None:
    mesh = mesh_named("two_levels")
    params = {"a": jnp.zeros((16, 800)), "b": jnp.zeros((1601,)), "c": jnp.zeros((8, 4))}
    axes = ("node", "device")
    found = slice_specs(params, mesh, axis_name=axes)
    assert found == {"a": P(None, axes), "b": P(), "c": P()}
    assert slice_specs(params, mesh, axis_name=axes, least=1)["c"] == P(axes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push": error_feedback(top_k(k=1))}, "takes codecs without memory"),
        ({"pull": {"model": dither()}}, r"is for \['model'\]"),
        ({"pull": dither(), "key": None}, "needs a key that is new in each step"),
        ({"push": ef21(top_k(k=1))}, "takes codecs without memory"),
        ({"gather": False, "push": dither()}, r"\['push'\] would have no effect here"),
        ({"gather": False, "scope": "leaf"}, r"\['scope'\] would have no effect here"),
    ],
)  # fmt: skip
def test_mistakes(options: dict[str, Any], message: str) -> None:
    mesh, specs, params = prepared("eight")
    key = options.pop("key", jax.random.key(0))
    rows = batch_of(48)
    with pytest.raises(ValueError, match=f"(?i){message}"):
        function = fully_sharded_value_and_grad(loss, mesh, specs, **options)
        jax.eval_shape(function, params, rows, key)


def test_other_axes_of_the_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match="also has the axes"):
        fully_sharded_value_and_grad(loss, mesh_named("two_levels"), P(), axis_name="device")


@pytest.mark.slow
def test_groups_of_3_by_8() -> None:
    """Simulated: the mean of 24 gradients, with 8 bits within a node and 4 rotated bits between."""
    codecs = {"device": dither(bits=8), "node": rotated(dither(bits=4))}
    gather = weight_gather(P(("node", "device")), axis_name=("node", "device"), push=codecs)
    rng = np.random.default_rng(0)
    slopes = jnp.asarray(rng.normal(size=(3, 8, 48)), jnp.float32)

    def gradient(part: jax.Array, slope: jax.Array, key: jax.Array) -> jax.Array:
        return jax.grad(lambda part: jnp.sum(gather(part, key) * slope))(part)

    over_devices = jax.vmap(gradient, (0, 0, None), axis_name="device")
    over_nodes = jax.vmap(over_devices, (0, 0, None), axis_name="node")
    draw = lambda key: over_nodes(jnp.zeros((3, 8, 2)), slopes, key).ravel()  # noqa: E731
    drawn = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 200)), float)
    mean = np.asarray(slopes, float).mean(axis=(0, 1))
    spread = drawn.std(axis=0).max()
    assert 0 < spread < 0.2
    assert np.abs(drawn.mean(axis=0) - mean).max() < 6 * spread / 200**0.5


def test_integer_leaves_are_refused() -> None:
    mesh = mesh_named("eight")
    function = fully_sharded_value_and_grad(lambda p, x: jnp.mean(x), mesh, P("data"))
    with pytest.raises((ValueError, TypeError), match=r"floating|int32"):
        function(jnp.arange(8), batch_of())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", slow("two_levels")])
def test_digits_train_beside_whole_weights(name: str) -> None:
    """Losses after 60 steps of Adam on scikit-learn's digits, with codecs at both ends."""
    images, labels = load_digits(return_X_y=True)
    x, y = np.float32(images[:1024] / 16), labels[:1024].astype(np.int32)
    mesh = mesh_named(name)
    axes = mesh.axis_names
    rng = np.random.default_rng(0)
    start = {
        "in": jnp.asarray(rng.normal(size=(64, 128)) / 8, jnp.float32),
        "out": jnp.asarray(rng.normal(size=(128, 10)) / 11, jnp.float32),
        "bias": jnp.zeros(10),
    }
    specs = slice_specs(start, mesh, axis_name=axes)
    tx = optax.adam(3e-3)

    def entropy(params: Any, batch: Any) -> jax.Array:
        logits = jnp.tanh(batch[0] @ params["in"]) @ params["out"] + params["bias"][None]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    def trained(value_and_grad: Any, params: Any) -> float:
        def body(carry: Any, step: jax.Array) -> Any:
            rows = jax.random.choice(jax.random.key(step), len(x), (128,), replace=False)
            key = jax.random.key(step, impl="threefry2x32")
            batch = jnp.asarray(x)[rows], jnp.asarray(y)[rows]
            value, gradient = value_and_grad(carry[0], batch, key)
            updates, state = tx.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), value

        run = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), jnp.arange(60))[1])
        return float(np.mean(run(params)[-10:]))

    def sharded(**codecs: Any) -> float:
        function = fully_sharded_value_and_grad(entropy, mesh, specs, axis_name=axes, **codecs)
        return trained(function, placed(start, mesh, specs))

    with jax.numpy_dtype_promotion("standard"):
        whole = trained(lambda p, batch, key: jax.value_and_grad(entropy)(p, batch), start)
        assert sharded() == pytest.approx(whole, rel=1e-3)
        codes = sharded(push=bits_of(mesh), pull=blockwise(dither(bits=8), 64))
        assert whole < 0.6
        assert codes == pytest.approx(whole, rel=0.05)


@pytest.mark.slow
def test_aux_of_single_examples_is_refused() -> None:
    mesh, specs, params = prepared("eight")
    function = fully_sharded_value_and_grad(
        lambda p, x: (loss(p, x), {"rows": x[:, 0]}), mesh, specs, has_aux=True
    )
    with pytest.raises(
        ValueError, match=r"`aux\['rows'\]` has shape \(6,\), one value per example"
    ):
        function(params, batch_of())


@pytest.mark.slow
@pytest.mark.parametrize("leaf", ["in", "bias"], ids=["sliced", "whole"])
def test_second_derivatives_are_refused(leaf: str) -> None:
    """They would be 0: messages of words have no derivative."""
    mesh, specs, params = prepared("eight")
    gather = weight_gather(specs)

    def of_gradient(slices: Any, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda p: loss(gather(p), x))(slices)
        return jnp.sum(gradient[leaf])

    second = jax.shard_map(
        jax.grad(of_gradient), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    with pytest.raises(ValueError, match="has no derivative"):
        second(params, batch_of())


def test_a_spec_beyond_the_dimensions_of_a_slice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at the root.*must shard one dimension of its leaves"):
        jax.vmap(weight_gather(P(None, "data")), axis_name="data")(jnp.ones((2, 3)))


@pytest.mark.slow
def test_calls_over_different_lists_draw_apart() -> None:
    """As calls over different dicts do: the coins come from the paths of all leaves of a call."""
    gather = weight_gather(P("data"), pull=dither(bits=4))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.float32)
    key = jax.random.key(0)

    def first(slices: list[jax.Array]) -> jax.Array:
        return jax.vmap(lambda slices: gather(slices, key)[0], axis_name="data")(slices)

    alone, beside = first([weights]), first([weights, weights[:, :32]])
    assert np.array_equal(alone, first([weights]))
    assert not np.array_equal(alone, beside)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["explicit", "odd"])
def test_a_step_over_explicit_axes_needs_no_mesh_that_is_set(name: str) -> None:
    mesh, specs, params = prepared(name)
    tx = optax.sgd(0.5, momentum=0.9)
    function = fully_sharded_value_and_grad(loss, mesh, specs, axis_name=mesh.axis_names)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        _, gradient = function(params, x)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    found, _ = step(params, tx.init(params), batch_of())
    expected = jax.tree.map(lambda w, g: w - g / 2, start(), jax.grad(loss)(start(), batch_of()))
    close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight", "odd"])
def test_empty_leaves(name: str) -> None:
    """Sliced or whole, they send nothing and have empty gradients."""
    mesh, specs, params = prepared(name)
    specs |= {"none": specs["in"], "nothing": P()}
    empty = {"none": jnp.zeros((0, HIDDEN)), "nothing": jnp.zeros(0)}
    codecs = {"push": dither(bits=8), "pull": cast("float32")}
    for options in ({}, codecs):
        function = fully_sharded_value_and_grad(
            loss, mesh, specs, axis_name=mesh.axis_names, **options
        )
        _, gradient = function(params | empty, batch_of(), jax.random.key(0))
        assert {k: gradient[k].shape for k in empty} == {k: x.shape for k, x in empty.items()}
        close(gradient["bias"], jax.grad(loss)(start(), batch_of())["bias"])
