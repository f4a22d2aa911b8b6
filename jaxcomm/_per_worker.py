"""Parameters and optimizer state that differ by worker."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._mesh import over_workers_of, require_axes, require_kept, require_marked, retyped
from jaxcomm._require import checked, own_weight, require_arrays, require_state
from jaxcomm._sharded import restricted, spec_on
from jaxcomm._state import worker_axes


def replicate(
    params: PyTree, workers: Mesh | int | Mapping[str, int], *, axis_name: AxisName = "data"
) -> PerWorker:
    """Copies the parameters to each worker, so that workers can then differ.

    Args:
      params: Arrays. If they are sharded over other axes of the mesh, so are their copies.
      workers: A mesh; or, for :func:`jaxcomm.simulate`, a number of workers, or the sizes of
        several axes by name, outermost first.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `PerWorker` with leaves `[workers, ...]`, for :func:`jaxcomm.init`, :func:`jaxcomm.make_step`
      and :func:`jaxcomm.simulate`. Nothing is sent except to place the copies.

    Raises:
      ValueError: If the mesh has no such axis, the number of workers is not a positive int, or
        `params` differ by worker already, or have the key 'per_worker'.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.replicate(jnp.ones(2), 3).per_worker["data"])
      [[1. 1.]
       [1. 1.]
       [1. 1.]]
    """
    axis = _axis.label(axis_name)
    if isinstance(workers, Mesh):
        require_axes(workers, axis_name)
        sizes = dict(workers.shape)
        mesh, lead = workers, PartitionSpec(_axis.names(axis_name))
        others = tuple(name for name in mesh.axis_names if name not in _axis.names(axis_name))

        def kept(x: Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*lead, *restricted(spec_on(mesh, x), others)))

        out = PerWorker({axis: jax.tree.map(kept, params)})
    else:
        sizes, out = worker_axes(workers, axis_name), None
    copies = 1
    for name in _axis.names(axis_name):
        copies *= sizes[name]

    def copy(params: PyTree) -> PerWorker:
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *x.shape)), params)
        return PerWorker(
            {axis: jax.tree.map(retyped, own, *out.per_worker.values()) if out else own}
        )

    if isinstance(params, PerWorker):
        raise ValueError(
            f"`params` differ by worker over {[*params.per_worker]} already: replicate the "
            "parameters of one worker, such as `jaxcomm.consensus(params)`."
        )
    require_arrays(params, "params")
    require_marked(params)
    require_kept(params, "params")
    params = jax.tree.map(jnp.asarray, params)
    return cast(PerWorker, jax.jit(copy, out_shardings=out)(params) if out else copy(params))


def of_all(params: PyTree, caller: str) -> PyTree:
    """The leaves `[workers, ...]` of parameters that differ by worker."""
    if not isinstance(params, PerWorker):
        raise ValueError(
            f"`{caller}` takes parameters that differ by worker, from `jaxcomm.replicate`, got "
            f"a {type(params).__name__}."
        )
    require_kept(params, "params")
    (leaves,) = params.per_worker.values()
    return leaves


def consensus(params: PerWorker) -> PyTree:
    r"""The mean of the workers' parameters, exact except for one rounding per coordinate.

    .. math:: \bar x = x_1 + \frac{1}{n} \sum_i (x_i - x_1)

    in at least float32. If all workers are equal, the result is bit-equal to their parameters. On
    a mesh this is one all-reduce. Leaves that have no mean, such as counters and keys of a model
    state, are those of the first worker.

    Args:
      params: Parameters that differ by worker, from :func:`jaxcomm.replicate` and training.

    Returns:
      Parameters without the leading axis of workers, with the same dtypes.

    Raises:
      ValueError: If `params` do not differ by worker.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus(jaxcomm.PerWorker({"data": jnp.array([[1.0], [4.0]])})))
      [2.5]
    """

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)

    return jax.tree.map(lambda x: over_workers_of(mean, x), of_all(params, "consensus"))


def consensus_distance(params: PerWorker) -> jax.Array:
    r"""Squared distance of the workers from their mean, :math:`\sum_i \|x_i - \bar x\|^2`.

    It is exact and therefore costly: on a mesh it averages all parameters. A gossip step computes
    the distance between neighbors at no such cost, and reports it with `diagnostics=True`. Leaves
    that have no mean, such as counters and keys, do not count.

    Args:
      params: Parameters that differ by worker.

    Returns:
      float32[].

    Raises:
      ValueError: If `params` do not differ by worker.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus_distance(jaxcomm.PerWorker({"data": jnp.array([1.0, 4.0])})))
      4.5
    """

    def distance(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        from_first = wide - wide[:1]
        from_mean = from_first - jnp.mean(from_first, axis=0, keepdims=True)
        return jnp.sum(jnp.square(from_mean.astype(jnp.float32)))

    leaves = [
        x
        for x in jax.tree.leaves(of_all(params, "consensus_distance"))
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return sum((over_workers_of(distance, x) for x in leaves), jnp.float32(0))


@checked()
def per_worker(
    tx: optax.GradientTransformation, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Marks the state of an optimizer as different by worker.

    If parameters differ by worker, so do the moments of an optimizer that gets local gradients. A
    step that would turn a finite value in the state into NaN or infinity does not change the state
    on this worker, since a NaN moment would stay NaN. It still returns the optimizer's update. A
    step of weight 0, a mean over no samples, does not change the state either, and its update is 0.
    A key in the state, such as that of `optax.add_noise`, stays equal on all workers. Nothing is
    sent.

    Args:
      tx: The optimizer.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The same transformation, whose state is a `PerWorker` with leaves `[workers, ...]`.

    Raises:
      ValueError: In `init` and `update`, if `axis_name` is not bound; in `update`, if `weight` is
        not a scalar or is statically out of range.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9))
      >>> jaxcomm.init(tx, jnp.zeros(3), 2).per_worker["data"][0].trace.shape
      (2, 3)
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> PerWorker:
        _axis.require_bound(axis_name)
        return _axis.marked(inner.init(params), axis_name)

    def update_fn(
        updates: PyTree, state: PerWorker, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PerWorker]:
        require_state(state, PerWorker, "`per_worker`")
        before = _axis.own(state, axis_name)
        updates, after = inner.update(updates, before, params, **extra_args)
        weight = extra_args.get("weight")
        keep = jnp.ones((), bool) if weight is None else own_weight(weight) != 0
        updates = jax.tree.map(lambda u: jnp.where(keep, u, jnp.zeros((), u.dtype)), updates)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            if jnp.issubdtype(new.dtype, jnp.inexact):
                keep &= jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
        after = jax.tree.map(lambda x, y: jnp.where(keep, x, y), after, before)
        return updates, _axis.marked(after, axis_name)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
