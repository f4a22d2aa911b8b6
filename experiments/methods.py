"""Every method that an experiment can name, and how it is built."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
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


BLOCK_SIZE = 256


def _two_stage(seed: int, bits: int = 8) -> optax.GradientTransformationExtraArgs:
    codec = jaxcomm.compression.quantizers.dither(bits=bits)
    return jaxcomm.two_stage_mean(
        "data", jaxcomm.compression.blockwise(codec, BLOCK_SIZE), seed=seed
    )


def _sparse(seed: int) -> optax.GradientTransformationExtraArgs:
    """With room for sqrt(d) non-zeros, where sqrt(d / n) are expected of workers that are alike."""

    def of_size(tree: Any) -> optax.GradientTransformationExtraArgs:
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        return jaxcomm.sparse_global_qsgd(capacity=math.ceil(math.sqrt(size)), seed=seed)

    return optax.GradientTransformationExtraArgs(
        lambda params: of_size(params).init(params),
        lambda updates, state, params=None, **extra: of_size(updates).update(
            updates, state, params, **extra
        ),
    )


METHODS: dict[str, Method] = {
    "mean": Method(lambda seed: jaxcomm.mean()),
    "ring_mean": Method(lambda seed: jaxcomm.ring_mean()),
    "mean_bfloat16": Method(lambda seed: jaxcomm.mean(wire_dtype="bfloat16")),
    "mean_float8": Method(lambda seed: jaxcomm.mean(wire_dtype="float8_e4m3fn")),
    "global_qsgd": Method(
        lambda seed, **options: jaxcomm.global_qsgd(seed=seed, **options), takes_bits=True
    ),
    "global_qsgd_exponential": Method(
        lambda seed: jaxcomm.global_qsgd(dithering="exponential", reduce="tree", seed=seed)
    ),
    "global_qsgd_exponential_two_stage": Method(
        lambda seed: jaxcomm.global_qsgd(dithering="exponential", reduce="two_stage", seed=seed)
    ),
    "sparse_global_qsgd": Method(_sparse),
    "two_stage": Method(_two_stage, takes_bits=True),
    "qsgd": Method(lambda seed, **options: jaxcomm.qsgd(seed=seed, **options), takes_bits=True),
    "truncating": Method(controls.truncating, is_control=True),
    "top_1_percent": Method(controls.top_1_percent, is_control=True),
}

ALL = "all"
EVERY = (
    "mean",
    "ring_mean",
    "mean_bfloat16",
    "mean_float8",
    "global_qsgd:6",
    "global_qsgd:8",
    "global_qsgd:10",
    "global_qsgd:16",
    "global_qsgd_exponential",
    "global_qsgd_exponential_two_stage",
    "sparse_global_qsgd",
    "two_stage:4",
    "two_stage:8",
    "qsgd:4",
    "qsgd",
    "truncating",
    "top_1_percent",
)


def expand(labels: Iterable[str]) -> tuple[str, ...]:
    """The labels, each once, with `EVERY` in place of `all`."""
    expanded = [each for label in labels for each in (EVERY if label == ALL else (label,))]
    return tuple(dict.fromkeys(expanded))


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
