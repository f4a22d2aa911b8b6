"""The timing of codecs and of whole steps."""

import dataclasses

from experiments.configs.option import devices_option, option, positive_integer


@dataclasses.dataclass(frozen=True)
class Bench:
    """Is 8-bit dithering within twice the time of the plainest code that does the same?

    Question: how many nanoseconds a coordinate do encode and decode take on one device, against
    one fused line of jnp; how many does `jit(encode)` of every codec take, beside `jax.lax.top_k`
    and a copy; how long do the codecs of sparse updates take, beside the first of these; how long
    does `pallas_kernels` take to quantize and to sketch on a CPU, beside plain scatters; how long
    is a step of some methods, with what bytes; how long is a simulated window of 64, 256 and 1,024
    workers; what do the compiled programs of a step of 288 leaves hold; and how many times
    the plainest compression does a whole update take on one core?

    Command: `python -m experiments bench`, or `make bench`.

    Expected time: six minutes on two CPU cores.

    Number: the ratio of the medians, at most 2; nanoseconds of a core to quantize, at most 1.5;
    milliseconds to encode and to decode by S2 Reducer, at most 30 with the mean, and together less
    than `top_k` takes with peeling.
    """

    coordinates: int = option(10_000_000, "size of the array to dither", positive_integer)
    codec_coordinates: int = option(
        1_000_000, "size of the array that every codec encodes", positive_integer
    )
    sketch_coordinates: int = option(2**24, "size of the array to sketch", positive_integer)
    parameters: int = option(1_000_000, "size of the model whose step is timed", positive_integer)
    repetitions: int = option(9, "timings of each, taken in turn", positive_integer)
    windows: int = option(20, "simulated windows that are timed", positive_integer)
    devices: int | None = devices_option()
