"""The options of `stragglers`."""

import dataclasses

from experiments.cli.options import (
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """How much time does training without waiting for slow workers save?

    Question: 8 simulated workers train scikit-learn's digits and a language model of bytes. Workers
    are slow in one of four ways: half of them by a factor of 3; all of them at random, with
    exponential or Pareto times; or one of them by a factor of 100. How long do synchronous SGD,
    local SGD, D-PSGD and MATCHA take to reach a training loss on a simulated clock, and how long do
    their non-blocking variants take? The paper claims up to half the time of D-PSGD and MATCHA.

    Command: `python -m experiments stragglers`.

    Expected time: forty minutes on two CPU cores.

    Number: seconds to the same loss of D-PSGD and MATCHA over those of their non-blocking forms.
    """

    seeds: int = option(5, "number of seeds", positive_integer)
    steps: int = option(
        120,
        "windows of a run in which every worker finishes all its mini-batches",
        positive_integer,
    )
    text_steps: int = option(60, "the same for the dataset text", positive_integer)
    minibatches: int = option(4, "mini-batches per worker and window", positive_integer)
    minibatch_size: int = option(16, "examples per mini-batch", positive_integer)
    period: int = option(
        8, "mini-batches between two averaging rounds of local SGD", positive_integer
    )
    learning_rates: tuple[float, ...] = option(
        (0.1, 0.2, 0.4, 0.8, 1.6), "the grid of learning rates", positive_number, many=True
    )
    log_every: int = option(4, "windows between two logged losses", positive_integer)
    datasets: tuple[str, ...] = option(
        ("digits", "text"), "datasets to train on", choices=("digits", "text"), many=True
    )
    speeds: tuple[str, ...] = option(
        ("all",), "speeds of the workers: 3:1, exponential, pareto, dead_slow, or all", many=True
    )
    strategies: tuple[str, ...] = option(("all",), "strategies to compare, or all", many=True)
    minibatch_seconds: float = option(
        0.01, "seconds of a mini-batch on a fast worker", positive_number
    )
    bandwidth: float = option(12.5e6, "bytes per second that a worker sends", positive_number)
    latency: float = option(2e-4, "seconds of latency per message", positive_number)
    record: str = record_option("stragglers")
    records: str = records_option()
