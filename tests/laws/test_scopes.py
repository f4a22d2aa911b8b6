"""Every collective lies in the scope of its method, and in that of what it sends."""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxcomm
from jaxcomm import aggregation, collectives, gossip, metrics, synchronization, training
from jaxcomm.catalogue import METHODS, TINY, Method
from jaxcomm.compression.quantizers import dither
from tests.cases import CASES
from tests.workers import gradients, of_one_worker

OF_TWO_AXES = {"hierarchical", "sliced"}
UNWEIGHTED = {case.name for case in CASES if not case.weighted}
OF_THE_BACKWARD_PASS = {"wait_free", "zeroth_order", "zeroth_order_gaussian"}
PARAMS = of_one_worker(gradients(1))
ROWS = jnp.ones(8)


def constructor(method: Method) -> str:
    """The first function that the call of a method calls, of those that send something."""
    names = re.findall(r"(\w+)\(", method.call.replace("aggregator", "jaxcomm.mean()"))
    return next(name for name in names if name not in ("chain", "per_worker"))


CONSTRUCTORS = {*map(constructor, METHODS.values()), "make_step", "average_every", "local"}
BY_HAND = {
    "mean": {"mean/values", "mean/weight"},
    "global_qsgd": {"global_qsgd/max_abs", "global_qsgd/codes", "global_qsgd/weight"},
    "power_sgd": {"power_sgd/left_factor", "power_sgd/values", "power_sgd/weight"},
    "top_k_sgd": {"top_k_sgd/sparse", "top_k_sgd/weight"},
    "chain_summed": {f"all_reduce_mean/{each}" for each in ("weight", "max_abs", "codes")},
    "two_stage_8_bits": {f"two_stage_mean/{x}" for x in ("weight", "flag", "rows", "means")},
    "accumulate": {"accumulate/mean/values", "accumulate/mean/weight"},
    "local_sgd": {"local_sgd/weight", "local_sgd/mean/values", "local_sgd/mean/weight"},
    "dpsgd": {"dpsgd/mixing", "dpsgd/weight/mixing"},
}


def traced(run: Callable[..., Any], *args: Any) -> set[str]:
    """The scopes of the collectives of a program."""
    return {each.scope for each in jaxcomm.wire.account(run, *args).collectives}


def mesh_of(**sizes: int) -> Mesh:
    devices = jax.devices()[: math.prod(sizes.values())]
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=devices)


DATA = mesh_of(data=4)


def loss(params: Any, rows: jax.Array) -> jax.Array:
    squares = [jnp.sum(x**2) for x in jax.tree.leaves(params)]
    return jnp.sum(jnp.stack(squares)) * jnp.mean(rows)


def with_weight(
    loss_fn: Any, params: Any, rows: jax.Array, *, axes: tuple[str, ...], **model_state: Any
) -> Any:
    evaluate = jaxcomm.local_value_and_grad(loss_fn, bool(model_state), axis_name=axes)
    return *evaluate(params, *model_state.values(), rows), jnp.sum(rows)


def of_step(tx: Any, mesh: Mesh = DATA, *, differ: bool = False, **options: Any) -> set[str]:
    params = jaxcomm.replicate(PARAMS, mesh, axis_name=mesh.axis_names) if differ else PARAMS
    state = jax.eval_shape(lambda x: jaxcomm.init(tx, x, mesh, axis_name=mesh.axis_names), params)
    step = jaxcomm.make_step(loss, tx, mesh, axis_name=mesh.axis_names, donate=False, **options)
    return traced(step, params, state, ROWS)


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    method = METHODS[name]
    mesh = mesh_of(dcn=2, ici=2) if name in OF_TWO_AXES else DATA
    workers = {"workers": mesh.size} if method.kind == "gossip" else {}
    tx = method.build(TINY, **workers)
    tx = optax.chain(optax.sgd(0.1), tx) if method.kind == "gossip" else tx
    weighted = name not in UNWEIGHTED | OF_THE_BACKWARD_PASS
    weights = functools.partial(with_weight, axes=mesh.axis_names) if weighted else None
    found = of_step(tx, mesh, differ=method.kind in ("gossip", "local"), gradients=weights)
    own = {scope for scope in found if not scope.startswith("make_step/")}
    assert found > own == BY_HAND.get(name, own) != set()
    for scope in own:
        first, *_, last = scope.split("/")
        assert first in (name, constructor(method)), scope
        assert last not in CONSTRUCTORS, f"{scope} does not say what is sent."


def of_workers(fn: Callable[[jax.Array], Any]) -> set[str]:
    """The scopes of a function of each worker's rows."""
    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
    return traced(jax.shard_map(fn, mesh=DATA, check_vma=False, **specs), ROWS)


def of_devices() -> set[str]:
    """A step with weights, whose workers have devices, model state, metrics and diagnostics."""

    def stateful(params: Any, mean: Any, rows: jax.Array) -> Any:
        aux = {"most": metrics.max(jnp.max(rows)), "mean": jnp.mean(rows)}
        return loss(params, rows), (mean + jnp.mean(rows), aux)

    mesh, tx = mesh_of(data=2, inner=2), jaxcomm.global_qsgd(diagnostics=True)
    options = {"has_aux": True, "has_model_state": True, "donate": False}
    weights = functools.partial(with_weight, axes=mesh.axis_names)
    step = jaxcomm.make_step(stateful, tx, mesh, gradients=weights, **options)
    return traced(step, PARAMS, jnp.zeros(()), jaxcomm.init(tx, PARAMS, mesh), ROWS)


