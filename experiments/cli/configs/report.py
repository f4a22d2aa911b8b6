"""The options of `report`."""

import dataclasses

from experiments.cli.options import argument, option


@dataclasses.dataclass(frozen=True)
class Report:
    """What does a record say? Writes a page with sortable tables and interactive figures.

    Command: `python -m experiments report RECORD`.

    Expected time: ten seconds.
    """

    folder: str = argument("the folder of the record")
    output: str | None = option(None, "the file to write (default: report.html in the record)")
