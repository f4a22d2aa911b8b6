"""A periodic exact average over all workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import Aggregator, PyTree
from jaxcomm._noise import following


class ExactAverageState(NamedTuple):
    """The state of `periodic_averaging`; equal on all workers except as `gossip` marks."""

    step: jax.Array  # int32[]
    gossip: Any


def periodic_averaging(
    period: int, gossip: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip that sets all workers to their exact mean in every k-th step.

    .. math:: x_i \gets \frac{1}{n} \sum_j x_j \text{ after the step of gossip,} \qquad\text{or of
              push-sum}\quad \frac{\sum_j w_j x_j}{\sum_j w_j},\quad w_i \gets \frac{1}{n} \sum_j
              w_j = 1

    The state of the method is adjusted: copies of neighbors become the mean, residuals become 0,
    and messages in flight arrive. The corrections of D2 and the pending updates of AD-PSGD do not
    change, because they apply to updates.

    These steps send an all-reduce of the parameters, in float32 at least; the other steps send
    none. Optax adds the update to the parameters, so workers are equal up to the rounding of this
    addition. Absent workers (`present`) are not averaged and do not change.

    Args:
      period: k, an int of at least 1.
      gossip: A method of :mod:`jaxcomm.gossip`.

    Returns:
      A transformation that replaces `gossip`, to place after the optimizer.

    Raises:
      ValueError: If `period` is not a positive int, or `gossip` is not a gossip method.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> push = gossip.sgp(gossip.one_peer_exponential(8))
      >>> tx = optax.chain(optax.sgd(0.1), gossip.periodic_averaging(10, push))
    """
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"`period` must be a Python int of at least 1, got {period!r}.")
    if not isinstance(gossip, Aggregator) or gossip.kind != "gossip":
        raise ValueError(
            f"`gossip` must be a method of `jaxcomm.gossip`, got {gossip!r}. Use "
            "`gossip.periodic_averaging(10, gossip.dpsgd(graph))` after the optimizer, in place of "
            "the method alone."
        )
    inner = optax.with_extra_args_support(gossip)

    def init_fn(params: PyTree) -> ExactAverageState:
        return ExactAverageState(jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(
        updates: PyTree,
        state: ExactAverageState,
        params: PyTree = None,
        *,
        exact: jax.Array | bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, ExactAverageState]:
        step = following(state.step, period)
        now = (step % period == 0) | jnp.asarray(exact)
        updates, after = inner.update(updates, state.gossip, params, exact=now, **extra_args)
        return updates, ExactAverageState(step, after)

    return Aggregator(init_fn, update_fn, gossip.axes, "gossip")
