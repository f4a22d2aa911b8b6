"""The exact mean as an explicit ring reduction, hop by hop."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _collectives, _units
from jaxcomm._contract import Aggregator, AxisName, PyTree, require_state
from jaxcomm._require import checked
from jaxcomm.aggregation._coded import weigh
from jaxcomm.compression._means import headroom


def _reduce_scatter(chunks: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums `[workers, ...]` over workers; worker i returns row i of the sum.

    The sum of row i starts on worker i + 1, visits each worker once, and ends on worker i.
    """
    workers = _axis.size(axis_name)
    chunks = _axis.as_varying(chunks, axis_name)
    worker = _axis.index(axis_name)

    def own_chunk(hop: jax.Array | int) -> jax.Array:
        row = (worker - 1 - hop) % workers
        return lax.dynamic_index_in_dim(chunks, row, keepdims=False)

    def body(hop: jax.Array, partial: jax.Array) -> jax.Array:
        return _collectives.shift(partial, axis_name) + own_chunk(hop)

    return lax.fori_loop(1, workers, body, own_chunk(0))


def _ring_mean(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The mean over workers of float32[d], scaled by `headroom`; equal on all workers."""
    if x.size == 0:
        return lax.psum(x, axis_name)  # Sends nothing, and types the result as equal.
    workers = _axis.size(axis_name)
    width = math.ceil(x.size / workers)
    chunks = jnp.pad(x, (0, workers * width - x.size)).reshape(workers, width)
    part = _reduce_scatter(chunks, axis_name) / (workers * headroom(workers))
    return _collectives.gather(part, axis_name).ravel()[: x.size]


@checked
def ring_mean(axis_name: AxisName = "data") -> optax.GradientTransformationExtraArgs:
    r"""The mean over workers in float32, by an explicit ring: n - 1 hops, then a gather.

    .. math:: \bar x = \frac{1}{n} \sum_{i=1}^n x_i

    An update is split into :math:`n` chunks. In each hop, a worker passes one partial sum to the
    next worker, and adds its part to the partial sum that it receives. After :math:`n - 1` hops,
    each worker holds one chunk of the sum, and all workers gather the means. The result equals that
    of :func:`jaxcomm.mean` up to rounding; the order of summation is fixed. A worker sends
    :math:`2 (n-1)/n` times 4 bytes per coordinate; their number is padded to a multiple of
    :math:`n` per bucket of 32 MiB. A ring all-reduce sends the same bytes, but here the backend
    cannot choose a better schedule. Use this function to study the schedule or to build on it, and
    :func:`jaxcomm.mean` to train.

    Args:
      axis_name: The mesh axis, or axes, of the workers. The ring visits them in order.

    Returns:
      A transformation to place before the optimizer, without state. Updates are equal on all
      workers and keep their shape and dtype; float64 updates have float32 precision.
      `update(..., weight=w)` computes a weighted mean. NaN and infinity propagate to every worker.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound, or an update is already summed or not
        floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.ring_mean("data")
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]

    References:
      Patarasuk and Yuan, `Bandwidth optimal all-reduce algorithms for clusters of workstations
      <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.

    Differs from the paper: the second half of the ring is one all-gather, which moves the same
    bytes, so that JAX types the results as equal on all workers.
    """

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        require_state(state, optax.EmptyState, "the exact mean")
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        units, _, join = _units.split(updates, "bucket", _units.BUCKET_BYTES)
        units = [x * headroom(_axis.size(axis_name)) for x in units]
        if units and weight is not None:
            units = [*map(weigh(axis_name, weight, units), units)]
        return join([_ring_mean(x, axis_name) for x in units]), state

    return Aggregator(init_fn, update_fn, axis_name)
