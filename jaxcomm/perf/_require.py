"""Checks of numbers, whose errors name the argument, the rule and the value."""

import sys


def is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    most = sys.float_info.max  # `math.isfinite` raises for an int beyond floats.
    return -most <= value <= most


def require_positive(value: object, option: str) -> None:
    """Raises unless `value` is a finite number above 0."""
    if not (is_number(value) and value > 0):  # type: ignore[operator]
        raise ValueError(f"`{option}` must be a finite number above 0, got {value!r}.")


def require_at_least(least: float, value: object, option: str) -> None:
    """Raises unless `value` is a finite number of at least `least`."""
    if not (is_number(value) and value >= least):  # type: ignore[operator]
        raise ValueError(f"`{option}` must be a finite number of at least {least}, got {value!r}.")


def require_share(value: object, option: str) -> None:
    """Raises unless `value` is a number from 0 to 1."""
    if not (is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        raise ValueError(f"`{option}` must be a number from 0 to 1, got {value!r}.")


def require_workers(value: object) -> None:
    """Raises unless `value` is a number of workers."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`workers` must be an int of at least 1, got {value!r}.")
