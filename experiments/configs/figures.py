"""Figures of a record."""

import dataclasses

from experiments.configs.option import argument


@dataclasses.dataclass(frozen=True)
class Figures:
    """What does a record look like? Draws its figures anew, from its files alone.

    Command: `python -m experiments figures RECORD`.

    Expected time: seconds.
    """

    folder: str = argument("folder of a record")
