"""Steps whose parameters are sharded over another axis than that of the workers."""

import contextlib
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.aggregation import two_stage_mean
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, scaled_signs
from tests.laws.test_wire import COLLECTIVE
from tests.slow import slow

KINDS = [AxisType.Auto, AxisType.Explicit]
SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None), "norm": P()}
SHAPES = {"up": (6, 8), "bias": (8,), "down": (8, 6), "norm": (6,)}
WORKERS, SHARDS, STEPS = 2, 4, 3

# Methods without private coins, so that a shard alone draws what it draws beside others.
METHODS: dict[str, Any] = {
    "mean": jaxcomm.mean,
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.3),
    "power_sgd": lambda: jaxcomm.power_sgd(rank=1),
    "two_stage": lambda: two_stage_mean(error_feedback(scaled_signs())),
    "warmup": lambda: jaxcomm.warmup(
        [jaxcomm.top_k_sgd(ratio=0.9), jaxcomm.top_k_sgd(ratio=0.3)], every=2
    ),
}


def mesh_of(kind: AxisType, *sizes: int) -> Mesh:
    return jax.make_mesh(sizes, ("data", "model"), (kind,) * 2)


def start(mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)
    whole = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    if mesh is None:
        return whole
    return {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in whole.items()}


def rows(seed: int, workers: int = WORKERS) -> Any:
    """The gradient of each worker."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(workers, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def linear(params: Any, batch: Any) -> jax.Array:
    """A loss whose gradient is the worker's row."""
    products = jax.tree.map(lambda x, row: jnp.sum(x.astype(jnp.float32) * row[0]), params, batch)
    return sum(jax.tree.leaves(products), jnp.float32(0))


def shard_of(tree: Any, number: int, lead: int = 0) -> Any:
    """One shard of the leaves that are sharded; or, with -1, the other leaves."""

    def part(name: str, x: Any) -> Any:
        axis = lead + [*SPECS[name]].index("model")
        return np.split(np.asarray(x), SHARDS, axis)[number]

    if number == -1:
        return {"norm": np.asarray(tree["norm"])}
    return {name: part(name, x) for name, x in tree.items() if name != "norm"}


def optimized(aggregator: Any) -> Any:
    return optax.chain(aggregator, optax.sgd(0.5, momentum=0.5))


@functools.cache
def alone(method: str, number: int) -> Any:
    """The oracle: the shard trained by simulated workers that have no other parameters."""
    tx = optimized(METHODS[method]())
    params = jax.tree.map(jnp.asarray, shard_of(start(), number))
    state = jaxcomm.init(tx, params, WORKERS)
    step = jaxcomm.simulate(linear, tx, workers=WORKERS)
    for seed in range(STEPS):
        params, state, _ = step(params, state, shard_of(rows(seed), number, lead=1))
    return jax.tree.map(np.asarray, params)


def require_trained_alone(method: str, params: Any) -> None:
    for number in (-1, *range(SHARDS)):
        chex.assert_trees_all_close(
            shard_of(params, number), alone(method, number), rtol=2e-6, atol=2e-6
        )


def by_steps(tx: Any, mesh: Mesh) -> Any:
    step = jaxcomm.make_step(linear, tx, mesh, shard_axes="model")
    params = start(mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    for seed in range(STEPS):
        params, state, _ = step(params, state, rows(seed))
    return params, state


def by_scan(tx: Any, mesh: Mesh) -> Any:
    step = jaxcomm.make_step(linear, tx, mesh, shard_axes="model")
    params = start(mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    batches = jax.tree.map(lambda *x: jnp.stack(x), *map(rows, range(STEPS)))
    over = lambda carry, batch: (step(*carry, batch)[:2], ())  # noqa: E731
    return jax.jit(lambda *carry: jax.lax.scan(over, carry, batches)[0])(params, state)


def by_shards(tx: Any, mesh: Mesh) -> Any:
    """A step of one's own, in which parameters are shards already."""
    params = start(mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    specs = jax.tree.map(
        lambda x, spec: spec if any(spec) else x.sharding.spec, state, jaxcomm.state_specs(state)
    )

    def train(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda x: x[0], batch), state, params)
        return optax.apply_updates(params, updates), state

    batch_specs = {name: P("data", *spec) for name, spec in SPECS.items()}
    run = jax.jit(
        jax.shard_map(
            train,
            mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2),
            in_specs=(SPECS, specs, batch_specs),
            out_specs=(SPECS, specs),
        )
    )
    for seed in range(STEPS):
        params, state = run(params, state, rows(seed))
    return params, state


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (AxisType.Auto, by_steps),
        (AxisType.Explicit, by_steps),
        (AxisType.Auto, by_shards),
        slow(AxisType.Auto, by_scan),
        slow(AxisType.Explicit, by_scan),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_each_shard_is_trained_as_if_alone(method: str, kind: AxisType, run: Any) -> None:
    mesh = mesh_of(kind, WORKERS, SHARDS)
    params, state = run(optimized(jaxcomm.shard_local(METHODS[method](), SPECS)), mesh)
    require_trained_alone(method, params)
    for name, x in params.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)
        moment = state[1][0].trace[name]
        assert moment.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), moment.ndim)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_mesh_that_is_set(kind: AxisType) -> None:
    mesh = mesh_of(kind, WORKERS, SHARDS)
    tx = optimized(jaxcomm.shard_local(METHODS["top_k"](), SPECS))
    with jax.set_mesh(mesh):
        params, _ = by_steps(tx, mesh)
    require_trained_alone("top_k", params)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", ["mean", "top_k", "power_sgd"])
