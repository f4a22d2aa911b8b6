"""The description of a method for the experiments."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import jax
import optax

from jaxcomm import catalogue

Kind: TypeAlias = Literal["exact", "nearest", "unbiased", "biased", "signs", "feedback", "shifts"]

KINDS: dict[Kind, str] = {
    "exact": "exact",
    "nearest": "rounds to nearest",
    "unbiased": "unbiased",
    "biased": "biased, without memory",
    "signs": "signs only",
    "feedback": "biased, with error feedback",
    "shifts": "sends differences to a shift",
}
"""How the update differs from the mean."""

WHY_THEY_LOSE: dict[Kind, str] = {
    "exact": "the update is exact, so this is chance",
    "nearest": "they round to nearest, and a part that is always rounded the same way is lost",
    "unbiased": (
        "they are right on average, but their noise, the compression error, adds to that of the "
        "batches and requires smaller steps"
    ),
    "biased": "they are biased and have no memory: the part that they do not send is lost",
    "signs": (
        "they send only signs: a coordinate with a small gradient moves as far as any other, and "
        "steps do not shrink as the gradient does"
    ),
    "feedback": (
        "they send only a part of each update, and the rest in later steps, when the gradient that "
        "it was computed from is out of date"
    ),
    "shifts": (
        "they send what has changed since the last steps; with gradients of small batches most of "
        "that is noise, which they follow late"
    ),
}
"""Why methods of a kind may lose to the mean."""


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
        lowest and the highest value, as `experiments.study.search.Axis` has them. They do not
        change the bytes: the loss alone would choose the most bytes.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    kind: Kind
    bits: tuple[int | None, ...] = (None,)
    takes_bits: bool = False
    is_control: bool = False
    has_momentum: bool = False
    stage: Callable[[Any], int] | None = None
    grid: Mapping[str, tuple[Any, ...]] = {}


def of_catalogue(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The builder of a method of the catalogue, at the size of a model."""
    method = catalogue.METHODS[name]
    return lambda seed, **options: method.build(catalogue.LARGE, seed=seed, **options)


class TrainableMethod(Protocol):
    """The interface of a method with its options that the training loop uses."""

    @property
    def label(self) -> str:
        """The name of the method in tables and records."""

    @property
    def has_momentum(self) -> bool:
        """See `Method`."""

    @property
    def is_vote(self) -> bool:
        """Whether its update has the scale of signs, so its compression error means nothing."""

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
