"""The description of a method for the experiments."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

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
    """A method, which builds an aggregator.

    Attributes:
      build: `(seed, **options) -> aggregator`, with the seed of its rounding.
      kind: How its update differs from the mean.
      bits: The values of `bits` that `all` selects; `None` is the method without the option.
      takes_bits: Whether `bits` is an option.
      is_control: Whether the method is a control, incorrect by design.
      has_momentum: Whether the aggregator has momentum, so the optimizer must have none.
      stage: `state -> branch` of the next step, if branches send different numbers of bytes.
      grid: Options of `build` that are tuned, by name: the values to try, and optionally the
        lowest and the highest value, as `experiments.study.search.Axis` has them.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    kind: Kind
    bits: tuple[int | None, ...] = (None,)
    takes_bits: bool = False
    is_control: bool = False
    has_momentum: bool = False
    stage: Callable[[Any], int] | None = None
    grid: Mapping[str, tuple[Any, ...]] = {}


class TrainableMethod(Protocol):
    """The interface of a method with its options that the training loop uses."""

    @property
    def label(self) -> str:
        """The name of the method in tables and records."""

    @property
    def has_momentum(self) -> bool:
        """See `Method`."""

    @property
    def stage(self) -> Callable[[Any], int] | None:
        """See `Method`."""

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        """See `Method`."""

    def tuned(self, **options: Any) -> Self:
        """The same method with other options of its grid."""

    def build(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The aggregator, with the seed of its rounding."""

    def build_with_diagnostics(
        self, seed: int | jax.Array
    ) -> optax.GradientTransformationExtraArgs:
        """The aggregator, which reports diagnostics of a step."""