def test_nothing_is_gathered_over_the_axis_of_shards(method: str) -> None:
    """Devices that hold shards of one worker exchange scalars of the loss only."""
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    tx = optimized(jaxcomm.shard_local(METHODS[method](), SPECS))
    params = start(mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(linear, tx, mesh, shard_axes="model")
    text = jax.jit(step).lower(params, state, rows(0)).compile().as_text()
    over_data = ("{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)", "'model'=4] {'data'}")
    lines = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    others = [line for line in lines if not any(groups in line for groups in over_data)]
    assert len(others) < len(lines)
    for line in others:
        results = line.split(" all-reduce(")[0]
        assert not re.search(r"\[\d", results), line
    sent = jaxcomm.wire.account(step, params, state, rows(0))
    assert set(sent.bytes_by_axis) == {"data"} and not sent.at_most


def test_bytes_are_those_of_a_shard() -> None:
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    tx = optimized(jaxcomm.shard_local(jaxcomm.mean(), SPECS))
    params = start(mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(linear, tx, mesh, shard_axes="model", metrics="own")
    sent = jaxcomm.wire.account(step, params, state, rows(0))
    coordinates = (48 + 8 + 48) // SHARDS + 6
    assert sent.bytes_per_worker == 4 * coordinates * 2 * (WORKERS - 1) / WORKERS


@pytest.mark.slow
def test_memory_of_a_device_falls_with_the_shards() -> None:
    """Parameters, moments and residuals: the arguments of the compiled step."""
    side, held = 256, []
    for shards in (1, 2, 4):
        devices = jax.devices()[: 2 * shards]
        mesh = jax.make_mesh((2, shards), ("data", "model"), (AxisType.Auto,) * 2, devices=devices)
        tx = optax.chain(
            jaxcomm.shard_local(METHODS["top_k"](), P(None, "model")), optax.sgd(0.5, momentum=0.5)
        )
        params = jax.device_put(jnp.zeros((side, side)), NamedSharding(mesh, P(None, "model")))
        state = jaxcomm.init(tx, params, mesh, shard_axes="model")
        step = jaxcomm.make_step(lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh, shard_axes="model")
        compiled = jax.jit(step).lower(params, state, np.zeros((2, side), np.float32)).compile()
        held.append(compiled.memory_analysis().argument_size_in_bytes)
    whole = 3 * 4 * side**2
    for shards, size in zip((1, 2, 4), held, strict=True):
        assert whole / shards <= size < whole / shards + 8 * side


@pytest.mark.slow
@pytest.mark.parametrize("run", ["steps", "shards"])
def test_a_nan_in_one_shard(run: str) -> None:
    """It spoils this shard on all workers, and no memory of it."""
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    tx = optax.chain(jaxcomm.shard_local(METHODS["top_k"](), SPECS), optax.sgd(1.0))
    params = start(mesh)
    before = jaxcomm.init(tx, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(linear, tx, mesh, shard_axes="model", donate=False)
    params, before, _ = step(params, before, rows(0))
    bad = rows(1)
    bad["up"][1, 0, 5] = np.nan  # Columns 4 and 5 are shard 2.
    new, after, _ = step(params, before, bad)
    for number in (-1, *range(SHARDS)):
        finite = [np.isfinite(x).all() for x in shard_of(new, number).values()]
        assert not any(finite) if number == 2 else all(finite)
    kept = [state[0].groups["model"].own.per_worker["data,model"] for state in (before, after)]
    for one, other in zip(*map(jax.tree.leaves, kept), strict=True):
        changed = np.any(np.asarray(one) != np.asarray(other), axis=tuple(range(1, one.ndim)))
        np.testing.assert_array_equal(changed.reshape(WORKERS, SHARDS)[:, 2], False)
        assert changed.reshape(WORKERS, SHARDS)[:, [0, 1, 3]].all()
    # A step that is skipped is skipped whole.
    skipping = optax.chain(
        jaxcomm.skip_nonfinite(jaxcomm.shard_local(METHODS["top_k"](), SPECS)), optax.sgd(1.0)
    )
    params = start(mesh)
    state = jaxcomm.init(skipping, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(linear, skipping, mesh, shard_axes="model", donate=False)
    new, _, metrics = step(params, state, bad)
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, x) for x in (new, params)))
    assert metrics["diagnostics/skipped_steps"] == 1


def test_the_norm_of_the_whole_gradient() -> None:
    """The optimizer sees whole arrays: transformations that mix coordinates are right."""
    tx = optax.chain(jaxcomm.mean(), optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    found = []
    for mesh, shard_axes in (
        (mesh_of(AxisType.Auto, WORKERS, SHARDS), "model"),
        (mesh_of(AxisType.Auto, WORKERS, 1), ()),
    ):
        params = start(mesh)
        state = jaxcomm.init(tx, params, mesh, shard_axes=shard_axes)
        step = jaxcomm.make_step(linear, tx, mesh, shard_axes=shard_axes, donate=False)
        found.append(jax.tree.map(np.asarray, step(params, state, rows(0))[0]))
    chex.assert_trees_all_close(*found, rtol=1e-6)


@pytest.mark.slow
def test_a_loss_over_shards() -> None:
    """Tensor parallelism by hand: `gradients=` is a nested `jax.shard_map`."""
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    tx = optax.chain(jaxcomm.shard_local(METHODS["top_k"](), SPECS), optax.adam(0.1))

    def automatic(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])
        return jnp.mean((hidden @ params["down"] - x) ** 2)

    def manual(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])
        return jnp.mean((jax.lax.psum(hidden @ params["down"], "model") - x) ** 2)

    def gradients(loss_fn: Any, params: Any, x: jax.Array) -> Any:
        return jax.shard_map(
            functools.partial(jaxcomm.local_value_and_grad(loss_fn)),
            axis_names={"model"},
            in_specs=(SPECS, P()),
            out_specs=(P(), SPECS),
        )(params, x)

    x, losses = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), []
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it.
        for loss_fn, options in ((automatic, {}), (manual, {"gradients": gradients})):
            params = start(mesh)
            state = jaxcomm.init(tx, params, mesh, shard_axes="model")
            step = jaxcomm.make_step(loss_fn, tx, mesh, shard_axes="model", **options)
            for _ in range(10):
                params, state, metrics = step(params, state, x)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0] < float(automatic(start(), jnp.asarray(x))) / 4


