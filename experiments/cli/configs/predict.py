"""The options of `predict`."""

import dataclasses

from experiments.cli.options import argument


@dataclasses.dataclass(frozen=True)
class Predict:
    """How well does the cost model predict a record of the lab? Prints a table.

    Question: the computation is that of the control, the time of each codec is from the unshaped
    link, and the bandwidth is nominal. What is the error of `jaxcomm.perf` on the shaped links, and
    is the method with the least predicted time the fastest?

    Command: `python -m experiments predict RECORD`.

    Expected time: a minute.

    Number: the median error per link.
    """

    folder: str = argument("the folder of a record of the study `lab`")
