"""One run."""

import dataclasses

from experiments.configs.option import (
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

    method: str = option("global_qsgd", "such as mean, qsgd or two_stage; a wrong one lists all")
    bits: int | None = option(
        None, "bits a coordinate, where the method has them", positive_integer
    )
    dataset: str = option("digits", "digits, mnist, cifar10, text, words or movielens")
    data: str | None = option(None, "folder of mnist or cifar10, a text file, or u.data")
    optimizer: str = option("sgd", "sgd (momentum 0.9) or adam", choices=("sgd", "adam"))
    learning_rate: float = option(0.05, "constant", positive_number)
    steps: int = option(200, "training steps", positive_integer)
    batch: int = option(64, "examples a step, of all workers together", positive_integer)
    seed: int = option(0, "decides weights, batches and rounding", natural_number)
    log_every: int = option(20, "steps between two logged losses", positive_integer)
    devices: int | None = devices_option()
    distributed: bool = flag(
        "join the processes that `launch`, Slurm, Open MPI, Kubernetes or a TPU pod has started; "
        "the workers are the devices of all"
    )
    start_timeout: float = option(
        300.0, "seconds until all processes have to be there", positive_number
    )
    record: str = record_option("none")
    records: str = records_option()
