"""A training step over the workers of a mesh."""

import math

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree
from jaxcomm._mesh import (
    is_traced,
    place,
    require_axes,
    require_kept,
    require_marked,
    require_whole_types,
    require_workers,
    shard_map,
    typed_as,
    unshared,
)
from jaxcomm._state import state_specs
from jaxcomm.training._metrics import Metrics, check_metrics
from jaxcomm.training._mistakes import (
    require_divisible,
    require_global,
    require_step_of,
    require_used,
)
from jaxcomm.training._worker_step import GradientFn, Step, worker_step


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    gradients: GradientFn | None = None,
    metrics: Metrics = "mean",
    donate: bool = True,
) -> Step:
    r"""Makes a jitted training step in which each worker of `mesh` takes its part of the batch.

    .. math:: g_i = \nabla f(x; B_i), \qquad (\Delta, s') = \mathrm{tx}(g_i, s, x),
              \qquad x' = x + \Delta

    `tx` determines what workers send; `metrics="mean"` adds one float32 per metric. See
    :func:`jaxcomm.wire.account`. Mesh axes that are not in `axis_name` index the devices of one
    worker. The worker's rows of the batch are split over these devices, and its gradient is the
    exact mean over them in float32.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over its batch; with `has_aux=True`,
        `(loss, aux)`, where `aux` is a dict of metrics. It is called with `(params, batch, key)` if
        the step is called with a key.
      tx: An optax transformation with an aggregator before the optimizer, or gossip after it.
      mesh: The devices; its axes may be Auto or Explicit.
      axis_name: The mesh axis, or axes, of the workers.
      has_aux: Whether `loss_fn` returns a pair.
      gradients: A replacement of :func:`jaxcomm.local_value_and_grad`: `(loss_fn, params, batch) ->
        (value, gradient)` or `(value, gradient, weight)` of this worker; with a key as the last
        argument if the step is called with one. `tx` receives the weight, and metrics are weighted
        by it.
      metrics: `"mean"` for means over workers in every step; `"own"` for each worker's own values,
        which sends nothing; or a period k for means in every k-th step and NaN in the other steps,
        which send no metrics. With a period, the step reads the number of steps so far from the
        first step counter in the state of `tx`. Aggregators with a codec, gossip, methods with
        local steps, Adam and schedules have such a counter.
      donate: Whether to donate the buffers of params and state to the new ones. If so, do not use
        the old arrays again.

    Returns:
      `step(params, opt_state, batch, *, key=None, **extra_args) -> (params, opt_state, metrics)`.

      - Params are equal on all workers and replicated on each of their devices, or are `PerWorker`
        parameters from :func:`jaxcomm.replicate`. For these, `loss_fn` and `tx` receive the
        worker's own parameters.
      - Extra arguments are equal on all workers and are passed to `tx.update`.
      - Batch leaves are `[global_batch, ...]`. On a mesh of several processes, they are arrays over
        all processes, for instance from `jax.make_array_from_process_local_data`.
      - Each device folds its index into the key.
      - `metrics["loss"]` and aux are float32[...] over all workers, or [workers, ...] per worker.
        If gradients are weighted, the means have the same weights, and `metrics["weight"]` is their
        sum. The diagnostics of an aggregator with `diagnostics=True` are added as
        `metrics["diagnostics/compression_error"]` and so on (`"diagnostics/<path in the
        state>/..."` if there are several such aggregators).

      The step can be traced, for instance in `jax.lax.scan`. On CPU devices, a call waits until the
      previous step has finished, since several steps in flight may deadlock there.

    Raises:
      ValueError: If the mesh lacks an axis; if the global batch is empty, is not divisible by the
        devices or, on a mesh of several processes, belongs to one process only; if aux is not a
        dict of means; if updates or state would differ by worker; if the state belongs to another
        `tx` or number of workers; if parameters are sharded over devices or were already donated;
        or if no transformation in `tx` uses an extra argument.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> opt_state = jaxcomm.init(tx, params, mesh)
      >>> step = jaxcomm.make_step(lambda w, x: jnp.mean((w - x) ** 2), tx, mesh)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(mesh.size))
      >>> print(params, metrics["loss"])
      1.0 4.0
    """
    require_axes(mesh, axis_name)
    require_step_of(loss_fn, tx, gradients)
    check_metrics(metrics)
    names = _axis.names(axis_name)
    inner = tuple(name for name in mesh.axis_names if name not in names)
    sizes = dict(mesh.shape)
    devices = math.prod(sizes.values())
    step_of_worker = worker_step(loss_fn, tx, axis_name, inner, has_aux, gradients, metrics)
    batch_spec, whole = PartitionSpec((*names, *inner)), PartitionSpec()
    metrics_spec = PartitionSpec(names) if metrics == "own" else whole

    def on_mesh(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        specs = state_specs(params), state_specs(opt_state)
        run = shard_map(
            step_of_worker,
            mesh,
            in_specs=(*specs, batch_spec, whole, whole),
            out_specs=(*specs, metrics_spec, whole),
        )
        new, new_state, values, diagnostics = run(params, opt_state, batch, key, extra_args)
        return typed_as(new, params), typed_as(new_state, opt_state), values | diagnostics

    jitted = jax.jit(on_mesh, donate_argnums=(0, 1) if donate else ())
    one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    used: set[str] = set()

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        require_divisible(batch, devices)
        require_marked(params)
        require_workers(params, sizes, "The parameters")
        require_workers(opt_state, sizes, "The optimizer state")
        traced = is_traced((params, opt_state, batch, key, extra_args))
        if traced:
            require_whole_types(params, state_specs(params), "params")
        else:
            require_global(batch, mesh)
            require_kept(params, "params")
            require_kept(opt_state, "opt_state")
            if one_at_a_time:
                jax.block_until_ready((params, opt_state))
            if donate:
                params, opt_state, batch = unshared(params, opt_state, batch)
            params = place(params, mesh, state_specs(params), "params")
            opt_state = place(opt_state, mesh, state_specs(opt_state), "opt_state")
            batch = place(batch, mesh, jax.tree.map(lambda _: batch_spec, batch), "batch")
            if (
                not mesh.is_multi_process
            ):  # With several, JAX would compare them across processes in each step.
                rest = jax.tree.map(lambda _: whole, (key, extra_args))
                key, extra_args = place((key, extra_args), mesh, rest, "extra")
        require_used(on_mesh, params, opt_state, batch, key, extra_args, used, devices)
        return (on_mesh if traced else jitted)(params, opt_state, batch, key, extra_args)

    return step
