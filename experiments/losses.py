"""What is made small in training, and when an answer is right."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Loss(NamedTuple):
    """How far what a network says is from the labels.

    Attributes:
      name: What it is called in a README.
      each: `(outputs, labels) -> float32[...]`, one a label.
      is_right: `(outputs, labels) -> bool[...]`, likewise.
    """

    name: str
    per_label: Callable[[jax.Array, jax.Array], jax.Array]
    is_correct: Callable[[jax.Array, jax.Array], jax.Array]


CROSS_ENTROPY = Loss(
    "cross-entropy",
    optax.softmax_cross_entropy_with_integer_labels,
    lambda logits, labels: jnp.argmax(logits, axis=-1) == labels,
)
"""Of classes. Right is the class of the largest logit."""

SQUARED_ERROR = Loss(
    "squared error",
    lambda outputs, labels: jnp.square(outputs - labels.astype(jnp.float32)),
    lambda outputs, labels: jnp.round(outputs).astype(jnp.int32) == labels,
)
"""Of whole numbers. Right is what rounds to the label."""

LOSSES: dict[str, Loss] = {"movielens": SQUARED_ERROR}
"""Of datasets whose labels are no classes."""
