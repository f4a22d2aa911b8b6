"""The optimizers that a run can name."""

from collections.abc import Callable

import optax

MOMENTUM = 0.9

OPTIMIZERS: dict[str, Callable[[float, float | None], optax.GradientTransformation]] = {
    "sgd": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum=momentum),
    "adam": lambda learning_rate, momentum: optax.adam(learning_rate),
    # Optax begins with 0.1, far above the squares that it is to add up.
    "adagrad": lambda learning_rate, momentum: optax.adagrad(learning_rate, 0.0),
}
"""`(learning_rate, momentum) -> optimizer`; no momentum where the aggregator gathers it."""
