"""Reports of the gradients of workers: their norms, and how many coordinates are not zero."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, PyTree, require_state
from jaxcomm._gradients import backward_of
from jaxcomm._require import checked, require_option
from jaxcomm.aggregation._aggregator import axes_of
from jaxcomm.aggregation._coded import weigh
from jaxcomm.aggregation._exchange import or_reduce, to_vector
from jaxcomm.compression import _support
from jaxcomm.compression._support import Granularity, Parts


class GradientNormsState(NamedTuple):
    """The state of `gradient_norms`, equal on all workers except `PerWorker` parts of `inner`."""

    inner: Any
    diagnostics: dict[str, jax.Array]  # float32[], of the last step; zeros before the first


def square_norm(tree: PyTree) -> jax.Array:
    """The squared norm of all leaves together, float32[]."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sum(jnp.stack(squares)) if squares else jnp.zeros((), jnp.float32)


@checked
def gradient_norms(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Measures the norms of the workers' gradients and of their mean.

    .. math:: \text{worker\_gradient\_norm} = \sqrt{\frac{1}{n} \sum_i \|g_i\|^2}, \qquad
              \text{gradient\_norm} = \|\bar g\|

    where :math:`\bar g` is what the aggregator returns. For the exact mean, the difference of the
    squares is the mean squared distance of a worker's gradient from the mean. The norms are over
    all leaves, in float32: above :math:`2^{63}` they are infinite. With weights, the mean of the
    squares is weighted too. Workers send one float32 more, in an all-reduce.

    Args:
      tx: An aggregator, such as `jaxcomm.mean()`. If it contains an optimizer, as
        :func:`jaxcomm.sharded_server` does, `gradient_norm` is that of the update.

    Returns:
      The same aggregator. `make_step` and `simulate` report the norms of the last step as
      `metrics["diagnostics/gradient_norm"]` and `"diagnostics/worker_gradient_norm"`. Place
      :func:`jaxcomm.accumulate` and :func:`jaxcomm.skip_nonfinite` around the chain, and clips
      after it. As the `aggregator` of local steps, it measures displacements.

    Raises:
      ValueError: If `tx` is not an aggregator. In `update`, if gradients are deferred, or it is a
        stage of :func:`jaxcomm.hierarchical` or inside :func:`jaxcomm.shard_local`: place it
        around these.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.gradient_norms(jaxcomm.mean()), optax.sgd(0.1))
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean(w * x), tx, 2)
      >>> params = jnp.float32(0)
      >>> _, _, metrics = step(params, jaxcomm.init(tx, params, 2), jnp.array([1.0, -7.0]))
      >>> print(metrics["diagnostics/gradient_norm"], metrics["diagnostics/worker_gradient_norm"])
      3.0 5.0
    """
    axes = axes_of(tx, "gradient_norms")
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> GradientNormsState:
        zero = jnp.zeros((), jnp.float32)
        diagnostics = {"gradient_norm": zero, "worker_gradient_norm": zero}
        return GradientNormsState(inner.init(params), diagnostics)

    def update_fn(
        updates: PyTree,
        state: GradientNormsState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: Any,
    ) -> tuple[PyTree, GradientNormsState]:
        require_state(state, GradientNormsState, "`gradient_norms`")
        if outer_axes or shard_axes:
            raise ValueError(
                "`gradient_norms` measures whole gradients of all workers: place it around "
                "`hierarchical` and `shard_local`, not inside."
            )
        if backward := backward_of(updates):
            raise ValueError(backward.taker.touched)
        extra = extra_args if weight is None else {**extra_args, "weight": weight}
        mean, after = inner.update(updates, state.inner, params, **extra)
        own = _axis.as_varying(square_norm(updates), axes)
        own = own if weight is None else weigh(axes, weight, own)(own)
        with jax.named_scope("norms"):
            before = lax.psum(own, axes) / _axis.size(axes)
        diagnostics = {
            "gradient_norm": jnp.sqrt(square_norm(mean)),
            "worker_gradient_norm": jnp.sqrt(before),
        }
        return mean, GradientNormsState(after, diagnostics)

    return Aggregator(init_fn, update_fn, axes, needs_whole="norms over all leaves")


def _parts(shape: tuple[int, ...], granularity: Granularity) -> Parts:
    has_rows = granularity != "row" or len(shape) > 1
    return _support.parts_of(shape, granularity if has_rows else "element")


def gradient_density(
    updates: PyTree, *, axis_name: AxisName | None = None, granularity: Granularity = "row"
) -> PyTree:
    r"""The fraction of nonzero rows in each leaf, on this worker or on any worker.

    .. math:: \rho = \frac{1}{R} \Big|\bigcup_i \{r : x_{ir} \ne 0\}\Big|

    Use it to choose the option `density` of the methods for sparse updates: take the maximum over
    many steps and add a margin. The method's docstring says whether it needs the density of one
    worker or of the union. With `axis_name`, a worker sends :math:`2 (n-1)/n` times one bit per
    row. Otherwise it sends nothing.

    Args:
      updates: Leaves of any shape.
      axis_name: The mesh axis, or axes, of the workers in the union. Default: none, the density of
        this worker's updates.
      granularity: The part that is counted: a `"row"` (a slice along the first axis; for a leaf
        with at most one axis, a coordinate), an `"element"`, or an int, a block of that many
        coordinates.

    Returns:
      A tree like `updates` of float32[], in [0, 1]; 0 for an empty leaf.

    Raises:
      ValueError: If `granularity` is none of these.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> gradients = {"embedding": jnp.zeros((8, 3)).at[2].set(1.0), "bias": jnp.ones(4)}
      >>> jaxcomm.gradient_density(gradients)["embedding"].item()
      0.125
    """
    require_option(granularity, "granularity", Granularity)
    leaves, treedef = jax.tree.flatten(updates)
    if not leaves:
        return updates
    parts = [_parts(x.shape, granularity) for x in leaves]
    bitmaps, split = to_vector([*map(_support.bitmap, leaves, parts)])
    if axis_name is not None:
        with jax.named_scope("gradient_density"):
            bitmaps = or_reduce(bitmaps, axis_name=axis_name)
    counts = [_support.count(words).astype(jnp.float32) for words in split(bitmaps)]
    densities = [count / max(part.number, 1) for count, part in zip(counts, parts, strict=True)]
    return jax.tree.unflatten(treedef, densities)
