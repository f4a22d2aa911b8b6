"""Aggregators that send something of every coordinate: exact means, quantizers, signs, codes."""

from typing import Any

import optax

from jaxcomm._contract import Codec
from jaxcomm.aggregation import (
    budgeted_mean,
    lazy,
    majority_vote,
    mean,
    ring_mean,
    sharded_server,
)
from jaxcomm.catalogue._method import Method, Size, gathered, in_two_stages, summed, with_feedback
from jaxcomm.compression import blockwise, rotated, scaled
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.feedback import diana, ecq, error_feedback, momentum
from jaxcomm.compression.quantizers import (
    adaptive_levels,
    block_float,
    dither,
    e3m0,
    exponential_dither,
    fixed_threshold,
    microscaling,
    min_max_dither,
    natural,
    one_bit,
    scaled_cast,
    scaled_signs,
    signs,
    ternary,
)
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.methods import (
    ef_sign_sgd,
    global_qsgd,
    natural_compression,
    one_bit_sgd,
    qsgd,
    sign_sgd,
    signum,
    sparse_global_qsgd,
    terngrad,
)

XIN, BERNSTEIN, MX = "Xin et al. 2023", "Bernstein et al. 2018", "Rouhani et al. 2023"
SHARED_NORM, OWN_NORM = "min(d/s², √(d/n)/s) / n", "min(d/s², √d/s) / n²"


def _global(
    name: str,
    call: str,
    codec: Codec,
    s: float = 15,
    b: float = 1,
    *,
    bucket_bytes: int | None = None,
    **options: Any,
) -> Method:
    """Global-QSGD with other options; small buckets for few coordinates."""

    def build(size: Size, **more: Any) -> optax.GradientTransformationExtraArgs:
        tiny = None if bucket_bytes is None else size.of(bucket_bytes, 2**20)
        return global_qsgd(bucket_bytes=tiny, **options, **more)

    return Method(
        name,
        call,
        build,
        claim="unbiased",
        error=SHARED_NORM,
        letters={"s": s, "b": b},
        like="global_qsgd",
        codec=lambda size: codec,
    )


def _qsgd(
    name: str, call: str, codec: Codec, s: float = 127, b: float = 1, **options: Any
) -> Method:
    return Method(
        name,
        call,
        lambda size, **more: qsgd(**options, **more),
        "all-gather",
        "unbiased",
        error=OWN_NORM,
        letters={"s": s, "b": b},
        like="qsgd",
        codec=lambda size: codec,
    )


def _blocks(bits: int, size: Size) -> Codec:
    """Dithering in blocks, which keep its variance bounded; without them for few coordinates."""
    return size.of(dither(bits=bits), blockwise(dither(bits=bits), 256))


