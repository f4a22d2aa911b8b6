"""Steps whose parameters are sharded over another axis than that of the workers."""

import functools
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
from tests.slow import slow
from tests.training import places
from tests.training.places import begun, normal

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None), "norm": P()}
SHAPES = {"up": (6, 8), "bias": (8,), "down": (8, 6), "norm": (6,)}
WHOLE = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items())}
WORKERS, SHARDS, STEPS = 2, 4, 3

# Methods without private keys, so that a shard alone draws what it draws beside others.
METHODS: dict[str, Any] = {
    "mean": jaxcomm.mean,
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.3),
    "power_sgd": lambda: jaxcomm.power_sgd(rank=1),
    "two_stage": lambda: two_stage_mean(error_feedback(scaled_signs())),
    "warmup": lambda: jaxcomm.warmup(
        [jaxcomm.top_k_sgd(ratio=0.9), jaxcomm.top_k_sgd(ratio=0.3)], every=2
    ),
}


def mesh_of(kind: AxisType = AUTO, workers: int = WORKERS, shards: int = SHARDS) -> Mesh:
    return places.mesh_of(kind, workers, shards, names=("data", "model"))


def start(mesh: Mesh, dtype: Any = jnp.float32) -> Any:
    return {
        name: jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh, SPECS[name]))
        for name, x in WHOLE.items()
    }


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


def hidden_of(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])


def nonlinear(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((hidden_of(params, x) @ params["down"] - x) ** 2)


def shard_of(tree: Any, number: int, lead: int = 0) -> Any:
    """One shard of the leaves that are sharded; or, with -1, the other leaves."""
    if number == -1:
        return {"norm": np.asarray(tree["norm"])}
    return {
        name: np.split(np.asarray(x), SHARDS, lead + [*SPECS[name]].index("model"))[number]
        for name, x in tree.items()
        if name != "norm"
    }


def optimized(aggregator: Any) -> Any:
    return optax.chain(aggregator, optax.sgd(0.5, momentum=0.5))


def sharded(method: str = "top_k") -> Any:
    return jaxcomm.shard_local(METHODS[method](), SPECS)


def begin(tx: Any, mesh: Mesh, loss: Any = linear, **options: Any) -> tuple[Any, Any, Any]:
    """The step, its parameters, and the state of the optimizer."""
    params = options.pop("params", None)
    params = start(mesh) if params is None else params
    step, state = begun(loss, tx, mesh, params, **{"shard_axes": "model", **options})
    return step, params, state


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def require_placed(tree: Any, mesh: Mesh) -> None:
    for name, x in tree.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)


@functools.cache
def alone(method: str, number: int) -> Any:
    """The oracle: the shard trained by simulated workers that have no other parameters."""
    params = jax.tree.map(jnp.asarray, shard_of(WHOLE, number))
    step, state = begun(linear, optimized(METHODS[method]()), WORKERS, params)
    for seed in range(STEPS):
        params, state, _ = step(params, state, shard_of(rows(seed), number, lead=1))
    return host(params)


def by_steps(tx: Any, mesh: Mesh) -> Any:
    step, params, state = begin(tx, mesh)
    for seed in range(STEPS):
        params, state, _ = step(params, state, rows(seed))
    return params, state


def in_a_mesh_that_is_set(tx: Any, mesh: Mesh) -> Any:
    with jax.set_mesh(mesh):
        return by_steps(tx, mesh)


def by_scan(tx: Any, mesh: Mesh) -> Any:
    step, *carry = begin(tx, mesh)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *map(rows, range(STEPS)))
    over = lambda carry, batch: (step(*carry, batch)[:2], ())  # noqa: E731
    return jax.jit(lambda *carry: jax.lax.scan(over, carry, batches)[0])(*carry)


def by_shards(tx: Any, mesh: Mesh) -> Any:
    """A step of one's own, in which parameters are shards already."""
    _, params, state = begin(tx, mesh)
    specs = jax.tree.map(
        lambda x, spec: spec if any(spec) else x.sharding.spec, state, jaxcomm.state_specs(state)
    )

    def train(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda x: x[0], batch), state, params)
        return optax.apply_updates(params, updates), state

    batch_specs = {name: P("data", *spec) for name, spec in SPECS.items()}
    in_specs, out_specs = (SPECS, specs, batch_specs), (SPECS, specs)
    run = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    for seed in range(STEPS):
        params, state = run(params, state, rows(seed))
    return params, state


