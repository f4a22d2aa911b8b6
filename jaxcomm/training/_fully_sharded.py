"""Gradients of weights that are sharded over the workers' own axis (ZeRO-3, FSDP)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn, parts_of_value
from jaxcomm._mesh import require_axes, shard_map
from jaxcomm._units import Scope
from jaxcomm.aggregation._weight_gather import Codecs, averaging_whole_leaves, weight_gather
from jaxcomm.metrics._reduced import over_axes, require_stated, separate, together, values_of
from jaxcomm.training._arguments import require_rows, typed_as
from jaxcomm.training._means import require_aux, require_means


def slice_specs(
    params: PyTree, mesh: Mesh, *, axis_name: AxisName = "data", least: int = 2**10
) -> PyTree:
    """Specs that slice the largest dimension that the number of workers divides, leaf by leaf.

    Leaves without such a dimension, or with few coordinates, stay whole: `PartitionSpec()`.

    Args:
      params: Arrays, or anything with a shape.
      mesh: The devices.
      axis_name: The mesh axis, or axes, of the workers.
      least: The least number of coordinates of a leaf that is sliced.

    Returns:
      A tree of `PartitionSpec`, for :func:`jax.device_put` and for
      :func:`jaxcomm.training.fully_sharded_value_and_grad`.

    Raises:
      ValueError: If the mesh lacks an axis.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> specs = jaxcomm.training.slice_specs(
      ...     {"w": jnp.zeros((3, 512)), "b": jnp.zeros(3)}, mesh
      ... )
      >>> print(specs["w"], specs["b"])
      P(None, 'data') P()
    """
    require_axes(mesh, axis_name)
    names = _axis.names(axis_name)
    workers = math.prod(mesh.shape[name] for name in names)
    entry = names[0] if len(names) == 1 else names

    def spec_of(x: Any) -> PartitionSpec:
        fits = [d for d, length in enumerate(x.shape) if length and length % workers == 0]
        if not fits or math.prod(x.shape) < least:
            return PartitionSpec()
        dimension = max(fits, key=lambda d: x.shape[d])
        return PartitionSpec(*[None] * dimension, entry)

    return jax.tree.map(spec_of, params)


def fully_sharded_value_and_grad(
    loss_fn: LossFn,
    mesh: Mesh,
    specs: PyTree,
    *,
    axis_name: AxisName = "data",
    push: Codecs = None,
    pull: Codecs = None,
    scope: Scope | None = None,
    bucket_bytes: int | None = None,
    has_aux: bool = False,
    gather: bool = True,
    rows_differ: bool = False,
) -> LossFn:
    r"""Like `jax.value_and_grad`, for weights that are sharded over the workers (FSDP, ZeRO-3).

    .. math:: x = \mathrm{pull}(x_1, \ldots, x_n), \qquad
              g_k = \frac{1}{n} \sum_i \mathrm{push}(\nabla f(x; B_i))_k

    Each worker keeps its slices of weights only. It gathers the weights, computes the gradient for
    its rows of the batch, and receives the mean gradient of its slices. Results are ordinary arrays
    that are sharded as the weights, so any optax optimizer without aggregator takes its step on
    them, in the same `jax.jit`. Bytes are those of :func:`jaxcomm.aggregation.weight_gather`, and 4
    for the loss and for each number of aux.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over its batch; with `has_aux=True`,
        `(loss, aux)`, where `aux` is a dict of means, or of :mod:`jaxcomm.metrics`. With
        `gather=False`, `(slices, batch, key) -> loss`, which gathers weights itself, layer by
        layer, with :func:`jaxcomm.aggregation.weight_gather`.
      mesh: The devices, one per worker.
      specs: How the weights are sharded, a tree of `PartitionSpec` or a prefix of it, as from
        :func:`jaxcomm.training.slice_specs`.
      axis_name: The mesh axis, or axes, of the workers; all axes of the mesh.
      push: The codec of gradients, or codecs by axis. Default: exact.
      pull: The codec of weights, or codecs by axis. Default: exact.
      scope: Which slices of a worker share statistics.
      bucket_bytes: The maximum size of a bucket of slices in float32 bytes.
      has_aux: Whether `loss_fn` returns metrics.
      gather: Whether to gather all weights at once, in one collective. With `False`, the loss must
        use slices only through `weight_gather`, which has the codecs. A slice that it uses
        directly, as in a penalty on weights, has the gradient of its worker's loss, not divided by
        n.
      rows_differ: As for :func:`jaxcomm.make_step`.

    Returns:
      `value_and_grad(params, batch, key=None, *, shared=None) -> (loss, gradients)`, or `((loss,
      aux), gradients)`, with means over workers. With a codec, `key` is a typed threefry key, new
      in each step. If the gradient of a sliced leaf is not finite on any worker, the gradients of
      all sliced leaves are NaN. On CPU devices, wait for each step with `jax.block_until_ready`,
      since several steps in flight may deadlock there.

    Raises:
      ValueError: If the mesh has other axes, or an option would have no effect with
        `gather=False`; when called, if specs do not fit the parameters, the batch is not divisible
        by the workers, aux has one value per example, a codec has memory, or a key is missing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jax.sharding import PartitionSpec
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> value_and_grad = jaxcomm.training.fully_sharded_value_and_grad(
      ...     lambda w, x: jnp.mean((x @ w) ** 2), mesh, PartitionSpec("data")
      ... )
      >>> loss, gradient = value_and_grad(jnp.ones(8), jnp.ones((8, 8)))
      >>> print(loss, gradient)
      64.0 [16. 16. 16. 16. 16. 16. 16. 16.]

    References:
      Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
      <https://arxiv.org/abs/1910.02054>`_, 2020. Differences: weights are gathered once per step,
      and stay for the backward pass unless the loss is under :func:`jax.checkpoint`.
    """
    require_axes(mesh, axis_name)
    names = _axis.names(axis_name)
    if others := [name for name in mesh.axis_names if name not in names]:
        raise ValueError(
            f"`mesh` also has the axes {others}: name all in `axis_name`; or, for parameters that "
            "are sharded over other axes, use `jaxcomm.make_step(..., shard_axes=)`."
        )
    options: dict[str, Any] = {
        "push": push,
        "pull": pull,
        "scope": scope,
        "bucket_bytes": bucket_bytes,
    }
    given = [name for name, value in options.items() if value is not None]
    if given and not gather:
        raise ValueError(
            f"With `gather=False`, {given} would have no effect here: pass them to the "
            "`jaxcomm.aggregation.weight_gather` of the loss."
        )
    gathered = weight_gather(specs, axis_name=axis_name, **options)

    def local(slices: PyTree, batch: PyTree, key: jax.Array | None, shared: PyTree) -> Any:
        shares = {} if shared is None else {"shared": jax.tree.map(lambda x: x, shared)}
        if gather:
            value = loss_fn(gathered(slices, key), batch, **shares)
        else:
            with averaging_whole_leaves(slices, specs, axis_name) as parts:
                value = loss_fn(parts, batch, key, **shares)
        parts_of_value(value, False, has_aux)
        return value

    def mean(x: Any) -> jax.Array:
        return lax.pmean(jnp.asarray(x).astype(jnp.float32), names)

    def of_worker(
        slices: PyTree, batch: PyTree, key: jax.Array | None, shared: PyTree
    ) -> tuple[Any, PyTree]:
        value, gradients = jax.value_and_grad(local, has_aux=has_aux)(slices, batch, key, shared)
        if has_aux:
            require_aux(value[1], {"loss"})
            require_stated(value[1])
            require_means(lambda rows: local(slices, rows, key, shared)[1], value[1], batch, "")
        means, others = separate(value)
        with jax.named_scope("fully_sharded_value_and_grad/metrics"):
            reduced = together(jax.tree.map(mean, means), over_axes(others, axis_name))
        return values_of(reduced), gradients

    def value_and_grad(
        params: PyTree, batch: PyTree, key: jax.Array | None = None, *, shared: PyTree = None
    ) -> Any:
        require_rows(batch, rows_differ)
        whole = PartitionSpec()
        # The exchanges are in the program of the loss, whose types are not checked.
        run = shard_map(
            of_worker,
            mesh,
            (specs, PartitionSpec(names), whole, whole),
            (whole, specs),
            check_vma=False,
        )
        value, gradients = run(params, batch, key, shared)
        return value, typed_as(gradients, params)

    return value_and_grad
