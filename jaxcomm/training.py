"""A training step over the workers of a mesh, or of one device that simulates them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PerWorker, PyTree
from jaxcomm._state import (
    is_traced,
    over_workers,
    own_params,
    place,
    require_axes,
    state_specs,
    worker_axes,
)

Step: TypeAlias = Callable[..., tuple[PyTree, optax.OptState, dict[str, jax.Array]]]
GradientFn: TypeAlias = Callable[..., tuple[Any, ...]]


def _require_divisible(batch: PyTree, workers: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"`{where}` is a scalar; batch leaves are `[global_batch, ...]`.")
        if jnp.shape(leaf)[0] % workers:
            raise ValueError(
                f"`{where}` has a global batch of {jnp.shape(leaf)[0]}, which is not divisible by "
                f"{workers} workers."
            )


def _require_global(batch: PyTree, mesh: Mesh) -> None:
    """Raises where the mesh has devices of other processes and a leaf is not one array of all."""
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"`batch{jax.tree_util.keystr(path)}` must be an array over all processes of the "
                f"mesh, got a {type(leaf).__name__} of this process alone: pass its rows to "
                "`jax.make_array_from_process_local_data`."
            )


def _average(
    axis_name: AxisName, metrics: dict[str, PyTree], weight: jax.Array | None
) -> dict[str, jax.Array]:
    """Means over workers in float32, weighted where the gradients are."""
    names = _axis.names(axis_name)
    own = jnp.float32(1) if weight is None else jnp.asarray(weight, jnp.float32)
    total = _axis.size(axis_name) if weight is None else lax.psum(own, names)

    def average(x: jax.Array) -> jax.Array:
        return lax.psum(jnp.asarray(x).astype(jnp.float32) * own, names) / total

    averages = jax.tree.map(average, metrics)
    return averages if weight is None else averages | {"weight": jnp.asarray(total)}


def _info(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """What aggregators with `info=True` tell, `info/<name>`; with their paths where several do."""
    found: dict[str, dict[str, jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        *before, field, name = [None, None, *path]
        if isinstance(field, jax.tree_util.GetAttrKey) and field.name == "info":
            where = jax.tree_util.keystr(
                tuple(key for key in before if key is not None), simple=True, separator="/"
            )
            found.setdefault(where, {})[jax.tree_util.keystr((name,), simple=True)] = leaf
    return {
        "/".join(["info", *([where] if len(found) > 1 else []), name]): value
        for where, values in found.items()
        for name, value in values.items()
    }


def _worker_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    has_aux: bool,
    gradients: GradientFn | None,
) -> Step:
    """One worker's step, the same whether devices or a simulator run it."""
    update = optax.with_extra_args_support(tx).update
    local_gradients = gradients or (
        lambda loss_fn, params, *args: _axis.local_value_and_grad(
            loss_fn, has_aux, axis_name=axis_name
        )(params, *args)
    )

    def step(
        given: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        apart = isinstance(given, PerWorker)
        if apart and [*given.per_worker] != [_axis.label(axis_name)]:
            raise ValueError(
                f"The parameters differ over {[*given.per_worker]}, and `axis_name` is "
                f"{axis_name!r}."
            )
        params = own_params(given)
        own_key = [] if key is None else [jax.random.fold_in(key, _axis.index(axis_name))]
        value, updates, *rest = local_gradients(loss_fn, params, batch, *own_key)
        weight = rest[0] if rest else None
        loss, aux = value if has_aux else (value, {})
        taken = {"loss"} if weight is None else {"loss", "weight"}
        if not isinstance(aux, Mapping) or taken & aux.keys():
            raise ValueError(
                "`loss_fn` with `has_aux=True` must return `(loss, aux)`, `aux` a dict of metrics "
                f"without the key {' or '.join(map(repr, sorted(taken)))}, got "
                f"{jax.tree.structure(aux)}."
            )
        extra = {} if weight is None else {"weight": weight}
        updates, opt_state = update(updates, opt_state, params, **extra, **extra_args)
        if not apart:
            _axis.require_replicated(
                updates,
                axis_name,
                "The update",
                "Place an aggregator, such as `jaxcomm.mean()`, first in `optax.chain`; or, for "
                "gossip, let parameters differ by worker with `jaxcomm.replicate(params, mesh)`.",
            )
        _axis.require_replicated(
            opt_state,
            axis_name,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`."
            if apart
            else "Place the aggregator before the transformation that keeps this state.",
        )
        metrics = _average(axis_name, {"loss": loss, **aux}, weight) | _info(opt_state)
        new = optax.apply_updates(params, updates)
        if apart:
            new = PerWorker({_axis.label(axis_name): jax.tree.map(lambda x: x[None], new)})
        return new, opt_state, metrics

    return step


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    gradients: GradientFn | None = None,
    donate: bool = True,
) -> Step:
    r"""A jitted training step in which each worker of `mesh` takes its part of the batch.

    .. math:: g_i = \nabla f(x; B_i), \qquad (\Delta, s') = \mathrm{tx}(g_i, s, x),
              \qquad x' = x + \Delta

    What is sent is up to `tx`, and one float32 a metric; see :func:`jaxcomm.wire.account`.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over the batch it is given; with `has_aux=True`,
        `(loss, aux)`, `aux` a dict of metrics. Called with `(params, batch, key)` when the step
        gets a key.
      tx: An optax transformation with an aggregator before the optimizer, or gossip after it.
      mesh: The devices.
      axis_name: The mesh axis, or axes, that number the workers.
      has_aux: Whether `loss_fn` returns a pair.
      gradients: In place of :func:`jaxcomm.local_value_and_grad`: `(loss_fn, params, batch) ->
        (value, gradient)` or `(value, gradient, weight)`, this worker's own; with a key as the last
        argument when the step gets one. The weight goes to `tx` and weighs the metrics.
      donate: Whether the buffers of params and state are given away to the new ones. Then the
        arrays passed in must not be used again.

    Returns:
      `step(params, opt_state, batch, *, key=None, **extra_args) -> (params, opt_state, metrics)`.
      Params are equal on all workers, or `PerWorker` ones of :func:`jaxcomm.replicate`, of which
      `loss_fn` and `tx` see a worker's own. Extra arguments, equal on all workers, go to
      `tx.update`. Batch leaves are `[global_batch, ...]`; on a mesh of several processes, arrays
      over all of them, such as `jax.make_array_from_process_local_data` makes. Each worker's key is
      folded with its number. `metrics["loss"]` and aux are means over workers, float32; where
      gradients are weighted so are they, and `metrics["weight"]` is the sum of the weights. What an
      aggregator with `info=True` tells joins them as `metrics["info/compression_error"]` and so on
      (`"info/<path in the state>/..."` where several do). It can be traced, in `jax.lax.scan` for
      one. On CPU devices, a call waits until the previous step is done, since several steps in
      flight may deadlock there.

    Raises:
      ValueError: If the mesh lacks an axis, the global batch is not divisible by the workers or is
        of one process alone where the mesh has several, aux is no dict, or updates or state would
        differ by worker.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> opt_state = jaxcomm.init(tx, params, mesh)
      >>> step = jaxcomm.make_step(lambda w, x: jnp.mean((w - x) ** 2), tx, mesh)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(mesh.size))
      >>> print(params, metrics["loss"])
      1.0 4.0
    """
    require_axes(mesh, axis_name)
    names = _axis.names(axis_name)
    workers = 1
    for name in names:
        workers *= mesh.shape[name]
    worker_step = _worker_step(loss_fn, tx, axis_name, has_aux, gradients)
    batch_spec = PartitionSpec(names)

    def on_mesh(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        specs = state_specs(params), state_specs(opt_state)
        return jax.shard_map(
            worker_step,
            mesh=mesh,
            in_specs=(*specs, batch_spec, PartitionSpec(), PartitionSpec()),
            out_specs=(*specs, PartitionSpec()),
        )(params, opt_state, batch, key, extra_args)

    jitted = jax.jit(on_mesh, donate_argnums=(0, 1) if donate else ())
    one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        _require_divisible(batch, workers)
        if is_traced((params, opt_state, batch, key, extra_args)):
            return on_mesh(params, opt_state, batch, key, extra_args)
        _require_global(batch, mesh)
        if one_at_a_time:
            jax.block_until_ready((params, opt_state))
        params = place(params, mesh, state_specs(params))
        opt_state = place(opt_state, mesh, state_specs(opt_state))
        batch = place(batch, mesh, jax.tree.map(lambda _: batch_spec, batch))
        return jitted(params, opt_state, batch, key, extra_args)

    return step


def simulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    num_workers: int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    gradients: GradientFn | None = None,
    donate: bool = True,
) -> Step:
    """The step of :func:`jaxcomm.make_step`, all workers simulated on one device.

    The same transformations run under `jax.vmap`, with the same random draws: results are equal bit
    for bit where sums are of integers and gradients are, and to rounding elsewhere. Nothing is
    sent; :func:`jaxcomm.wire.account` reports what so many workers would send.

    Args:
      loss_fn: As for :func:`jaxcomm.make_step`.
      tx: As for :func:`jaxcomm.make_step`.
      num_workers: The number of workers, or the sizes of several axes by name, outermost first.
      axis_name: The axis of the workers; with a dict of sizes, the axis or axes that `tx` averages
        over and the batch is split over.
      has_aux: Whether `loss_fn` returns a pair.
      gradients: As for :func:`jaxcomm.make_step`.
      donate: Whether the buffers of params and state are given away to the new ones.

    Returns:
      A step called like that of :func:`jaxcomm.make_step`. Its state comes from
      `jaxcomm.init(tx, params, num_workers)` and has the same shapes as on a mesh.

    Raises:
      ValueError: As :func:`jaxcomm.make_step` does, or if the number of workers is no positive int.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> opt_state = jaxcomm.init(tx, params, 64)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, num_workers=64)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(64))
      >>> print(params, metrics["loss"])
      1.0 4.0
    """
    axes = worker_axes(num_workers, axis_name)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    names = _axis.names(axis_name)
    if names != tuple(name for name in axes if name in names):
        raise ValueError(
            f"`axis_name`={axis_name!r} must name axes of {num_workers!r}, in the same order."
        )
    workers = 1
    for name in names:
        workers *= axes[name]
    worker_step = _worker_step(loss_fn, tx, axis_name, has_aux, gradients)
    batch_spec = PartitionSpec(names)

    def specs_of(params: PyTree, opt_state: optax.OptState) -> tuple[PyTree, PyTree]:
        state = state_specs(params), state_specs(opt_state)
        replicated = PartitionSpec()
        return (*state, batch_spec, replicated, replicated), (*state, replicated)

    def on_mesh(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        _require_divisible(batch, workers)
        in_specs, out_specs = specs_of(params, opt_state)
        return jax.shard_map(worker_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(
            params, opt_state, batch, key, extra_args
        )

    def simulated(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        # `jax.vmap` does not know what varies by worker; `jax.shard_map` does, and says so.
        jax.eval_shape(functools.partial(on_mesh, key=key, **extra_args), params, opt_state, batch)
        return over_workers(worker_step, axes, *specs_of(params, opt_state))(
            params, opt_state, batch, key, extra_args
        )

    jitted = jax.jit(simulated, donate_argnums=(0, 1) if donate else ())

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        _require_divisible(batch, workers)
        return jitted(params, opt_state, batch, key, extra_args)

    step.on_mesh = on_mesh  # type: ignore[attr-defined]  # What `wire.account` traces instead.
    return step
