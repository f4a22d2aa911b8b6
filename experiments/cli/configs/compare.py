"""The options of `compare`, which `make demo` runs."""

import dataclasses

from experiments.cli.options import (
    devices_option,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Compare:
    """Does 8-bit Global-QSGD train as well as the exact mean for about a quarter of its bytes?

    Question: a small convolutional network on scikit-learn's digits, 8 workers, five seeds; every
    method starts from the same weights and sees the same batches. Is the mean final loss over the
    whole training set within 1.5 times that of the float32 mean, at no more than 0.26 of its bytes?
    The comparison must also discriminate: two controls, truncation instead of random rounding and
    the largest 1 % without error feedback, must each exceed one of the two limits.

    Command: `python -m experiments compare`, or `make demo`.

    Expected time: about two minutes on two CPU cores.

    Number: the ratio of the final loss of `global_qsgd:8` to that of `mean`, about 1.0 with SGD and
    momentum and about 1.2 with Adam, at 0.25 of the bytes.
    """

    methods: tuple[str, ...] = option(
        ("mean", "global_qsgd:8", "global_qsgd:16", "qsgd", "truncating", "top_1_percent"),
        "methods to compare, each METHOD or METHOD:BITS, or all",
        many=True,
    )
    optimizers: tuple[str, ...] = option(
        ("sgd", "adam"), "one or more optimizers", choices=("sgd", "adam"), many=True
    )
    seeds: int = option(5, "number of seeds", positive_integer)
    steps: int = option(150, "training steps per run", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    learning_rate_sgd: float = option(
        0.05, "learning rate of SGD with momentum 0.9", positive_number
    )
    learning_rate_adam: float = option(0.002, "learning rate of Adam", positive_number)
    log_every: int = option(25, "steps between two logged losses", positive_integer)
    learning_rates: tuple[float, ...] | None = option(
        None,
        "a grid that replaces the two options above: each method uses the rate with the least "
        "validation loss, and one device simulates the workers",
        positive_number,
        many=True,
    )
    tuning_seeds: int = option(
        2, "number of additional seeds for the choice of the rate", positive_integer
    )
    devices: int | None = devices_option()
    record: str = record_option("digits")
    records: str = records_option()
    dataset: str = "digits"
    most_loss: float = 1.5
    most_bytes: float = 0.26
    passing: str = "global_qsgd:8"

    @property
    def fixed_learning_rates(self) -> dict[str, float]:
        """The learning rate of each optimizer, the same for all methods."""
        return {"sgd": self.learning_rate_sgd, "adam": self.learning_rate_adam}