QUANTIZED = [
    Method("mean", "jaxcomm.mean()", lambda size, axis_name="data", **_: mean(axis_name),
        claim="exact", error="0", bytes="8 d (n-1)/n"),
    Method("ring_mean", "jaxcomm.ring_mean()",
        lambda size, axis_name="data", **_: ring_mean(axis_name), "ring", "exact", error="0",
        bytes="8 d (n-1)/n", paper="Patarasuk and Yuan 2009"),
    Method("mean_bfloat16", 'jaxcomm.mean(wire_dtype="bfloat16")',
        lambda size, axis_name="data", **_: mean(axis_name, wire_dtype="bfloat16"), "two stages",
        "nearest", bytes="4 d (n-1)/n", parts=("cast",)),
    Method("mean_float8", 'jaxcomm.mean(wire_dtype="float8_e4m3fn")', lambda size, axis_name="data",
            **_: mean(axis_name, wire_dtype="float8_e4m3fn", block_size=size.of(4, 256)),
        "two stages", "nearest", bytes="2 (1 + 4/B) d (n-1)/n; blocks of B = 256",
        letters={"B": (4, 256)}, parts=("scaled_cast",)),
    Method("global_qsgd", "jaxcomm.global_qsgd()", lambda size, **options: global_qsgd(**options),
        claim="unbiased", error=SHARED_NORM, bytes="2 b d (n-1)/n",
        letters={"s": 15, "b": 1}, paper=XIN, codec=lambda size: dither(), parts=("dither",)),
    Method("global_qsgd_exponential", 'jaxcomm.global_qsgd(dithering="exponential")',
        lambda size, **options: global_qsgd(dithering="exponential", **options), "tree", "unbiased",
        error="((9/8)^(1+⌈log₂ n⌉) - 1) / n", bytes="2 d (n-1)/n", paper=XIN,
        codec=lambda size: exponential_dither(), parts=("exponential_dither", "merged_mean")),
    Method("global_qsgd_exponential_two_stage",
        'jaxcomm.global_qsgd(dithering="exponential", reduce="two_stage")',
        lambda size, **options: global_qsgd(dithering="exponential", reduce="two_stage", **options),
        "two stages", "unbiased", error="(1/8 + 9/(64 n)) / n",
        bytes="2 (n-1)/n (d + 4 n)", paper=XIN, parts=("exponential_dither",)),
    Method("sparse_global_qsgd", "jaxcomm.sparse_global_qsgd(capacity=k)", lambda size, **options:
            sparse_global_qsgd(capacity=size.capacity, levels=size.of(4, 1), **options),
        "all-gather", "unbiased", error=SHARED_NORM,
        bytes="(n-1) k (i + b); i is 2 or 4",
        letters={"k": "capacity", "i": 2, "b": (0.5, 0.25), "s": (4, 1)}, paper=XIN,
        parts=("sparse_dither",)),
    Method("qsgd", "jaxcomm.qsgd()", lambda size, **options: qsgd(**options), "all-gather",
        "unbiased", error=OWN_NORM, bytes="b d (n-1)", letters={"s": 127, "b": 1},
        paper="Alistarh et al. 2017", codec=lambda size: dither(bits=8), parts=("dither",)),
    in_two_stages("two_stage_4_bits", "jaxcomm.two_stage_mean(blockwise(dither(bits=4), 256))",
        lambda size: blockwise(dither(bits=4), size.of(8, 256)), claim="unbiased",
        note=", if the codec is",
        error="(ω/n + ω (1 + ω/n)) / n",
        bytes="2 p (n-1)/n",
        letters={"p": ("d", "33/64 d"), "ω": ("min(8/7², √8/7)", "min(256/7², 16/7)")},
        suffix=", or another codec"),
    in_two_stages("two_stage_8_bits", "jaxcomm.two_stage_mean(dither(bits=8))",
        lambda size: dither(bits=8), claim="unbiased", error="(ω/n + ω (1 + ω/n)) / n",
        letters={"p": "d", "ω": "min(d/n/127², √(d/n)/127)"}, like="two_stage_4_bits"),
    _global("global_qsgd_8_bits", "jaxcomm.global_qsgd(bits=8)", dither(bits=8), bits=8),
    _global("global_qsgd_10_bits", "jaxcomm.global_qsgd(bits=10)", dither(bits=10), 63, 4 / 3,
        bits=10),
    _global("global_qsgd_16_bits", "jaxcomm.global_qsgd(bits=16)", dither(bits=16), 4095, 2,
        bits=16),
    _global("global_qsgd_32_bits", "jaxcomm.global_qsgd(bits=32)", dither(bits=32), 2**24 - 1, 4,
        bits=32),
    _global("global_qsgd_3_levels", "jaxcomm.global_qsgd(levels=3)", dither(levels=3), 3, 0.8,
        levels=3),
    _global("global_qsgd_l2", 'jaxcomm.global_qsgd(norm="l2")', dither(norm="l2"), norm="l2"),
    _global("global_qsgd_leaf", 'jaxcomm.global_qsgd(scope="leaf")', dither(), scope="leaf"),
    _global("global_qsgd_buckets", "jaxcomm.global_qsgd(bucket_bytes=2**20)", dither(),
        bucket_bytes=35),
    _global("global_qsgd_tree", 'jaxcomm.global_qsgd(scope="tree", bucket_bytes=2**20)', dither(),
        bucket_bytes=32, scope="tree"),
    _qsgd("qsgd_4_bits", "jaxcomm.qsgd(bits=4)", dither(bits=4), 7, 0.5, bits=4),
    _qsgd("qsgd_16_bits", "jaxcomm.qsgd(bits=16)", dither(bits=16), 32767, 2, bits=16),
    _qsgd("qsgd_l2", 'jaxcomm.qsgd(norm="l2")', dither(bits=8, norm="l2"), norm="l2"),
    _qsgd("qsgd_leaf", 'jaxcomm.qsgd(scope="leaf")', dither(bits=8), scope="leaf"),
]  # fmt: skip

