"""Selects names that the user requests."""

from collections.abc import Sequence

from experiments.cli.errors import ExperimentError


def select(requested: Sequence[str], available: Sequence[str], option: str) -> list[str]:
    """The requested names, or all available names for `all`, in the order of `available`.

    Raises:
      ExperimentError: If a requested name is not available.
    """
    if unknown := [name for name in requested if name not in ("all", *available)]:
        raise ExperimentError(
            f"{option} must be of {', '.join(available)} or all, got {unknown[0]!r}."
        )
    return [name for name in available if name in requested or "all" in requested]
