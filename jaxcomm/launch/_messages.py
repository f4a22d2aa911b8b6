"""What the launcher says of the end of its processes."""

import signal

from jaxcomm.launch._processes import Outcome


def name_of(number: int) -> str:
    """Returns the name of a signal; real-time signals have only a number."""
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def cause(outcome: Outcome, processes: int) -> str:
    """Returns which process failed and how."""
    process = f"process {outcome.failed} of {processes}"
    if outcome.signal == signal.SIGSTOP:
        return f"{process} was stopped (SIGSTOP) and did not answer"
    how = f"exit code {outcome.code}" if outcome.signal is None else name_of(outcome.signal)
    return f"{process} has ended with {how}"


def explain(outcome: Outcome, processes: int, checkpoint: str | None = None) -> str | None:
    """Returns why the launch ended; None if a process has explained it and left no checkpoint."""
    newest = f"the newest checkpoint is {checkpoint}"
    if outcome.reason is not None:
        line = f"error: {outcome.reason}"
    elif outcome.failed is not None and outcome.explained:
        return f"{newest}." if checkpoint else None
    elif outcome.failed is not None:
        line = f"error: {cause(outcome, processes)}; the others were stopped"
    elif outcome.signal is not None:
        name = name_of(outcome.signal).removeprefix("signal ")
        line = f"interrupted: {name} has stopped all processes"
    else:
        return None
    return f"{line}; {newest}." if checkpoint else f"{line}."
