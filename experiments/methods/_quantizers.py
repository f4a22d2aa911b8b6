"""The quantizers of the survey, with and without feedback."""

from collections.abc import Callable

import optax

import jaxcomm
from experiments.methods._means import BLOCK_SIZE, two_stage
from experiments.methods._method import Method, of_catalogue
from jaxcomm.compression import blockwise, compressed_memory, rotated
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.feedback import ecq, error_feedback
from jaxcomm.compression.quantizers import (
    adaptive_levels,
    dither,
    fixed_threshold,
    min_max_dither,
    natural,
)

# On digits, about 5 % of a worker's gradient exceed the threshold in mid-training.
THRESHOLD = 0.1
THRESHOLDS = ((0.03, 0.1, 0.3), 1e-4, 10.0)
MOMENTA = ((0.8, 0.9, 0.95), 0.5, 0.99)


def _blocks(bits: int) -> jaxcomm.Codec:
    """Blocks reduce the variance bound, on which `ecq` and `diana` depend."""
    return blockwise(dither(bits=bits), BLOCK_SIZE)


def _server(push: jaxcomm.Codec, pull: jaxcomm.Codec, seed: int) -> optax.GradientTransformation:
    """The mean by owners of slices; the optimizer follows, so it has no slices here."""
    return jaxcomm.sharded_server(optax.identity(), push, pull, seed=seed)


def _loco(seed: int) -> optax.GradientTransformation:
    """4 bits with a residual of 8 bits, and differences of 8 bits with feedback."""
    push = error_feedback(blockwise(dither(bits=4), 32), averaging=0.5)
    return _server(compressed_memory(push, dither(bits=8)), error_feedback(_blocks(8)), seed)


def _coded(codec: jaxcomm.Codec) -> Callable[[int], optax.GradientTransformationExtraArgs]:
    return lambda seed: jaxcomm.all_gather_mean(codec, seed=seed)


QUANTIZERS: dict[str, Method] = {
    "terngrad": Method(of_catalogue("terngrad"), "unbiased"),
    "terngrad_shared": Method(lambda seed: jaxcomm.terngrad(scale="shared", seed=seed), "unbiased"),
    "natural_compression": Method(of_catalogue("natural_compression"), "unbiased"),
    "natural_two_stage": Method(
        lambda seed: jaxcomm.two_stage_mean(natural(), seed=seed), "unbiased"
    ),
    "min_max_two_stage": Method(
        lambda seed: two_stage(seed, min_max_dither(levels=16)), "unbiased"
    ),
    "rotated_two_stage": Method(
        lambda seed: two_stage(seed, rotated(min_max_dither(levels=16))), "unbiased"
    ),
    "adaptive_levels": Method(lambda seed: two_stage(seed, adaptive_levels(levels=7)), "unbiased"),
    "elias": Method(_coded(elias(dither(levels=7))), "unbiased"),
    "golomb_rice": Method(
        _coded(golomb_rice(blockwise(dither(levels=1, norm="l2"), 32))), "unbiased"
    ),
    "rans": Method(_coded(rans(min_max_dither(levels=16))), "unbiased"),
    "sign_sgd": Method(lambda seed: jaxcomm.sign_sgd(), "signs"),
    "signum": Method(
        lambda seed, **options: jaxcomm.signum(**options),
        "signs",
        has_momentum=True,
        grid={"momentum": MOMENTA},
    ),
    "ef_sign_sgd": Method(lambda seed: jaxcomm.ef_sign_sgd(), "feedback"),
    "one_bit_sgd": Method(lambda seed: jaxcomm.one_bit_sgd(), "feedback"),
    "ef_fixed_threshold": Method(
        lambda seed, threshold=THRESHOLD: jaxcomm.all_reduce_mean(
            error_feedback(fixed_threshold(threshold))
        ),
        "feedback",
        grid={"threshold": THRESHOLDS},
    ),
    "ecq": Method(lambda seed: jaxcomm.two_stage_mean(ecq(_blocks(4)), seed=seed), "feedback"),
    "diana": Method(of_catalogue("diana"), "shifts"),
    "sharded_server_8_bits": Method(lambda seed: _server(_blocks(8), _blocks(8), seed), "unbiased"),
    "sharded_server_loco": Method(_loco, "feedback"),
}
