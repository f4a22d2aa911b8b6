"""What an aggregator with `info=True` tells of a step."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Codec, Coins, Memory, PyTree


def require_switch(info: bool) -> None:
    """Raises unless `info` is a Python bool, on which the structure of the state depends."""
    if not isinstance(info, bool):
        raise ValueError(
            f"`info` must be a Python bool, got {info!r}. Under `optax.inject_hyperparams` pass "
            "`static_args=('info',)`."
        )


Observations: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""What a codec observes: `{name: (part, whole)}`."""

MEASURED = ("compression_error", "density", "residual_norm")


def add_observations(observed: Iterable[Observations]) -> Observations:
    """Of several units, rows or rounds together."""
    total: Observations = {}
    for each in observed:
        for name, (part, whole) in each.items():
            parts, wholes = total.get(name, (jnp.zeros(()), jnp.zeros(())))
            total[name] = (parts + part, wholes + whole)
    return total


def nothing_known(codec: Codec, units: list[jax.Array]) -> dict[str, jax.Array]:
    """The field `info` before the first step."""

    def observed(x: jax.Array) -> Observations:
        coins = Coins(jax.random.key(0), jax.random.key(0))
        return codec.observe(coins.public, codec.measure(coins, codec.init(x), x), x)

    told = codec.tell(codec.init(jnp.zeros(1)))
    seen = jax.eval_shape(observed, units[0]) if units else {}
    return {name: jnp.zeros(()) for name in (*MEASURED, *told, *seen, *codec.facts(1))}


def measure_info(
    codec: Codec,
    axes: tuple[str, ...],
    units: list[jax.Array],
    sent: list[jax.Array],
    memories: list[Memory],
    finite: jax.Array,
    common: Sequence[tuple[jax.Array, PyTree]],
) -> dict[str, jax.Array]:
    r"""Means over workers of what each knows by itself, in one all-reduce of three float32 or more.

    .. math:: \frac{1}{n} \sum_i \frac{\|q_i - x_i\|^2}{\|x_i\|^2}, \qquad
              \frac{1}{n} \sum_i \frac{|\{j : q_{ij} \ne 0\}|}{d}, \qquad
              \sqrt{\frac{1}{n} \sum_i \|e_i\|^2}

    Besides what the codec tells, added over units, and the ratios that it observes.

    Args:
      codec: The codec.
      axes: The axes of the workers.
      units: This worker's :math:`x_i`, in parts; of a codec with feedback, the `target`.
      sent: What it sent, decoded, :math:`q_i`, in parts.
      memories: What it remembers of each unit; its own are :math:`e_i`.
      finite: bool[]; NaN is told where it is false on any worker.
      common: The public coin and the statistics, agreed or its own, of each unit.
    """
    with jax.named_scope("info"):
        peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in units]))
        scale = jnp.where(peak > 0, peak, 1)  # So that squares of huge updates do not overflow.
        square = lambda x: jnp.sum(jnp.square(x))  # noqa: E731
        given = sum(square(x / scale) for x in units)
        lost = sum(square(q / scale - x / scale) for q, x in zip(sent, units, strict=True))
        filled = sum(jnp.sum(q != 0, dtype=jnp.uint32).astype(jnp.float32) for q in sent)
        kept = sum(
            square(e.astype(jnp.float32))
            for e in jax.tree.leaves([memory.own for memory in memories])
            if jnp.issubdtype(e.dtype, jnp.floating)
        )
        told = jax.tree.map(lambda *values: sum(values), *map(codec.tell, memories))
        parts = add_observations(
            codec.observe(*pair, x / scale) for pair, x in zip(common, units, strict=False)
        )
        seen = {
            name: jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
            for name, (part, whole) in parts.items()
        }
        own = jnp.stack(
            [
                jnp.where(peak > 0, lost / jnp.where(peak > 0, given, 1), 0),
                filled / max(sum(x.size for x in units), 1),
                jnp.asarray(kept, jnp.float32),
                *told.values(),
                *seen.values(),
            ]
        )
        error, density, square_norm, *news = lax.pmean(jnp.where(finite, own, jnp.nan), axes)
        measured = dict(zip(MEASURED, [error, density, jnp.sqrt(square_norm)], strict=True))
        return measured | dict(zip([*told, *seen], news, strict=True))
