"""Progress for a terminal and for a log: a line per result, and a bar on a terminal."""

from types import TracebackType

from rich import progress
from rich.console import Console

LOG_WIDTH = 150


class Progress:
    """Lines of results, with a bar below them on a terminal."""

    def __init__(self, total: int):
        """For `total` steps or runs."""
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, width=LOG_WIDTH)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def print(self, what: object) -> None:
        """Prints a line or a table."""
        self._bar.console.print(what)

    def advance(self, done: int, line: str) -> None:
        """Sets the number of finished steps or runs, and prints a line."""
        self._bar.update(self._task, completed=done)
        self.print(line)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
