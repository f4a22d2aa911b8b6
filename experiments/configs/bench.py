"""The cost of every method, and of kernels, codecs and simulated windows."""

import dataclasses

from experiments.configs.option import (
    flag,
    option,
    positive_integer,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What does each method cost on a core, in memory and in the compiler?

    Question: how many nanoseconds a coordinate does the whole update of each method take on one
    core, and how many times the plainest compression is that; what does its compiled step read and
    write, hold, and exchange; which of it became worse since the last record of this machine? And:
    how many nanoseconds does 8-bit dithering take, beside one fused line of jnp; how long do the
    codecs of sparse updates take, beside that; how long does `pallas_kernels` take to quantize and
    to sketch on a CPU, beside plain scatters; how long is a simulated window of 64, 256 and 1,024
    workers?

    Command: `python -m experiments bench`, or `make bench`.

    Expected time: 15 minutes on two CPU cores that do nothing else; two with --quick.

    Number: multiples of the baseline, at most the goals of the table; the ratio of the medians of
    dithering, at most 2; nanoseconds of a core to quantize, at most 1.5; milliseconds to encode and
    to decode by S2 Reducer, at most 30 with the mean, and together less than `top_k` takes with
    peeling.
    """

    only: tuple[str, ...] = option(
        ("all",), "rows of the table, or families, and no other tables", many=True
    )
    quick: bool = flag("one row of each family, and no other tables")
    against: str = option(
        "newest", "record folder to compare with; newest: of each row, of the same machine and JAX"
    )
    repeats: int = option(3, "of the timing of updates, each of two rounds", positive_integer)
    side: int = option(1024, "of the ten square layers of the updates", positive_integer)
    width: int = option(1024, "of the transformer whose step is compiled", positive_integer)
    coordinates: int = option(10_000_000, "size of the array to dither", positive_integer)
    sketch_coordinates: int = option(2**24, "size of the array to sketch", positive_integer)
    repetitions: int = option(9, "timings of codecs, taken in turn", positive_integer)
    windows: int = option(20, "simulated windows that are timed", positive_integer)
    record: str = record_option("bench")
    records: str = records_option()
