"""The methods that the survey compares: those of `jaxcomm.catalogue`, at the size of a model,
and others of its codecs with settings of their own.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxcomm
from experiments.errors import ExperimentError
from jaxcomm import all_gather_mean, all_reduce_mean, catalogue, two_stage_mean
from jaxcomm.compression import (
    blockwise,
    chain,
    compressed_memory,
    quantizers,
    reserved,
    rotated,
    scaled,
    sparsifiers,
)
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.feedback import ecq, ef21, error_feedback
from jaxcomm.compression.quantizers import dither, min_max_dither
from jaxcomm.compression.sparsifiers import random_k, top_k

Build = Callable[..., optax.GradientTransformationExtraArgs]
Kind = Literal["exact", "nearest", "unbiased", "biased", "signs", "feedback", "shifts"]

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

OF_CLAIMS: Mapping[str, Kind] = {
    "exact": "exact",
    "exact if all fits": "exact",
    "unbiased": "unbiased",
    "nearest": "nearest",
    "biased": "biased",
    "no mean": "signs",
    "feedback": "feedback",
    "damped feedback": "feedback",
}
"""The kind of a method of the catalogue."""


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A method.

    Attributes:
      build: `(seed=..., **options) -> aggregator`, with the seed of its rounding.
      kind: How its update differs from the mean.
      label: Its name in tables and records, such as `global_qsgd:8`.
      is_control: Whether it is incorrect by design.
      has_momentum: Whether the aggregator has momentum, so the optimizer must have none.
      stage: `state -> branch` of the next step, if branches send different numbers of bytes.
      grid: Options of `build` that are tuned, by name: the values to try, and optionally the
        lowest and the highest, as `experiments.study.tuning.Values` has them. They do not change
        the bytes: the loss alone would choose the most bytes.
    """

    build: Build
    kind: Kind
    label: str = ""
    is_control: bool = False
    has_momentum: bool = False
    stage: Callable[[Any], int] | None = None
    grid: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def is_vote(self) -> bool:
        """Whether its update is a vote on signs, whose compression error means nothing."""
        return self.kind == "signs"

    def tuned(self, **options: Any) -> "Method":
        """The same method with other options of its grid."""
        return dataclasses.replace(self, build=partial(self.build, **options)) if options else self


BLOCK_SIZE = 256
CAPACITY = 0.05
# On digits, about 5 % of a worker's gradient exceed the threshold in mid-training.
THRESHOLD, THRESHOLDS = 0.1, {"threshold": ((0.03, 0.1, 0.3), 1e-4, 10.0)}
MOMENTUM = {"has_momentum": True, "grid": {"momentum": ((0.8, 0.9, 0.95), 0.5, 0.99)}}
RATIOS = (0.01, 0.03, 0.1, 0.3)
WARM_UP_STEPS = 15


def _blocks(bits: int) -> jaxcomm.Codec:
    """Blocks reduce the variance bound, on which `ecq` and `diana` depend."""
    return blockwise(dither(bits=bits), BLOCK_SIZE)


def _two_stage(seed: Any, codec: jaxcomm.Codec) -> optax.GradientTransformationExtraArgs:
    """The mean in two stages, with statistics per block."""
    return two_stage_mean(blockwise(codec, BLOCK_SIZE), seed=seed)


def _coded(codec: jaxcomm.Codec, kind: Kind = "unbiased", **more: Any) -> Method:
    return Method(lambda seed: all_gather_mean(codec, seed=seed), kind, **more)


def _with_feedback(codec: jaxcomm.Codec) -> Method:
    return _coded(error_feedback(codec), "feedback")


def _summed(codec: jaxcomm.Codec, kind: Kind, **more: Any) -> Method:
    return Method(lambda seed: all_reduce_mean(codec, seed=seed), kind, **more)


def _top(ratio: float) -> jaxcomm.Codec:
    return error_feedback(top_k(ratio=ratio))


def _sparse(seed: Any) -> optax.GradientTransformationExtraArgs:
    """With capacity for sqrt(d) nonzeros; sqrt(d / n) are expected for n identical workers."""

    def of_size(tree: Any) -> optax.GradientTransformationExtraArgs:
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        return jaxcomm.sparse_global_qsgd(capacity=math.ceil(math.sqrt(size)), seed=seed)

    return optax.GradientTransformationExtraArgs(
        lambda params: of_size(params).init(params),
        lambda updates, state, params=None, **extra: of_size(updates).update(
            updates, state, params, **extra
        ),
    )


