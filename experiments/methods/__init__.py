"""All methods of the experiments, by name."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from experiments.cli.errors import ExperimentError
from experiments.methods._means import MEANS
from experiments.methods._method import (
    KINDS,
    WHY_THEY_LOSE,
    Kind,
    Method,
    TrainableMethod,
)
from experiments.methods._quantizers import QUANTIZERS
from experiments.methods._sparsifiers import SPARSIFIERS

METHODS: dict[str, Method] = {**MEANS, **QUANTIZERS, **SPARSIFIERS}

ALL = "all"
BASELINE = "mean"


class Variant(NamedTuple):
    """A method with its options.

    Attributes:
      method: The name of the method.
      bits: The option `bits`; None is its default.
      options: The tuned options of the method.
    """

    method: str
    bits: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The name of the variant in tables, in records and on the command line."""
        return self.method if self.bits is None else f"{self.method}:{self.bits}"

    @property
    def is_control(self) -> bool:
        """Whether the method is a control, incorrect by design."""
        return METHODS[self.method].is_control

    @property
    def kind(self) -> Kind:
        """How its update differs from the mean."""
        return METHODS[self.method].kind

    @property
    def is_vote(self) -> bool:
        """Whether its update is a vote on signs, whose compression error means nothing."""
        return self.kind == "signs"

    @property
    def has_momentum(self) -> bool:
        """Whether the aggregator has momentum."""
        return METHODS[self.method].has_momentum

    @property
    def stage(self) -> Callable[[Any], int] | None:
        """`state -> branch` of the next step, if the branches send different numbers of bytes."""
        return METHODS[self.method].stage

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        """The options that are tuned."""
        return METHODS[self.method].grid

    def tuned(self, **options: Any) -> "Variant":
        """The same method with other options of its grid."""
        return self._replace(options=tuple(options.items()))

    def build(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The aggregator, with the seed of its rounding."""
        options = {} if self.bits is None else {"bits": self.bits}
        return METHODS[self.method].build(seed, **options, **dict(self.options))

    def build_with_diagnostics(
        self, seed: int | jax.Array
    ) -> optax.GradientTransformationExtraArgs:
        """The same aggregator: these methods report no diagnostics here."""
        return self.build(seed)


_VARIANTS = [Variant(name, bits) for name, method in METHODS.items() for bits in method.bits]

ALL_LABELS = tuple(variant.label for variant in _VARIANTS)
"""The labels that `all` selects."""

SELECTED = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "two_stage:4", "terngrad", "natural_two_stage"),
    *("top_1_percent", "ecq", "diana", "signum", "ef_sign_sgd", "ef_top_1_percent"),
    *("ef_random_10_percent", "variance_based"),
    *("deep_gradient_compression", "ef21_top_10_percent"),
)
"""Methods of all kinds, for runs that are too long for all methods."""

ESTIMATORS = tuple(
    variant.label
    for variant in _VARIANTS
    if variant.kind in ("exact", "nearest", "unbiased", "biased")
)
"""Methods that estimate the mean of a single step, without memory or majority vote."""


def expand(labels: Iterable[str], every: Iterable[str] = ALL_LABELS) -> tuple[str, ...]:
    """The labels without duplicates; `every` replaces `all`."""
    expanded = [each for label in labels for each in (every if label == ALL else (label,))]
    return tuple(dict.fromkeys(expanded))


def make_variant(method: str, bits: int | None) -> Variant:
    """The variant of the method with the option.

    Raises:
      ExperimentError: If there is no such method, or it does not support the option.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        question = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise ExperimentError(f"there is no method {method!r}; {question} {', '.join(METHODS)}.")
    if bits is not None and not METHODS[method].takes_bits:
        raise ExperimentError(f"the method {method!r} takes no bits.")
    variant = Variant(method, bits)
    try:
        variant.build(0)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    return variant


def parse_variant(label: str) -> Variant:
    """Parses `"global_qsgd:8"` as `global_qsgd` with 8 bits, and `"mean"` as `mean`."""
    method, colon, bits = label.partition(":")
    if colon and not (bits.isdecimal() and len(bits) <= 3):
        raise ExperimentError(f"{label!r} is not a method: write METHOD or METHOD:BITS.")
    return make_variant(method, int(bits) if colon else None)


__all__ = [
    "ALL",
    "BASELINE",
    "ESTIMATORS",
    "ALL_LABELS",
    "KINDS",
    "METHODS",
    "SELECTED",
    "WHY_THEY_LOSE",
    "Kind",
    "Method",
    "TrainableMethod",
    "Variant",
    "expand",
    "make_variant",
    "parse_variant",
]
