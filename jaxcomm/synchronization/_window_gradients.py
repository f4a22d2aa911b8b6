"""Gradients of the mini-batches of a window, and the `gradients=` of a step for windows."""

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn, local_value_and_grad, parts_of_value, same_model_state
from jaxcomm._mesh import zeros_as
from jaxcomm._require import require_option
from jaxcomm.metrics._reduced import added, divided, none_yet, require_stated, separate, together
from jaxcomm.synchronization._trees import narrow, wide
from jaxcomm.synchronization._windows import require_stale_params

AverageOver = Literal["minibatches", "workers"]


class GradientSums(NamedTuple):
    """The sums of a worker over its finished mini-batches in a window."""

    gradients: PyTree  # the sum over mini-batches, shaped like the parameters, in float32 at least
    finished: jax.Array  # int32[], the number of mini-batches
    loss: jax.Array  # float32[], the sum of their losses
    aux: PyTree = None  # float32, the sums of the metrics of the loss; others as they state
    model_state: PyTree = None  # the model state after the last mini-batch, not a sum


def microbatch_gradients(
    loss_fn: LossFn,
    params: PyTree,
    microbatches: PyTree,
    finished: jax.Array | int,
    *,
    stale_params: PyTree = None,
    key: jax.Array | None = None,
    has_aux: bool = False,
    model_state: PyTree = None,
    axis_name: AxisName = "data",
) -> GradientSums:
    r"""Sums the gradients and losses of the first :math:`m_i` mini-batches at the same parameters.

    .. math:: \Big(\sum_{j \le m_i} \nabla f(x; B_{ij}),\; m_i,\; \sum_{j \le m_i} f(x; B_{ij})\Big)

    :math:`m_i` may differ by worker. The loop runs :math:`m_i` times on each worker, and sends
    nothing. Under `jax.vmap`, the loop runs :math:`\max_i m_i` times for every worker.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over a mini-batch; with `has_aux=True`, `(loss,
        aux)`. It is called with `(params, batch, key)` if `key` is passed.
      params: Parameters.
      microbatches: Leaves `[M, ...]`, this worker's mini-batches in order.
      finished: :math:`m_i`, int32[], clipped to 0 to M.
      stale_params: The parameters at which the first mini-batch began, if they differ from
        `params`. The first mini-batch is evaluated at them; see :func:`stale_params`.
      key: A typed key. The number of the mini-batch in the window is folded in.
      has_aux: Whether `loss_fn` returns metrics; those that are means are summed in float32, and
        those of :mod:`jaxcomm.metrics` are reduced as they state.
      model_state: The model state before the first mini-batch, if the loss has one: `(params,
        model_state, batch) -> (loss, model_state)`, or `(loss, (model_state, aux))`. Each
        mini-batch gets the model state after the one before.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The sums, in float32 at least; 0 if no mini-batch was finished.

    Raises:
      ValueError: If leaves differ in their number of mini-batches, or `finished` comes from windows
        with `in_flight="finish_late"` and `stale_params` is missing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization._window_gradients import microbatch_gradients
      >>> def window(m):
      ...     return microbatch_gradients(lambda w, x: w * x, jnp.float32(2), jnp.arange(4.0), m)
      >>> print(jax.vmap(window, axis_name="data")(jnp.array([0, 3])).gradients)
      [0. 3.]

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not available: the evaluation
      of all mini-batches of a window at its first parameters is a reconstruction.
    """
    require_stale_params(finished, stale_params)
    (most,) = {x.shape[0] for x in jax.tree.leaves(microbatches)}
    count = jnp.clip(jnp.asarray(finished, jnp.int32), 0, most)
    has_model_state = model_state is not None
    has_parts = has_aux or has_model_state
    local = local_value_and_grad(loss_fn, has_parts, axis_name=axis_name)

    def of_one(number: jax.Array, *model_state: PyTree) -> GradientSums:
        batch = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), microbatches
        )
        point = params
        if stale_params is not None:
            point = jax.tree.map(lambda z, x: jnp.where(number == 0, z, x), stale_params, params)
        folded_key = [] if key is None else [jax.random.fold_in(key, number)]
        value, gradients = local(point, *model_state, batch, *folded_key)
        loss, state, aux = parts_of_value(value, has_model_state, has_aux)
        means, others = separate((loss, aux))
        means = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), means)
        loss, aux = together(means, others)
        if has_model_state:
            state = same_model_state(state, model_state[0])
        state = jax.tree.map(lambda x: _axis.as_varying(x, axis_name), state)
        return GradientSums(wide(gradients), jnp.ones((), jnp.int32), loss, aux, state)

    def add(number: jax.Array, total: GradientSums) -> GradientSums:
        state = [total.model_state] if has_model_state else []
        one = of_one(number, *state)
        sums = added(total._replace(model_state=None), one._replace(model_state=None))
        return cast(GradientSums, sums._replace(model_state=one.model_state))

    first = jax.tree.map(lambda x: _axis.as_varying(x, axis_name), model_state)
    shapes = jax.eval_shape(of_one, jnp.zeros((), jnp.int32), *([first] if has_model_state else []))
    zeros = jax.tree.map(
        lambda x: _axis.as_varying(x, axis_name),
        none_yet(shapes._replace(model_state=None), zeros_as),
    )
    count = _axis.as_varying(count, axis_name)
    total: GradientSums = lax.fori_loop(0, count, add, zeros._replace(model_state=first))
    return total


