"""Stochastic gradient push: gossip over links of one direction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import AxisName
from jaxcomm.gossip._gossiped import Mixed, gossiped
from jaxcomm.gossip._neighbors import Talk
from jaxcomm.gossip._to_mixing import to_mixing


class PushSum(NamedTuple):
    """What a worker remembers: its mass, and what is on its way to it, the next to arrive first."""

    mass: jax.Array  # in the dtype of sums, []
    on_the_way: list[tuple[list[jax.Array], jax.Array]]  # of each step of delay


def sgp(
    mixing: Any,
    *,
    delay: int = 0,
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient push (SGP), and with `delay` Overlap SGP.

    Parameters are :math:`z_i = x_i / w_i`, of a sum :math:`x_i` and a mass :math:`w_i`, at first 1:

    .. math:: x_i \gets \sum_j P_{ij} (x_j + \Delta_j), \qquad w_i \gets \sum_j P_{ij} w_j

    Columns of :math:`P` add to 1: senders split what they have, so that the sums over workers are
    kept whatever receivers do, and graphs may be directed and change from step to step. A worker
    sends its parameters and 4 bytes to each that it sends to. With `delay` :math:`\tau`, shares
    arrive :math:`\tau` steps late, so that a step need not wait for its own messages.

    Args:
      mixing: A graph, directed or not; a list of them to take in turns, such as
        :func:`one_peer_exponential`; a matrix whose columns add to 1; or a :class:`Mixing`. Graphs
        get equal shares (`"push"`).
      delay: :math:`\tau`, an int of at least 0. A worker keeps so many copies of the parameters.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      seed: Seed of what is drawn where mixing is at random.
      key: A typed threefry key, in place of `seed`.
      diagnostics: As for :func:`dpsgd`; the disagreement is told of shares as they are received.

    Returns:
      A transformation like that of :func:`dpsgd`. Where columns and rows add to 1 and nothing is
      late, masses stay 1 and this is adapt-then-combine D-PSGD. Not the mean of the parameters but
      that of :math:`x_i`, on their way or not, moves by the mean of steps.

    Raises:
      ValueError: If `delay` is negative, columns do not add to 1, or not all workers hear of all.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.sgp(gossip.one_peer_exponential(8)))

    References:
      Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
      <https://arxiv.org/abs/1811.10792>`_, 2018.
    """
    if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
        raise ValueError(f"`delay` must be a Python int of at least 0, got {delay!r}.")
    given = to_mixing(mixing, "push")

    def start(units: list[jax.Array]) -> PushSum:
        mass = jnp.ones((), units[0].dtype if units else jnp.float32)
        nothing = [*map(jnp.zeros_like, units)], jnp.zeros_like(mass)
        return PushSum(mass, [nothing for _ in range(delay)])

    def method(talk: Talk, memory: PushSum, z: list[jax.Array], steps: list[jax.Array]) -> Mixed:
        x = [memory.mass * a + b for a, b in zip(z, steps, strict=True)]
        sent = [a.astype(talk.dtype) for a in x]
        widened = [a.astype(talk.wide) for a in sent]

        def take(
            heard: tuple[list[jax.Array], jax.Array], weight: jax.Array
        ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
            shares, mass = [a.astype(talk.wide) for a in heard[0]], heard[1]
            squares = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(shares, widened, strict=True))
            return [weight * a for a in shares], weight * mass, weight * squares

        nothing = [*map(jnp.zeros_like, x)], talk.zero, talk.zero
        *arrived, disagreement = talk.hear((sent, memory.mass), take, nothing)
        away = talk.given_away()
        # What rounding leaves out of a message stays with its sender.
        kept = [a - away * b for a, b in zip(x, widened, strict=True)]
        due, *later = [*memory.on_the_way, tuple(arrived)]
        total = [a + b for a, b in zip(kept, due[0], strict=True)]
        mass = memory.mass - away * memory.mass + due[1]
        changes = [a / mass - b for a, b in zip(total, z, strict=True)]
        return Mixed(changes, PushSum(mass, later), disagreement)

    def average(talk: Talk, memory: PushSum, z: list[jax.Array]) -> tuple[list[jax.Array], PushSum]:
        held = [([memory.mass * a for a in z], memory.mass), *memory.on_the_way]
        x, mass = talk.mean(jax.tree.map(lambda *parts: sum(parts), *held))
        return [a / mass for a in x], PushSum(mass, start(z).on_the_way)

    return gossiped(
        given,
        axis_name,
        start,
        method,
        average=average,
        seed=seed,
        key=key,
        diagnostics=diagnostics,
    )
