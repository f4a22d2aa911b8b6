"""The options of `figures`."""

import dataclasses

from experiments.cli.options import argument


@dataclasses.dataclass(frozen=True)
class Figures:
    """What does a record look like? Redraws its figure from its files alone.

    Command: `python -m experiments figures RECORD`.

    Expected time: seconds.
    """

    folder: str = argument("the folder of the record")
