"""The sparsifiers and low-rank methods of the survey, most of them with error feedback."""

from collections.abc import Callable
from typing import Any

import optax

import jaxcomm
from experiments.methods._method import Method, of_catalogue
from experiments.methods._quantizers import MOMENTA, THRESHOLD, THRESHOLDS
from jaxcomm.compression import blockwise, chain, reserved, scaled
from jaxcomm.compression.feedback import ef21, error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import (
    block_coordinate,
    random_k,
    top_k,
    variance_based,
    wangni,
)
from jaxcomm.compression.sparsifiers import threshold as above_threshold
from jaxcomm.compression.sparsifiers._block_coordinate import Order

# On digits, about 5 % of a worker's gradient exceed `THRESHOLD` in mid-training.
CAPACITY = 0.05
BLOCKS = 10
DIRECTIONS = 64
RATIOS = (0.01, 0.03, 0.1, 0.3)
TARGET = 0.6
WARM_UP_STEPS = 15


def _all_gather(codec: jaxcomm.Codec) -> Callable[[int], optax.GradientTransformationExtraArgs]:
    return lambda seed: jaxcomm.all_gather_mean(codec, seed=seed)


def _with_feedback(codec: jaxcomm.Codec) -> Method:
    return Method(_all_gather(error_feedback(codec)), "feedback")


def _power_sgd(rank: int) -> Method:
    return Method(lambda seed: jaxcomm.power_sgd(rank=rank, seed=seed), "feedback")


def _top(ratio: float) -> jaxcomm.Codec:
    return error_feedback(top_k(ratio=ratio))


def _in_blocks(order: Order) -> Method:
    codec = error_feedback(block_coordinate(BLOCKS, order))
    return Method(lambda seed: jaxcomm.all_reduce_mean(codec, seed=seed), "feedback")


def _warm_up(seed: int) -> optax.GradientTransformationExtraArgs:
    stages = [jaxcomm.all_gather_mean(_top(ratio), seed=seed) for ratio in RATIOS[::-1]]
    return jaxcomm.warmup(stages, WARM_UP_STEPS)


def _warm_up_stage(state: Any) -> int:
    return min(int(state.step) // WARM_UP_STEPS, 3)  # There are four stages, here and in the paper.


SPARSIFIERS: dict[str, Method] = {
    "ef_top_1_percent": Method(of_catalogue("top_k_sgd"), "feedback"),
    "ef_top_10_percent": _with_feedback(top_k(ratio=0.1)),
    "ef_top_1_percent_blocks": _with_feedback(top_k(k=1, block_size=100)),
    "ef_top_1_percent_sampled": _with_feedback(top_k(ratio=0.01, sample_ratio=0.1)),
    "ef_top_1_percent_two_stage": Method(of_catalogue("top_k_two_stage"), "feedback"),
    "random_10_percent": Method(
        lambda seed: jaxcomm.all_reduce_mean(random_k(ratio=0.1), seed=seed), "unbiased"
    ),
    "ef_random_10_percent": Method(
        lambda seed: jaxcomm.all_reduce_mean(
            error_feedback(scaled(random_k(ratio=0.1))), seed=seed
        ),
        "feedback",
    ),
    "wangni_10_percent": Method(_all_gather(wangni(ratio=0.1)), "unbiased"),
    "ef_threshold": Method(
        lambda seed, threshold=THRESHOLD: _all_gather(
            error_feedback(above_threshold(threshold, ratio=CAPACITY))
        )(seed),
        "feedback",
        grid={"threshold": THRESHOLDS},
    ),
    "ef_adaptive_threshold": Method(of_catalogue("adaptive_threshold"), "feedback"),
    "ef_sbc": Method(of_catalogue("sbc"), "feedback"),
    "ef_stc": Method(of_catalogue("stc"), "feedback"),
    "ef_stc_two_stage": Method(of_catalogue("stc_two_stage"), "feedback"),
    "ef_blocks": _in_blocks("cyclic"),
    "ef_blocks_southwell": _in_blocks("gauss_southwell"),
    "ada_comp": Method(of_catalogue("ada_comp"), "feedback"),
    "variance_based": Method(
        lambda seed, **options: _all_gather(variance_based(ratio=CAPACITY, **options))(seed),
        "feedback",
        grid={"alpha": ((0.5, 1.0, 2.0), 0.1, 10.0)},
    ),
    "gtop_1_percent": Method(of_catalogue("gtop_k"), "feedback"),
    "deep_gradient_compression": Method(
        lambda seed, **options: jaxcomm.deep_gradient_compression(
            ratio=0.01, warmup_every=WARM_UP_STEPS, **options
        ),
        "feedback",
        has_momentum=True,
        stage=_warm_up_stage,
        grid={"momentum": MOMENTA},
    ),
    "zeroth_order": Method(
        lambda seed: jaxcomm.zeroth_order(DIRECTIONS, distribution="rademacher", seed=seed),
        "unbiased",
    ),
    "ef_cocktail": _with_feedback(
        chain(scaled(random_k(ratio=0.1)), top_k(ratio=0.1), scaled(dither(bits=8)))
    ),
    "reserved_4_bits": Method(
        _all_gather(reserved(blockwise(dither(bits=4), 64), top_k(k=2, block_size=64))), "unbiased"
    ),
    "demo": Method(
        lambda seed, **options: jaxcomm.demo(k=3, block_size=16, **options),
        "feedback",
        has_momentum=True,
        grid={"momentum": MOMENTA},
    ),
    "atomo_rank_4": Method(of_catalogue("atomo"), "unbiased"),
    "power_sgd_rank_1": _power_sgd(1),
    "power_sgd_rank_2": _power_sgd(2),
    "power_sgd_rank_4": _power_sgd(4),
    "ef21_top_10_percent": Method(_all_gather(ef21(top_k(ratio=0.1))), "shifts"),
    "warm_up": Method(_warm_up, "feedback", stage=_warm_up_stage),
    "adaptive_ratio": Method(
        lambda seed: jaxcomm.adaptive_ratio(_top, RATIOS, target_error=TARGET, seed=seed),
        "feedback",
        stage=lambda state: int(state.stage),
    ),
}
