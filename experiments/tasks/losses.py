"""Loss functions, and the criterion of a correct prediction."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Loss(NamedTuple):
    """A loss of the outputs of a network.

    Attributes:
      name: Its name in a README.
      per_label: `(outputs, labels) -> float32[...]`, the loss per label.
      is_correct: `(outputs, labels) -> bool[...]`, per label.
    """

    name: str
    per_label: Callable[[jax.Array, jax.Array], jax.Array]
    is_correct: Callable[[jax.Array, jax.Array], jax.Array]


CROSS_ENTROPY = Loss(
    "cross-entropy",
    optax.softmax_cross_entropy_with_integer_labels,
    lambda logits, labels: jnp.argmax(logits, axis=-1) == labels,
)
"""For classes. The prediction is the class with the largest logit."""

SQUARED_ERROR = Loss(
    "squared error",
    lambda outputs, labels: jnp.square(outputs - labels.astype(jnp.float32)),
    lambda outputs, labels: jnp.round(outputs).astype(jnp.int32) == labels,
)
"""For integers. A prediction is correct if it rounds to the label."""

LOSSES: dict[str, Loss] = {"movielens": SQUARED_ERROR}
"""The losses of datasets whose labels are not classes."""
