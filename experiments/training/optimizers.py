"""The optimizers of the command line."""

from collections.abc import Callable

import optax

MOMENTUM = 0.9

OPTIMIZER_TITLES = {"sgd": "SGD with momentum", "adam": "Adam", "adagrad": "Adagrad"}

OPTIMIZERS: dict[str, Callable[[float, float | None], optax.GradientTransformation]] = {
    "sgd": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum=momentum),
    "adam": lambda learning_rate, momentum: optax.adam(learning_rate),
    # The default of optax, 0.1, is much larger than the squared gradients here.
    "adagrad": lambda learning_rate, momentum: optax.adagrad(learning_rate, 0.0),
}
"""`(learning_rate, momentum) -> optimizer`; `None` if the aggregator has momentum."""
