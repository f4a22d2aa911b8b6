"""The exchange of summed and merged means: payloads are combined, then decoded once."""

from collections.abc import Callable
from typing import TypeAlias

import jax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, Codec, PyTree
from jaxcomm.aggregation._agreement import all_finite, over_units, reduce_statistics
from jaxcomm.aggregation._exchange import (
    Encoded,
    Exchange,
    Exchanged,
    Part,
    decoded_payloads,
)

Combine: TypeAlias = Callable[[list[Part], list[PyTree]], list[PyTree]]
"""From this worker's payloads of all units to the payloads combined over workers."""


def _checkable(codec: Codec, statistic: PyTree) -> list[jax.Array]:
    """The statistics that are non-finite if the unit is; empty if there are none."""
    leaves = jax.tree.leaves(statistic) if "measure" in codec.fast.exposes_nonfinite else []
    return [leaf for leaf in leaves if leaf.size]


def combine_payloads(axis_name: AxisName, codec: Codec, combine: Combine) -> Exchange:
    """Reduces statistics, encodes with them, combines the payloads, and decodes once."""

    # The sum of such payloads is not finite if a unit of any worker is not.
    sends_statistics = {*jax.tree.leaves(codec.reduce_statistics)} - {"equal"}
    flagged_by_payload = "encode" in codec.fast.exposes_nonfinite and not sends_statistics

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        contexts = [part.context.replace(workers=workers) for part in parts]
        measured = [
            part.codec.measure(context, part.x)
            for context, part in zip(contexts, parts, strict=True)
        ]
        # A statistic is much smaller than its unit.
        checked = [
            array
            for part, statistic in zip(parts, measured, strict=True)
            for array in (_checkable(part.codec, statistic) or [part.x])
        ]
        groups = [part.unit.group for part in parts]
        of_groups = over_units(codec.reduce_statistics, measured, groups)
        statistics: dict[int, PyTree] = of_groups
        if not flagged_by_payload:
            statistics, finite = reduce_statistics(
                axis_name, codec.reduce_statistics, of_groups, all_finite(checked)
            )
        contexts = [
            context.replace(statistics=statistics[group])
            for context, group in zip(contexts, groups, strict=True)
        ]
        encoded = [
            part.codec.encode(context, part.x)
            for context, part in zip(contexts, parts, strict=True)
        ]
        payloads = [payload for payload, _ in encoded]
        totals = combine(parts, payloads)
        if flagged_by_payload:
            finite = all_finite(jax.tree.leaves(totals))
        units = [
            Encoded(context, memory, part.codec.decode(context.received(workers), total), total)
            for part, context, (_, memory), total in zip(
                parts, contexts, encoded, totals, strict=True
            )
        ]

        return Exchanged(units, finite, decoded_payloads(parts, contexts, payloads))

    return exchange
