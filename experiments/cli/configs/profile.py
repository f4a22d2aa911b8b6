"""The options of `profile`."""

import dataclasses

from experiments.cli.options import argument, option, positive_integer


@dataclasses.dataclass(frozen=True)
class Profile:
    """What does a step on a slow link spend its time on? Writes traces and a table.

    Question: which operations of the compiled step take how long in the first worker, computation,
    compression and collectives?

    Command: `python -m experiments profile FOLDER --methods two_stage:4 power_sgd_rank_1`, as root
    or where unprivileged user namespaces are permitted, on Linux with iproute2.

    Expected time: a minute per method.

    Number: milliseconds per step of each operation, without those inside it.
    """

    folder: str = argument("the folder for a trace per method and the table")
    methods: tuple[str, ...] = option(
        ("two_stage:4", "power_sgd_rank_1"), "methods of jaxcomm to profile", many=True
    )
    bandwidth: str = option("200mbit", "bandwidth of each worker's link")
    model: str = option("mlp", "what trains", choices=("mlp", "transformer"))
    workers: int = option(4, "number of workers, each a process", positive_integer)
    threads: int = option(1, "threads that compute, per process", positive_integer)
    steps: int = option(3, "steps of a trace", positive_integer)
    longest: int = option(10, "operations of the table, per method", positive_integer)
    delay: str | None = option(None, "delay per direction of the link, such as 5ms")

    def before_jax(self) -> None:
        """Moves this process to a private network, which requires a single thread."""
        from experiments.lab.isolation import isolate

        isolate()
