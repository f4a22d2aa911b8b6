"""`python -m experiments stragglers`."""

import dataclasses

from experiments.configs.option import (
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """What is it worth not to wait for slow workers?

    Question: 8 simulated workers train scikit-learn's digits and a language model of bytes, some of
    them slow: half of them by a factor of 3, all of them at random (exponential, Pareto), or one of
    them as good as dead. How long do synchronous SGD, local SGD, D-PSGD and MATCHA take to a
    training loss on a simulated clock, and how long does Non-blocking SGD take in its three
    variants? The paper claims up to half the time of D-PSGD and MATCHA.

    Command: `python -m experiments stragglers`.

    Expected time: forty minutes on two CPU cores.

    Number: seconds to the same loss, of D-PSGD and MATCHA, to those of their non-blocking forms.
    """

    seeds: int = option(5, "number of seeds", positive_integer)
    steps: int = option(
        120, "windows of a run, if every worker did all it has in each", positive_integer
    )
    text_steps: int = option(60, "the same of the text", positive_integer)
    minibatches: int = option(4, "mini-batches of a worker in a window", positive_integer)
    minibatch_size: int = option(16, "examples of a mini-batch", positive_integer)
    period: int = option(8, "mini-batches between two meetings of local SGD", positive_integer)
    learning_rates: tuple[float, ...] = option(
        (0.1, 0.2, 0.4, 0.8, 1.6), "the grid of learning rates", positive_number, many=True
    )
    log_every: int = option(4, "windows between two logged losses", positive_integer)
    datasets: tuple[str, ...] = option(
        ("digits", "text"), "what is trained", choices=("digits", "text"), many=True
    )
    speeds: tuple[str, ...] = option(
        ("all",), "3:1, exponential, pareto, dead_slow, or all", many=True
    )
    strategies: tuple[str, ...] = option(("all",), "which, or all", many=True)
    minibatch_seconds: float = option(
        0.01, "that a mini-batch takes a fast worker", positive_number
    )
    bandwidth: float = option(12.5e6, "bytes that a worker sends in a second", positive_number)
    latency: float = option(2e-4, "seconds of a message", positive_number)
    record: str = record_option("stragglers")
    records: str = records_option()
