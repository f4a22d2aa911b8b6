"""Replicas of several devices: every local and gossip method trains as with one device each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import diloco, local_sgd
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, RECIPES, LocalCase

REPLICAS, DEVICES, STEPS = 4, 2, 7
KINDS = [AxisType.Auto, AxisType.Explicit]
START = np.random.default_rng(0).normal(size=(REPLICAS, 5)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(STEPS, 16, 5)).astype(np.float32)


def loss(params: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((rows[:, :2] @ params["a"] + rows[:, 2:] @ params["b"] - 1) ** 2)


def transformation(case: LocalCase | GossipCase) -> Any:
    if isinstance(case, LocalCase):
        return case.make(optax.sgd(0.1, momentum=0.5))
    return optax.chain(jaxcomm.per_worker(optax.sgd(0.1, momentum=0.5)), case.make(REPLICAS))


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((REPLICAS, DEVICES), ("data", "ici"), axis_types=(kind,) * 2)


def prepared(tx: Any, where: Any, **options: Any) -> tuple[Any, Any, Any]:
    """`(step, params, state)` of replicas over `"data"`."""
    params = jaxcomm.PerWorker({"data": {"a": START[:, :2], "b": START[:, 2:]}})
    params = jax.tree.map(jnp.asarray, params)
    make: Any = jaxcomm.make_step if isinstance(where, Mesh) else jaxcomm.simulate
    step = make(loss, tx, where, donate=False, **{"metrics": "own", **options})
    return step, params, jaxcomm.init(tx, params, where)


def scanned(step: Any, params: Any, state: Any) -> np.ndarray:
    @jax.jit
    def run(params: Any, state: Any, batches: jax.Array) -> Any:
        body = lambda carry, rows: (step(*carry, rows)[:2], None)  # noqa: E731
        return jax.lax.scan(body, (params, state), batches)[0][0]

    after = run(params, state, ROWS).per_worker["data"]
    return np.concatenate([np.asarray(after["a"]), np.asarray(after["b"])], axis=-1)


@functools.cache
def of_one_device_each(case: LocalCase | GossipCase) -> tuple[np.ndarray, float]:
    """What simulated replicas of one device reach and send."""
    step, params, state = prepared(transformation(case), REPLICAS)
    sent = jaxcomm.wire.account(step, params, state, ROWS[0])
    return scanned(step, params, state), sent.bytes_by_axis["data"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", [*LOCAL, *GOSSIP, *RECIPES], ids=repr)
def test_replicas_of_several_devices(case: LocalCase | GossipCase, kind: AxisType) -> None:
    """Their devices share the rows, and send float32 gradients; replicas send what they did."""
    step, params, state = prepared(transformation(case), mesh_of(kind))
    sent = jaxcomm.wire.account(step, params, state, ROWS[0]).bytes_by_axis
    expected, between = of_one_device_each(case)
    assert sent == {"data": between, "ici": 2 * (DEVICES - 1) / DEVICES * 4 * (5 + 1)}
    np.testing.assert_allclose(scanned(step, params, state), expected, rtol=1e-4, atol=1e-5)


AGGREGATED: dict[str, Any] = {
    "diloco": lambda: diloco(optax.sgd(0.1, momentum=0.5), optax.sgd(0.7, momentum=0.5), 3),
    "dpsgd": lambda: optax.chain(
        jaxcomm.per_worker(optax.sgd(0.1)), gossip.dpsgd(gossip.ring(REPLICAS))
    ),
}


def within(aggregator: Any, method: str) -> Any:
    return optax.chain(jaxcomm.hierarchical(aggregator, outer_axes="data"), AGGREGATED[method]())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["simulated", *KINDS], ids=str)
@pytest.mark.parametrize("method", AGGREGATED)
def test_a_mean_within_a_replica_by_the_transformation(method: str, where: Any) -> None:
    """Exact as the step's own mean, and compressed: 16 bits within are close to it."""
    place: Any = {"data": REPLICAS, "ici": DEVICES} if where == "simulated" else mesh_of(where)
    expected = scanned(*prepared(AGGREGATED[method](), REPLICAS))
    found = [
        prepared(within(aggregator, method), place, axis_name=("data", "ici"))
        for aggregator in (jaxcomm.mean("ici"), jaxcomm.global_qsgd("ici", bits=16))
    ]
    np.testing.assert_allclose(scanned(*found[0]), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scanned(*found[1]), expected, rtol=0, atol=2e-3)
    step, params, state = found[1]
    sent = jaxcomm.wire.account(step, params, state, ROWS[0])
    assert "uint32" in {str(c.dtype) for c in sent.collectives if c.axes == ("ici",)}


