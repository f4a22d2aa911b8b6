"""The comparison of every method, each at a learning rate of its own."""

import dataclasses

from experiments.configs.compare import Compare
from experiments.configs.option import option, positive_integer, positive_number, record_option


@dataclasses.dataclass(frozen=True)
class Survey(Compare):
    """Which methods lose to the exact mean, at what they save, and why?

    Question: the network and data of `compare`, 8 workers, five seeds. Each method takes the
    learning rate that does best on a fifth of the training set held out, from one small grid, with
    seeds of its own; then it is trained on the whole training set. For how many bytes does it reach
    what test loss, and is that more than the exact mean reaches from the same weights and batches?

    Command: `python -m experiments survey`, or `make survey`; the same as `compare` with these
    options.

    Expected time: half an hour on two busy CPU cores.

    Number: the ratio of each method's test loss to that of `mean`, beside that of its bytes.
    """

    methods: tuple[str, ...] = option(
        ("all",),
        "what to compare, each METHOD or METHOD:BITS; all for every one there is",
        many=True,
    )
    optimizers: tuple[str, ...] = option(
        ("sgd",), "one or more of them", choices=("sgd", "adam"), many=True
    )
    steps: int = option(150, "training steps a run", positive_integer)
    batch: int = option(128, "examples a step, of all workers together", positive_integer)
    learning_rate_sgd: float = 0.05  # No option: the grid takes its place.
    learning_rate_adam: float = 0.002
    log_every: int = option(50, "steps between two logged losses", positive_integer)
    learning_rates: tuple[float, ...] | None = option(
        (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        "the grid, of which each method takes the one of least validation loss",
        positive_number,
        many=True,
    )
    record: str = record_option("survey")
