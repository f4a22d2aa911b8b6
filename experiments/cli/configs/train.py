"""The options of `train`."""

import dataclasses

from experiments.cli.options import (
    devices_option,
    flag,
    natural_number,
    option,
    positive_integer,
    positive_number,
    record_option,
    records_option,
)


@dataclasses.dataclass(frozen=True)
class Train:
    """How does one method train one network?

    Command: `python -m experiments train --method global_qsgd --bits 8`.

    Expected time: ten seconds for digits on two CPU cores.
    """

    method: str = option(
        "global_qsgd",
        "the method, e.g. mean, qsgd or two_stage; the error for an unknown method lists all",
    )
    bits: int | None = option(
        None, "bits per coordinate, if the method has this option", positive_integer
    )
    dataset: str = option("digits", "digits, glyphs, mnist, cifar10, text, words or movielens")
    data: str | None = option(None, "folder of mnist or cifar10, a text file, or u.data")
    optimizer: str = option("sgd", "sgd (momentum 0.9) or adam", choices=("sgd", "adam"))
    learning_rate: float | None = option(
        None,
        "constant learning rate (default: the survey's choice for the method with sgd on digits)",
        positive_number,
    )
    steps: int = option(200, "training steps", positive_integer)
    batch: int = option(64, "examples per step, over all workers", positive_integer)
    seed: int = option(0, "seed of weights, batches and rounding", natural_number)
    log_every: int = option(20, "steps between two logged losses", positive_integer)
    devices: int | None = devices_option()
    distributed: bool = flag(
        "join the processes that `launch`, Slurm, Open MPI, Kubernetes or a TPU pod has started; "
        "the workers are the devices of all processes"
    )
    start_timeout: float = option(
        300.0, "seconds within which all processes must start", positive_number
    )
    record: str = record_option("none")
    records: str = records_option()
