"""Where a method is above or below its reference: all settings, also those where it loses."""

import math
from collections.abc import Sequence

from experiments.study.columns import Line
from experiments.study.groups import Estimate

SIGNS = ("higher", "lower", "not told apart", "not measurable")


def _sign(estimate: Estimate, equal: float) -> str:
    if math.isnan(estimate.mean):
        return "not measurable"
    if estimate.low > equal:
        return "higher"
    return "lower" if estimate.high < equal else "not told apart"


def describe_signs(
    lines: Sequence[Line], column: str, names: Sequence[str], *, equal: float = 1.0
) -> str:
    """The settings in which an interval is above, below or around `equal`, or there is none.

    Args:
      lines: Lines of a table. Those without an estimate, such as the reference itself, do not
        count.
      column: A column of estimates, such as ratios to a reference.
      names: The keys that name a line.
      equal: The value without a difference: 1 for ratios, 0 for differences.

    Example:
      >>> from experiments.study.groups import Group
      >>> lines = [
      ...     Line(Group({"graph": graph}, [], {}, {}), {"ratio": Estimate(mean, low, 2 * mean)})
      ...     for graph, mean, low in (("ring", 1.2, 1.1), ("torus", 1.1, 0.9))
      ... ]
      >>> describe_signs(lines, "ratio", ["graph"])
      'higher in 1 of 2 settings: ring (1.20); not told apart in 1: torus (1.10)'
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        estimate = line.values[column]
        if not isinstance(estimate, Estimate):
            continue
        sign = _sign(estimate, equal)
        number = " (diverged)" if math.isinf(estimate.mean) else f" ({estimate.mean:.2f})"
        where = " ".join(str(line.group.keys[name]) for name in names)
        found.setdefault(sign, []).append(where + (number if sign != SIGNS[-1] else ""))
    total = sum(map(len, found.values()))
    parts = [
        f"{sign} in {len(found[sign])}: {', '.join(found[sign])}" for sign in SIGNS if sign in found
    ]
    unit = f" of {total} setting{'' if total == 1 else 's'}:"
    return "; ".join(parts).replace(":", unit, 1) if parts else "not compared"