def of_scaled_loss() -> set[str]:
    step = jaxcomm.make_step(
        lambda params, state, rows: (loss(params, rows), state),
        jaxcomm.mean(),
        DATA,
        has_model_state=True,
        gradients=training.loss_scaled_gradients,
        metrics="own",
    )
    state = jaxcomm.mean().init(PARAMS)
    return traced(step, PARAMS, training.loss_scaled(), state, ROWS)


def of_exchange_beside_steps() -> set[str]:
    outer = optax.sgd(1.0)
    tx = synchronization.streaming_diloco(optax.sgd(0.1), outer, 2, fragments=1, overlap=1)
    params = jaxcomm.replicate(PARAMS, DATA)
    step = training.make_overlapped_step(loss, tx, DATA)
    run = functools.partial(step, number=2)
    return traced(run, params, jaxcomm.init(tx, params, DATA), ROWS)


def of_sharded_weights() -> set[str]:
    specs = PartitionSpec("data")
    run = training.fully_sharded_value_and_grad(lambda w, x: jnp.mean(w) * jnp.mean(x), DATA, specs)
    return traced(run, ROWS, ROWS)


def of_first_state() -> set[str]:
    tx = synchronization.local_sgd(2)
    params = jaxcomm.replicate(PARAMS, DATA)
    return traced(lambda x: jaxcomm.init(tx, x, DATA), params)


def of_user_method() -> set[str]:
    tx = aggregation.aggregator(lambda arrays: [collectives.gather(x, "data")[0] for x in arrays])
    return of_step(tx, metrics="own")


def of_finished() -> set[str]:
    tx = synchronization.scale_by_finished(lambda count: 1.0)
    return of_workers(lambda x: tx.update(x, tx.init(x), weight=jnp.sum(x)))


def of_gossip() -> set[str]:
    tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(4), diagnostics=True))
    return of_step(tx, differ=True)


def of_density() -> set[str]:
    return of_workers(lambda x: jaxcomm.gradient_density(x, axis_name="data"))


def of_slopes() -> set[str]:
    of = aggregation.zeroth_order_gradient
    return of_workers(lambda x: of(loss, PARAMS, x, key=jax.random.key(0))[1])


OTHERS = {
    of_gossip: {"dpsgd/mixing", "dpsgd/diagnostics", "make_step/metrics"},
    of_density: {"gradient_density/or_reduce"},
    of_slopes: {"zeroth_order_gradient/slopes"},
    of_devices: {
        *(f"make_step/devices/{each}" for each in ("mean/values", "mean/weight", "weight")),
        *(f"make_step/model_state/{each}" for each in ("mean/values", "mean/weight", "weight")),
        *("make_step/metrics", "make_step/devices/metrics"),
        *(f"global_qsgd/{each}" for each in ("max_abs", "codes", "weight", "diagnostics")),
    },
    of_scaled_loss: {"mean/values", "loss_scaled_gradients/flag"},
    of_exchange_beside_steps: {
        "make_overlapped_step/weight",
        "make_overlapped_step/mean/values",
    },
    of_sharded_weights: {
        "weight_gather/slices",
        "weight_gather/rows",
        "fully_sharded_value_and_grad/metrics",
    },
    of_first_state: {"local_sgd/anchor"},
    of_user_method: {"aggregator/flag", "aggregator/exchange"},
    of_finished: {"scale_by_finished/count"},
}


@pytest.mark.parametrize("of", OTHERS)
def test_others(of: Callable[[], set[str]]) -> None:
    assert of() == OTHERS[of]


def test_outermost_name_wins_and_wrappers_nest() -> None:
    def named(tx: Any) -> set[str]:
        return of_workers(lambda x: tx.update(x, tx.init(x)))

    assert named(jaxcomm.all_reduce_mean(dither())) == {
        "all_reduce_mean/max_abs",
        "all_reduce_mean/codes",
    }
    inner = jaxcomm.mean()
    assert jaxcomm.accumulate(inner, 1) is jaxcomm.backup(inner, 0) is inner
    assert named(inner) == {"mean/values"}
    assert named(jaxcomm.gradient_norms(inner)) == {
        "gradient_norms/norms",
        "gradient_norms/mean/values",
    }


@pytest.mark.parametrize("name", ["mean", "global_qsgd", "top_k_sgd", "power_sgd"])
def test_scopes_add_no_instruction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered() -> Any:
        tx = METHODS[name].build(TINY)
        step = jaxcomm.make_step(loss, tx, DATA, donate=False)
        return jax.jit(step).lower(PARAMS, jaxcomm.init(tx, PARAMS, DATA), ROWS)

    named = lowered()
    assert f"{name}/" in named.as_text(debug_info=True)
    monkeypatch.setattr(jax, "named_scope", contextlib.contextmanager(lambda name: iter([None])))
    plain = lowered()
    assert f"{name}/" not in plain.as_text(debug_info=True)
    assert named.as_text() == plain.as_text()  # What XLA compiles, without locations.