EXCHANGED = [
    Method("budgeted_mean",
        "jaxcomm.budgeted_mean(lambda levels: dither(levels=levels), 127, slow={0: 1})",
        lambda size, **options: budgeted_mean(lambda levels: dither(levels=levels), 127, slow={0:
            1}, **options), "two stages", "unbiased",
        error="((1 + ω) v + n ω) / n²; v of the slow worker's codec, ω of the others', for d/m "
            "coordinates",
        bytes="p + (n-1)/m p' for the slow worker, (m-1)/m p + (n-1)/m p' for each of the m "
            "others; p of a worker's codec, p' of that of the mean",
        letters={"w": "⌈d/7⌉", "ω": "min(w/127², √w/127)", "v": "min(w, √w)"},
        paper="Tang et al. 2020"),
    Method("sharded_server", "jaxcomm.sharded_server(optax.identity())",
        lambda size, **options: sharded_server(optax.identity(), **options), "server", "exact",
        error="0", bytes="8 d (n-1)/n; 2 p (n-1)/n with `push=codec, pull=codec`",
        paper="Rajbhandari et al. 2020",
        suffix=", with the optimizer as argument"),
    Method("sharded_server_8_bits",
        "jaxcomm.sharded_server(optax.identity(), dither(bits=8), dither(bits=8))", lambda size,
            **options: sharded_server(optax.identity(), dither(bits=8), dither(bits=8), **options),
        "server", "unbiased", error="(ω/n + ω (1 + ω/n)) / n", bytes="2 d (n-1)/n",
        letters={"ω": "min(d/n/127², √(d/n)/127)"}, like="sharded_server"),
    Method("sharded_server_top_k",
        "jaxcomm.sharded_server(optax.identity(), *2 * [error_feedback(top_k(ratio=k/d))])",
        lambda size, **options: sharded_server(optax.identity(), *2 * [error_feedback(top_k(
            ratio=size.ratio))], **options), "server", "feedback", bytes="2 k (4 + i) (n-1)/n",
        letters={"k": "ratio d"}, like="sharded_server"),
]  # fmt: skip

