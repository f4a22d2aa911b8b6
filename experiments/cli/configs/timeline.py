"""The options of `timeline`."""

import dataclasses

from experiments.cli.options import option, positive_number


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When do the bytes of a step move? Draws a simulated step of several plans.

    Question: how long is a step of a network if its gradients are sent at its end, layer by layer,
    merged, sparsified or by priority? The seconds are those of a model, and nothing trains.

    Command: `python -m experiments timeline`.

    Expected time: seconds.

    Number: the seconds of a step under each plan, and those in which computation waits.
    """

    network: str = option(
        "densenet201",
        "the network",
        choices=("resnet50", "resnet152", "densenet161", "densenet201"),
    )
    compute: float = option(0.361, "seconds of a forward and a backward pass", positive_number)
    latency: float = option(9.08e-4, "seconds of a message without its bytes", positive_number)
    bandwidth: float = option(1.352e9, "bytes per second of the whole collective", positive_number)
    encode: float = option(
        2e-9, "seconds a coordinate to select those of a sparse message", positive_number
    )
    figure: str = option("timeline.png", "the file of the picture")
