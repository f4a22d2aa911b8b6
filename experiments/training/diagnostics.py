"""Diagnostics that aggregators report, and their maxima over a run."""

from collections.abc import Mapping
from typing import Any

import jax

RECORDED_MAXIMA = {
    "expected_error": "the predicted error of estimates, relative to the squared norm",
    "overflow": (
        "the fraction of rows of one worker above the capacity (for `union`, of rows of the union)"
    ),
    "union_density": "the fraction of rows in the union",
    "unpeeled": "the fraction of the union that peeling did not decode",
}
"""Diagnostics of aggregators whose maximum over steps is recorded, and what they are."""

_PREFIX = "diagnostics/"


def read_diagnostics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The diagnostics of a step by name: the largest, if several aggregators report the name."""
    values: dict[str, float] = {}
    for path, value in jax.device_get(dict(metrics)).items():
        if path.startswith(_PREFIX):
            name = path.rsplit("/")[-1]
            values[name] = max(values.get(name, float(value)), float(value))
    return values


def update_maxima(maxima: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """The maxima with the new values, for each name in `RECORDED_MAXIMA` that has a value."""
    return {
        f"max_{name}": max(maxima.get(f"max_{name}", values[name]), values[name])
        for name in RECORDED_MAXIMA
        if name in values
    }
