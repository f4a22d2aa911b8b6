"""Gradients of as many mini-batches as a worker has finished."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree
from jaxcomm.synchronization._wide import narrow, wide
from jaxcomm.synchronization._windows import require_points


class Finished(NamedTuple):
    """What a worker has done in a window."""

    gradients: PyTree  # their sum over mini-batches, as the parameters, in float32 at least
    finished: jax.Array  # int32[], how many mini-batches
    loss: jax.Array  # float32[], the sum of their losses


def _length(microbatches: PyTree) -> int:
    lengths = {x.shape[0] for x in jax.tree.leaves(microbatches) if x.ndim}
    if len(lengths) != 1 or any(x.ndim == 0 for x in jax.tree.leaves(microbatches)):
        raise ValueError(
            "`microbatches` must be `[mini-batches, ...]`, as many in each leaf, got "
            f"{[x.shape for x in jax.tree.leaves(microbatches)]}."
        )
    return lengths.pop()


def microbatch_gradients(
    loss_fn: LossFn,
    params: PyTree,
    microbatches: PyTree,
    finished: jax.Array | int,
    *,
    begun: PyTree = None,
    axis_name: AxisName = "data",
) -> Finished:
    r"""Sums of the gradients and losses of the first so many mini-batches, at the same parameters.

    .. math:: \Big(\sum_{j \le m_i} \nabla f(x; B_{ij}),\; m_i,\; \sum_{j \le m_i} f(x; B_{ij})\Big)

    :math:`m_i` may differ by worker: the loop runs as often as it has to on each, and nothing in it
    is sent. (`jax.vmap` runs it as often as the fastest worker needs on all.)

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over a mini-batch.
      params: Parameters.
      microbatches: Leaves `[M, ...]`, this worker's mini-batches in order.
      finished: :math:`m_i`, int32[], 0 to M; beyond is cut.
      begun: Parameters at which the first mini-batch has begun, and so is evaluated, where those
        are others: see :func:`begun_at`.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      The sums, in float32 at least; 0 where nothing was finished.

    Raises:
      ValueError: If leaves differ in their number of mini-batches, or `finished` is of windows
        with `in_flight="finish_late"` and there is no `begun`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import microbatch_gradients
      >>> def window(m):
      ...     return microbatch_gradients(lambda w, x: w * x, jnp.float32(2), jnp.arange(4.0), m)
      >>> print(jax.vmap(window, axis_name="data")(jnp.array([0, 3])).gradients)
      [0. 3.]

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not at hand: that all
      mini-batches of a window are evaluated at its first parameters is a reconstruction.
    """
    require_points(finished, begun)
    most = _length(microbatches)
    count = jnp.clip(jnp.asarray(finished, jnp.int32), 0, most)
    local = _axis.local_value_and_grad(loss_fn, axis_name=axis_name)

    def add(number: jax.Array, total: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        batch = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), microbatches
        )
        point = params
        if begun is not None:
            point = jax.tree.map(lambda z, x: jnp.where(number == 0, z, x), begun, params)
        loss, gradients = local(point, batch)
        return jax.tree.map(jnp.add, total, (wide(gradients), loss.astype(jnp.float32)))

    nothing = jax.tree.map(
        lambda x: _axis.as_varying(x, axis_name),
        (jax.tree.map(jnp.zeros_like, wide(params)), jnp.zeros((), jnp.float32)),
    )
    count = _axis.as_varying(count, axis_name)
    gradients, loss = lax.fori_loop(0, count, add, nothing)
    return Finished(gradients, count, loss)


def mean_of(done: Finished, params: PyTree) -> tuple[jax.Array, PyTree, jax.Array]:
    """`(mean loss, mean gradient as the parameters, count)`; zeros where nothing is finished."""
    some: Any = jnp.maximum(done.finished, 1).astype(jnp.float32)
    mean = jax.tree.map(lambda x: x / some.astype(x.dtype), done.gradients)
    return done.loss / some, narrow(mean, params), done.finished


def window_gradients(
    loss_fn: LossFn, params: PyTree, batch: tuple[PyTree, ...], *, axis_name: AxisName = "data"
) -> tuple[jax.Array, PyTree, jax.Array]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` for windows of mini-batches.

    Means over a worker's finished mini-batches, weighted by their count: an aggregator then forms
    :math:`\sum_i \sum_{j \le m_i} g_{ij} / \sum_i m_i`. Gossip, whose weights scale steps, moves a
    worker by :math:`\gamma \sum_{j \le m_i} g_{ij}`: :math:`\gamma` is then the learning rate of a
    single mini-batch. Where a worker has finished nothing, its mean is 0 and its weight too, and it
    only mixes; where nobody has, the loss, a mean over nothing, is NaN.

    Args:
      loss_fn: As for :func:`microbatch_gradients`.
      params: Parameters.
      batch: `(microbatches, finished)`: leaves `[M, ...]` of this worker, and int32[1]; or with a
        third part, parameters [1, ...] of :func:`begun_at`, which counts of windows with
        `in_flight="finish_late"` need.
      axis_name: The mesh axis, or axes, that number the workers; other than the default with
        `functools.partial`.

    Returns:
      `(mean loss, mean gradient, count)`.

    Raises:
      ValueError: As :func:`microbatch_gradients` does.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.synchronization import window_gradients
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
      >>> loss = lambda w, x: w * jnp.mean(x)
      >>> step = jaxcomm.simulate(loss, tx, 2, gradients=window_gradients)
      >>> microbatches, finished = jnp.array([[1.0], [9.0], [2.0], [3.0]]), jnp.array([1, 2])
      >>> params, state = jnp.float32(0), jaxcomm.init(tx, jnp.float32(0), 2)
      >>> print(step(params, state, (microbatches, finished))[0])  # -(1 + 2 + 3) / 3
      -2.0
    """
    microbatches, finished, *late = batch
    if finished.shape != (1,):
        raise ValueError(
            f"`finished` must be one count a worker, [workers] of all, got {finished.shape} here."
        )
    begun = jax.tree.map(lambda z: z[0], late[0]) if late else None
    done = microbatch_gradients(
        loss_fn, params, microbatches, finished[0], begun=begun, axis_name=axis_name
    )
    return mean_of(done, params)


def given_gradients(
    loss_fn: LossFn, params: PyTree, batch: Finished
) -> tuple[jax.Array, PyTree, jax.Array]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` where sums over mini-batches are at hand.

    Args:
      loss_fn: Not called.
      params: Whose dtypes the mean gradient takes.
      batch: Sums of this worker, with a leading axis of length 1, as :class:`RealTimeWindow` makes.

    Returns:
      `(mean loss, mean gradient, count)`, like :func:`window_gradients`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.synchronization import Finished, given_gradients
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
      >>> step = jaxcomm.simulate(lambda w, x: w, tx, 2, gradients=given_gradients)
      >>> params = jnp.float32(0)
      >>> sums = Finished(jnp.array([1.0, 5.0]), jnp.array([1, 2]), jnp.array([0.5, 1.0]))
      >>> print(step(params, jaxcomm.init(tx, params, 2), sums)[0])  # -(1 + 5) / 3
      -2.0
    """
    del loss_fn
    return mean_of(jax.tree.map(lambda x: x[0], batch), params)
