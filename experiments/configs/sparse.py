"""The comparison of all that sends sparse updates."""

import dataclasses

from experiments.configs.option import (
    devices_option,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """How much does S2 Reducer save on sparse updates, against everything it was compared with?

    Question: a language model with an embedding of 5,000 words on the text of Python's `help()`, or
    a factorization of MovieLens ratings; 8 workers, five seeds. How dense is the gradient of each
    leaf? For how many bytes of the sparse leaves, how many milliseconds of encoding and decoding,
    and what held-out loss after equally many steps does each method send them, each at the learning
    rate of one grid that does best on a validation split? Is the cut of 81 % that the paper states
    reached, within one standard deviation of the dense mean, and what do peeling and 8 bits add?

    Command: `python -m experiments sparse`, or `make sparse`.

    Expected time: twenty minutes on two CPU cores.

    Number: the bytes of the sparse leaves, to those of the sparse all-gather and of the dense
    all-reduce, beside the difference in held-out loss in standard deviations.
    """

    dataset: str = option("words", "what is trained on", choices=("words", "movielens"))
    data: str | None = option(None, "a plain-text file for words, u.data for movielens")
    vocabulary: int | None = option(
        None, "how many words have an embedding of their own: 5000 if not given", positive_integer
    )
    methods: tuple[str, ...] = option(
        ("all",), "what to compare; all for every one there is", many=True
    )
    optimizer: str = option(
        "adagrad",
        "adagrad, which leaves rows alone whose gradient is 0; sgd (momentum 0.9) or adam",
        choices=("adagrad", "sgd", "adam"),
    )
    seeds: int = option(5, "number of seeds", positive_integer)
    tuning_seeds: int = option(
        1, "seeds for choosing a rate, other than those that are reported", positive_integer
    )
    steps: int = option(150, "training steps a run", positive_integer)
    batch: int = option(256, "examples a step, of all workers together", positive_integer)
    log_every: int = option(150, "steps between two logged losses", positive_integer)
    learning_rates: tuple[float, ...] | None = option(
        (0.01, 0.03, 0.1, 0.3),
        "the grid, of which each method takes the one of least validation loss",
        positive_number,
        many=True,
    )
    calibration_batches: int = option(
        20, "batches from whose gradients densities are measured", positive_integer
    )
    repetitions: int = option(9, "timings of each codec", positive_integer)
    devices: int | None = devices_option()
    record: str = record_option("sparse")
    records: str = records_option()
