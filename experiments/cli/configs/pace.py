"""The options of `pace`."""

import dataclasses

from experiments.cli.options import (
    flag,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Does Non-blocking SGD save the wall-clock time that the simulated clock predicts?

    Question: several processes of one machine train on scikit-learn's digits. Extra work in each
    mini-batch slows down the last process. How long do synchronous SGD and Non-blocking SGD with a
    deadline take to reach the same training loss? Does the simulated clock, with the measured times
    of mini-batches, predict the same ratio?

    Command: `python -m experiments launch --processes 4 -- pace`.

    Expected time: seven minutes on two idle CPU cores.

    Number: the ratio of the two times, measured and simulated.
    """

    repeats: int = option(5, "runs per strategy, each with another seed", positive_integer)
    windows: int = option(90, "windows of a synchronous run", positive_integer)
    minibatches: int = option(4, "mini-batches per worker and window", positive_integer)
    minibatch_size: int = option(16, "examples per mini-batch", positive_integer)
    learning_rate: float = option(
        0.4, "learning rate of plain SGD, the same for both strategies", positive_number
    )
    minibatch_seconds: float = option(
        0.02, "seconds of sleep per mini-batch, which emulate an accelerator", positive_number
    )
    slowdown: float = option(3.0, "slowdown of the last process", positive_number)
    deadline_slack: float = option(
        1.1, "deadline of a window over the time of all mini-batches on a fast worker",
        positive_number,
    )  # fmt: skip
    loss: float = option(0.4, "training loss at which the time is measured", positive_number)
    log_every: int = option(3, "windows between two evaluations of the loss", positive_integer)
    distributed: bool = flag("join the processes that `launch` has started")
    start_timeout: float = option(
        300.0, "seconds within which all processes must start", positive_number
    )
    record: str = record_option("pace")
    records: str = records_option()
