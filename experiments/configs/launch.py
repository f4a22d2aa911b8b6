"""Several processes on one machine."""

import dataclasses

from experiments.configs.option import remaining_arguments


@dataclasses.dataclass(frozen=True)
class Launch:
    """How does `train` fare as several processes, which really send what they say?

    Starts processes of `python -m experiments train`, or `pace`: a name for
    `python -m jaxcomm.launch [OPTIONS] -- -m experiments train --distributed`.

    Command: `python -m experiments launch --processes 4 -- train --method global_qsgd`.

    Expected time: that of `train`, and five seconds a process to start on two CPU cores.
    """

    arguments: tuple[str, ...] = remaining_arguments()
