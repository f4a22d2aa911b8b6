"""What can go wrong before processes train together, and while they do."""

WRONG_INPUT = 2
LOST_PROCESS = 3


class LaunchError(Exception):
    """A wrong option, variable or number of processes, or one that is missing; in one line."""

    code = WRONG_INPUT


class LostProcessError(LaunchError):
    """Another process of the cluster has ended, so that this one cannot go on."""

    code = LOST_PROCESS


def shown(text: str) -> str:
    """What a user has typed, as a message shows it: the beginning where it is long."""
    return repr(text) if len(text) <= 80 else f"{text[:40]!r}... of {len(text)} letters"
