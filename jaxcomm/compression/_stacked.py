"""A codec of several arrays of one shape, each by itself."""

import jax

from jaxcomm._base import Codec
from jaxcomm.compression._diagnosed import diagnose_each


def stacked(codec: Codec) -> Codec:
    r"""Encodes each row of `[rows, *shape]` with coins, memory and statistics of its own.

    .. math:: Q(x_1, x_2, \ldots) = (Q(x_1), Q(x_2), \ldots)

    One program for all, where a copy for each would take the longer to compile the more there are.
    Contexts have one more leading dimension in all their arrays; their `shape` is of a row.
    """
    return codec._replace(
        init=jax.vmap(codec.init),
        measure=jax.vmap(codec.measure),
        encode=jax.vmap(codec.encode),
        decode=jax.vmap(codec.decode),
        finalize=jax.vmap(codec.finalize),
        diagnose=lambda *given: diagnose_each(codec.diagnose, *given),
        drop_overflow=codec.drop_overflow and stacked(codec.drop_overflow),
    )
