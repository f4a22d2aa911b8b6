"""What is reported to the user in one line, without a traceback."""

WRONG_INPUT = 2
LOST_PROCESS = 3
INTERRUPTED = 130


class ExperimentError(Exception):
    """A wrong option, number, file or name. The message says which, and how to mend it."""

    code = WRONG_INPUT


class LostProcessError(ExperimentError):
    """Another process of the cluster has ended, so that this one cannot go on."""

    code = LOST_PROCESS


class Interrupted(Exception):
    """The user stopped the run. The message says what is left of it, and where."""
