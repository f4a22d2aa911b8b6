"""A training step over the workers of a mesh."""

import contextlib

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._mesh import (
    is_traced,
    kept_specs,
    place,
    require_axes,
    require_shard_axes,
    tracing,
)
from jaxcomm._require import checked
from jaxcomm.training._arguments import (
    Carry,
    Given,
    Latest,
    Step,
    constrained,
    fits,
    place_carry,
    public_step,
    require_carry,
    require_carry_kept,
    require_global,
    require_rows,
    sharded_as,
    typed_as,
    unshared,
)
from jaxcomm.training._means import Metrics
from jaxcomm.training._worker_step import GradientFn, WorkerStep


@checked
def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    shard_axes: AxisName = (),
    batch_axes: AxisName = (),
    has_aux: bool = False,
    has_model_state: bool = False,
    gradients: GradientFn | None = None,
    metrics: Metrics = "mean",
    rows_differ: bool = False,
    donate: bool = True,
) -> Step:
    r"""Makes a jitted training step in which each worker of `mesh` takes its part of the batch.

    .. math:: g_i = \nabla f(x; B_i), \qquad (\Delta, s') = \mathrm{tx}(g_i, s, x),
              \qquad x' = x + \Delta

    `tx` determines what workers send; `metrics="mean"` adds one float32 per metric. See
    :func:`jaxcomm.wire.account`. Mesh axes that are neither in `axis_name` nor in `shard_axes`
    index the devices of one worker. The worker's rows of the batch are split over these devices.
    Its gradient is the exact mean over them in float32, rounded to the dtype of the gradient.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over its batch; with `has_aux=True`,
        `(loss, aux)`, where `aux` is a dict of metrics. It is called with `(params, batch, key)` if
        the step is called with a key. With `has_model_state=True`, it is called with `(params,
        model_state, batch)` and returns `(loss, model_state)`, or `(loss, (model_state, aux))`. If
        the step is called with `shared`, so is the loss: `shared=` has what all workers share. Any
        function that `jax.value_and_grad` differentiates on one device is a loss here. If it
        averages over workers itself, its gradient is that of the mean.
      tx: An optax transformation with an aggregator before the optimizer, or gossip after it. Clip
        the mean gradient after the aggregator.
      mesh: The devices; its axes may be Auto or Explicit.
      axis_name: The mesh axis, or axes, of the workers.
      shard_axes: The mesh axes over which parameters are sharded. They stay automatic: `loss_fn`
        computes with whole arrays, and XLA's partitioner divides the work over these axes, or
        `loss_fn` has a nested `jax.shard_map` over them. Parameters and state keep their sharding.
        Wrap aggregators with a codec in :func:`jaxcomm.shard_local`. The batch is whole on these
        axes unless they are in `batch_axes`.
      batch_axes: Those of `shard_axes` over which the rows of the batch are split too (FSDP). The
        partitioner then gathers weights, and sums gradients over these axes.
      has_aux: Whether `loss_fn` returns metrics. They are averaged over workers, unless they are a
        :func:`jaxcomm.metrics.sum`, `max` or `min`.
      has_model_state: Whether `loss_fn` takes and returns a model state: values that the forward
        pass changes, such as the running statistics of BatchNorm.
      gradients: A replacement of :func:`jaxcomm.local_value_and_grad`: `(loss_fn, params, batch) ->
        (value, gradient)` or `(value, gradient, weight)` of this worker, where `value` is what
        `loss_fn` returns; with a key as the last argument if the step is called with one, and with
        `model_state=` if it has one. `tx` receives the weight, and metrics are weighted by it.
      metrics: `"mean"` for means over workers in every step; `"own"` for each worker's own values,
        which sends nothing; or a period k for means in the last of every k steps and NaN in the
        other steps, which send no metrics. With a period, the step reads the number of steps so
        far from the first step counter in the state of `tx`. Aggregators with a codec, gossip,
        methods with local steps, Adam and schedules have such a counter. Inside
        `jaxcomm.accumulate` it counts updates, so means are in all mini-steps of every k-th update.
      rows_differ: Whether leaves of the batch may have different numbers of rows, such as nodes and
        edges of graphs. Always true with `gradients`.
      donate: Whether to donate the buffers of params and state to the new ones. If so, do not use
        the old arrays again.

    Returns:
      `step(params, opt_state, batch, *, key=None, shared=None, **extra_args) -> (params, opt_state,
      metrics)`;
      with `has_model_state=True`, `step(params, model_state, opt_state, batch, ...) -> (params,
      model_state, opt_state, metrics)`.

      - Params are equal on all workers and replicated on each of their devices, or are `PerWorker`
        parameters from :func:`jaxcomm.replicate`. For these, `loss_fn` and `tx` receive the
        worker's own parameters. If they differ over the first axes in `axis_name` only, `tx` has to
        average gradients over the others, as `jaxcomm.hierarchical(..., outer_axes=)` does.
      - The new model state is the exact mean over workers, which sends 4 bytes per value that
        differs by worker; with weighted gradients, it has the same weights. Values that are not
        floating-point, such as counters, must be equal on all workers. If `model_state` is a
        `PerWorker` from :func:`jaxcomm.replicate`, each worker keeps its own, and nothing is sent.
        A leaf that would change from finite to NaN or infinite keeps its values.
      - Extra arguments are equal on all workers and are passed to `tx.update`.
      - `shared` is any tree of arrays that the loss reads and that is not split over workers: class
        weights, a teacher, a target network, the other network of a GAN, a coefficient of this
        step. It has no gradient, is not donated, and sends nothing.
      - Batch leaves are `[global_batch, ...]`. On a mesh of several processes, they are arrays over
        all processes, for instance from `jax.make_array_from_process_local_data`.
      - Each device folds its index into the key.
      - `metrics["loss"]` and aux are float32[...] over all workers, or [workers, ...] per worker.
        Sums and extremes of :mod:`jaxcomm.metrics` keep the dtype of integers, except with a
        period, with which they are float32.
        If gradients are weighted, the means have the same weights, and `metrics["weight"]` is their
        sum. The diagnostics of an aggregator with `diagnostics=True` are added as
        `metrics["diagnostics/compression_error"]` and so on (`"diagnostics/<path in the
        state>/..."` if there are several such aggregators).

      The step can be traced, for instance in `jax.lax.scan`. On CPU devices, a call waits until the
      previous step has finished, since several steps in flight may deadlock there.

    Raises:
      ValueError: If the mesh lacks an axis; if the global batch is not divisible by the devices,
        has leaves with different numbers of rows or, on a mesh of several processes, belongs to one
        process only; if aux has one value per example, a reserved name, or an integer that is no
        sum or extreme; if a clip comes before an aggregator in `tx`;
        if updates or state would differ by worker; if the state belongs to another number of
        workers; if parameters are sharded over other axes than `shard_axes` or were already
        donated; or if a transformation would gather sharded parameters.

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
    names, shards = _axis.names(axis_name), require_shard_axes(mesh, axis_name, shard_axes)
    split = _axis.names(batch_axes)
    inner = tuple(name for name in mesh.axis_names if name not in (*names, *shards))
    of_worker = WorkerStep(loss_fn, tx, names, inner, has_aux, has_model_state, gradients, metrics)
    batch_spec, whole = PartitionSpec((*names, *inner, *split)), PartitionSpec()

    def on_mesh(
        carry: Carry,
        given: Given,
        extra_args: dict[str, PyTree],
        kept: tuple[PartitionSpec, ...] = (),
    ) -> tuple[Carry, dict[str, jax.Array]]:
        if split:
            given = given._replace(batch=sharded_as(given.batch, mesh, batch_spec))
        # The specs of the parameters are the first.
        with tracing(shards, carry.params, kept) if shards else contextlib.nullcontext():
            new, values, diagnostics = of_worker.on_mesh(mesh, carry, given, extra_args, shards)
        return typed_as(constrained(new, mesh, kept), carry), values | diagnostics

    rows, everywhere = NamedSharding(mesh, batch_spec), NamedSharding(mesh, whole)
    # With several processes, JAX would compare what is everywhere across them in each step.
    rest = None if shards or mesh.is_multi_process else everywhere
    of_given = Given(None if shards else rows, rest, rest)
    jitted = jax.jit(
        on_mesh,
        in_shardings=(None, of_given, rest),
        donate_argnums=0 if donate else (),
        static_argnums=3,
    )
    one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    latest = Latest()
    kept: tuple[PartitionSpec, ...] = ()

    def placed(tree: PyTree, spec: PartitionSpec, what: str) -> PyTree:
        sharding = NamedSharding(mesh, spec)
        if not shards and all(fits(x, sharding) for x in jax.tree.leaves(tree)):
            return tree
        specs = kept_specs(tree, mesh, jax.tree.map(lambda _: spec, tree), shards)
        return place(tree, mesh, specs, what)

    def placed_carry(carry: Carry) -> Carry:
        nonlocal kept
        carry, specs = place_carry(carry, mesh, shards)
        kept = tuple(jax.tree.leaves(specs)) if shards else ()
        return carry

    def run(
        carry: Carry, given: Given, extra_args: dict[str, PyTree]
    ) -> tuple[Carry, dict[str, jax.Array]]:
        require_rows(given.batch, rows_differ or gradients is not None)
        known = latest.has(carry)
        if not known:
            require_carry(carry, mesh.shape, axis_name, shards)
        if is_traced((given, extra_args)) or (not known and is_traced(carry)):
            return on_mesh(carry, given, extra_args)
        require_global(given.batch, mesh)
        if not known:
            require_carry_kept(carry)
        if one_at_a_time:
            jax.block_until_ready(carry)
        if not known:
            carry = placed_carry(carry)
        batch, (key, shared) = placed(given.batch, batch_spec, "batch"), given[1:]
        if not mesh.is_multi_process:
            key, shared, extra_args = placed((key, shared, extra_args), whole, "extra")
        given = Given(batch, key, shared)
        if donate and not (known and latest.shares_nothing_with((given, extra_args))):
            carry = unshared(carry, given, extra_args, distinct=known)
        new, values = jitted(carry, given, extra_args, kept)
        latest.keep(new, known)
        return new, values

    step = public_step(run, has_model_state)
    step.places_arguments = True  # type: ignore[attr-defined]  # Read by `wire.account`.
    return step
