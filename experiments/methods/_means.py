"""Exact means, the Global-QSGD family, and the two controls."""

import math
from typing import Any

import jax
import optax

import jaxcomm
from experiments.methods import controls
from experiments.methods._method import Method, of_catalogue

BLOCK_SIZE = 256


def two_stage(seed: int, codec: jaxcomm.Codec) -> optax.GradientTransformationExtraArgs:
    """The mean in two stages, with statistics per block."""
    return jaxcomm.two_stage_mean(jaxcomm.compression.blockwise(codec, BLOCK_SIZE), seed=seed)


def _sparse(seed: int) -> optax.GradientTransformationExtraArgs:
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


MEANS: dict[str, Method] = {
    "mean": Method(of_catalogue("mean"), "exact"),
    "ring_mean": Method(of_catalogue("ring_mean"), "exact"),
    "mean_bfloat16": Method(of_catalogue("mean_bfloat16"), "nearest"),
    "mean_float8": Method(of_catalogue("mean_float8"), "nearest"),
    "global_qsgd": Method(
        of_catalogue("global_qsgd"),
        "unbiased",
        bits=(6, 8, 10, 16),
        takes_bits=True,
    ),
    "global_qsgd_exponential": Method(
        of_catalogue("global_qsgd_exponential"),
        "unbiased",
    ),
    "global_qsgd_exponential_two_stage": Method(
        of_catalogue("global_qsgd_exponential_two_stage"),
        "unbiased",
    ),
    "sparse_global_qsgd": Method(_sparse, "unbiased"),
    "two_stage": Method(
        lambda seed, bits=8: two_stage(seed, jaxcomm.compression.quantizers.dither(bits=bits)),
        "unbiased",
        bits=(4, 8),
        takes_bits=True,
    ),
    "qsgd": Method(
        of_catalogue("qsgd"),
        "unbiased",
        bits=(4, None),
        takes_bits=True,
    ),
    "truncating": Method(controls.truncating, "biased", is_control=True),
    "top_1_percent": Method(controls.top_1_percent, "biased", is_control=True),
}
