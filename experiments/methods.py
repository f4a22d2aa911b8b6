"""Every method that an experiment can name, and how it is built."""

from collections.abc import Callable
from typing import NamedTuple

import optax

import jaxcomm
from experiments import controls
from experiments.errors import ExperimentError


class Method(NamedTuple):
    """An aggregator to be built.

    Attributes:
      build: `(seed, **options) -> aggregator`; the seed decides the rounding.
      takes_bits: Whether `bits` is an option.
      is_control: Whether it is wrong on purpose.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    takes_bits: bool = False
    is_control: bool = False


METHODS: dict[str, Method] = {
    "mean": Method(lambda seed: jaxcomm.mean()),
    "global_qsgd": Method(
        lambda seed, **options: jaxcomm.global_qsgd(seed=seed, **options), takes_bits=True
    ),
    "qsgd": Method(lambda seed, **options: jaxcomm.qsgd(seed=seed, **options), takes_bits=True),
    "truncating": Method(controls.truncating, is_control=True),
    "top_1_percent": Method(controls.top_1_percent, is_control=True),
}


class Variant(NamedTuple):
    """A method with its options."""

    method: str
    bits: int | None = None

    @property
    def label(self) -> str:
        """How the variant is called in tables, records and on the command line."""
        return self.method if self.bits is None else f"{self.method}:{self.bits}"

    @property
    def is_control(self) -> bool:
        """Whether it is wrong on purpose."""
        return METHODS[self.method].is_control

    def build(self, seed: int) -> optax.GradientTransformationExtraArgs:
        """The aggregator; `seed` decides its rounding."""
        options = {} if self.bits is None else {"bits": self.bits}
        return METHODS[self.method].build(seed, **options)


def make_variant(method: str, bits: int | None) -> Variant:
    """The variant, if there is such a method and it takes the option.

    Raises:
      ExperimentError: If not.
    """
    if method not in METHODS:
        raise ExperimentError(f"there is no method {method!r}; there are {', '.join(METHODS)}.")
    if bits is not None and not METHODS[method].takes_bits:
        raise ExperimentError(f"the method {method!r} takes no bits.")
    variant = Variant(method, bits)
    try:
        variant.build(0)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    return variant


def parse_variant(label: str) -> Variant:
    """`"global_qsgd:8"` as the method `global_qsgd` of 8 bits, `"mean"` as the method alone."""
    method, colon, bits = label.partition(":")
    if colon and not bits.isdecimal():
        raise ExperimentError(f"{label!r} is no method: write METHOD or METHOD:BITS.")
    return make_variant(method, int(bits) if colon else None)
