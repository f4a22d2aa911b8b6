"""The options of `estimate`."""

import dataclasses

from experiments.cli.options import (
    devices_option,
    natural_number,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How far from the exact mean is each method on real gradients, and at how many bits?

    Question: distributed mean estimation. A small convolutional network is trained once on
    scikit-learn's digits with the exact mean. At a few steps of that run, every method estimates
    the mean of the gradients of the 8 workers, with new rounding in each of 20 draws. What is the
    squared error E|G - mean|^2 / |mean|^2 of each method, and how many bytes does it send?

    Command: `python -m experiments estimate`.

    Expected time: under a minute on two CPU cores.

    Number: the error of each method and its bits per coordinate: 0.04 for `global_qsgd:8` at 14
    bits; the float32 all-reduce of 8 workers sends 56.
    """

    methods: tuple[str, ...] = option(
        ("all",),
        "methods to compare, each METHOD or METHOD:BITS, or all",
        many=True,
    )
    steps: tuple[int, ...] = option(
        (1, 20, 60, 150), "steps at which the gradients are estimated", positive_integer, many=True
    )
    draws: int = option(20, "estimates of the same gradients per method", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    learning_rate: float = option(0.05, "learning rate of SGD with momentum 0.9", positive_number)
    seed: int = option(0, "seed of weights, batches and rounding", natural_number)
    devices: int | None = devices_option()
    record: str = record_option("estimate")
    records: str = records_option()
    dataset: str = "digits"
