"""Errors of the launcher, before and during training."""

WRONG_INPUT = 2
LOST_PROCESS = 3


class LaunchError(Exception):
    """An option, environment variable or process is wrong or missing. The message is one line."""

    code = WRONG_INPUT


class LostProcessError(LaunchError):
    """Another process of the cluster has ended, so this process cannot continue."""

    code = LOST_PROCESS


def shown(text: str) -> str:
    """Quotes user input for a message; shortens long input."""
    return repr(text) if len(text) <= 80 else f"{text[:40]!r}... of {len(text)} characters"
