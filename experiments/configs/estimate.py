"""The error of each mean on gradients of a training run."""

import dataclasses

from experiments.configs.option import (
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
    scikit-learn's digits with the exact mean; at a few steps of that run every method forms the
    mean of the 8 workers' own gradients, with fresh rounding in each of 20 draws. What is the
    squared error E|G - mean|^2 / |mean|^2 of each, for what it sends?

    Command: `python -m experiments estimate`.

    Expected time: under a minute on two CPU cores.

    Number: the error of each method beside its bits a coordinate; 0.04 for `global_qsgd:8` at 14
    bits, where the float32 all-reduce of 8 workers takes 56.
    """

    methods: tuple[str, ...] = option(
        ("all",),
        "what to compare, each METHOD or METHOD:BITS; all for every one there is",
        many=True,
    )
    steps: tuple[int, ...] = option(
        (1, 20, 60, 150), "steps whose gradients are taken", positive_integer, many=True
    )
    draws: int = option(20, "times each method rounds the same gradients", positive_integer)
    batch: int = option(256, "examples a step, of all workers together", positive_integer)
    learning_rate: float = option(0.05, "with SGD and momentum 0.9", positive_number)
    seed: int = option(0, "decides weights, batches and rounding", natural_number)
    devices: int | None = devices_option()
    record: str = record_option("estimate")
    records: str = records_option()
    dataset: str = "digits"
