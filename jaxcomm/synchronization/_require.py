"""Checks of options."""

import math
from typing import Any


def require_int(value: Any, option: str, least: int = 1) -> None:
    """Raises unless `value` is a Python int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{option}` must be a Python int of at least {least}, got {value!r}.")


def require_seconds(seconds: float, option: str) -> None:
    """Raises unless `seconds` is a finite number of at least 0."""
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"`{option}` must be a finite number of seconds, at least 0, got {seconds!r}."
        )