def _own_row(tree: PyTree, option: str, axis_name: AxisName) -> PyTree:
    """This worker's row of an argument with one row per worker; the leaves are `[1, ...]` here.

    Raises:
      ValueError: If there are several rows: taking the first of them would be wrong.
    """
    if any(x.shape[:1] != (1,) for x in jax.tree.leaves(tree)):
        workers = _axis.size(axis_name)
        raise ValueError(f"`{option}` must have one row per worker, [{workers}, ...] in total.")
    return jax.tree.map(lambda x: x[0], tree)


def mean_of(
    done: GradientSums, params: PyTree, average_over: AverageOver = "minibatches"
) -> tuple[PyTree, PyTree, jax.Array]:
    """`(mean value, mean gradient in the parameters' dtypes, weight)`; zeros for no mini-batch."""
    require_option(average_over, "average_over", AverageOver)
    count: Any = jnp.maximum(done.finished, 1).astype(jnp.float32)
    gradient = jax.tree.map(lambda x: x / count.astype(x.dtype), done.gradients)
    loss, aux = divided((done.loss, done.aux), count)
    weight = done.finished if average_over == "minibatches" else done.finished > 0
    rest = [x for x in (done.model_state, aux) if x is not None]
    value = loss if not rest else (loss, rest[0] if len(rest) == 1 else tuple(rest))
    return value, narrow(gradient, params), weight


def window_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: tuple[PyTree, ...],
    key: jax.Array | None = None,
    *,
    average_over: AverageOver = "minibatches",
    has_aux: bool = False,
    model_state: PyTree = None,
    axis_name: AxisName = "data",
) -> tuple[PyTree, PyTree, jax.Array]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` for windows of mini-batches.

    Computes the mean :math:`\bar g_i` over a worker's :math:`m_i` finished mini-batches, and a
    weight. There are two forms. With `average_over="minibatches"`, all mini-batches count equally:
    the weight is :math:`m_i`, so faster workers weigh more. With `average_over="workers"`, all
    workers that have finished any mini-batch count equally: the weight is 1. An aggregator computes

    .. math:: \frac{\sum_i m_i \bar g_i}{\sum_i m_i} = \frac{\sum_i \sum_{j \le m_i} g_{ij}}{\sum_i
              m_i} \qquad\text{or}\qquad \frac{\sum_{i: m_i > 0} \bar g_i}{\sum_{i: m_i > 0} 1},

    Gossip methods scale a worker's step by its weight relative to the mean of those of the worker
    and its neighbors. A worker then moves by

    .. math:: \Delta_i = -\gamma\, \frac{m_i}{\bar m_i}\, \bar g_i .

    If a worker has finished nothing, its mean and its weight are 0, and it only mixes. If no worker
    has finished a mini-batch, the mean loss is NaN.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over a mini-batch; with `has_aux=True`, `(loss,
        aux)`. It is called with `(params, batch, key)` if `key` is passed.
      params: Parameters, at which all mini-batches of the window are evaluated.
      batch: `(microbatches, finished)`: leaves `[M, ...]` of this worker, and int32[1]. A third
        part holds the parameters [1, ...] of :func:`stale_params`; it is required for counts from
        windows with `in_flight="finish_late"`.
      key: A typed key; `step(..., key=key)` passes each worker its own. The number of the
        mini-batch in the window is folded in.
      average_over: Whether `"minibatches"` or `"workers"` count equally. Set this and the following
        arguments with `functools.partial(window_gradients, average_over="workers")`.
      has_aux: Whether `loss_fn` returns `(loss, aux)`. Also pass `has_aux=True` to `make_step`.
        Means of aux have the same weights as the loss. Metrics of :mod:`jaxcomm.metrics` are over
        all finished mini-batches; of none, a sum is 0, and an extreme is infinite or the limit of
        its dtype.
      model_state: The model state before the first mini-batch; each mini-batch gets that after the
        one before. The loss is then `(params, model_state, batch) -> (loss, model_state)`, or
        `(loss, (model_state, aux))`. With `has_model_state=True`, `make_step` passes it, and
        averages the workers' model states with the same weights. Counters and keys in it differ by
        worker after a window: they need `jaxcomm.replicate(model_state, mesh)`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `(mean loss, mean gradient, weight)`. With aux, the first element is the pair of the mean loss
      and the means of aux. The weight is a count, int32[], or bool[] if workers count equally.

    Raises:
      ValueError: If leaves differ in their number of mini-batches, `finished` comes from windows
        with `in_flight="finish_late"` and `stale_params` is missing, `average_over` has another
        value, a metric is an integer and no sum or extreme of :mod:`jaxcomm.metrics`, or `finished`
        or `stale_params` does not have one row per worker.

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

    def stated_loss(*args: PyTree) -> PyTree:
        value = loss_fn(*args)
        require_stated(parts_of_value(value, model_state is not None, has_aux)[2])
        return value

    microbatches, finished, *late = batch
    stale_params = _own_row(late[0], "stale_params", axis_name) if late else None
    done = microbatch_gradients(
        stated_loss,
        params,
        microbatches,
        _own_row(finished, "finished", axis_name),
        stale_params=stale_params,
        key=key,
        has_aux=has_aux,
        model_state=model_state,
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
    r"""The `gradients=` of :func:`jaxcomm.make_step` for precomputed sums over mini-batches.

    Args:
      loss_fn: Not called.
      params: Parameters; the mean gradient has their dtypes.
      batch: The sums of this worker, with a leading axis of length 1, as from
        :class:`RealTimeWindow`.
      key: Not used.
      average_over: As for :func:`window_gradients`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `(mean loss, mean gradient, weight)`, like :func:`window_gradients`.

    Raises:
      ValueError: If the sums do not have one row per worker, or `average_over` has another value.

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
