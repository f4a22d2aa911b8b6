"""Codes of any codec between neighbours."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._base import Codec, Context, PyTree
from jaxcomm._message import from_message, to_message
from jaxcomm.compression._scaled import require_contraction
from jaxcomm.gossip._neighbors import Talk


def require_own(codec: Codec, method: str, size: int) -> None:
    """Raises unless a worker can encode by itself, remembering nothing, and errors shrink."""
    kinds = jax.tree.leaves(codec.reduce_statistics)
    if "or" in kinds:
        raise ValueError(
            f"`{method}` has no way for workers to agree on a support before they encode, and this "
            "codec needs it: take one whose statistics are a sender's own."
        )
    if jax.tree.leaves(codec.init(jnp.zeros(2))):
        raise ValueError(
            f"`{method}` gives back what a codec leaves out by itself: take the codec without "
            "feedback or other memory."
        )
    require_contraction(codec, size, 1, method)


def encode(
    codec: Codec, talk: Talk, units: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array], Callable[[jax.Array], list[jax.Array]]]:
    """One message of all units, what it decodes to, and how others decode theirs."""
    contexts = [Context(coins, shape=x.shape) for coins, x in zip(talk.coins, units, strict=True)]
    contents: list[Any] = []
    for context, x in zip(contexts, units, strict=True):
        narrow = x.astype(jnp.float32)
        statistics = codec.measure(context, narrow)
        payload, _ = codec.encode(context.replace(statistics=statistics), narrow)
        contents.append((payload, statistics))

    def decoded(contents: PyTree) -> list[jax.Array]:
        return [
            codec.decode(context.received().replace(statistics=own), payload).astype(x.dtype)
            for context, (payload, own), x in zip(contexts, contents, units, strict=True)
        ]

    message = _axis.as_varying(to_message(contents), talk.axis_name)
    return message, decoded(contents), lambda heard: decoded(from_message(heard, contents))
