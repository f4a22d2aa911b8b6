"""The options of `records`."""

import dataclasses
import datetime

from experiments.cli.options import option, records_option


@dataclasses.dataclass(frozen=True)
class Records:
    """Which studies have no new record? Runs them, or continues them where they stopped.

    Command: `python -m experiments records`, or `make records`.

    Expected time: hours. After an interruption, the same command goes on; on another day it needs
    `--after` and the day on which it began.

    Number: the minutes of each study.
    """

    studies: tuple[str, ...] = option(("all",), "studies to run, or all", many=True)
    after: str = option(
        "today", "the oldest date of a finished record that is not repeated, such as 2026-11-23"
    )
    records: str = records_option()

    @property
    def date(self) -> str:
        """The date of `after`, as in the names of records."""
        return str(datetime.date.today()) if self.after == "today" else self.after
