"""The options of `gossip`."""

import dataclasses

from experiments.cli.options import (
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Gossip:
    """Does MATCHA at half the budget train as well as D-PSGD, step for step?

    Question: a small convolutional network on scikit-learn's digits, 8 and 16 simulated workers on
    the graphs of MATCHA's paper and on a ring, five seeds, the training set split uniformly or with
    skewed labels (Dirichlet 0.1). Is the mean training loss of the consensus model within one
    standard deviation of D-PSGD's over the last half of the steps, with half the message rounds?
    Which loss do compressed, directed and asynchronous gossip reach, and for how many bytes?

    Command: `python -m experiments compare --preset gossip`.

    Expected time: fifteen minutes on two CPU cores.

    Number: the largest difference of the two curves over the last half, in standard deviations.
    """

    seeds: int = option(5, "number of seeds", positive_integer)
    steps: int = option(250, "training steps per run", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    learning_rate: float = option(
        0.1, "learning rate of plain SGD, the same for all methods", positive_number
    )
    log_every: int = option(10, "steps between two logged losses", positive_integer)
    graphs: tuple[str, ...] = option(
        ("all",), "erdos_renyi_8, ring_8, erdos_renyi_16, or all", many=True
    )
    splits: tuple[str, ...] = option(
        ("iid", "skewed"), "how the training set is split", choices=("iid", "skewed"), many=True
    )
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    record: str = record_option("gossip")
    records: str = records_option()
