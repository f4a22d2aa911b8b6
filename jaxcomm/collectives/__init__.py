"""Collectives that work in every mode: `jax.shard_map` with and without types, and `jax.vmap`.

`gather`, `exchange`, `shift` and `permute` move one array; floats of 16 and 8 bits are
moved as words, since XLA widens them on CPUs. `gather_contents` moves a tree of arrays in one
message. All have derivatives.
"""

from jaxcomm._collectives import (
    exchange,
    gather,
    gather_contents,
    permute,
    shift,
)

__all__ = [
    "exchange",
    "gather",
    "gather_contents",
    "permute",
    "shift",
]
