"""Which processes run next: all again after a failure, fewer, or more when there is room."""

import signal
from pathlib import Path

from jaxcomm.launch._available import GROW, GrowthWatch, read_available
from jaxcomm.launch._errors import LaunchError
from jaxcomm.launch._messages import cause, explain
from jaxcomm.launch._options import LaunchOptions
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._run_directory import PREEMPTED, STARTED, RunDirectory

# Failures before the roll call was complete, one after the other, that take a slot out of use.
MOST_FAILED_STARTS = 2
PREEMPTED_CODE = 128 + signal.SIGTERM


class Restarts:
    """The slots of the next start, and whether there is one.

    A slot is a place for a process: its number selects the devices.
    """

    def __init__(self, options: LaunchOptions, directory: RunDirectory) -> None:
        self._options = options
        self._directory = directory
        self._lost: set[int] = set()  # Slots that could not start.
        self._left = options.restarts
        self._failed_starts = 0
        self.starts = 0  # How often the processes were started again.
        self.starts_again = False
        self._prepare()
        if (problem := self._too_few()) is not None:
            raise LaunchError(f"{problem}.")

    def _prepare(self) -> None:
        """Chooses the slots of the next start."""
        options = self._options
        room = options.processes
        self._growth: GrowthWatch | None = None
        if options.available is not None:
            room = read_available(Path(options.available))
        usable = [slot for slot in range(options.processes) if slot not in self._lost]
        self.slots = usable[:room]
        if options.available is not None:
            self._growth = GrowthWatch(
                Path(options.available), room, len(self.slots), options.processes, self._directory
            )

    def _too_few(self) -> str | None:
        if len(self.slots) >= self._options.min_processes:
            return None
        return (
            f"only {len(self.slots)} of {self._options.processes} processes can start and "
            f"--min-processes is {self._options.min_processes}"
        )

    def watch(self) -> Outcome | None:
        """Returns an outcome when the processes are to be stopped so that more can start."""
        return self._growth() if self._growth else None

    def _preempted(self, outcome: Outcome) -> bool:
        return outcome == Outcome(0) and self._directory.has(PREEMPTED)

    def code_of(self, outcome: Outcome) -> int:
        """Returns the exit code of the launch after its last start."""
        if outcome.interrupted is not None and outcome.reason == GROW:
            return 128 + outcome.interrupted
        return PREEMPTED_CODE if self._preempted(outcome) else outcome.code

    def _last_words(self, outcome: Outcome, processes: int) -> str | None:
        checkpoint = self._directory.checkpoint()
        if outcome.reason == GROW:  # It was interrupted while it stopped.
            outcome = Outcome(outcome.code, signal=outcome.interrupted)
        if self._preempted(outcome):
            outcome = Outcome(PREEMPTED_CODE, signal=signal.SIGTERM)
        return explain(outcome, processes, checkpoint)

    def _lose_slot(self, outcome: Outcome) -> None:
        """Takes a slot out of use after failed starts, if enough are left."""
        if outcome.failed is None or len(self.slots) <= self._options.min_processes:
            return
        # A process that explains its failure reports others, and does not say which slot.
        at_fault = self.slots[-1] if outcome.explained else self.slots[outcome.failed]
        self._lost.add(at_fault)
        self._failed_starts = 0

    def conclude(self, outcome: Outcome, program: str) -> str | None:
        """Decides what follows the end of all processes; returns the line of the launcher."""
        line = self._conclude(outcome)
        return line and f"{program}: {line}"

    def _conclude(self, outcome: Outcome) -> str | None:
        before = len(self.slots)
        grows = outcome.reason == GROW
        fails = outcome.failed is not None or self._preempted(outcome)
        self.starts_again = outcome.interrupted is None and (grows or (fails and self._left > 0))
        if not self.starts_again:
            return self._last_words(outcome, before)
        if grows:
            self._lost.clear()
        else:
            self._left -= 1
            started = self._directory.has(STARTED)
            self._failed_starts = 0 if started else self._failed_starts + 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                self._lose_slot(outcome)
        self._prepare()
        if (problem := self._too_few()) is not None:
            self.starts_again = False
            return f"error: {self._why(outcome, before)}; {problem}{self._newest()}."
        self.starts += 1
        checkpoint = self._directory.checkpoint()
        source = f"from the checkpoint {checkpoint}" if checkpoint else "without a checkpoint"
        used = self._options.restarts - self._left
        count = "" if grows else f" (restart {used} of {self._options.restarts})"
        start = f"{len(self.slots)} {'start' if len(self.slots) > 1 else 'starts'}"
        return f"{self._why(outcome, before)}; {start} again {source}{count}."

    def _why(self, outcome: Outcome, before: int) -> str:
        if outcome.reason == GROW:
            return f"there is room for more than {before} processes"
        if outcome.failed is None:
            return "a process has received SIGTERM and all have ended"
        return cause(outcome, before)

    def _newest(self) -> str:
        checkpoint = self._directory.checkpoint()
        return f"; the newest checkpoint is {checkpoint}" if checkpoint else ""
