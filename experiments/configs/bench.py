"""The timing of the codec and of whole steps."""

import dataclasses

from experiments.configs.option import devices_option, option, positive_integer


@dataclasses.dataclass(frozen=True)
class Bench:
    """Is 8-bit dithering within twice the time of the plainest code that does the same?

    Question: how many nanoseconds a coordinate do encode and decode take on one device, against
    one fused line of jnp; and how long is a step of each method, with what bytes?

    Command: `python -m experiments bench`, or `make bench`.

    Expected time: ten seconds on two CPU cores.

    Number: the ratio of the medians, at most 2.
    """

    coordinates: int = option(10_000_000, "size of the array to encode", positive_integer)
    parameters: int = option(1_000_000, "size of the model whose step is timed", positive_integer)
    repetitions: int = option(9, "timings of each, taken in turn", positive_integer)
    devices: int | None = devices_option()
