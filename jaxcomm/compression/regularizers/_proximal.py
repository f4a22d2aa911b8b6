"""Proximal gradient steps, with the step of any optimizer as their gradient part."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import PyTree, require_state
from jaxcomm._require import checked
from jaxcomm.compression.regularizers._thresholds import wide_of


class Regularizer(NamedTuple):
    r"""A convex function of the parameters, and its proximal operator.

    Attributes:
      value: `params -> float32[]`.
      operator: `(params, step) -> params`, with a step of at least 0, a number or float32[]:
        :math:`\operatorname{argmin}_y\, s\, r(y) + \frac{1}{2} \|y - x\|^2`. Leaves may be wider
        than those of `params`.
    """

    value: Callable[[PyTree], jax.Array]
    operator: Callable[[PyTree, jax.Array | float], PyTree]


class RegularizedState(NamedTuple):
    """The state of `proximal`, equal on all workers if that of the optimizer is."""

    step: jax.Array  # int32[]
    inner: Any


@checked
def proximal(
    tx: optax.GradientTransformation,
    regularizer: Regularizer,
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""The proximal operator of a regularizer after the step of an optimizer.

    .. math:: (\Delta, s') = \mathrm{tx}(g, s, x), \qquad
              x' = \operatorname{prox}_{\eta r}(x + \Delta)
                 = \operatorname*{argmin}_y\; r(y) + \frac{1}{2 \eta} \|y - (x + \Delta)\|^2

    With `optax.sgd(learning_rate)` this is proximal gradient descent, whose fixed points are the
    minimizers of loss plus :math:`r` if both are convex. With an optimizer that scales coordinates,
    such as Adam, the regularizer keeps the rate :math:`\eta` for all coordinates, as the weight
    decay of AdamW does.

    Weights that become zero are exactly zero, and so are the updates of weights that stay zero. So
    a sparsifier with room for the others, such as `nonzero`, sends them exactly:

    - updates, as the `pull` of :func:`jaxcomm.sharded_server` around this transformation (with
      :func:`jaxcomm.compression.regularizers.l1`, which is element-wise);
    - sums of updates in the exchanges of local steps, with this transformation as inner optimizer;
    - slices of weights, in :func:`jaxcomm.aggregation.weight_gather`.

    Gradients stay dense. Nothing is sent here.

    Args:
      tx: An optimizer, or a whole chain of aggregator and optimizer.
      regularizer: The regularizer, from :mod:`jaxcomm.compression.regularizers` or your own.
      learning_rate: :math:`\eta`, that of the optimizer: a number of at least 0, which may be
        traced, or a schedule of the number of steps.

    Returns:
      A transformation to use in place of `tx`, as the last one of a chain. A NaN in the step of
      `tx` is a NaN in the update.

    Raises:
      ValueError: If an argument is out of range; in `update`, if `params` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.compression.regularizers import l1
      >>> tx = jaxcomm.proximal(optax.sgd(1.0), l1(0.5), learning_rate=1.0)
      >>> params = jnp.array([2.0, 0.2])
      >>> update, _ = tx.update(jnp.array([1.0, 0.1]), tx.init(params), params)
      >>> print(params + update)
      [0.5 0. ]

    References:
      Parikh, Boyd, `Proximal Algorithms <https://doi.org/10.1561/2400000003>`_, 2014. Grishchenko
      et al., `Asynchronous Distributed Learning with Sparse Communications and Identification
      <https://arxiv.org/abs/1812.03871>`_, 2018, for sparse iterates that are sent sparsely.
    """
    if not (hasattr(regularizer, "operator") and callable(regularizer.operator)):
        raise ValueError(
            "`regularizer` must be a regularizer, such as `jaxcomm.regularizers.l1(1e-4)`, got "
            f"{regularizer!r}."
        )
    is_number = isinstance(learning_rate, int | float) and not isinstance(learning_rate, bool)
    is_rate = isinstance(learning_rate, jax.Array) or callable(learning_rate)
    if not is_rate and not (is_number and 0 <= learning_rate < math.inf):
        raise ValueError(
            f"`learning_rate` must be a finite number of at least 0, or a schedule, got "
            f"{learning_rate!r}."
        )
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> RegularizedState:
        return RegularizedState(jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(
        updates: PyTree, state: RegularizedState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, RegularizedState]:
        require_state(state, RegularizedState, "`proximal`")
        if params is None:
            raise ValueError("`proximal` needs parameters: `tx.update(updates, state, params)`.")
        steps, after = inner.update(updates, state.inner, params, **extra_args)
        rate: Any = learning_rate(state.step) if callable(learning_rate) else learning_rate
        moved = jax.tree.map(lambda x, step: wide_of(x) + wide_of(step), params, steps)
        shrunk = regularizer.operator(moved, rate)
        # The update of a weight that becomes zero is exact, also in 16 bits: it is -x.
        result = jax.tree.map(
            lambda y, x, step: (y - x.astype(y.dtype)).astype(step.dtype), shrunk, params, steps
        )
        return result, RegularizedState(optax.safe_increment(state.step), after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
