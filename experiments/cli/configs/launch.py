"""The options of `launch`."""

import dataclasses

from experiments.cli.options import remaining_arguments


@dataclasses.dataclass(frozen=True)
class Launch:
    """How does `train` run as several processes, which exchange their updates?

    Starts processes of `python -m experiments train` or `pace`: an alias of
    `python -m jaxcomm.launch [OPTIONS] -- -m experiments train --distributed`.

    Command: `python -m experiments launch --processes 4 -- train --method global_qsgd`.

    Expected time: that of `train`, plus five seconds per process to start on two CPU cores.
    """

    arguments: tuple[str, ...] = remaining_arguments()