def _server(push: jaxcomm.Codec, pull: jaxcomm.Codec, seed: Any) -> optax.GradientTransformation:
    """The mean by owners of slices; the optimizer follows, so it has no slices here."""
    return jaxcomm.sharded_server(optax.identity(), push, pull, seed=seed)


def _loco(seed: Any) -> optax.GradientTransformation:
    """4 bits with a residual of 8 bits, and differences of 8 bits with feedback."""
    push = error_feedback(blockwise(dither(bits=4), 32), averaging=0.5)
    return _server(compressed_memory(push, dither(bits=8)), error_feedback(_blocks(8)), seed)


def _warm_up(seed: Any) -> optax.GradientTransformationExtraArgs:
    stages = [all_gather_mean(_top(ratio), seed=seed) for ratio in RATIOS[::-1]]
    return jaxcomm.warmup(stages, WARM_UP_STEPS)


def _warm_up_stage(state: Any) -> int:
    return min(int(state.step) // WARM_UP_STEPS, len(RATIOS) - 1)


def truncating_dither() -> jaxcomm.Codec:
    r"""A control: 8-bit dithering that truncates toward zero instead of rounding at random.

    .. math:: c_j = \mathrm{trunc}(s x_j / \|x\|)

    with the levels, norm, payload and decoder of `dither(bits=8)`. Coordinates below the first
    level are always lost.
    """

    def encode(context: jaxcomm.Context, x: jax.Array) -> tuple[CodesPayload, jaxcomm.Memory]:
        levels, norm = 127 // context.workers, context.statistics.max_abs
        scale = jnp.where(norm > 0, levels / norm, 0)
        codes = jnp.clip(jnp.trunc(x * scale), -levels, levels)
        return CodesPayload(codes.astype(jnp.int8)), context.memory

    return dither(bits=8).replace(encode=encode)


def largest(fraction: float) -> jaxcomm.Codec:
    """A control: the coordinates of largest magnitude, without error feedback; at least one."""

    def encode(context: jaxcomm.Context, x: jax.Array) -> tuple[Any, jaxcomm.Memory]:
        flat = x.ravel()
        _, indices = lax.top_k(jnp.abs(flat), max(1, round(fraction * flat.size)))
        indices = indices.astype(jnp.int32)
        return (indices, flat[indices]), context.memory

    def decode(context: jaxcomm.Context, payload: Any) -> jax.Array:
        indices, values = payload
        zeros = jnp.zeros(context.shape, jnp.float32)
        return zeros.ravel().at[indices].set(values).reshape(context.shape)

    return jaxcomm.Codec(encode=encode, decode=decode)


_CONTROL = {"kind": "biased", "is_control": True}
_OWN: dict[str, Method] = {
    "sparse_global_qsgd": Method(_sparse, "unbiased"),
    "two_stage": Method(lambda seed, bits=8: _two_stage(seed, dither(bits=bits)), "unbiased"),
    "truncating": _summed(truncating_dither(), **_CONTROL),
    "top_1_percent": _coded(largest(0.01), **_CONTROL),
    "natural_two_stage": Method(
        lambda seed: two_stage_mean(quantizers.natural(), seed=seed), "unbiased"
    ),
    "min_max_two_stage": Method(
        lambda seed: _two_stage(seed, min_max_dither(levels=16)), "unbiased"
    ),
    "rotated_two_stage": Method(
        lambda seed: _two_stage(seed, rotated(min_max_dither(levels=16))), "unbiased"
    ),
    "adaptive_levels": Method(
        lambda seed: _two_stage(seed, quantizers.adaptive_levels(levels=7)), "unbiased"
    ),
    "elias": _coded(elias(dither(levels=7))),
    "golomb_rice": _coded(golomb_rice(blockwise(dither(levels=1, norm="l2"), 32))),
    "rans": _coded(rans(min_max_dither(levels=16))),
    "signum": Method(lambda seed, **options: jaxcomm.signum(**options), "signs", **MOMENTUM),
    "ef_fixed_threshold": Method(
        lambda seed, threshold=THRESHOLD: all_reduce_mean(
            error_feedback(quantizers.fixed_threshold(threshold)), seed=seed
        ),
        "feedback",
        grid=THRESHOLDS,
    ),
    "ecq": Method(lambda seed: two_stage_mean(ecq(_blocks(4)), seed=seed), "feedback"),
    "sharded_server_8_bits": Method(lambda seed: _server(_blocks(8), _blocks(8), seed), "unbiased"),
    "sharded_server_loco": Method(_loco, "feedback"),
    "ef_top_1_percent": _with_feedback(top_k(ratio=0.01)),
    "ef_top_10_percent": _with_feedback(top_k(ratio=0.1)),
    "ef_top_1_percent_blocks": _with_feedback(top_k(k=1, block_size=100)),
    "ef_top_1_percent_sampled": _with_feedback(top_k(ratio=0.01, sample_ratio=0.1)),
    "random_10_percent": _summed(random_k(ratio=0.1), "unbiased"),
    "ef_random_10_percent": _summed(error_feedback(scaled(random_k(ratio=0.1))), "feedback"),
    "wangni_10_percent": _coded(sparsifiers.wangni(ratio=0.1)),
    "ef_threshold": Method(
        lambda seed, threshold=THRESHOLD: all_gather_mean(
            error_feedback(sparsifiers.threshold(threshold, ratio=CAPACITY)), seed=seed
        ),
        "feedback",
        grid=THRESHOLDS,
    ),
    "ef_blocks": _summed(error_feedback(sparsifiers.block_coordinate(10, "cyclic")), "feedback"),
    "ef_blocks_southwell": _summed(
        error_feedback(sparsifiers.block_coordinate(10, "gauss_southwell")), "feedback"
    ),
    "variance_based": Method(
        lambda seed, **options: all_gather_mean(
            sparsifiers.variance_based(ratio=CAPACITY, **options), seed=seed
        ),
        "feedback",
        grid={"alpha": ((0.5, 1.0, 2.0), 0.1, 10.0)},
    ),
    "deep_gradient_compression": Method(
        lambda seed, **options: jaxcomm.deep_gradient_compression(
            ratio=0.01, warmup_every=WARM_UP_STEPS, **options
        ),
        "feedback",
        stage=_warm_up_stage,
        **MOMENTUM,
    ),
    "zeroth_order": Method(
        lambda seed: jaxcomm.zeroth_order(64, distribution="rademacher", seed=seed), "unbiased"
    ),
    "ef_cocktail": _with_feedback(
        chain(scaled(random_k(ratio=0.1)), top_k(ratio=0.1), scaled(dither(bits=8)))
    ),
    "reserved_4_bits": _coded(
        reserved(blockwise(dither(bits=4), 64), top_k(k=2, block_size=64)), "unbiased"
    ),
    "demo": Method(
        lambda seed, **options: jaxcomm.demo(k=3, block_size=16, **options),
        "feedback",
        **MOMENTUM,
    ),
    "dion": Method(
        lambda seed, **options: jaxcomm.dion(rank=4, seed=seed, **options), "feedback", **MOMENTUM
    ),
    **{
        f"power_sgd_rank_{rank}": Method(
            lambda seed, rank=rank: jaxcomm.power_sgd(rank=rank, seed=seed), "feedback"
        )
        for rank in (1, 2, 4)
    },
    "ef21_top_10_percent": _coded(ef21(top_k(ratio=0.1)), "shifts"),
    "warm_up": Method(_warm_up, "feedback", stage=_warm_up_stage),
    "adaptive_ratio": Method(
        lambda seed: jaxcomm.adaptive_ratio(_top, RATIOS, target_error=0.6, seed=seed),
        "feedback",
        stage=lambda state: int(state.stage),
    ),
}
"""Methods with other settings than those of the catalogue."""

_RENAMED = {
    "ef_top_1_percent_two_stage": "top_k_two_stage",
    "ef_adaptive_threshold": "adaptive_threshold",
    "ef_sbc": "sbc",
    "ef_stc": "stc",
    "ef_stc_two_stage": "stc_two_stage",
    "gtop_1_percent": "gtop_k",
    "atomo_rank_4": "atomo",
}
"""Names in the records of methods of the catalogue."""


def _of_catalogue(name: str) -> Method:
    method = catalogue.METHODS[_RENAMED.get(name, name)]
    return Method(partial(method.build, catalogue.LARGE), OF_CLAIMS[method.claim])


METHODS: dict[str, Method] = {
    **{
        name: _of_catalogue(name)
        for name, method in catalogue.METHODS.items()
        if method.kind == "mean" and method.claim in OF_CLAIMS
    },
    **{name: _of_catalogue(name) for name in _RENAMED},
    "diana": dataclasses.replace(_of_catalogue("diana"), kind="shifts"),
    **_OWN,
}

BASELINE, WITH_BITS = "mean", ("global_qsgd", "qsgd", "two_stage")

_BY_RATE = {
    0.001: "sign_sgd",
    0.003: "ef_random_10_percent random_10_percent signum sparse_global_qsgd",
    0.01: "ef_fixed_threshold ef_sign_sgd ef_stc_two_stage gtop_1_percent",
    0.03: (
        "ada_comp adaptive_ratio ef_sbc ef_stc ef_threshold ef_top_1_percent_blocks "
        "ef_top_1_percent_sampled ef_top_1_percent_two_stage global_qsgd:6 global_qsgd:8 "
        "global_qsgd_exponential one_bit_sgd variance_based warm_up"
    ),
    0.1: (
        "mean mean_bfloat16 mean_float8 adaptive_levels diana ecq ef21_top_10_percent "
        "ef_adaptive_threshold ef_top_10_percent ef_top_1_percent global_qsgd:10 global_qsgd:16 "
        "global_qsgd_exponential_two_stage min_max_two_stage natural_compression natural_two_stage "
        "qsgd qsgd:4 ring_mean rotated_two_stage terngrad terngrad_shared top_1_percent truncating "
        "two_stage:4 two_stage:8 wangni_10_percent"
    ),
    0.3: "deep_gradient_compression",
}
SURVEYED = {label: rate for rate, labels in _BY_RATE.items() for label in labels.split()}
"""The learning rates that the survey of 2026-11-21 chose, with SGD on digits."""

DEFAULT_RATES = {"sgd": 0.05, "adam": 0.002}
"""For other methods, and with other optimizers."""

ALL_LABELS = (
    BASELINE,
    *(label for label in SURVEYED if label != BASELINE),
    *("elias", "golomb_rice", "rans", "sharded_server_8_bits", "sharded_server_loco"),
    *("ef_blocks", "ef_blocks_southwell", "zeroth_order", "ef_cocktail", "reserved_4_bits", "demo"),
    *("atomo_rank_4", "power_sgd_rank_1", "power_sgd_rank_2", "power_sgd_rank_4", "dion"),
)
"""The labels that `all` selects."""

SELECTED = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "two_stage:4", "terngrad", "natural_two_stage"),
    *("top_1_percent", "ecq", "diana", "signum", "ef_sign_sgd", "ef_top_1_percent"),
    *("ef_random_10_percent", "variance_based"),
    *("deep_gradient_compression", "ef21_top_10_percent"),
)
"""Methods of all kinds, for runs that are too long for all methods."""


def expand(labels: Iterable[str], every: Iterable[str] = ALL_LABELS) -> tuple[str, ...]:
    """The labels without duplicates; `every` replaces `all`."""
    expanded = [each for label in labels for each in (every if label == "all" else (label,))]
    return tuple(dict.fromkeys(expanded))


@functools.cache
def parse_method(label: str) -> Method:
    """The method of `"mean"`, and of `"global_qsgd:8"` with 8 bits.

    Raises:
      ExperimentError: If there is no such method, or it has no such option.
    """
    name, colon, bits = label.partition(":")
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}."
        raise ExperimentError(f"there is no method {name!r}; {remedy}")
    method = dataclasses.replace(METHODS[name], label=label)
    if colon and name not in WITH_BITS:
        raise ExperimentError(f"the method {name!r} takes no bits.")
    try:
        method = method.tuned(bits=int(bits)) if colon else method
        method.build(seed=0)
    except ValueError as error:
        raise ExperimentError(f"{label!r} is not METHOD or METHOD:BITS: {error}") from error
    return method
