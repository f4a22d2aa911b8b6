"""Workers that have parameters of their own, and average them in pairs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxcomm._contract import PyTree


class Member(NamedTuple):
    """A worker's parameters, and those at which it computes; of all workers, leaves [workers, ...].

    Attributes:
      params: In float32 at least.
      read: In the dtypes of the model.
      optimizer: The state of its optimizer.
    """

    params: PyTree
    read: PyTree
    optimizer: Any


class Pairs(NamedTuple):
    """What workers do without an owner, each with a :class:`Member` of its own.

    Attributes:
      join: `params -> member`, of a worker that joins at these parameters.
      partner: `(worker, key, present) -> int32[]`, a neighbor in the mask `present`; -1 if none is.
      meet: `(params, params) -> (params, params)`, their averages; the first has the gradient.
      step: `(member, gradient) -> member`, after they have met.
      mean: `members' params -> params`, leaves [workers, ...] to those of the model's dtypes.
    """

    join: Callable[[PyTree], Member]
    partner: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    meet: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    step: Callable[[Member, PyTree], Member]
    mean: Callable[[PyTree, PyTree], PyTree]
