"""Gradients of the mini-batches that a worker has finished."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn, local_value_and_grad, parts_of_value
from jaxcomm._mesh import zeros_as
from jaxcomm._require import same_model_state
from jaxcomm.metrics._reduced import added, apart, none_yet, together
from jaxcomm.synchronization._trees import wide
from jaxcomm.synchronization._windows import require_stale_params


class GradientSums(NamedTuple):
    """The sums of a worker over its finished mini-batches in a window."""

    gradients: PyTree  # the sum over mini-batches, shaped like the parameters, in float32 at least
    finished: jax.Array  # int32[], the number of mini-batches
    loss: jax.Array  # float32[], the sum of their losses
    aux: PyTree = None  # float32, the sums of the metrics of the loss; others as they state
    model_state: PyTree = None  # the model state after the last mini-batch, not a sum


def _length(microbatches: PyTree) -> int:
    lengths = {x.shape[0] for x in jax.tree.leaves(microbatches) if x.ndim}
    if len(lengths) != 1 or any(x.ndim == 0 for x in jax.tree.leaves(microbatches)):
        raise ValueError(
            "`microbatches` must be leaves `[mini-batches, ...]` of equal leading sizes, got "
            f"{[x.shape for x in jax.tree.leaves(microbatches)]}."
        )
    return lengths.pop()


@names_itself
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
      >>> from jaxcomm.synchronization import microbatch_gradients
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
    most = _length(microbatches)
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
        means, others = apart((loss, aux))
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
