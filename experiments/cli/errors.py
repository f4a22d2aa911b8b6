"""Errors that are reported to the user in one line, without a traceback."""

WRONG_INPUT = 2
LOST_PROCESS = 3
INTERRUPTED = 130


class ExperimentError(Exception):
    """An invalid option, number, file or name. The message names it and the remedy."""

    code = WRONG_INPUT


class LostProcessError(ExperimentError):
    """Another process of the cluster has ended, so this process cannot continue."""

    code = LOST_PROCESS


class Interrupted(Exception):
    """The user stopped the run. The message names the partial record."""
