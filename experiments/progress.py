"""Progress for a terminal and for a log: a line a result, and on a terminal a bar."""

from types import TracebackType

from rich import progress
from rich.console import Console

LOG_WIDTH = 150


class Progress:
    """Lines of results; on a terminal, a bar below them."""

    def __init__(self, total: int):
        """Of `total` steps or runs."""
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
        """So many are done; prints a line about the latest."""
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
