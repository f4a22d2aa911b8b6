"""What an experiment knows of a method."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import optax

Kind: TypeAlias = Literal["exact", "nearest", "unbiased", "biased", "signs", "feedback", "shifts"]

KINDS: dict[Kind, str] = {
    "exact": "exact",
    "nearest": "rounds to nearest",
    "unbiased": "unbiased",
    "biased": "biased, remembers nothing",
    "signs": "signs alone",
    "feedback": "biased, with error feedback",
    "shifts": "sends differences to a shift",
}
"""How the update differs from the mean."""


class Method(NamedTuple):
    """An aggregator to be built.

    Attributes:
      build: `(seed, **options) -> aggregator`; the seed decides the rounding.
      kind: How its update differs from the mean.
      bits: The widths that `all` stands for; `None` is the method without the option.
      takes_bits: Whether `bits` is an option.
      is_control: Whether it is wrong on purpose.
      has_momentum: Whether it gathers momentum itself, so that the optimizer is to have none.
      stage: Of an aggregator that does not send the same in each step, which branch of it the step
        from a state takes.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    kind: Kind
    bits: tuple[int | None, ...] = (None,)
    takes_bits: bool = False
    is_control: bool = False
    has_momentum: bool = False
    stage: Callable[[Any], int] | None = None


class TrainableMethod(Protocol):
    """A method with its options, as the training loop knows it."""

    @property
    def label(self) -> str:
        """How it is called in tables and records."""

    @property
    def has_momentum(self) -> bool:
        """As of a `Method`."""

    @property
    def stage(self) -> Callable[[Any], int] | None:
        """As of a `Method`."""

    def build(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The aggregator; `seed` decides its rounding."""

    def build_with_diagnostics(
        self, seed: int | jax.Array
    ) -> optax.GradientTransformationExtraArgs:
        """The aggregator, which tells what it knows of a step."""
