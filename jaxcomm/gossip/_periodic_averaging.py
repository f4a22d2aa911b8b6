"""An exact average of all workers now and then."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import PyTree


class ExactAverageState(NamedTuple):
    """The state of `periodic_averaging`, equal on all workers but for what `gossip` marks."""

    step: jax.Array  # int32[]
    gossip: Any


def periodic_averaging(
    every: int, gossip: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip that sets all workers to their exact mean in every k-th step.

    .. math:: x_i \gets \frac{1}{n} \sum_j x_j \text{ after the step of gossip,} \qquad\text{or of
              push-sum}\quad \frac{\sum_j w_j x_j}{\sum_j w_j},\quad w_i \gets \frac{1}{n} \sum_j
              w_j = 1

    What a method remembers of the parameters follows: copies of neighbours become the mean,
    residuals 0, and messages on their way arrive; D2's corrections and AD-PSGD's late steps are of
    the steps, and stay.

    Sends an all-reduce of the parameters, in float32 at least, in those steps and none in the
    others. Optax adds updates, so that workers agree but for the rounding of that one sum. Who is
    absent (`present`) is not averaged and stays as it is.

    Args:
      every: k, an int of at least 1.
      gossip: A method of :mod:`jaxcomm.gossip`.

    Returns:
      A transformation in place of `gossip`, to place after the optimizer.

    Raises:
      ValueError: If `every` is no positive int, or `gossip` is no method of gossip.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> push = gossip.sgp(gossip.one_peer_exponential(8))
      >>> tx = optax.chain(optax.sgd(0.1), gossip.periodic_averaging(10, push))
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"`every` must be a Python int of at least 1, got {every!r}.")
    update = getattr(gossip, "update", None)
    if update is None or "exact" not in inspect.signature(update).parameters:
        raise ValueError(
            f"`gossip` must be a method of `jaxcomm.gossip`, got {gossip!r}: only the method knows "
            "its masses and copies. Use `gossip.periodic_averaging(10, gossip.dpsgd(graph))` after "
            "the optimizer, in place of the method."
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
        step = optax.safe_increment(state.step)
        now = (step % every == 0) | jnp.asarray(exact)
        updates, after = inner.update(updates, state.gossip, params, exact=now, **extra_args)
        return updates, ExactAverageState(step, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