@pytest.mark.parametrize(
    ("method", "kind", "run"),
    [
        ("top_k", AUTO, by_steps),
        ("power_sgd", EXPLICIT, in_a_mesh_that_is_set),
        *(slow(method, AUTO, by_steps) for method in ("mean", "two_stage", "warmup")),
        slow("two_stage", AUTO, in_a_mesh_that_is_set),
        slow("warmup", EXPLICIT, by_steps),
        slow("power_sgd", AUTO, by_shards),
        slow("warmup", AUTO, by_scan),
        slow("top_k", EXPLICIT, by_scan),
    ],
)
def test_each_shard_is_trained_as_if_alone(
    method: str, kind: AxisType, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = mesh_of(kind)
    with jax.log_compiles():
        params, state = run(optimized(sharded(method)), mesh)
    for number in (-1, *range(SHARDS)):
        found, expected = shard_of(params, number), alone(method, number)
        chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=2e-6)
    for tree in (params, state[1][0].trace):
        require_placed(tree, mesh)
    of_steps = [x for x in caplog.messages if x.startswith("Finished XLA compilation of jit(on_me")]
    assert len(of_steps) == (run in (by_steps, in_a_mesh_that_is_set))


@pytest.mark.parametrize("method", ["top_k", slow("mean"), slow("power_sgd")])
def test_nothing_is_gathered_over_the_axis_of_shards(method: str) -> None:
    """Devices that hold shards of one worker exchange scalars of the loss only."""
    step, *carry = begin(optimized(sharded(method)), mesh_of())
    found = jaxcomm.wire.account(jax.jit(step).lower(*carry, rows(0))).collectives
    assert any(c.axes == ("data",) for c in found)
    assert all(c.axes == ("data",) or (c.kind, c.shape) == ("all_reduce", ()) for c in found)
    sent = jaxcomm.wire.account(step, *carry, rows(0))
    assert set(sent.bytes_by_axis) == {"data"} and not sent.at_most
    if method == "mean":  # Coordinates of a shard, the whole leaf, and the loss.
        coordinates = (48 + 8 + 48) // SHARDS + 6 + 1
        assert sent.bytes_per_worker == 4 * coordinates * 2 * (WORKERS - 1) / WORKERS


@pytest.mark.slow
def test_a_nan_in_one_shard() -> None:
    """It spoils this shard on all workers, and no memory of it."""
    bad = rows(1)
    bad["up"][1, 0, 5] = np.nan  # Columns 4 and 5 are shard 2.
    step, params, before = begin(optax.chain(sharded(), optax.sgd(1.0)), mesh_of())
    params, before, _ = step(params, before, rows(0))
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
    skipping = optax.chain(jaxcomm.skip_nonfinite(sharded()), optax.sgd(1.0))
    step, params, state = begin(skipping, mesh_of())
    new, _, metrics = step(params, state, bad)
    chex.assert_trees_all_equal(host(new), host(params))
    assert metrics["diagnostics/skipped_steps"] == 1


def test_the_norm_of_the_whole_gradient() -> None:
    """The optimizer sees whole arrays: transformations that mix coordinates are right."""
    tx = optax.chain(jaxcomm.mean(), optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    step, params, state = begin(tx, mesh_of())
    found, _, _ = step(params, state, rows(0))
    mean = {name: x.mean(axis=0) for name, x in rows(0).items()}
    norm = np.sqrt(sum(np.sum(x**2) for x in mean.values()))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g / norm, WHOLE, mean)
    chex.assert_trees_all_close(host(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_loss_over_shards() -> None:
    """Tensor parallelism by hand: `gradients=` is a nested `jax.shard_map`."""
    tx = optax.chain(sharded(), optax.adam(0.1))

    def manual(params: Any, x: jax.Array) -> jax.Array:
        out = jax.lax.psum(hidden_of(params, x) @ params["down"], "model")
        return jnp.mean((out - x) ** 2)

    def gradients(loss_fn: Any, params: Any, x: jax.Array) -> Any:
        run = functools.partial(jaxcomm.local_value_and_grad(loss_fn))
        specs: Any = {"in_specs": (SPECS, P()), "out_specs": (P(), SPECS)}
        return jax.shard_map(run, axis_names={"model"}, **specs)(params, x)

    x, losses = normal(0, 8, 6), []
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it.
        for loss, options in ((nonlinear, {}), (manual, {"gradients": gradients})):
            step, params, state = begin(tx, mesh_of(), loss, **options)
            for _ in range(10):
                params, state, metrics = step(params, state, x)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0] < float(nonlinear(WHOLE, x)) / 4


@pytest.mark.slow
def test_bfloat16_accumulation_and_model_state() -> None:
    mesh, dtype = mesh_of(), jnp.bfloat16
    codec = error_feedback(scaled(dither(levels=100)))
    aggregator = jaxcomm.shard_local(jaxcomm.all_reduce_mean(codec), SPECS)
    tx = optax.chain(jaxcomm.accumulate(aggregator, 2), optax.sgd(1.0))

    def loss(params: Any, seen: jax.Array, batch: Any) -> Any:
        return linear(params, batch), seen + jnp.mean(batch["norm"])

    first, seen = start(mesh, dtype=dtype), jnp.float32(0)
    step, params, state = begin(tx, mesh, loss, params=first, has_model_state=True)
    for seed in range(2):
        params, seen, state, _ = step(params, seen, state, rows(seed))
    assert seen == pytest.approx(sum(rows(seed)["norm"].mean() for seed in range(2)), rel=1e-5)
    require_placed(params, mesh)
    for name, x in params.items():
        assert x.dtype == dtype
        mean = np.stack([rows(seed)[name] for seed in range(2)]).mean(axis=(0, 1))
        expected = np.asarray(first[name], np.float32) - mean
        np.testing.assert_allclose(np.asarray(x, np.float32), expected, atol=0.06)
    held = state[0].own.per_worker["data"]["mean"]["up"]
    assert held.sharding.spec == P("data", None, "model")


def unlike_the_parameters(spec_of: Any) -> Any:
    specs = {**SPECS, **spec_of}
    begin(jaxcomm.shard_local(METHODS["top_k"](), specs), mesh_of())


def of_other_workers() -> Any:
    _, _, state = begin(optimized(sharded()), mesh_of())
    step, params, _ = begin(optimized(sharded()), mesh_of(AUTO, 4, 2))
    step(params, state, rows(0, 4))


MISTAKES: dict[str, Any] = {
    "would gather them": lambda: begin(METHODS["top_k"](), mesh_of()),
    r"at \['bias'\] over \['model'\], but all": lambda: begin(
        sharded(), mesh_of(), params=WHOLE, shard_axes=()
    ),
    "other than those of the workers": lambda: begin(sharded(), mesh_of(), shard_axes="data"),
    "is for 2 workers, but there are 4": of_other_workers,
    r"at \['down'\], but the parameter, sharded": lambda: unlike_the_parameters({"down": P()}),
    "inside another": lambda: by_steps(jaxcomm.shard_local(sharded("mean"), SPECS), mesh_of()),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MISTAKES[message]()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("model"), P()])
