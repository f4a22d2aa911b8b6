"""Parameters and optimizer state that differ by worker."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._mesh import over_workers_of, require_axes, require_kept
from jaxcomm._require import checked, own_weight, require_state
from jaxcomm._state import worker_axes


def replicate(
    params: PyTree, workers: Mesh | int | Mapping[str, int], *, axis_name: AxisName = "data"
) -> PerWorker:
    """A copy of the parameters for each worker, which may then go its own way.

    Args:
      params: Arrays.
      workers: A mesh; or, for :func:`jaxcomm.simulate`, a number of workers, or the sizes of
        several axes by name, outermost first.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      `PerWorker` of leaves `[workers, ...]`, for :func:`jaxcomm.init`, :func:`jaxcomm.make_step`
      and :func:`jaxcomm.simulate`. Nothing is sent but what placing them takes.

    Raises:
      ValueError: If the mesh has no such axis, or the number of workers is no positive int.

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
        spec = PartitionSpec(_axis.names(axis_name))
        out = PerWorker({axis: jax.tree.map(lambda _: NamedSharding(workers, spec), params)})
    else:
        sizes, out = worker_axes(workers, axis_name), None
    copies = 1
    for name in _axis.names(axis_name):
        copies *= sizes[name]

    def copy(params: PyTree) -> PerWorker:
        return PerWorker(
            {axis: jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *x.shape)), params)}
        )

    require_kept(params, "params")
    params = jax.tree.map(jnp.asarray, params)
    return cast(PerWorker, jax.jit(copy, out_shardings=out)(params) if out else copy(params))


def of_all(params: PyTree, caller: str) -> PyTree:
    """The leaves `[workers, ...]` of parameters that differ by worker."""
    if not isinstance(params, PerWorker):
        raise ValueError(
            f"`{caller}` takes parameters that differ by worker, as `jaxcomm.replicate` makes, got "
            f"a {type(params).__name__}."
        )
    require_kept(params, "params")
    (leaves,) = params.per_worker.values()
    return leaves


def consensus(params: PerWorker) -> PyTree:
    r"""The mean of the workers' parameters, exact but for one rounding of each coordinate.

    .. math:: \bar x = x_1 + \frac{1}{n} \sum_i (x_i - x_1)

    in float32 at least, so that workers that agree get what they agree on, bit for bit. On a mesh
    this is one all-reduce.

    Args:
      params: What :func:`jaxcomm.replicate` made and training has changed.

    Returns:
      Parameters without the leading axis of workers, in their dtypes.

    Raises:
      ValueError: If `params` do not differ by worker.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus(jaxcomm.PerWorker({"data": jnp.array([[1.0], [4.0]])})))
      [2.5]
    """

    def mean(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)

    return jax.tree.map(lambda x: over_workers_of(mean, x), of_all(params, "consensus"))


def consensus_distance(params: PerWorker) -> jax.Array:
    r"""How far workers are from their mean: :math:`\sum_i \|x_i - \bar x\|^2`, float32[].

    Exact, and so not free: on a mesh it averages all parameters. What a step knows anyway is the
    disagreement of neighbours, which gossip with `diagnostics=True` tells.

    Args:
      params: Parameters that differ by worker.

    Returns:
      float32[].

    Raises:
      ValueError: If they do not.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus_distance(jaxcomm.PerWorker({"data": jnp.array([1.0, 4.0])})))
      4.5
    """

    def distance(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        apart = wide - wide[:1]
        from_mean = (apart - jnp.mean(apart, axis=0, keepdims=True)).astype(jnp.float32)
        return jnp.sum(jnp.square(from_mean))

    leaves = jax.tree.leaves(of_all(params, "consensus_distance"))
    return sum((over_workers_of(distance, x) for x in leaves), jnp.float32(0))


@checked()
def per_worker(
    tx: optax.GradientTransformation, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Marks the state of an optimizer as different by worker.

    Where parameters differ by worker, so do the moments of an optimizer that sees local gradients.
    A step that would make a finite number of that state NaN or infinite leaves it as it was on this
    worker: a moment that is NaN once stays so. The update is what the optimizer makes of it. A step
    of weight 0, a mean over nothing, leaves the state too, and its update is 0. Nothing is sent.

    Args:
      tx: The optimizer.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      The same transformation, whose state is `PerWorker` of leaves `[workers, ...]`.

    Raises:
      ValueError: In `init` and `update`, if `axis_name` is not bound; in `update`, if `weight` is
        no scalar or known to be out of range.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9))
      >>> jaxcomm.init(tx, jnp.zeros(3), 2).per_worker["data"][0].trace.shape
      (2, 3)
    """
    inner = optax.with_extra_args_support(tx)
    axis = _axis.label(axis_name)

    def mark(state: PyTree) -> PerWorker:
        return PerWorker({axis: jax.tree.map(lambda x: x[None], state)})

    def init_fn(params: PyTree) -> PerWorker:
        _axis.require_bound(axis_name)
        return mark(inner.init(params))

    def update_fn(
        updates: PyTree, state: PerWorker, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PerWorker]:
        require_state(state, PerWorker, "`per_worker`")
        own = _axis.own(state, axis_name)
        updates, after = inner.update(updates, own, params, **extra_args)
        weight = extra_args.get("weight")
        fine = jnp.ones((), bool) if weight is None else own_weight(weight) != 0
        updates = jax.tree.map(lambda u: jnp.where(fine, u, jnp.zeros((), u.dtype)), updates)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(own), strict=True):
            if jnp.issubdtype(new.dtype, jnp.inexact):
                fine &= jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
        return updates, mark(jax.tree.map(lambda x, y: jnp.where(fine, x, y), after, own))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
