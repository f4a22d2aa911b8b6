"""What an aggregator with `diagnostics=True` tells of a step."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Codec, Context, Diagnostics, Memory

Ratios: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""`{name: (part, whole)}`."""

MEASURED = ("compression_error", "density", "residual_norm")


def add_totals(told: Iterable[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Of several units, rows or rounds together."""
    total: dict[str, jax.Array] = {}
    for each in told:
        for name, value in each.items():
            total[name] = total[name] + value if name in total else value
    return total


def add_ratios(told: Iterable[Ratios]) -> Ratios:
    """Of several units, rows or rounds together."""
    total: Ratios = {}
    for each in told:
        for name, (part, whole) in each.items():
            parts, wholes = total.get(name, (jnp.zeros(()), jnp.zeros(())))
            total[name] = (parts + part, wholes + whole)
    return total


def weighted_errors(squares: jax.Array, diagnosed: Sequence[Diagnostics]) -> Ratios:
    """The errors of units as ratios, of which the wholes are their squares, float32[units]."""
    return add_ratios(
        {name: (error * whole, whole) for name, error in each.errors.items()}
        for whole, each in zip(squares, diagnosed, strict=True)
    )


def initial_diagnostics(codecs: Sequence[Codec], units: list[jax.Array]) -> dict[str, jax.Array]:
    """The field `diagnostics` before the first step."""

    def told(codec: Codec, x: jax.Array) -> list[str]:
        context = Context.of(x, memory=codec.init(x))
        context = context.replace(statistics=codec.measure(context, x))
        names: list[str] = []

        def diagnose(context: Context, x: jax.Array) -> None:
            diagnosed = codec.diagnose(context, x, context.memory)
            names.extend(name for kind in diagnosed[1:] for name in kind)

        jax.eval_shape(diagnose, context, x)
        return names

    names = [name for x in units[:1] for codec in codecs for name in told(codec, x)]
    return {name: jnp.zeros(()) for name in (*MEASURED, *names)}


def measure_diagnostics(
    axes: tuple[str, ...],
    diagnosed: list[Diagnostics],
    sent: list[jax.Array],
    memories: list[Memory],
    finite: jax.Array,
) -> dict[str, jax.Array]:
    r"""Means over workers of what each knows by itself, in one all-reduce of three float32 or more.

    .. math:: \frac{1}{n} \sum_i \frac{\|q_i - x_i\|^2}{\|x_i\|^2}, \qquad
              \frac{1}{n} \sum_i \frac{|\{j : q_{ij} \ne 0\}|}{d}, \qquad
              \sqrt{\frac{1}{n} \sum_i \|e_i\|^2}

    Besides what the codec tells: totals, ratios and errors of all units together, and constants.

    Args:
      axes: The axes of the workers.
      diagnosed: Of each unit; its `target` is :math:`x_i`, in parts.
      sent: What this worker sent, decoded, :math:`q_i`, in parts.
      memories: What it remembers of each unit; its own are :math:`e_i`.
      finite: bool[]; NaN is told where it is false on any worker.
    """
    with jax.named_scope("diagnostics"):
        units = [each.target for each in diagnosed]
        peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in units]))
        scale = jnp.where(peak > 0, peak, 1)  # So that squares of huge updates do not overflow.
        square = lambda x: jnp.sum(jnp.square(x))  # noqa: E731
        squares = jnp.stack([square(x / scale) for x in units])
        given = jnp.sum(squares)
        lost = sum(square(q / scale - x / scale) for q, x in zip(sent, units, strict=True))
        filled = sum(jnp.sum(q != 0, dtype=jnp.uint32).astype(jnp.float32) for q in sent)
        kept = sum(
            square(e.astype(jnp.float32))
            for e in jax.tree.leaves([memory.own for memory in memories])
            if jnp.issubdtype(e.dtype, jnp.floating)
        )
        totals = add_totals(each.totals for each in diagnosed)
        ratios = add_ratios(each.ratios for each in diagnosed) | weighted_errors(squares, diagnosed)
        seen = {
            name: jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
            for name, (part, whole) in ratios.items()
        }
        own = jnp.stack(
            [
                jnp.where(peak > 0, lost / jnp.where(peak > 0, given, 1), 0),
                filled / max(sum(x.size for x in units), 1),
                jnp.asarray(kept, jnp.float32),
                *totals.values(),
                *seen.values(),
            ]
        )
        error, density, square_norm, *news = lax.pmean(jnp.where(finite, own, jnp.nan), axes)
        measured = dict(zip(MEASURED, [error, density, jnp.sqrt(square_norm)], strict=True))
        constants = {
            name: jnp.float32(number)
            for each in diagnosed
            for name, number in each.constants.items()
        }
        return measured | dict(zip([*totals, *seen], news, strict=True)) | constants