@pytest.mark.slow
def test_fully_sharded_within_a_rack() -> None:
    """Parameters and rows over `fsdp`, workers over `dcn`; compared with workers of one device."""
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), (AxisType.Auto,) * 2)
    specs = {"up": P(None, "fsdp"), "bias": P("fsdp"), "down": P("fsdp"), "norm": P()}
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])
        return jnp.mean((hidden @ params["down"] - x) ** 2)

    tx = optimized(jaxcomm.mean("dcn"))
    params = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in start().items()}
    state = jaxcomm.init(tx, params, mesh, shard_axes="fsdp")
    step = jaxcomm.make_step(loss, tx, mesh, axis_name="dcn", shard_axes="fsdp")
    batch = jax.device_put(x, NamedSharding(mesh, P(("dcn", "fsdp"))))
    text = jax.jit(step).lower(params, state, batch).compile().as_text()
    assert re.search(r"f32\[2,6\]\S* parameter\(", text)  # Each device takes 2 of the 16 rows.
    whole = start()
    reference = optimized(jaxcomm.mean())
    simulated = jaxcomm.simulate(loss, reference, workers=2)
    whole_state = jaxcomm.init(reference, whole, 2)
    for _ in range(3):
        params, state, _ = step(params, state, batch)
        whole, whole_state, _ = simulated(whole, whole_state, x)
    chex.assert_trees_all_close(
        *(jax.tree.map(np.asarray, x) for x in (params, whole)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_bfloat16_accumulation_and_model_state(dtype: Any) -> None:
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    aggregator = jaxcomm.shard_local(
        jaxcomm.all_reduce_mean(error_feedback(scaled(dither(levels=100)))), SPECS
    )
    tx = optax.chain(jaxcomm.accumulate(aggregator, 2), optax.sgd(1.0))

    def loss(params: Any, seen: jax.Array, batch: Any) -> Any:
        return linear(params, batch), seen + jnp.mean(batch["norm"])

    params, seen = start(mesh, dtype), jnp.float32(0)
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(loss, tx, mesh, shard_axes="model", has_model_state=True)
    first = jax.tree.map(np.asarray, params)
    for seed in range(2):
        params, seen, state, _ = step(params, seen, state, rows(seed))
    assert seen == pytest.approx(sum(rows(seed)["norm"].mean() for seed in range(2)), rel=1e-5)
    for name, x in params.items():
        assert x.dtype == dtype
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)
        mean = np.stack([rows(seed)[name] for seed in range(2)]).mean(axis=(0, 1))
        expected = np.asarray(first[name], np.float32) - mean
        np.testing.assert_allclose(np.asarray(x, np.float32), expected, atol=0.06)
    held = state[0].own.per_worker["data"]["mean"]["up"]
    assert held.sharding.spec == P("data", None, "model")


def test_one_compilation(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    with jax.log_compiles():
        by_steps(optimized(jaxcomm.shard_local(METHODS["top_k"](), SPECS)), mesh)
    steps = "Finished XLA compilation of jit(on_mesh)"
    assert len([r for r in caplog.messages if r.startswith(steps)]) == 1


def test_mistakes() -> None:
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    other, params, whole = mesh_of(AxisType.Auto, 4, 2), start(mesh), start()
    tx = optimized(jaxcomm.shard_local(METHODS["top_k"](), SPECS))
    nested = jaxcomm.shard_local(jaxcomm.shard_local(jaxcomm.mean(), SPECS), SPECS)
    unwrapped = optimized(jaxcomm.top_k_sgd(ratio=0.3))
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    for run, message in (
        (lambda: jaxcomm.init(unwrapped, params, mesh, shard_axes="model"), "would gather them"),
        (lambda: jaxcomm.init(tx, whole, mesh), r"at \['bias'\] over \['model'\], but all"),
        (lambda: jaxcomm.init(tx, params, mesh, shard_axes="tensor"), "`shard_axes` must name"),
        (
            lambda: jaxcomm.make_step(linear, tx, mesh, shard_axes="data"),
            "other than those of the workers",
        ),
        (
            lambda: jaxcomm.make_step(
                linear,
                tx,
                jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto, AxisType.Explicit)),
                shard_axes="model",
            ),
            "all Auto or all Explicit",
        ),
        (
            lambda: jaxcomm.make_step(linear, tx, mesh)(params, state, rows(0, 8)),
            r"params\['bias'\] is sharded over devices.*`shard_axes=`",
        ),
        (
            lambda: jaxcomm.make_step(linear, tx, other, shard_axes="model")(
                start(other), state, rows(0, 4)
            ),
            "is for 2 workers, but there are 4",
        ),
        (
            lambda: jaxcomm.init(
                jaxcomm.shard_local(jaxcomm.top_k_sgd(ratio=0.3), dict(SPECS, down=P())),
                params,
                mesh,
                shard_axes="model",
            ),
            r"at \['down'\], but the parameter, sharded",
        ),
        (
            lambda: jaxcomm.make_step(
                linear,
                jaxcomm.shard_local(jaxcomm.mean(), dict(SPECS, up=P("model"))),
                mesh,
                shard_axes="model",
            )(params, jaxcomm.shard_local(jaxcomm.mean(), SPECS).init(params), rows(0)),
            r"at \['up'\], but the parameter, sharded",
        ),
        (
            lambda: jaxcomm.make_step(linear, nested, mesh, shard_axes="model")(
                params, nested.init(whole), rows(0)
            ),
            "inside another",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("model"), P()])
