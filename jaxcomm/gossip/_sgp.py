"""Stochastic gradient push: gossip over directed links."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import Natural, checked
from jaxcomm.gossip._gossiped import Mixed, gossiped
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._to_mixing import agreeing


class PushSum(NamedTuple):
    """The memory of a worker: its mass, and the messages in flight in their order of arrival."""

    mass: jax.Array  # [], in the dtype of sums
    in_transit: list[tuple[list[jax.Array], jax.Array]]  # one entry per step of delay


@checked
def sgp(
    mixing: Any,
    *,
    overlap: Natural = 0,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient push (SGP); with `overlap`, Overlap SGP.

    Each worker has a numerator :math:`x_i` and a mass :math:`w_i`, which is 1 at the start. Its
    parameters are :math:`z_i = x_i / w_i`:

    .. math:: x_i \gets \sum_j P_{ij} (x_j + \Delta_j), \qquad w_i \gets \sum_j P_{ij} w_j

    The columns of :math:`P` add to 1: a sender splits its numerator and its mass into shares.
    Mixing therefore preserves their sums over workers, and graphs may be directed and change
    between steps. A worker sends its parameters and 4 bytes to each of its receivers. With
    `overlap` :math:`\tau`, shares arrive :math:`\tau` steps late, so a step need not wait for its
    own messages.

    Args:
      mixing: A graph, directed or not; a list of graphs to cycle through, such as
        :func:`one_peer_exponential`; a matrix whose columns add to 1; or a :class:`Mixing`. Graphs
        become matrices with equal shares (`"push"`).
      overlap: :math:`\tau`, an int of at least 0. A worker stores this number of copies of the
        parameters.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      seed: Seed for random mixing.
      diagnostics: As for :func:`dpsgd`. The `disagreement` compares the numerators :math:`x_j +
        \Delta_j` that workers send, not the parameters.

    Returns:
      A transformation as returned by :func:`dpsgd`. If the rows also add to 1 and `overlap` is 0,
      the masses stay 1, and this is D-PSGD with `order="adapt_then_combine"`. In general, the mean
      of :math:`x_i`, including shares in flight, moves by the mean of the updates; the mean of the
      parameters does not.

    Raises:
      ValueError: If `overlap` is negative, the columns do not add to 1, or the graph is not
        strongly connected. In `update`, if the state has another `overlap`.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.sgp(gossip.one_peer_exponential(8)))

    References:
      Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
      <https://arxiv.org/abs/1811.10792>`_, 2018.
    """
    mixing = agreeing(mixing, "push")

    def start(units: list[jax.Array]) -> PushSum:
        mass = jnp.ones((), units[0].dtype if units else jnp.float32)
        zeros = [*map(jnp.zeros_like, units)], jnp.zeros_like(mass)
        return PushSum(mass, [zeros for _ in range(overlap)])

    def method(
        mixing_step: MixingStep, memory: PushSum, z: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        x = [memory.mass * a + b for a, b in zip(z, steps, strict=True)]
        sent = [a.astype(mixing_step.dtype) for a in x]
        widened = [a.astype(mixing_step.wide) for a in sent]

        def contribution(
            received: tuple[list[jax.Array], jax.Array], weight: jax.Array
        ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
            shares, mass = [a.astype(mixing_step.wide) for a in received[0]], received[1]
            squares = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(shares, widened, strict=True))
            return [weight * a for a in shares], weight * mass, weight * squares

        zeros = [*map(jnp.zeros_like, x)], mixing_step.zero, mixing_step.zero
        *arrived, disagreement = mixing_step.sum_over_neighbors(
            (sent, memory.mass), contribution, zeros
        )
        outgoing = mixing_step.outgoing_weight()
        # The sender keeps the rounding error of its message.
        kept = [a - outgoing * b for a, b in zip(x, widened, strict=True)]
        due, *later = [*memory.in_transit, tuple(arrived)]
        total = jax.tree.map(jnp.add, kept, due[0])
        mass = memory.mass - outgoing * memory.mass + due[1]
        changes = [a / mass - b for a, b in zip(total, z, strict=True)]
        return Mixed(changes, PushSum(mass, later), disagreement)

    def average(
        mixing_step: MixingStep, memory: PushSum, z: list[jax.Array]
    ) -> tuple[list[jax.Array], PushSum]:
        held = [([memory.mass * a for a in z], memory.mass), *memory.in_transit]
        x, mass = mixing_step.mean(jax.tree.map(lambda *parts: sum(parts), *held))
        return [a / mass for a in x], PushSum(mass, start(z).in_transit)

    return gossiped(
        mixing,
        start,
        method,
        average=average,
        seed=seed,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
