"""A codec of several arrays of one shape, encoded independently."""

import jax

from jaxcomm._contract import Codec
from jaxcomm.compression._diagnosed import diagnose_each


def stacked(codec: Codec) -> Codec:
    r"""Encodes each row of `[rows, *shape]` with separate coins, memory and statistics.

    .. math:: Q(x_1, x_2, \ldots) = (Q(x_1), Q(x_2), \ldots)

    All rows share one vectorized program: one copy per row would take longer to compile, the more
    rows there are. All arrays of a context have one more leading dimension; its `shape` is that of
    one row.
    """
    return codec.replace(
        init=jax.vmap(codec.init),
        measure=jax.vmap(codec.measure),
        encode=jax.vmap(codec.encode),
        decode=jax.vmap(codec.decode),
        finalize=jax.vmap(codec.finalize),
        diagnose=lambda *args: diagnose_each(codec.diagnose, *args),
        drop_overflow=codec.drop_overflow and stacked(codec.drop_overflow),
    )