def test_an_axis_that_shards_no_leaf_of_the_specs(spec: P) -> None:
    """`shard_axes` may name more axes than the specs: the aggregator runs on whole leaves there."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "expert"), (AxisType.Auto,) * 3)
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    params = jax.device_put(jnp.zeros((4, 6)), NamedSharding(mesh, spec))
    tx = optax.chain(
        jaxcomm.shard_local(jaxcomm.top_k_sgd(ratio=1.0), spec), optax.sgd(1.0, momentum=0.5)
    )
    state = jaxcomm.init(tx, params, mesh, shard_axes=("model", "expert"))
    step = jaxcomm.make_step(
        lambda w, x: jnp.sum(w * x[0]), tx, mesh, shard_axes=("model", "expert")
    )
    params, _, _ = step(params, state, x)
    np.testing.assert_allclose(params, -x.mean(0), rtol=1e-6)
    assert params.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_moments_of_parameters_whose_paths_end_equally() -> None:
    mesh = mesh_of(AxisType.Auto, WORKERS, SHARDS)
    specs = {"kernel": P("model"), "layer": {"kernel": P(None, "model")}}
    params = jax.tree.map(
        lambda spec: jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec)), specs
    )
    tx = optax.chain(jaxcomm.shard_local(jaxcomm.mean(), specs), optax.sgd(1.0, momentum=0.5))
    trace = jaxcomm.init(tx, params, mesh, shard_axes="model")[1][0].trace
    assert jax.tree.map(lambda x: x.sharding.spec, trace) == specs


def test_one_parameter_on_an_axis_of_one_device() -> None:
    """Its residual has the shape of the parameter, but is sharded over the axis already."""
    mesh = mesh_of(AxisType.Auto, 8, 1)
    params = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("model")))
    tx = jaxcomm.shard_local(METHODS["top_k"](), P("model"))
    (held,) = [
        x
        for x in jax.tree.leaves(jaxcomm.init(tx, params, mesh, shard_axes="model"))
        if x.shape == (8, 4)
    ]
    assert held.sharding.shard_shape(held.shape) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda tx: jaxcomm.accumulate(tx, 2), jaxcomm.skip_nonfinite])
def test_wrappers_in_an_explicit_mesh_that_is_set(wrap: Any) -> None:
    """Both branches of a step that waits or skips have the same type."""
    found = []
    for kind in KINDS:
        mesh = mesh_of(kind, WORKERS, SHARDS)
        with jax.set_mesh(mesh):
            tx = optimized(wrap(jaxcomm.shard_local(METHODS["top_k"](), SPECS)))
            found.append(by_steps(tx, mesh)[0])
        for name, x in found[-1].items():
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, params) for params in found))


@pytest.mark.slow
def test_windows_in_an_explicit_mesh_that_is_set() -> None:
    """Workers finish different numbers of mini-batches, and the partitioner sends in each."""
    x = np.random.default_rng(0).normal(size=(2 * WORKERS, 3, 6)).astype(np.float32)
    finished, found = np.array([1, 2], np.int32), []

    def loss(params: Any, x: jax.Array, **options: Any) -> jax.Array:
        hidden = jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])
        return jnp.mean((jnp.matmul(hidden, params["down"], **options) - x) ** 2)

    for kind, options in (
        (AxisType.Auto, {}),
        (AxisType.Explicit, {"out_sharding": P(None, None)}),
    ):
        mesh = mesh_of(kind, WORKERS, SHARDS)
        with jax.set_mesh(mesh):
            tx, params = optimized(jaxcomm.shard_local(METHODS["top_k"](), SPECS)), start(mesh)
            state = jaxcomm.init(tx, params, mesh, shard_axes="model")
            step = jaxcomm.make_step(
                functools.partial(loss, **options),
                tx,
                mesh,
                shard_axes="model",
                gradients=jaxcomm.synchronization.window_gradients,
            )
            found.append(step(params, state, (x, finished))[0])
    chex.assert_trees_all_close(*(jax.tree.map(np.asarray, x) for x in found), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_set", [False, slow(True)])
def test_a_loss_that_names_the_sharding_of_a_result(kind: AxisType, is_set: bool) -> None:
    """As in plain JAX, the mesh must be set. Otherwise the axes are Auto in the loss."""
    mesh, rows = mesh_of(kind, WORKERS, SHARDS), jnp.arange(12) * 5 % 16
    table = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    spec = P(None, "model")

    def loss(table: jax.Array, rows: jax.Array) -> jax.Array:
        if kind == AxisType.Auto:
            return jnp.mean(jnp.square(table[rows]))
        return jnp.mean(jnp.square(table.at[rows].get(out_sharding=spec)))

    params = jax.device_put(table, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        whole = jax.device_put(rows, NamedSharding(mesh, P()))
        expected = params - jax.jit(jax.grad(loss))(params, whole)
    tx = optax.chain(jaxcomm.shard_local(jaxcomm.mean(), spec), optax.sgd(1.0))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        state = jaxcomm.init(tx, params, mesh, shard_axes="model")
        step = jaxcomm.make_step(loss, tx, mesh, shard_axes="model", donate=False)
        if kind == AxisType.Explicit and not is_set:
            with pytest.raises(ValueError, match="axis names that are of type Auto or Manual"):
                step(params, state, rows)
            return
        found, _, metrics = step(params, state, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    alone = table - jax.grad(lambda table: jnp.mean(jnp.square(table[rows])))(table)
    np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(metrics["loss"], jnp.mean(jnp.square(table[rows])), rtol=1e-6)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
