"""Errors that are reported to the user in one line, without a traceback."""

from collections.abc import Sequence


class ExperimentError(Exception):
    """An invalid option, number, file or name. The message names it and the remedy."""

    code = 2


class LostProcessError(ExperimentError):
    """Another process of the cluster has ended, so this process cannot continue."""

    code = 3


class Interrupted(Exception):
    """The user stopped the run. The message names the partial record."""

    code = 130


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
