"""What a chain of codecs needs to know of a sparsifier: which coordinates it selects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm._contract import Codec, Context, Memory, PyTree, mark_of
from jaxcomm.compression.sparsifiers._indices import Layout


@dataclasses.dataclass(frozen=True)
class Selecting:
    r"""The `encode` of a codec that sends some coordinates of its input as they are.

    .. math:: C(x) = \gamma \sum_{j \in S} x_j e_j

    :math:`\gamma` is 1 for a codec that claims a contraction. For one that claims a variance
    :math:`\omega` it is :math:`1 + \omega`, one over the probability that :math:`j \in S`: no other
    factor is unbiased.

    Attributes:
      function: The `encode` itself.
      choose: `(public, flat) -> uint32[layout(size).entries]`, the selected coordinates, ascending.
        Those that are not below the size name none; they are below `layout(size).size`.
      layout: `size -> Layout`, the code of these indices.
      drawn: Whether receivers choose the same from the public coin: `choose` then reads only the
        size of `flat`.
      value_dtype: The dtype in which `encode` sends the values.
    """

    function: Callable[[Context, jax.Array], tuple[PyTree, Memory]]
    choose: Callable[[jax.Array, jax.Array], jax.Array]
    layout: Callable[[int], Layout]
    drawn: bool
    value_dtype: Any

    def __call__(self, context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        """The result of the function."""
        return self.function(context, x)


def selection_of(codec: Codec) -> Selecting | None:
    """How the codec selects coordinates; `None` if it does more, or something else."""
    return mark_of(codec.encode, Selecting)
