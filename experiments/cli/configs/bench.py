"""The cost of every method, and of kernels, codecs and simulated windows."""

import dataclasses

from experiments.cli.options import (
    flag,
    option,
    positive_integer,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What does each method cost on a core, in memory and in the compiler?

    Question: how many nanoseconds per coordinate does the whole update of each method take on one
    core, and which multiple of a baseline, the simplest compression, is that? How many bytes does
    its compiled step access and hold, and how many collectives has it? Which of these numbers
    became worse since the last record of this machine? The other tables compare 8-bit dithering
    with one fused line of jnp, codecs of sparse updates with `jax.lax.top_k`, and `pallas_kernels`
    on a CPU with plain scatters. They also time simulated windows of 64, 256 and 1,024 workers.

    Command: `python -m experiments bench`, or `make bench`.

    Expected time: 25 minutes on two idle CPU cores; two minutes with --quick.

    Number: multiples of the baseline, at most the goals in the table; the time of dithering over
    that of plain code, at most 2; nanoseconds of one core to quantize, at most 1.5 per coordinate.
    S2 Reducer takes at most 30 ms each to encode and to decode with the mean, and less than `top_k`
    in total with peeling.
    """

    only: tuple[str, ...] = option(
        ("all",),
        "rows or families of the first table to measure, or goals; omits the other tables",
        many=True,
    )
    quick: bool = flag("measures a few rows of the first table; omits the other tables")
    against: str = option(
        "newest",
        "record folder to compare with; newest: per row, the newest record of this machine and JAX",
    )
    repeats: int = option(3, "timings of the updates, each of two rounds", positive_integer)
    side: int = option(
        1024, "width of the ten square layers of the timed updates", positive_integer
    )
    width: int = option(1024, "width of the transformer whose step is compiled", positive_integer)
    coordinates: int = option(10_000_000, "size of the array to dither", positive_integer)
    sketch_coordinates: int = option(2**24, "size of the array to sketch", positive_integer)
    repetitions: int = option(9, "timings of the codecs, in turn", positive_integer)
    windows: int = option(20, "number of simulated windows to time", positive_integer)
    record: str = record_option("bench")
    records: str = records_option()
