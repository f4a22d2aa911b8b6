"""What aggregators tell of their steps, and the most of it over a run."""

from collections.abc import Mapping
from typing import Any

import jax

MOST = ("overflow", "union_density", "unpeeled", "expected_error")
"""Of what aggregators with `diagnostics=True` tell, that whose largest value over steps is
recorded."""

_PREFIX = "diagnostics/"


def told_by(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What aggregators tell of a step; where several use a name, the largest."""
    told: dict[str, float] = {}
    for path, value in jax.device_get(dict(metrics)).items():
        if path.startswith(_PREFIX):
            name = path.rsplit("/")[-1]
            told[name] = max(told.get(name, float(value)), float(value))
    return told


def most(so_far: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """The larger of each name in `MOST`, as far as it is told."""
    return {
        f"most_{name}": max(so_far.get(f"most_{name}", told[name]), told[name])
        for name in MOST
        if name in told
    }
