"""Compressed messages between neighbors, for any codec."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._collectives import Message, to_message
from jaxcomm._contract import Codec, Context, PyTree
from jaxcomm.compression._scaled import require_contraction
from jaxcomm.gossip._neighbors import MixingStep


def require_standalone_codec(codec: Codec, method: str, size: int) -> None:
    """Raises unless workers can encode separately, without memory, and the codec contracts."""
    kinds = jax.tree.leaves(codec.reduce_statistics)
    if "or" in kinds:
        raise ValueError(
            f"`{method}` cannot use a codec whose `reduce_statistics` has 'or', which makes "
            "a support shared by all workers. Use a codec whose statistics come from the sender "
            "alone."
        )
    if jax.tree.leaves(codec.init(jnp.zeros(2))):
        raise ValueError(
            f"`{method}` compensates the compression error itself: pass the codec without "
            "feedback or other memory."
        )
    require_contraction(codec, size, 1, method)


def encode(
    codec: Codec, mixing_step: MixingStep, units: list[jax.Array]
) -> tuple[Message, list[jax.Array], Callable[[PyTree], list[jax.Array]]]:
    """The message of all units, its decoded values, and a function that decodes contents."""
    contexts = [
        Context(coins, shape=x.shape) for coins, x in zip(mixing_step.coins, units, strict=True)
    ]
    contents: list[Any] = []
    for context, x in zip(contexts, units, strict=True):
        narrow = x.astype(jnp.float32)
        statistics = codec.measure(context, narrow)
        payload, _ = codec.encode(context.replace(statistics=statistics), narrow)
        contents.append((payload, statistics))

    def decoded(contents: PyTree) -> list[jax.Array]:
        return [
            codec.decode(context.received().replace(statistics=statistics), payload).astype(x.dtype)
            for context, (payload, statistics), x in zip(contexts, contents, units, strict=True)
        ]

    axis_name = mixing_step.axis_name
    message = Message(axis_name, contents, _axis.as_varying(to_message(contents), axis_name))
    return message, decoded(contents), decoded
