"""What exchanges beside steps save on a slow link: Streaming DiLoCo in one program, and in two.

`python -m experiments.lab.overlap` starts one process per worker, each in a network namespace with
a shaped link and with two CPU devices. It needs root or unprivileged user namespaces, on Linux with
iproute2. All forms are measured in turn, and their ratios are of one round.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import NamedTuple

FORMS = ("no_communication", "one_program", "overlapped")


class Form(NamedTuple):
    """The steps of one form in one round, in milliseconds.

    Attributes:
      mean: Of all steps, the time of training.
      median: Of all steps, most of which neither begin nor apply an exchange.
      begins: The mean time above the median of the steps that begin an exchange.
      arrives: The same for the steps that apply one.
    """

    mean: float
    median: float
    begins: float
    arrives: float


def offsets(period: int, fragments: int, overlap: int) -> tuple[set[int], set[int]]:
    """The steps, modulo the period, that begin and that apply an exchange.

    Example:
      >>> offsets(8, 2, 3)
      ({0, 4}, {3, 7})
    """
    begins = {number * period // fragments for number in range(fragments)}
    return begins, {(step + overlap) % period for step in begins}


def of_steps(
    milliseconds: Sequence[float], begins: set[int], arrives: set[int], period: int
) -> Form:
    """The summary of the steps of whole periods, from a multiple of the period on.

    Example:
      >>> of_steps([4.0, 1.0, 1.0, 2.0], {0}, {3}, 4)
      Form(mean=2.0, median=1.5, begins=2.5, arrives=0.5)
    """
    median = statistics.median(milliseconds)

    def above(steps: set[int]) -> float:
        return statistics.mean(
            each - median for number, each in enumerate(milliseconds) if number % period in steps
        )

    return Form(statistics.mean(milliseconds), median, above(begins), above(arrives))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.lab.overlap", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rate", default="200mbit", help="bandwidth of each worker's link")
    parser.add_argument("--model", default="mlp", choices=("mlp", "transformer"))
    for name, default, text in (
        ("workers", 2, "number of workers, each a process"),
        ("period", 32, "steps between two exchanges of a fragment"),
        ("fragments", 2, "number of fragments"),
        ("overlap", 15, "steps between an exchange and the use of its result"),
        ("periods", 2, "periods of a measurement"),
        ("rounds", 3, "rounds, in which all forms are measured in turn"),
        ("threads", 2, "threads that compute, per process"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a line per round and form."""
    options = parsed(arguments)

    from experiments.lab.isolation import isolate

    isolate()  # Before anything starts a thread.

    from experiments.lab.network import Link, Network
    from experiments.lab.processes import FIRST_PORT, Group

    network = Network(options.workers)
    names = ("model", "period", "fragments", "overlap")
    begins, arrives = offsets(options.period, options.fragments, options.overlap)
    with Group(
        "overlap",
        options.workers,
        options.threads,
        {name: getattr(options, name) for name in names},
        keeps_memory=True,
        port=FIRST_PORT,
    ) as group:
        for form in FORMS:
            group.ask("prepare", form=form)
        network.shape(Link(options.rate))
        print(
            f"{options.rate}, {options.workers} workers, {options.model}, period {options.period}, "
            f"{options.fragments} fragments, overlap {options.overlap}; milliseconds",
            flush=True,
        )
        heads = ("round", "form", "mean", "median", "begins", "arrives", "MB/period", "of one")
        print(" ".join(f"{head:>16}" for head in heads), flush=True)
        for number in range(options.rounds):
            found: dict[str, Form] = {}
            for form in FORMS:
                answers = group.ask("measure", form=form, steps=options.periods * options.period)
                each = (answer["milliseconds"] for answer in answers)
                slowest = [*map(max, *each)]
                found[form] = of_steps(slowest, begins, arrives, options.period)
                sent = (answers[0]["sent"] or 0) / 1e6 / options.periods
                ratio = found[form].mean / found["one_program"].mean if len(found) > 1 else 0.0
                cells = [*(f"{each:.1f}" for each in found[form]), f"{sent:.1f}", f"{ratio:.3f}"]
                print(" ".join(f"{cell:>16}" for cell in (number, form, *cells)), flush=True)


if __name__ == "__main__":
    main()