def test_an_axis_that_shards_no_leaf_of_the_specs(spec: P) -> None:
    """`shard_axes` may name more axes than the specs: the aggregator runs on whole leaves there."""
    axes = ("model", "expert")
    mesh = places.mesh_of(AUTO, 2, 2, 2, names=("data", *axes))
    x, loss = normal(0, 2, 4, 6), lambda w, x: jnp.sum(w * x[0])
    params = jax.device_put(jnp.zeros((4, 6)), NamedSharding(mesh, spec))
    aggregator = jaxcomm.shard_local(jaxcomm.top_k_sgd(ratio=1.0), spec)
    tx = optax.chain(aggregator, optax.sgd(1.0, momentum=0.5))
    step, params, state = begin(tx, mesh, loss, params=params, shard_axes=axes)
    params, _, _ = step(params, state, x)
    np.testing.assert_allclose(params, -x.mean(0), rtol=1e-6)
    assert params.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_state_that_looks_like_another_parameter() -> None:
    """Moments of paths that end equally; and a residual that is sharded already."""
    mesh = mesh_of()
    specs = {"kernel": P("model"), "layer": {"kernel": P(None, "model")}}
    place = lambda spec: jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec))  # noqa: E731
    tx = optimized(jaxcomm.shard_local(jaxcomm.mean(), specs))
    state = jaxcomm.init(tx, jax.tree.map(place, specs), mesh, shard_axes="model")
    assert jax.tree.map(lambda x: x.sharding.spec, state[1][0].trace) == specs
    mesh, tx = mesh_of(AUTO, 8, 1), jaxcomm.shard_local(METHODS["top_k"](), P("model"))
    params = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("model")))
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    (held,) = [x for x in jax.tree.leaves(state) if x.shape == (8, 4)]
    assert held.sharding.shard_shape(held.shape) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda tx: jaxcomm.accumulate(tx, 2), jaxcomm.skip_nonfinite])
def test_wrappers_in_an_explicit_mesh_that_is_set(wrap: Any) -> None:
    """Both branches of a step that waits or skips have the same type."""
    found = []
    for kind in (AUTO, EXPLICIT):
        params, _ = in_a_mesh_that_is_set(optimized(wrap(sharded())), mesh_of(kind))
        require_placed(params, mesh_of(kind))
        found.append(host(params))
    chex.assert_trees_all_equal(*found)


def test_a_loss_that_names_the_sharding_of_a_result() -> None:
    """As in plain JAX, the mesh must be set. Otherwise the axes are Auto in the loss."""
    mesh, rows, spec = mesh_of(EXPLICIT), jnp.arange(12) * 5 % 16, P(None, "model")
    table = jnp.asarray(normal(0, 16, 8))
    get = lambda table, rows: table.at[rows].get(out_sharding=spec)  # noqa: E731
    loss = lambda table, rows: jnp.mean(jnp.square(get(table, rows)))  # noqa: E731
    params = jax.device_put(table, NamedSharding(mesh, spec))
    tx = optax.chain(jaxcomm.shard_local(jaxcomm.mean(), spec), optax.sgd(1.0))
    with jax.set_mesh(mesh):
        step, params, state = begin(tx, mesh, loss, params=params)
        found, _, metrics = step(params, state, rows)
    plain = lambda table: jnp.mean(jnp.square(table[rows]))  # noqa: E731
    np.testing.assert_allclose(found, table - jax.grad(plain)(table), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(metrics["loss"], plain(table), rtol=1e-6)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