def _outer_of(aggregator: Any, axis_name: Any = "data") -> Any:
    inner, outer = optax.sgd(0.1, momentum=0.5), optax.sgd(0.7, momentum=0.5)
    return diloco(inner, outer, 3, aggregator=aggregator, axis_name=axis_name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_devices_of_a_replica_share_the_outer_exchange(kind: AxisType) -> None:
    """Each sends its slice between replicas: the same numbers, for a part of the bytes."""
    expected = scanned(*prepared(_outer_of(jaxcomm.mean()), REPLICAS))
    whole = prepared(_outer_of(jaxcomm.mean()), mesh_of(kind))
    step, params, state = prepared(
        _outer_of(jaxcomm.sliced(jaxcomm.mean(), axis_name="ici")), mesh_of(kind)
    )
    np.testing.assert_allclose(scanned(step, params, state), expected, rtol=1e-5, atol=1e-6)
    sent = jaxcomm.wire.account(step, params, state, ROWS[0]).bytes_by_axis
    of_whole = jaxcomm.wire.account(*whole, ROWS[0]).bytes_by_axis
    steps = 2 * (REPLICAS - 1) / REPLICAS * 4 * 2  # Numbers that are not sliced.
    # Of 2 and 3 coordinates, the 3 are padded to 4.
    assert sent["data"] - steps == (of_whole["data"] - steps) * 3 / 5
    top_k = jaxcomm.top_k_sgd(ratio=0.5)  # Its residuals differ by device of a replica.
    step, params, state = prepared(_outer_of(jaxcomm.sliced(top_k, axis_name="ici")), mesh_of(kind))
    assert np.isfinite(scanned(step, params, state)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stages_between_and_within_clusters_of_replicas(kind: AxisType) -> None:
    """Replicas of one device over both axes: outer means in two stages, exact or in 16 bits."""
    axes, sizes = ("dcn", "data"), {"dcn": 2, "data": REPLICAS // 2}
    mesh = jax.make_mesh(tuple(sizes.values()), axes, axis_types=(kind,) * 2)
    params = jaxcomm.PerWorker({"dcn,data": {"a": START[:, :2], "b": START[:, 2:]}})
    params = jax.tree.map(jnp.asarray, params)
    expected = scanned(*prepared(_outer_of(jaxcomm.mean()), REPLICAS))
    for last, tolerance in (
        (jaxcomm.mean("dcn"), 1e-5),
        (jaxcomm.global_qsgd("dcn", bits=16), 2e-3),
    ):
        tx = _outer_of(jaxcomm.hierarchical(jaxcomm.mean("data"), last), axes)
        state = jaxcomm.init(tx, params, mesh)
        step = jaxcomm.make_step(loss, tx, mesh, axis_name=axes, metrics="own", donate=False)
        after, kept = params, state
        for rows in ROWS:
            after, kept, _ = step(after, kept, rows)
        found = np.concatenate([np.asarray(x) for x in after.per_worker["dcn,data"].values()], -1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


# Parameters that are sharded within a replica.
WORKERS, SHARDS = 2, 4
SPECS = {"up": P(None, "ici"), "bias": P("ici"), "down": P("ici"), "norm": P()}
SHAPES = {"up": (6, 8), "bias": (8,), "down": (8, 6), "norm": (6,)}
BATCHES = np.random.default_rng(2).normal(size=(STEPS, 16, 6)).astype(np.float32)


def network(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh((x * params["norm"][None]) @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def first_weights() -> Any:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()}


@functools.cache
def whole(case: LocalCase) -> Any:
    """Simulated replicas with whole parameters."""
    tx = case.make(optax.sgd(0.1, momentum=0.5))
    params = jaxcomm.replicate(first_weights(), WORKERS)
    step, state = jaxcomm.simulate(network, tx, WORKERS), jaxcomm.init(tx, params, WORKERS)
    for x in BATCHES:
        params, state, _ = step(params, state, x)
    return jax.tree.map(np.asarray, params.per_worker["data"])


def sharded(tx: Any, kind: AxisType, **options: Any) -> tuple[Any, Any, Any]:
    """`(step, params, state)` of replicas that are sharded over `"ici"`."""
    mesh = jax.make_mesh((WORKERS, SHARDS), ("data", "ici"), axis_types=(kind,) * 2)
    cut = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in first_weights().items()}
    params = jaxcomm.replicate(cut, mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="ici")
    step = jaxcomm.make_step(
        network, tx, mesh, shard_axes="ici", batch_axes="ici", donate=False, **options
    )
    return step, params, state


def require_shards(params: Any, state: Any) -> None:
    """Parameters, moments and anchors are cut as the parameters were."""
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        name = getattr(path[-1], "key", None)
        if name in SPECS and any(SPECS[name]) and x.ndim >= len(SHAPES[name]):
            lead = x.ndim - len(SHAPES[name])
            part = x.addressable_shards[0].data.size * (WORKERS if lead else 1)
            assert part * SHARDS == x.size, (jax.tree_util.keystr(path), x.sharding)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", LOCAL, ids=repr)
def test_replicas_that_shard_their_parameters(case: LocalCase, kind: AxisType) -> None:
    """Weights and rows over `"ici"`: step by step, then in a scan under jit."""
    step, params, state = sharded(case.make(optax.sgd(0.1, momentum=0.5)), kind)
    params, state, _ = step(params, state, BATCHES[0])
    require_shards(params, state)

    @jax.jit
    def run(params: Any, state: Any, batches: jax.Array) -> Any:
        body = lambda carry, x: (step(*carry, x)[:2], None)  # noqa: E731
        return jax.lax.scan(body, (params, state), batches)[0]

    params, state = run(params, state, BATCHES[1:])
    require_shards(params, state)
    for name, x in params.per_worker["data"].items():
        np.testing.assert_allclose(x, whole(case)[name], rtol=1e-4, atol=1e-5)


# A codec's norms and choices are of a shard.
DENSE = [c for c in GOSSIP if c.message >= 12 * 4 and c.name != "periodic_averaging"]


def mixed(gossiped: Any) -> Any:
    return optax.chain(jaxcomm.per_worker(optax.sgd(0.1, momentum=0.5)), gossiped)


def of_shards(case: GossipCase) -> Any:
    return jaxcomm.shard_local(case.make(WORKERS), SPECS)


def weighed(loss: Any, params: Any, x: Any) -> Any:
    """With a weight that differs by worker and step."""
    return *jaxcomm.local_value_and_grad(loss)(params, x), jnp.sum(jnp.square(x))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", DENSE, ids=repr)
def test_gossip_of_replicas_that_shard_their_parameters(case: GossipCase, kind: AxisType) -> None:
    """Shard by shard as of whole parameters, and nothing but a flag over the shards' axis."""
    tx = mixed(case.make(WORKERS))
    params = jaxcomm.replicate(first_weights(), WORKERS)
    step = jaxcomm.simulate(network, tx, WORKERS, gradients=weighed)
    state = jaxcomm.init(tx, params, WORKERS)
    for x in BATCHES:
        params, state, _ = step(params, state, x)
    expected = jax.tree.map(np.asarray, params.per_worker["data"])
    step, params, state = sharded(mixed(of_shards(case)), kind, metrics="own", gradients=weighed)
    sent = jaxcomm.wire.account(step, params, state, BATCHES[0])
    over = [c for c in sent.collectives if "ici" in c.axes]
    assert {c.shape for c in over} == {()}
    for x in BATCHES:
        params, state, _ = step(params, state, x)
    require_shards(params, ())
    for name, x in params.per_worker["data"].items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gossip_skips_a_step_that_is_not_finite_in_one_shard(kind: AxisType) -> None:
    """The worker keeps all its shards; and exact averages now and then, of shards."""
    plain = gossip.dpsgd(gossip.ring(WORKERS))
    rng, results = np.random.default_rng(3), []
    batches = [
        {n: rng.normal(size=(WORKERS, *s)).astype(np.float32) for n, s in SHAPES.items()}
        for _ in range(STEPS)
    ]
    batches[1]["up"][1, 2, 5] = np.nan
    mesh = jax.make_mesh((WORKERS, SHARDS), ("data", "ici"), axis_types=(kind,) * 2)
    cut = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in first_weights().items()}
    for where, start, inner in (
        (WORKERS, first_weights(), plain),
        (mesh, cut, jaxcomm.shard_local(plain, SPECS)),
    ):
        tx = mixed(gossip.periodic_averaging(3, inner))
        options: Any = {"shard_axes": "ici"} if isinstance(where, Mesh) else {}
        make: Any = jaxcomm.make_step if isinstance(where, Mesh) else jaxcomm.simulate
        params = jaxcomm.replicate(start, where)
        state = jaxcomm.init(tx, params, where, **options)
        step = make(rows_of, tx, where, metrics="own", donate=False, **options)
        for batch in batches:
            params, state, _ = step(params, state, batch)
        results.append(jax.tree.map(np.asarray, params.per_worker["data"]))
    for name in SHAPES:
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5, atol=1e-5)


def rows_of(params: Any, batch: Any) -> jax.Array:
    """A loss whose gradient is the replica's row."""
    return sum(jnp.sum(x * batch[name][0]) for name, x in params.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("method", ["diloco", "streaming_diloco"])
def test_compressed_between_replicas_shard_by_shard(method: str, kind: AxisType) -> None:
    """Each shard is trained as by replicas that have nothing else."""
    (case,) = [case for case in LOCAL if case.name == method]
    names, rng = ["up", "down"], np.random.default_rng(3)
    given = [{n: rng.normal(size=(WORKERS, *SHAPES[n])) for n in names} for _ in range(STEPS)]
    batches = jax.tree.map(lambda x: x.astype(np.float32), given)
    make = lambda aggregator: case.make(optax.sgd(0.1, momentum=0.5), aggregator=aggregator)  # noqa: E731
    specs = {name: SPECS[name] for name in names}
    mesh = jax.make_mesh((WORKERS, SHARDS), ("data", "ici"), axis_types=(kind,) * 2)
    start = {name: first_weights()[name] for name in names}
    tx = make(jaxcomm.shard_local(jaxcomm.top_k_sgd(ratio=0.3), specs))
    cut = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in start.items()}
    params = jaxcomm.replicate(cut, mesh)
    state = jaxcomm.init(tx, params, mesh, shard_axes="ici")
    step = jaxcomm.make_step(rows_of, tx, mesh, shard_axes="ici", metrics="own")
    sent = jaxcomm.wire.account(step, params, state, batches[0])
    assert set(sent.bytes_by_axis) == {"data"} and not sent.at_most
    for batch in batches:
        params, state, _ = step(params, state, batch)
    alone = make(jaxcomm.top_k_sgd(ratio=0.3))
    one = jaxcomm.simulate(rows_of, alone, WORKERS)
    for number in range(SHARDS):

        def part(name: str, x: Any, lead: int = 0, number: int = number) -> Any:
            axis = lead + [*specs[name]].index("ici")
            return np.split(np.asarray(x), SHARDS, axis)[number]

        own = jaxcomm.replicate({k: jnp.asarray(part(k, x)) for k, x in start.items()}, WORKERS)
        kept = jaxcomm.init(alone, own, WORKERS)
        for batch in batches:
            own, kept, _ = one(own, kept, {k: part(k, x, 1) for k, x in batch.items()})
        for name, x in params.per_worker["data"].items():
            expected = own.per_worker["data"][name]
            np.testing.assert_allclose(part(name, x, 1), expected, rtol=1e-5, atol=1e-5)


def _replicated(tx: Any, axis_name: Any, **options: Any) -> Any:
    step, params, state = prepared(tx, mesh_of(AxisType.Auto), axis_name=axis_name, **options)
    return step(params, state, ROWS[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _replicated(AGGREGATED["dpsgd"](), ("data", "ici")),
            r"differs by worker over \['ici'\].*Place an aggregator",
        ),
        (
            lambda: _replicated(AGGREGATED["diloco"](), ("data", "ici")),
            r"varies over \['ici'\] as well",
        ),
        (
            lambda: _replicated(AGGREGATED["diloco"](), ("ici", "data")),
            "`params` differs over the axes .* must begin",
        ),
        (
            lambda: _replicated(
                within(jaxcomm.top_k_sgd("ici", ratio=0.5), "diloco"), ("data", "ici")
            ),
            "keeps memory.*Only the last stage",
        ),
        (
            lambda: local_sgd(2, aggregator=jaxcomm.mean("ici")),
            r"`aggregator` averages over \['ici'\].*`axis_name`='data'",
        ),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
