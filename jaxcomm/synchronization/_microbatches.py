"""Gradients of as many mini-batches as a worker has finished."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree
from jaxcomm.synchronization._wide import narrow, wide
from jaxcomm.synchronization._windows import require_points


class GradientSums(NamedTuple):
    """What a worker has done in a window."""

    gradients: PyTree  # their sum over mini-batches, as the parameters, in float32 at least
    finished: jax.Array  # int32[], how many mini-batches
    loss: jax.Array  # float32[], the sum of their losses
    aux: PyTree = None  # float32, the sums of what the loss returns besides


AverageOver = Literal["minibatches", "workers"]


def _length(microbatches: PyTree) -> int:
    lengths = {x.shape[0] for x in jax.tree.leaves(microbatches) if x.ndim}
    if len(lengths) != 1 or any(x.ndim == 0 for x in jax.tree.leaves(microbatches)):
        raise ValueError(
            "`microbatches` must be `[mini-batches, ...]`, as many in each leaf, got "
            f"{[x.shape for x in jax.tree.leaves(microbatches)]}."
        )
    return lengths.pop()


def _own_row(tree: PyTree, option: str, axis_name: AxisName) -> PyTree:
    """This worker's row of what has one a worker, and so lies here as leaves `[1, ...]`.

    Raises:
      ValueError: If there are several: a worker must not take the first of them.
    """
    for x in jax.tree.leaves(tree):
        if not x.ndim or x.shape[0] != 1:
            workers = _axis.size(axis_name)
            got = f"{x.shape[0] * workers} rows" if x.ndim else "no axis of workers"
            raise ValueError(
                f"`{option}` must have one row a worker, [{workers}, ...] of all, got {got}."
            )
    return jax.tree.map(lambda x: x[0], tree)


def microbatch_gradients(
    loss_fn: LossFn,
    params: PyTree,
    microbatches: PyTree,
    finished: jax.Array | int,
    *,
    stale_params: PyTree = None,
    key: jax.Array | None = None,
    has_aux: bool = False,
    axis_name: AxisName = "data",
) -> GradientSums:
    r"""Sums of the gradients and losses of the first so many mini-batches, at the same parameters.

    .. math:: \Big(\sum_{j \le m_i} \nabla f(x; B_{ij}),\; m_i,\; \sum_{j \le m_i} f(x; B_{ij})\Big)

    :math:`m_i` may differ by worker: the loop runs as often as it has to on each, and nothing in it
    is sent. (`jax.vmap` runs it as often as the fastest worker needs on all.)

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over a mini-batch; with `has_aux=True`, `(loss,
        aux)`. Called with `(params, batch, key)` where there is a key.
      params: Parameters.
      microbatches: Leaves `[M, ...]`, this worker's mini-batches in order.
      finished: :math:`m_i`, int32[], 0 to M; beyond is cut.
      stale_params: Parameters at which the first mini-batch has begun, and so is evaluated, where
        those are others: see :func:`stale_params`.
      key: A typed key, folded with the number of the mini-batch in the window.
      has_aux: Whether `loss_fn` returns a pair; aux is summed in float32.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      The sums, in float32 at least; 0 where nothing was finished.

    Raises:
      ValueError: If leaves differ in their number of mini-batches, or `finished` is of windows
        with `in_flight="finish_late"` and there is no `stale_params`.

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
    require_points(finished, stale_params)
    most = _length(microbatches)
    count = jnp.clip(jnp.asarray(finished, jnp.int32), 0, most)
    local = _axis.local_value_and_grad(loss_fn, has_aux, axis_name=axis_name)

    def of_one(number: jax.Array) -> GradientSums:
        batch = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), microbatches
        )
        point = params
        if stale_params is not None:
            point = jax.tree.map(lambda z, x: jnp.where(number == 0, z, x), stale_params, params)
        own_key = [] if key is None else [jax.random.fold_in(key, number)]
        value, gradients = local(point, batch, *own_key)
        loss, aux = value if has_aux else (value, None)
        told = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), (loss, aux))
        return GradientSums(wide(gradients), jnp.ones((), jnp.int32), *told)

    nothing = jax.tree.map(
        lambda x: _axis.as_varying(jnp.zeros(x.shape, x.dtype), axis_name),
        jax.eval_shape(of_one, jnp.zeros((), jnp.int32)),
    )
    count = _axis.as_varying(count, axis_name)
    total: GradientSums = lax.fori_loop(
        0, count, lambda number, total: jax.tree.map(jnp.add, total, of_one(number)), nothing
    )
    return total


