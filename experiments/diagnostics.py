"""What aggregators tell of their steps, and the most of it over a run."""

from collections.abc import Mapping
from typing import Any

import jax

RECORDED_MAXIMA = ("overflow", "union_density", "unpeeled", "expected_error")
"""Of what aggregators with `diagnostics=True` tell, that whose largest value over steps is
recorded."""

_PREFIX = "diagnostics/"


def read_diagnostics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What aggregators tell of a step; where several use a name, the largest."""
    values: dict[str, float] = {}
    for path, value in jax.device_get(dict(metrics)).items():
        if path.startswith(_PREFIX):
            name = path.rsplit("/")[-1]
            values[name] = max(values.get(name, float(value)), float(value))
    return values


def update_maxima(maxima: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """The larger of each name in `MOST`, as far as it is told."""
    return {
        f"most_{name}": max(maxima.get(f"most_{name}", values[name]), values[name])
        for name in RECORDED_MAXIMA
        if name in values
    }
