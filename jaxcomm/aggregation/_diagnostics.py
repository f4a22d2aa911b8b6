"""The metrics of a step of an aggregator with `diagnostics=True`."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Codec, Context, Diagnostics, Memory
from jaxcomm.compression._compressed_memory import CompressedArray
from jaxcomm.compression._means import over_peak

Ratios: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""`{name: (part, whole)}`."""

MEASURED = ("compression_error", "density", "residual_norm")


def add_by_name(each: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sums by name of totals, or of parts and wholes, of several units, rows or rounds."""
    total: dict[str, Any] = {}
    for values in each:
        for name, value in values.items():
            total[name] = jax.tree.map(jnp.add, total[name], value) if name in total else value
    return total


def weighted_errors(squares: jax.Array, diagnosed: Sequence[Diagnostics]) -> Ratios:
    """The errors of units as ratios, weighted by `squares`, float32[units]."""
    return add_by_name(
        {name: (error * whole, whole) for name, error in each.errors.items()}
        for whole, each in zip(squares, diagnosed, strict=True)
    )


def initial_diagnostics(codecs: Sequence[Codec], units: list[jax.Array]) -> dict[str, jax.Array]:
    """The field `diagnostics` before the first step: zeros."""

    def names_of(codec: Codec, x: jax.Array) -> list[str]:
        context = Context.of(x, memory=codec.init(x))
        context = context.replace(statistics=codec.measure(context, x))
        names: list[str] = []

        def diagnose(context: Context, x: jax.Array) -> None:
            diagnosed = codec.diagnose(context, x, context.memory)
            names.extend(name for kind in diagnosed[1:] for name in kind)

        jax.eval_shape(diagnose, context, x)
        return names

    names = [name for x in units[:1] for codec in codecs for name in names_of(codec, x)]
    return {name: jnp.zeros((), jnp.float32) for name in (*MEASURED, *names)}


def measure_diagnostics(
    axes: tuple[str, ...],
    diagnosed: list[Diagnostics],
    sent: list[jax.Array],
    memories: list[Memory],
    finite: jax.Array,
) -> dict[str, jax.Array]:
    r"""Means over workers of per-worker metrics, in one all-reduce of three or more float32.

    .. math:: \frac{1}{n} \sum_i \frac{\|q_i - x_i\|^2}{\|x_i\|^2}, \qquad
              \frac{1}{n} \sum_i \frac{|\{j : q_{ij} \ne 0\}|}{d}, \qquad
              \sqrt{\frac{1}{n} \sum_i \|e_i\|^2}

    The result also has the metrics of the codec: totals, ratios and errors over all units, and
    constants.

    Args:
      axes: The axes of the workers.
      diagnosed: The diagnostics of each unit; the targets are the parts of :math:`x_i`.
      sent: This worker's payloads, decoded: the parts of :math:`q_i`.
      memories: The memory of each unit; the `own` fields are the parts of :math:`e_i`.
      finite: bool[]. Metrics are NaN if it is false on any worker.
    """
    with jax.named_scope("diagnostics"):
        units = [each.target for each in diagnosed]
        peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in units]))
        square = lambda x: jnp.sum(jnp.square(x))  # noqa: E731
        squares = jnp.stack([square(over_peak(x, peak)) for x in units])
        energy = jnp.sum(squares)
        loss = sum(
            square(over_peak(q, peak) - over_peak(x, peak))
            for q, x in zip(sent, units, strict=True)
        )
        nonzero = sum(jnp.sum(q != 0, dtype=jnp.uint32).astype(jnp.float32) for q in sent)
        is_compressed = lambda node: isinstance(node, CompressedArray)  # noqa: E731
        residual = sum(
            jnp.sum(e.square_norm) if is_compressed(e) else square(e.astype(jnp.float32))
            for e in jax.tree.leaves([memory.own for memory in memories], is_leaf=is_compressed)
            if is_compressed(e) or jnp.issubdtype(e.dtype, jnp.floating)
        )
        totals = add_by_name(each.totals for each in diagnosed)
        ratios = add_by_name(each.ratios for each in diagnosed) | weighted_errors(
            squares, diagnosed
        )
        quotients = {
            name: jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)
            for name, (part, whole) in ratios.items()
        }
        local = jnp.stack(
            [
                jnp.where(peak > 0, loss / jnp.where(peak > 0, energy, 1), 0),
                nonzero / max(sum(x.size for x in units), 1),
                jnp.asarray(residual, jnp.float32),
                *totals.values(),
                *quotients.values(),
            ]
        )
        error, density, square_norm, *others = lax.pmean(jnp.where(finite, local, jnp.nan), axes)
        measured = dict(zip(MEASURED, [error, density, jnp.sqrt(square_norm)], strict=True))
        constants = {
            name: jnp.float32(number)
            for each in diagnosed
            for name, number in each.constants.items()
        }
        return measured | dict(zip([*totals, *quotients], others, strict=True)) | constants