def mean_of(
    done: GradientSums, params: PyTree, average_over: AverageOver = "minibatches"
) -> tuple[PyTree, PyTree, jax.Array]:
    """`(mean value, mean gradient as the parameters, weight)`; zeros where nothing is finished."""
    if average_over not in get_args(AverageOver):
        raise ValueError(
            f"`average_over` must be one of {get_args(AverageOver)}, got {average_over!r}."
        )
    some: Any = jnp.maximum(done.finished, 1).astype(jnp.float32)
    gradient, loss, aux = jax.tree.map(
        lambda x: x / some.astype(x.dtype), (done.gradients, done.loss, done.aux)
    )
    weight = done.finished if average_over == "minibatches" else done.finished > 0
    return loss if aux is None else (loss, aux), narrow(gradient, params), weight


def window_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: tuple[PyTree, ...],
    key: jax.Array | None = None,
    *,
    average_over: AverageOver = "minibatches",
    has_aux: bool = False,
    axis_name: AxisName = "data",
) -> tuple[PyTree, PyTree, jax.Array]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` for windows of mini-batches.

    The mean :math:`\bar g_i` over a worker's :math:`m_i` finished mini-batches, with a weight, in
    one of two forms. Either all *mini-batches* count alike (weight :math:`m_i`), so that faster
    workers weigh more, or all *workers* do that have finished any (weight 1). An aggregator forms

    .. math:: \frac{\sum_i m_i \bar g_i}{\sum_i m_i} = \frac{\sum_i \sum_{j \le m_i} g_{ij}}{\sum_i
              m_i} \qquad\text{or}\qquad \frac{\sum_{i: m_i > 0} \bar g_i}{\sum_{i: m_i > 0} 1},

    and gossip, whose weights scale steps, moves a worker by the sum over its mini-batches, with
    :math:`\gamma` the learning rate of a single one, or by their mean:

    .. math:: \Delta_i = -\gamma \sum_{j \le m_i} g_{ij} \qquad\text{or}\qquad
              \Delta_i = -\gamma\, \bar g_i .

    Where a worker has finished nothing, its mean is 0 and its weight too, and it only mixes; where
    nobody has, the loss, a mean over nothing, is NaN.

    Args:
      loss_fn: As for :func:`microbatch_gradients`.
      params: Parameters.
      batch: `(microbatches, finished)`: leaves `[M, ...]` of this worker, and int32[1]; or with a
        third part, parameters [1, ...] of :func:`stale_params`, which counts of windows with
        `in_flight="finish_late"` need.
      key: As for :func:`microbatch_gradients`; `step(..., key=key)` gives a worker its own.
      average_over: What counts alike, `"minibatches"` or `"workers"`. This and what follows are
        given with `functools.partial(window_gradients, average_over="workers")`.
      has_aux: Whether `loss_fn` returns `(loss, aux)`, as `make_step(..., has_aux=True)` is told
        too. Means of aux are weighted as the loss is.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      `(mean loss, mean gradient, weight)`, the loss in a pair with the means of aux where there is
      aux; the weight is a count, int32[], or bool[] where workers count alike.

    Raises:
      ValueError: As :func:`microbatch_gradients` does, if `average_over` is neither, or if
        `finished` or `stale_params` has not one row a worker.

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
    if finished.ndim > 1:
        raise ValueError(
            f"`finished` must be one count a worker, [workers] of all, got {finished.shape} here."
        )
    stale_params = _own_row(late[0], "stale_params", axis_name) if late else None
    done = microbatch_gradients(
        loss_fn,
        params,
        microbatches,
        _own_row(finished, "finished", axis_name),
        stale_params=stale_params,
        key=key,
        has_aux=has_aux,
        axis_name=axis_name,
    )
    return mean_of(done, params, average_over)


def precomputed_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: GradientSums,
    key: jax.Array | None = None,
    *,
    average_over: AverageOver = "minibatches",
    axis_name: AxisName = "data",
) -> tuple[PyTree, PyTree, jax.Array]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` where sums over mini-batches are at hand.

    Args:
      loss_fn: Not called.
      params: Whose dtypes the mean gradient takes.
      batch: Sums of this worker, with a leading axis of length 1, as :class:`RealTimeWindow` makes.
      key: Not used.
      average_over: As for :func:`window_gradients`.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      `(mean loss, mean gradient, weight)`, like :func:`window_gradients`.

    Raises:
      ValueError: If sums have not one row a worker, or `average_over` is neither.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.synchronization import GradientSums, precomputed_gradients
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
      >>> step = jaxcomm.simulate(lambda w, x: w, tx, 2, gradients=precomputed_gradients)
      >>> params = jnp.float32(0)
      >>> sums = GradientSums(jnp.array([1.0, 5.0]), jnp.array([1, 2]), jnp.array([0.5, 1.0]))
      >>> print(step(params, jaxcomm.init(tx, params, 2), sums)[0])  # -(1 + 5) / 3
      -2.0
    """
    del loss_fn, key
    return mean_of(_own_row(batch, "sums", axis_name), params, average_over)
