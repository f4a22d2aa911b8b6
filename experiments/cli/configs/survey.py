"""The options of `survey`."""

import dataclasses

from experiments.cli.configs.compare import Compare
from experiments.cli.options import option, positive_integer, positive_number, record_option


@dataclasses.dataclass(frozen=True)
class Survey(Compare):
    """Which methods lose to the exact mean, why, and how many bytes do they save?

    Question: the network and data of `compare`, 8 workers, five seeds. Each method uses the
    learning rate of a small grid that has the least loss on a held-out fifth of the training set,
    over additional seeds. Then it is trained on the whole training set. How many bytes does it send
    and which test loss does it reach? Is that loss higher than that of the exact mean from the same
    weights and batches?

    Command: `python -m experiments survey`, or `make survey`; the same as `compare` with these
    options.

    Expected time: half an hour on two busy CPU cores.

    Number: the ratio of each method's test loss to that of `mean`, and the ratio of its bytes.
    """

    methods: tuple[str, ...] = option(
        ("all",),
        "methods to compare, each METHOD or METHOD:BITS, or all",
        many=True,
    )
    optimizers: tuple[str, ...] = option(
        ("sgd",), "one or more optimizers", choices=("sgd", "adam"), many=True
    )
    steps: int = option(150, "training steps per run", positive_integer)
    batch: int = option(128, "examples per step, over all workers", positive_integer)
    learning_rate_sgd: float = 0.05  # Not an option: the grid replaces it.
    learning_rate_adam: float = 0.002
    log_every: int = option(50, "steps between two logged losses", positive_integer)
    learning_rates: tuple[float, ...] | None = option(
        (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        "the grid from which each method uses the rate with the least validation loss",
        positive_number,
        many=True,
    )
    record: str = record_option("survey")