SIGNS = [
    Method("sign_sgd", "jaxcomm.sign_sgd()", lambda size, **options: sign_sgd(**options), "votes",
        "no mean", ": majority of signs", bytes="d/4 (n-1)/n",
        paper=BERNSTEIN, codec=lambda size: signs(), parts=("signs",)),
    Method("signum", "jaxcomm.signum()", lambda size, **options: signum(**options), "votes",
        "no mean", ": majority of signs of momenta", bytes="d/4 (n-1)/n",
        paper=BERNSTEIN, codec=lambda size: signs(), feedback=momentum,
        parts=("signs", "momentum")),
    Method("majority_vote", "jaxcomm.majority_vote()",
        lambda size, axis_name="data", **_: majority_vote(axis_name), "votes", "no mean",
        ": majority of signs", bytes="d/4 (n-1)/n", paper=BERNSTEIN),
    Method("ef_sign_sgd", "jaxcomm.ef_sign_sgd()", lambda size, **options: ef_sign_sgd(**options),
        "all-gather", "feedback", error="1/d; d per leaf", bytes="(n-1) (d/8 + 4 l)",
        paper="Karimireddy et al. 2019", codec=lambda size: scaled_signs(), feedback=error_feedback,
        parts=("scaled_signs",)),
    Method("one_bit_sgd", "jaxcomm.one_bit_sgd()", lambda size, **options: one_bit_sgd(**options),
        "all-gather", "feedback", error="1/d; d per leaf",
        bytes="(n-1) (d/8 + 8 C); C columns of all leaves", letters={"C": 1},
        paper="Seide et al. 2014", codec=lambda size: one_bit(), feedback=error_feedback,
        parts=("one_bit",)),
    with_feedback("one_bit", 'jaxcomm.all_gather_mean(error_feedback(one_bit()), scope="bucket")',
        lambda size: one_bit(), error="1/d", like="one_bit_sgd", scope=("bucket", "bucket")),
    Method("terngrad", "jaxcomm.terngrad()", lambda size, **options: terngrad(**options),
        "all-gather", "biased", ": clips at 2.5 standard deviations", bytes="(n-1) (d/4 + 4 l)",
        paper="Wen et al. 2017", parts=("ternary",)),
    Method("terngrad_unclipped", "jaxcomm.terngrad(clip=None)",
        lambda size, **options: terngrad(clip=None, **options), "all-gather", "unbiased",
        error="(√d - 1)/2 / n²; d per leaf", bytes="(n-1) (d/4 + 4 l)", paper="Wen et al. 2017",
        codec=lambda size: ternary(), parts=("ternary",)),
    Method("terngrad_shared", 'jaxcomm.terngrad(clip=None, scale="shared")',
        lambda size, **options: terngrad(clip=None, scale="shared", **options), claim="unbiased",
        error="(√(n d) - 1)/2 / n²; d per leaf", bytes="2 (n-1)/n (b d + 4 l); b for s = 1",
        letters={"b": "4/6"}, paper="Wen et al. 2017", codec=lambda size: ternary(),
        parts=("ternary",)),
    Method("natural_compression", "jaxcomm.natural_compression()",
        lambda size, **options: natural_compression(**options), "all-gather", "unbiased",
        error="1/8 / n²", bytes="9/8 d (n-1)", paper="Horváth et al. 2019",
        codec=lambda size: natural(), parts=("natural",)),
    gathered("e3m0", "jaxcomm.all_gather_mean(e3m0())", lambda size: e3m0(), claim="unbiased",
        error="(1/8 + d/2^14) / n²", bytes="(n-1) (d/2 + 8)", paper="Douillard et al. 2025",
        suffix="; in `blockwise(e3m0(), 256)`, d is 256"),
    gathered("block_float", "jaxcomm.all_gather_mean(block_float())", lambda size: block_float(),
        claim="unbiased", error="(1/256 + 2^-13/448²) / n²", bytes="(n-1) (33/32 d + 4)",
        paper=MX, suffix=", as MXFP8"),
    with_feedback("block_float_int8", "jaxcomm.all_gather_mean(error_feedback("
            'block_float("int8", block_size=256, rounding="nearest")))',
        lambda size: block_float("int8", block_size=256, rounding="nearest"), error="1 - 256/127²",
        bytes="(n-1) (257/256 d + 4)"),
    with_feedback("microscaling", "jaxcomm.all_gather_mean(error_feedback(microscaling()))",
        lambda size: microscaling(), error="59/60", bytes="(n-1) (33/32 d + 4)", paper=MX,
        suffix=', MXFP8; or `"mxfp4"`, `"nvfp4"`, ...'),
    with_feedback("microscaling_mxfp4",
        'jaxcomm.all_gather_mean(error_feedback(microscaling("mxfp4")))',
        lambda size: microscaling("mxfp4"), error="13/16", bytes="(n-1) (17/32 d + 4)",
        like="microscaling"),
    with_feedback("microscaling_nvfp4",
        'jaxcomm.all_gather_mean(error_feedback(microscaling("nvfp4")))',
        lambda size: microscaling("nvfp4"), error="7/8 - d/28672²", bytes="(n-1) (9/16 d + 8)",
        like="microscaling"),
    in_two_stages("two_stage_microscaling",
        'jaxcomm.two_stage_mean(error_feedback(microscaling("mxfp4")))',
        lambda size: error_feedback(microscaling("mxfp4")), claim="feedback",
        note=" at both ends", bytes="17/16 d (n-1)/n", like="two_stage_4_bits"),
    summed("rotated", "jaxcomm.all_reduce_mean(rotated(dither(levels=15)))",
        lambda size: rotated(dither(levels=15)), claim="unbiased", error=SHARED_NORM,
        like="global_qsgd"),
    gathered("rotated_blocks", "jaxcomm.all_gather_mean(blockwise(rotated(dither(bits=4)), 256))",
        lambda size: blockwise(rotated(dither(bits=4)), size.of(8, 256)), claim="unbiased",
        error="min(B/s², √B/s) / n²", letters={"B": (8, 256), "s": 7, "b": (1, "33/64")},
        like="qsgd"),
]  # fmt: skip

BINARY = [
    summed("fixed_threshold_summed", "jaxcomm.all_reduce_mean(error_feedback(fixed_threshold(t)))",
        lambda size: fixed_threshold(size.threshold), claim="feedback",
        note="; decodes to sums of ±t", bytes="2 b d (n-1)/n; b for s = 1", letters={"b": "4/6"},
        paper="Strom 2015", feedback=error_feedback),
    with_feedback("fixed_threshold", "jaxcomm.all_gather_mean(error_feedback(fixed_threshold(t)))",
        lambda size: fixed_threshold(size.threshold), bytes="(n-1) d/4",
        like="fixed_threshold_summed"),
    gathered("adaptive_levels", "jaxcomm.all_gather_mean(adaptive_levels(levels=s))",
        lambda size: adaptive_levels(levels=size.of(3, 7)), claim="unbiased",
        error="(√d - 1)/2 / n²; in practice far less", bytes="(n-1) (d/8 ⌈log₂(2 s + 2)⌉ + 4 s)",
        letters={"s": (3, 7)}, paper="Faghri et al. 2020"),
    gathered("min_max_dither", "jaxcomm.all_gather_mean(min_max_dither(levels=16))",
        lambda size: min_max_dither(levels=16), claim="unbiased",
        error="d / (2 (s-1)²) / n²; s levels", bytes="(n-1) (b d + 8); b for integers 0 to s-1",
        letters={"s": 16, "b": 0.5}, paper="Suresh et al. 2017"),
    summed("min_max_dither_summed", "jaxcomm.all_reduce_mean(min_max_dither(levels=16))",
        lambda size: min_max_dither(levels=size.of(5, 16)), claim="unbiased",
        error="d / (2 (s-1)²) / n; s levels",
        bytes="2 (n-1)/n (b d + 8); b for integers 0 to n (s-1)",
        letters={"s": (5, 16), "b": ("4/5", 1)}, paper="Suresh et al. 2017"),
]  # fmt: skip

