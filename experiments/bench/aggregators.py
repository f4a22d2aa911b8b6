"""The aggregators of the bench: each row of the table of cases in the tests, at realistic sizes.

Sparse rows send 1 % of the coordinates. Blocks have 256 coordinates.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

import jaxcomm
from experiments.bench.programs import by_hand
from experiments.bench.updates import BenchMethod
from jaxcomm import Codec, all_gather_mean, all_reduce_mean, two_stage_mean
from jaxcomm.compression import (
    blockwise,
    chain,
    compressed_memory,
    feedback,
    low_rank,
    quantizers,
    reserved,
    rotated,
    scaled,
    sparsifiers,
)
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, min_max_dither
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sparsifiers import top_k

Rows = Mapping[str, BenchMethod]

RATIO = 0.01
BLOCK = 256
BLOCKS = 100  # In which coordinate descent takes turns.
THRESHOLD = 2.576  # 1 % of normal numbers exceed it in magnitude.
SPARSE: Any = {"density": RATIO, "granularity": 100}
S2: Any = {**SPARSE, "scope": "bucket", "overflow": "drop"}
SKETCHED: Any = {"sketch_ratio": 0.1, "rows": 3, "ratio": RATIO}


def _global(goal: float | None = None, **options: Any) -> BenchMethod:
    return BenchMethod(lambda: jaxcomm.global_qsgd(**options), goal)


def _qsgd(goal: float | None = None, **options: Any) -> BenchMethod:
    return BenchMethod(lambda: jaxcomm.qsgd(**options), goal)


def _all_gather(codec: Codec, goal: float | None = None) -> BenchMethod:
    return BenchMethod(lambda: all_gather_mean(codec), goal)


def _all_reduce(codec: Codec) -> BenchMethod:
    return BenchMethod(lambda: all_reduce_mean(codec))


def _two_stage(codec: Codec, goal: float | None = None) -> BenchMethod:
    return BenchMethod(lambda: two_stage_mean(codec), goal)


def _server(codec: Codec | None) -> BenchMethod:
    return BenchMethod(lambda: jaxcomm.sharded_server(optax.identity(), codec, codec))


def _with_feedback(codec: Codec, goal: float | None = None) -> BenchMethod:
    return _all_gather(error_feedback(codec), goal)


def _top(ratio: float = RATIO) -> Codec:
    return error_feedback(top_k(ratio=ratio))


def _matrices(updates: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, updates)


AGGREGATORS: Mapping[str, Rows] = {
    "quantized": {
        "mean": BenchMethod(jaxcomm.mean),
        "mean_bfloat16": BenchMethod(lambda: jaxcomm.mean(wire_dtype="bfloat16")),
        "mean_float8": BenchMethod(lambda: jaxcomm.mean(wire_dtype="float8_e4m3fn")),
        "ring_mean": BenchMethod(jaxcomm.ring_mean),
        "votes": BenchMethod(jaxcomm.majority_vote),
        "by_hand_8_bits": BenchMethod(by_hand),
        "global_qsgd": _global(),
        "global_qsgd_8_bits": _global(2.5, bits=8),
        "global_qsgd_3_levels": _global(levels=3),
        "global_qsgd_10_bits": _global(bits=10),
        "global_qsgd_16_bits": _global(bits=16),
        "global_qsgd_32_bits": _global(bits=32),
        "global_qsgd_l2": _global(norm="l2"),
        "global_qsgd_leaf": _global(scope="leaf"),
        "global_qsgd_buckets": _global(bucket_bytes=2**20),
        "global_qsgd_tree": _global(scope="tree"),
        "global_qsgd_exponential": _global(6, dithering="exponential"),
        "global_qsgd_exponential_two_stage": _global(dithering="exponential", reduce="two_stage"),
        "sparse_global_qsgd": BenchMethod(lambda: jaxcomm.sparse_global_qsgd(capacity=4096)),
        "qsgd": _qsgd(3),
        "qsgd_4_bits": _qsgd(bits=4),
        "qsgd_16_bits": _qsgd(bits=16),
        "qsgd_l2": _qsgd(norm="l2"),
        "qsgd_leaf": _qsgd(scope="leaf"),
        "two_stage_8_bits": _two_stage(dither(bits=8), 4),
        "two_stage_4_bits": _two_stage(blockwise(dither(bits=4), BLOCK), 6),
    },
    "signs": {
        "sign_sgd": BenchMethod(jaxcomm.sign_sgd),
        "signum": BenchMethod(jaxcomm.signum, 4),
        "ef_sign_sgd": BenchMethod(jaxcomm.ef_sign_sgd, 4),
        "one_bit_sgd": BenchMethod(jaxcomm.one_bit_sgd),
        "terngrad": BenchMethod(jaxcomm.terngrad, 5),
        "terngrad_unclipped": BenchMethod(lambda: jaxcomm.terngrad(clip=None)),
        "terngrad_shared": BenchMethod(lambda: jaxcomm.terngrad(scale="shared")),
        "e3m0": _all_gather(blockwise(quantizers.e3m0(), BLOCK)),
        "mxfp8": _all_gather(quantizers.block_float()),
        "block_float_int8": _with_feedback(
            quantizers.block_float("int8", block_size=256, rounding="nearest")
        ),
        "natural_compression": BenchMethod(jaxcomm.natural_compression, 4),
        "rotated": _all_reduce(rotated(dither(levels=15))),
        "rotated_blocks": _all_gather(blockwise(rotated(dither(bits=4)), BLOCK)),
    },
    "sparse": {
        "top_k_sgd": _with_feedback(top_k(ratio=RATIO), 15),
        "top_k_bfloat16": _with_feedback(top_k(ratio=RATIO, value_dtype="bfloat16")),
        "coarse_top_k": _with_feedback(sparsifiers.coarse_top_k(k=10, block_size=1000)),
        "top_k_blocks": _with_feedback(top_k(k=10, block_size=1000)),
        "top_k_sampled": _with_feedback(top_k(ratio=RATIO, sample_ratio=0.1)),
        "top_k_two_stage": _two_stage(_top()),
    },
    "coded": {
        "elias": _all_gather(elias(dither(levels=7), room=3.5)),
        "golomb_rice": _all_gather(golomb_rice(dither(levels=1, norm="l2"))),
        "rans": _all_gather(rans(dither(levels=7), room=3.5)),
        "golomb_rice_top_k": _with_feedback(golomb_rice(top_k(ratio=RATIO))),
    },
    "binary": {
        "stc": _with_feedback(sparsifiers.stc(ratio=RATIO)),
        "stc_two_stage": _two_stage(error_feedback(sparsifiers.stc(ratio=RATIO))),
        "sbc": _with_feedback(sparsifiers.sbc(ratio=RATIO)),
        "adaptive_threshold": _with_feedback(sparsifiers.adaptive_threshold(ratio=RATIO)),
        "one_bit": _with_feedback(quantizers.one_bit()),
        "fixed_threshold": _with_feedback(quantizers.fixed_threshold(THRESHOLD)),
        "fixed_threshold_summed": _all_reduce(
            error_feedback(quantizers.fixed_threshold(THRESHOLD))
        ),
        "adaptive_levels": _all_gather(quantizers.adaptive_levels(levels=7)),
        "min_max_dither": _all_gather(min_max_dither(levels=16)),
        "min_max_dither_summed": _all_reduce(min_max_dither(levels=16)),
    },
    "sampled": {
        "random_k": _all_reduce(sparsifiers.random_k(ratio=RATIO)),
        "random_k_feedback": _all_reduce(error_feedback(scaled(sparsifiers.random_k(ratio=RATIO)))),
        "wangni": _all_gather(sparsifiers.wangni(ratio=RATIO)),
        "threshold": _with_feedback(sparsifiers.threshold(THRESHOLD, ratio=2 * RATIO)),
        "ada_comp": _all_gather(sparsifiers.ada_comp()),
        "variance_based": _all_gather(sparsifiers.variance_based(ratio=RATIO), 8),
    },
    "blocks": {
        "block_coordinate": _all_reduce(error_feedback(sparsifiers.block_coordinate(BLOCKS))),
        "block_coordinate_random": _all_reduce(
            error_feedback(sparsifiers.block_coordinate(BLOCKS, "random"))
        ),
        "block_coordinate_southwell": _all_reduce(
            error_feedback(sparsifiers.block_coordinate(BLOCKS, "gauss_southwell"))
        ),
        "block_coordinate_alone": _all_reduce(sparsifiers.block_coordinate(BLOCKS)),
    },
    "chained": {
        "chain": _with_feedback(
            chain(scaled(sparsifiers.random_k(ratio=0.1)), top_k(ratio=0.1), scaled(dither(bits=8)))
        ),
        "chain_summed": _all_reduce(chain(sparsifiers.random_k(ratio=RATIO), dither(bits=8))),
        "reserved": _all_gather(
            reserved(blockwise(dither(bits=4), BLOCK), top_k(k=4, block_size=BLOCK))
        ),
        "demo": BenchMethod(jaxcomm.demo),
    },
    "low_rank": {
        "power_sgd": BenchMethod(lambda: jaxcomm.power_sgd(rank=4)),
        "power_sgd_alternate": BenchMethod(lambda: jaxcomm.power_sgd(rank=4, alternate=True)),
        "power_sgd_factor_codec": BenchMethod(
            lambda: jaxcomm.power_sgd(rank=4, alternate=True, factor_codec=dither(bits=16))
        ),
        "atomo": BenchMethod(lambda: jaxcomm.atomo(rank=4)),
        "spectral_sampling": _all_gather(low_rank.spectral_sampling(1)),
        "power_iteration": _all_reduce(error_feedback(low_rank.power_iteration(1))),
    },
    "sketched": {
        "s2_reducer": BenchMethod(lambda: jaxcomm.s2_reducer(sketch_ratio=1.4, **S2)),
        "s2_reducer_median": BenchMethod(
            lambda: jaxcomm.s2_reducer(sketch_ratio=2.0, rows=3, decode="median", **S2)
        ),
        "s2_reducer_peel": BenchMethod(
            lambda: jaxcomm.s2_reducer(sketch_ratio=1.5, rows=3, decode="peel", **S2)
        ),
        "s2_reducer_8_bits": BenchMethod(
            lambda: jaxcomm.s2_reducer(sketch_ratio=1.5, rows=3, decode="peel", bits=8, **S2)
        ),
        "count_sketch": _all_reduce(count_sketch(sketch_ratio=RATIO)),
        "nonzero_union": _all_reduce(sparsifiers.nonzero_union(overflow="drop", **SPARSE)),
        "nonzero": _with_feedback(sparsifiers.nonzero(overflow="drop", **SPARSE)),
    },
    "exchanged": {
        "sharded_server": _server(None),
        "sharded_server_8_bits": _server(dither(bits=8)),
        "sharded_server_top_k": _server(error_feedback(top_k(ratio=RATIO))),
        "compressed_memory": _all_gather(
            compressed_memory(error_feedback(top_k(ratio=RATIO)), dither(bits=8))
        ),
        "budgeted_mean": BenchMethod(
            lambda: jaxcomm.budgeted_mean(lambda levels: dither(levels=levels), 127, slow={0: 1})
        ),
        "sparcml": BenchMethod(lambda: jaxcomm.sparcml(**SPARSE)),
        "parallax": BenchMethod(
            lambda: jaxcomm.parallax(sparse=_matrices, density=RATIO, union_density=2 * RATIO)
        ),
        "sketched_sgd": BenchMethod(lambda: jaxcomm.sketched_sgd(**SKETCHED)),
        "fetch_sgd": BenchMethod(lambda: jaxcomm.fetch_sgd(**SKETCHED)),
    },
    "switched": {
        "warmup": BenchMethod(
            lambda: jaxcomm.warmup(
                [all_gather_mean(_top(ratio)) for ratio in (0.25, 0.0625, RATIO)], every=100
            )
        ),
        "adaptive_ratio": BenchMethod(
            lambda: jaxcomm.adaptive_ratio(_top, [RATIO, 0.03, 0.1], target_error=0.3)
        ),
        "gtop_k": BenchMethod(lambda: jaxcomm.gtop_k(ratio=RATIO), 18),
        "deep_gradient_compression": BenchMethod(
            lambda: jaxcomm.deep_gradient_compression(ratio=RATIO), 20
        ),
    },
    "zeroth_order": {
        "zeroth_order": BenchMethod(lambda: jaxcomm.zeroth_order(2, distribution="rademacher")),
        "zeroth_order_gaussian": BenchMethod(lambda: jaxcomm.zeroth_order(2)),
    },
    "stale": {
        "delayed": BenchMethod(lambda: jaxcomm.delayed(jaxcomm.mean())),
        "lazy": BenchMethod(jaxcomm.lazy),
        "laq": BenchMethod(lambda: jaxcomm.lazy(blockwise(dither(bits=16), 64))),
    },
    "feedback": {
        "ef21": _all_gather(feedback.ef21(top_k(ratio=RATIO))),
        "diana": _all_reduce(feedback.diana(dither(bits=8))),
        "ecq": _all_gather(feedback.ecq(blockwise(dither(bits=8), BLOCK))),
        "error_feedback_dither": _all_reduce(error_feedback(scaled(dither(bits=8)))),
        "momentum_correction": _all_gather(feedback.momentum_correction(_top())),
        "local_clip": _all_gather(feedback.local_clip(_top(), 1.0)),
    },
}
