"""`python -m experiments pace`, one of several processes."""

import dataclasses

from experiments.configs.option import (
    flag,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Does Non-blocking SGD save the time on the wall that the simulated clock promises?

    Question: several processes of one machine train scikit-learn's digits, the last of them slowed
    by extra work in each mini-batch. How long do synchronous SGD and Non-blocking SGD with a
    deadline take to the same training loss, and does the simulated clock, told how long
    mini-batches took, give the same ratio?

    Command: `python -m experiments launch --processes 4 -- pace`.

    Expected time: seven minutes on two CPU cores that do nothing else.

    Number: the ratio of the two times, measured and simulated.
    """

    repeats: int = option(5, "runs of each, of a seed each", positive_integer)
    windows: int = option(90, "of a synchronous run", positive_integer)
    minibatches: int = option(4, "mini-batches of a worker in a window", positive_integer)
    minibatch_size: int = option(16, "examples of a mini-batch", positive_integer)
    learning_rate: float = option(0.4, "of plain SGD, the same for both", positive_number)
    minibatch_seconds: float = option(
        0.02, "that a mini-batch waits, in place of a device this machine lacks", positive_number
    )
    slowdown: float = option(3.0, "times as long for the last process", positive_number)
    deadline_slack: float = option(
        1.1, "of the deadline, in times of what all mini-batches take a fast worker",
        positive_number,
    )  # fmt: skip
    loss: float = option(0.4, "training loss to which time is taken", positive_number)
    log_every: int = option(3, "windows between two looks at the loss", positive_integer)
    distributed: bool = flag("join the processes that `launch` has started")
    start_timeout: float = option(
        300.0, "seconds until all processes have to be there", positive_number
    )
    record: str = record_option("pace")
    records: str = records_option()