CODED = [
    gathered("elias", "jaxcomm.all_gather_mean(elias(dither(levels=s), capacity=3.5))",
        lambda size: elias(dither(levels=7), capacity=3.5), claim="unbiased",
        error=OWN_NORM, bytes="(n-1) r d/8", letters={"r": 3.5 + 1 / 64, "s": 7},
        paper="Alistarh et al. 2017"),
    gathered("rans", "jaxcomm.all_gather_mean(rans(dither(levels=s), capacity=3.5))",
        lambda size: rans(dither(levels=7), capacity=3.5), claim="unbiased",
        error=OWN_NORM, bytes="(n-1) (r d/8 + 2 (2 s + 1))",
        letters={"r": 3.5 + 1 / 128, "s": 7}, paper="Suresh et al. 2017"),
    gathered("golomb_rice", 'jaxcomm.all_gather_mean(golomb_rice(dither(levels=1, norm="l2")))',
        lambda size: golomb_rice(dither(levels=1, norm="l2"), capacity=size.of(1.5, None)),
        claim="unbiased", error="√d / n²", bytes="(n-1) r d/8", letters={"r": 1.5 + 1 / 64},
        paper="Golomb 1966, Rice and Plaunt 1971"),
    with_feedback("golomb_rice_top_k",
        "jaxcomm.all_gather_mean(error_feedback(golomb_rice(top_k(k=k))))",
        lambda size: golomb_rice(top_k(ratio=size.ratio), capacity=size.of(5.0, None)), error="k/d",
        bytes="(n-1) k (4 + r/8)", letters={"k": "ratio d", "r": 5 + 1 / 64},
        paper="Sattler et al. 2019"),
]  # fmt: skip

SHIFTED = [
    summed("diana", "jaxcomm.all_reduce_mean(diana(blockwise(dither(bits=8), 256)))",
        lambda size: _blocks(8, size), claim="unbiased",
        error="ω/n² · Σ|xᵢ - hᵢ|²; ω for a norm shared by n workers; hᵢ the learned shift of "
            "worker i", bytes="2 p (n-1)/n",
        letters={"p": ("d", "65/64 d"), "ω": "n min(d/15², √(d/n)/15)"},
        paper="Mishchenko et al. 2019", feedback=diana, suffix=", or another codec"),
    gathered("ecq", "jaxcomm.all_gather_mean(ecq(blockwise(dither(bits=8), 256)))",
        lambda size: _blocks(8, size), claim="damped feedback", bytes="(n-1) p",
        letters={"p": ("d", "65/64 d")}, paper="Wu et al. 2018", feedback=ecq,
        suffix=", or another codec"),
    summed("error_feedback_dither",
        "jaxcomm.all_reduce_mean(error_feedback(scaled(dither(bits=8))))",
        lambda size: scaled(dither(bits=8)), claim="feedback", feedback=error_feedback,
        error="1/(1 + ω)", bytes="2 d (n-1)/n", letters={"ω": "min(d/127², √d/127)"},
        like="top_k_sgd"),
    Method("lazy", "jaxcomm.lazy()", lambda size, **options: lazy(**options), claim="exact",
        note=" mean of last uploads", error="0; for these",
        bytes="8 d (n-1)/n; 16 (n-1)/n if all workers skip; 2 p (n-1)/n with a codec",
        paper="Chen et al. 2018, Sun et al. 2019"),
    Method("lazy_float8", 'jaxcomm.lazy(blockwise(scaled_cast("float8_e4m3fn"), 64))', lambda size,
            **options: lazy(blockwise(scaled_cast("float8_e4m3fn"), size.of(16, 64)),
            threshold=size.of(0.8, 1.0), max_skip=size.of(4, 100), **options), "all-gather",
        bytes="(1 + 4/B) d (n-1); nothing if all workers skip",
        letters={"B": (16, 64)}, like="lazy"),
]  # fmt: skip
