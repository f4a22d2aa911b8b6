"""The options of `sparse`."""

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
class Sparse:
    """How many bytes does S2 Reducer save on sparse updates, compared with other methods?

    Question: a language model with an embedding of 5,000 words on the text of Python's `help()`, or
    a factorization of MovieLens ratings; 8 workers, five seeds. How dense is the gradient of each
    leaf? How many bytes of the sparse leaves does each method send, how many milliseconds does it
    take to encode and decode them, and which held-out loss does it reach after the same number of
    steps? Each method uses the learning rate of one grid with the least validation loss. Does S2
    Reducer save the 81 % that the paper states, at a loss within one standard deviation of that of
    the dense mean, and what do peeling and 8 bits add?

    Command: `python -m experiments sparse`, or `make sparse`.

    Expected time: twenty minutes on two CPU cores.

    Number: the bytes of the sparse leaves over those of the sparse all-gather and of the dense
    all-reduce, and the difference in held-out loss in standard deviations.
    """

    dataset: str = option("words", "dataset to train on", choices=("words", "movielens"))
    data: str | None = option(None, "a plain-text file for words, u.data for movielens")
    vocabulary: int | None = option(
        None, "number of words with an embedding (default: 5000); only for words", positive_integer
    )
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    optimizer: str = option(
        "adagrad",
        "adagrad, which does not change rows whose gradient is 0; sgd (momentum 0.9); or adam",
        choices=("adagrad", "sgd", "adam"),
    )
    seeds: int = option(5, "number of seeds", positive_integer)
    tuning_seeds: int = option(
        1, "number of additional seeds for the choice of the rate", positive_integer
    )
    steps: int = option(150, "training steps per run", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    log_every: int = option(150, "steps between two logged losses", positive_integer)
    learning_rates: tuple[float, ...] | None = option(
        (0.01, 0.03, 0.1, 0.3),
        "the grid from which each method uses the rate with the least validation loss",
        positive_number,
        many=True,
    )
    calibration_batches: int = option(
        20, "batches on whose gradients densities are measured", positive_integer
    )
    repetitions: int = option(9, "timings of each codec", positive_integer)
    devices: int | None = devices_option()
    record: str = record_option("sparse")
    records: str = records_option()
