"""Aggregators that send a part of the coordinates, or less than one number of each."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jaxcomm._contract import Codec
from jaxcomm.aggregation import (
    adaptive_ratio,
    all_gather_mean,
    delayed,
    mean,
    warmup,
    zeroth_order,
)
from jaxcomm.catalogue._method import (
    Letters,
    Method,
    Size,
    gathered,
    in_two_stages,
    summed,
    with_feedback,
)
from jaxcomm.compression import blockwise, chain, compressed_memory, cosine, reserved, scaled
from jaxcomm.compression.feedback import ef21, error_feedback, local_clip, momentum_correction
from jaxcomm.compression.low_rank import power_iteration, projection, spectral_sampling
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sketches import count_sketch, s2_sketch
from jaxcomm.compression.sparsifiers import (
    ada_comp,
    adaptive_threshold,
    block_coordinate,
    coarse_top_k,
    nonzero,
    nonzero_union,
    random_k,
    sbc,
    stc,
    threshold,
    top_k,
    variance_based,
    wangni,
)
from jaxcomm.methods import (
    atomo,
    deep_gradient_compression,
    demo,
    dion,
    fetch_sgd,
    gtop_k,
    parallax,
    power_sgd,
    s2_reducer,
    sketched_sgd,
    sparcml,
    top_k_sgd,
)

K: Letters = {"k": "ratio d"}
BLOCKS: Letters = {"B": "blocks"}


def family(ratio: float) -> Codec:
    """The largest coordinates, with feedback."""
    return error_feedback(top_k(ratio=ratio))


def _s2(name: str, call: str, few: Mapping[str, Any], /, **options: Any) -> dict[str, Any]:
    """The call and the builder of S2 Reducer; `few` are other options for few coordinates."""

    def build(size: Size, **more: Any) -> optax.GradientTransformationExtraArgs:
        given: Any = {
            "density": size.union_density,
            "sketch_ratio": size.sketch_ratio,
            "granularity": size.granularity,
            "overflow": size.overflow,
            **options,
            **size.of({"scope": "bucket", **few}, {}),
        }
        return s2_reducer(**given, **more)

    return {"name": name, "call": call, "build": build}


def _s2_codec(size: Size) -> Codec:
    return s2_sketch(
        density=size.union_density,
        sketch_ratio=size.of(1.0, size.sketch_ratio),
        granularity=size.granularity,
        overflow=size.overflow,
    )


SPARSE = [
    Method("top_k_sgd", "jaxcomm.all_gather_mean(error_feedback(top_k(k=k)))",
        lambda size, **options: top_k_sgd(ratio=size.ratio, **options), "all-gather", "feedback",
        error="k/d", bytes="(n-1) k (4 + i)", letters=K, paper="Stich et al. 2018",
        suffix=", or `jaxcomm.top_k_sgd(k=k)`", codec=lambda size: top_k(ratio=size.ratio),
        feedback=error_feedback),
    with_feedback("top_k_bfloat16",
        'jaxcomm.all_gather_mean(error_feedback(top_k(k=k, value_dtype="bfloat16")))',
        lambda size: top_k(ratio=size.ratio, value_dtype="bfloat16"), error="k/d",
        bytes="(n-1) k (2 + i)", like="top_k_sgd"),
    with_feedback("top_k_blocks",
        "jaxcomm.all_gather_mean(error_feedback(top_k(k=10, block_size=1000)))",
        lambda size: top_k(k=size.of(1, 10), block_size=size.of(4, 1000)), error="k/d",
        letters={"i": (1 / 4, "(2 + log₂(d/k)) / 8")}, like="top_k_sgd"),
    with_feedback("top_k_sampled",
        "jaxcomm.all_gather_mean(error_feedback(top_k(k=k, sample_ratio=0.1)))",
        lambda size: top_k(ratio=size.ratio, sample_ratio=size.of(0.5, 0.1)), error="a k/d",
        letters={"a": (0.5, 0.1)}, like="top_k_sgd"),
    with_feedback("coarse_top_k", "jaxcomm.all_gather_mean(error_feedback(coarse_top_k(k=64)))",
        lambda size: coarse_top_k(k=size.of(2, 64), block_size=size.of(4, 4096)),
        error="min(k/B, 1/k)", bytes="(n-1) d/B (k (1/4 + i) + 8); blocks of B = 4096",
        letters={"k": (2, 64), "B": (4, 4096), "i": (0.25, 1)}, paper="Sarfi et al. 2025"),
    in_two_stages("top_k_two_stage", "jaxcomm.two_stage_mean(error_feedback(top_k(ratio=k/d)))",
        lambda size: family(size.ratio), claim="feedback", bytes="2 k (4 + i) (n-1)/n", letters=K,
        like="two_stage_4_bits"),
    gathered("ef21", "jaxcomm.all_gather_mean(ef21(top_k(k=k)))",
        lambda size: top_k(ratio=size.ratio), claim="feedback", bytes="(n-1) k (4 + i)", letters=K,
        paper="Richtárik et al. 2021", feedback=ef21),
    gathered("compressed_memory",
        "jaxcomm.all_gather_mean(compressed_memory(error_feedback(top_k(k=k)), dither(bits=8)))",
        lambda size: compressed_memory(family(size.ratio), dither(bits=8)), claim="feedback",
        like="top_k_sgd"),
    gathered("momentum_correction",
        "jaxcomm.all_gather_mean(momentum_correction(error_feedback(top_k(k=k))))",
        lambda size: momentum_correction(family(size.ratio)), claim="feedback",
        like="deep_gradient_compression"),
    gathered("local_clip", "jaxcomm.all_gather_mean(local_clip(error_feedback(top_k(k=k)), 1.0))",
        lambda size: local_clip(family(size.ratio), 1.0), claim="feedback",
        like="deep_gradient_compression"),
    Method("deep_gradient_compression", "jaxcomm.deep_gradient_compression(ratio=k/d)", lambda size,
            **options: deep_gradient_compression(ratio=size.of(0.1, size.ratio), max_norm=size.of(
            2.0, None), sample_ratio=size.of(0.5, None), warmup_every=size.of(2, None), **options),
        "all-gather", "feedback", bytes="(n-1) k (4 + i); more during the warm-up", letters=K,
        paper="Lin et al. 2018"),
    Method("gtop_k", "jaxcomm.gtop_k(k=k)",
        lambda size, axis_name="data", **_: gtop_k(axis_name, ratio=size.ratio), "tree", "feedback",
        bytes="(⌈log₂ n⌉ + 2 (n-1)/n) k (4 + i)", letters=K, paper="Shi et al. 2019",
        codec=lambda size: top_k(ratio=size.ratio), feedback=error_feedback),
]  # fmt: skip

BINARY = [
    with_feedback("sbc", "jaxcomm.all_gather_mean(error_feedback(sbc(k=k)))",
        lambda size: sbc(ratio=size.ratio), error="1/(k + max(k, (d-1)/k)); k and d per leaf",
        bytes="(n-1) (i k + 4 l)", letters=K, paper="Sattler et al. 2018"),
    with_feedback("stc", "jaxcomm.all_gather_mean(error_feedback(stc(k=k)))",
        lambda size: stc(ratio=size.ratio), error="min(k/d, 1/k); k and d per leaf",
        bytes="(n-1) ((i + 1/8) k + 4 l)", letters=K, paper="Sattler et al. 2019"),
    in_two_stages("stc_two_stage", "jaxcomm.two_stage_mean(error_feedback(stc(ratio=k/d)))",
        lambda size: error_feedback(stc(ratio=size.ratio)), claim="feedback", note=" at both ends",
        bytes="2 (n-1) ((i + 1/8) k + 4 l); k per part of d/n coordinates",
        letters={"k": "ratio d/n", "i": (0.5, 1)}, paper="Sattler et al. 2019"),
    with_feedback("adaptive_threshold",
        "jaxcomm.all_gather_mean(error_feedback(adaptive_threshold(ratio=k/d)))",
        lambda size: adaptive_threshold(ratio=size.ratio),
        error="min(max(k/(2 d), 1/d), 1/max(k, 1)); k and d per leaf",
        bytes="(n-1) ((i + 1/8) (k + 1) + 8 l)", letters=K, paper="Dryden et al. 2016"),
]  # fmt: skip

CHAINED = [
    with_feedback("chain",
        "jaxcomm.all_gather_mean(error_feedback(chain(scaled(random_k(k=10 * k)), top_k(k=k), "
            "scaled(dither(bits=8)))))", lambda size: chain(scaled(random_k(ratio=size.first)),
            top_k(ratio=size.ratio / size.first), scaled(dither(bits=8))),
        error="k/d / (1 + ω); ω of `dither` for k coordinates",
        bytes="(n-1) k (1 + i); i of k among the drawn coordinates",
        letters={"k": "ratio d", "i": (1 / 4, 1), "ω": "min(k/127², √k/127)"},
        paper="Wang et al. 2023"),
    summed("chain_summed", "jaxcomm.all_reduce_mean(chain(random_k(k=k), dither(bits=8)))",
        lambda size: chain(random_k(ratio=size.drawn), dither(bits=8)), claim="unbiased",
        error="(d/k (1 + ω) - 1) / n; ω = min(k/s², √(k/n)/s)", bytes="2 k (n-1)/n",
        letters={"k": "drawn d", "s": 15, "ω": "min(k/s², √(k/n)/s)"}, paper="Wang et al. 2023"),
    gathered("reserved",
        "jaxcomm.all_gather_mean(reserved(blockwise(dither(bits=4), 256), top_k(k=k)))",
        lambda size: reserved(size.of(dither(bits=4), blockwise(dither(bits=4), 256)), top_k(
            ratio=size.ratio)), claim="unbiased", error="ω (1 - k/d) / n²",
        bytes="(n-1) (p + k (4 + i))",
        letters={"k": "ratio d", "p": ("d/2", "33/64 d"), "ω": "min(d/7², √d/7)"},
        paper="Li et al. 2024", suffix=", or another codec"),
    Method("demo", "jaxcomm.demo()",
        lambda size, **options: demo(k=size.of(3, 32), block_size=size.of(4, 64), **options),
        "all-gather", "damped feedback", error="min(max(k/c², k/d), 1)",
        bytes="(n-1) m k (4 + i); m chunks of at most c by c, k = 32, c = 64",
        letters={"k": (3, 32), "c": (4, 64), "m": ("d/4", "d/4096"), "i": (4 / 3, 1)},
        paper="Peng et al. 2024",
        codec=lambda size: cosine(top_k(k=size.of(3, 32)), size.of(4, 64)),
        feedback=lambda codec: error_feedback(codec, decay=0.999), parts=("cosine",)),
]  # fmt: skip

SAMPLED = [
    summed("random_k", "jaxcomm.all_reduce_mean(random_k(k=k))",
        lambda size: random_k(ratio=size.drawn), claim="unbiased", error="(d/k - 1) / n",
        bytes="8 k (n-1)/n", letters={"k": "drawn d"}, paper="Stich et al. 2018"),
    summed("random_k_feedback", "jaxcomm.all_reduce_mean(error_feedback(scaled(random_k(k=k))))",
        lambda size: scaled(random_k(ratio=size.ratio)), claim="feedback", feedback=error_feedback,
        error="k/d", letters=K, like="random_k"),
    gathered("wangni", "jaxcomm.all_gather_mean(wangni(k=k))",
        lambda size: wangni(ratio=size.ratio), claim="unbiased",
        error="(d/k - 1) / n²", bytes="(n-1) k (4 + i)", letters=K, paper="Wangni et al. 2018"),
    with_feedback("threshold", "jaxcomm.all_gather_mean(error_feedback(threshold(λ, k=k)))",
        lambda size: threshold(size.threshold, ratio=size.ratio), bytes="(n-1) k (4 + i)",
        letters=K, paper="Strom 2015"),
    gathered("variance_based", "jaxcomm.all_gather_mean(variance_based(k=k))",
        lambda size: variance_based(alpha=size.of(0.5, 1.0), ratio=size.ratio), claim="feedback",
        note=", built in", bytes="(n-1) (k (1/2 + i) + l)", letters=K, paper="Tsuzuku et al. 2018"),
    gathered("ada_comp", "jaxcomm.all_gather_mean(ada_comp(block_size=m, capacity=c))",
        lambda size: ada_comp(block_size=size.of(4, 500), capacity=size.of(2, 5)), claim="feedback",
        note=", built in", bytes="(n-1) (c/m d ⌈log₂(2 m + 1)⌉/8 + 4 l)",
        letters={"m": (4, 500), "c": (2, 5)}, paper="Chen et al. 2018"),
]  # fmt: skip

IN_TURNS = [
    summed("block_coordinate", "jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B)))",
        lambda size: block_coordinate(size.blocks), claim="feedback", bytes="8 d/B (n-1)/n",
        letters=BLOCKS, paper="Wright 2015", feedback=error_feedback),
    summed("block_coordinate_random",
        'jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B, "random")))',
        lambda size: block_coordinate(size.blocks, "random"), claim="feedback", error="1/B",
        bytes="8 d/B (n-1)/n", letters=BLOCKS, paper="Nesterov 2012", feedback=error_feedback),
    summed("block_coordinate_southwell",
        'jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B, "gauss_southwell")))',
        lambda size: block_coordinate(size.blocks, "gauss_southwell"), claim="feedback",
        bytes="8 (n-1)/n (d/B + 8 B)", letters=BLOCKS, paper="Nutini et al. 2015",
        feedback=error_feedback),
    summed("block_coordinate_alone", "jaxcomm.all_reduce_mean(block_coordinate(B))",
        lambda size: block_coordinate(size.blocks), like="block_coordinate"),
]  # fmt: skip

RANKS: Letters = {"R": "rank", "p": 3, "m": "d/p"}
LOW_RANK = [
    Method("power_sgd", "jaxcomm.power_sgd(rank=R)",
        lambda size, **options: power_sgd(rank=size.rank, **options), claim="feedback",
        error="1/d; d per leaf, in practice far more",
        bytes="8 (n-1)/n (R (m + p) + p)", letters=RANKS,
        paper="Vogels et al. 2019", codec=lambda size: power_iteration(size.rank),
        feedback=error_feedback, parts=("power_iteration",)),
    Method("power_sgd_alternate", "jaxcomm.power_sgd(rank=R, alternate=True)",
        lambda size, **options: power_sgd(rank=size.rank, alternate=True, **options),
        claim="feedback", error="1/d; d per leaf, in practice far more",
        bytes="8 (n-1)/n (R + 1) m; in odd steps p instead of m",
        letters=RANKS, paper="Zhang et al. 2023", codec=lambda size: projection(size.rank, "right"),
        feedback=error_feedback, parts=("projection",)),
    Method("power_sgd_factor_codec",
        "jaxcomm.power_sgd(rank=R, alternate=True, factor_codec=dither(bits=16))", lambda size,
            **options: power_sgd(rank=size.rank, alternate=True, factor_codec=dither(bits=16),
            **options), claim="feedback", error="1/(2 d²); d per leaf, in practice far more",
        bytes="4 (n-1)/n (R + 1) m; in odd steps p instead of m",
        letters=RANKS, paper="Zhang et al. 2023, Xin et al. 2023",
        codec=lambda size: projection(size.rank, "right", factor_codec=dither(bits=16)),
        feedback=error_feedback, parts=("projection",)),
    summed("power_iteration",
        "jaxcomm.all_reduce_mean(error_feedback(low_rank.power_iteration(R)))",
        lambda size: power_iteration(size.rank), claim="feedback", feedback=error_feedback,
        error="1/d; in practice far more", like="power_sgd"),
    Method("dion", "jaxcomm.dion(rank=R)",
        lambda size, **options: dion(rank=size.rank, **options), 
        note="orthonormal factors of momenta", bytes="8 (n-1)/n R (m + p)", letters=RANKS,
        paper="Ahn et al. 2025", parts=("power_iteration",)),
    Method("atomo", "jaxcomm.atomo(rank=R)",
        lambda size, **options: atomo(rank=size.rank, **options), "all-gather", "unbiased",
        error="(√d/R - 1) / n²; d per leaf",
        bytes="4 (n-1) R (m + p)",
        letters={"R": "rank", "p": 2, "m": "d/p"}, paper="Wang et al. 2018",
        codec=lambda size: spectral_sampling(size.rank), parts=("spectral_sampling",)),
    gathered("spectral_sampling", "jaxcomm.all_gather_mean(low_rank.spectral_sampling(R))",
        lambda size: spectral_sampling(size.rank), claim="unbiased", error="(√d/R - 1) / n²",
        like="atomo"),
]  # fmt: skip

ROWS_OF: Letters = {"γ": "sketch_ratio", "υ": "union_density", "r": "d", "K": "d"}
SKETCHED = [
    Method(**_s2("s2_reducer", "jaxcomm.s2_reducer(density=υ, sketch_ratio=γ)", {"sketch_ratio":
            1.0}), claim="unbiased",
        error="(K - 1)/(γ υ d) / n; K coordinates of nonzero rows in the union",
        bytes="2 (n-1)/n (4 γ υ d + r/8)",
        letters={**ROWS_OF, "γ": (1, "sketch_ratio")}, paper="Ge et al. 2021", codec=_s2_codec,
        parts=("s2_sketch",)),
    Method(**_s2("s2_reducer_median",
            'jaxcomm.s2_reducer(density=υ, sketch_ratio=γ, decode="median", rows=3)', {
            "sketch_ratio": 2.0}, decode="median", rows=3), letters={"γ": (2, "sketch_ratio")},
        like="s2_reducer",
        parts=("s2_sketch",)),
    Method(**_s2("s2_reducer_peel",
            'jaxcomm.s2_reducer(density=υ, sketch_ratio=γ, decode="peel", rows=3)', {},
            decode="peel", rows=3), claim="exact if all fits",
        note=" and peeling recovers them, up to rounding",
        error="(K - 1)/(γ υ d) / n; 0 if peeling recovers all",
        bytes="2 (n-1)/n (4 γ υ d + r/8)", letters=ROWS_OF, suffix=", γ ≥ 1.25",
        parts=("s2_sketch",)),
    Method(**_s2("s2_reducer_8_bits",
            'jaxcomm.s2_reducer(density=υ, sketch_ratio=γ, decode="peel", rows=3, bits=8)', {
            "overflow": "drop"}, decode="peel", rows=3, bits=8),
        note="as `global_qsgd` for K coordinates, if peeling recovers all",
        bytes="2 (n-1)/n (γ υ d + r/8 + 4)", letters=ROWS_OF,
        parts=("s2_codes",)),
    summed("nonzero_union", 'jaxcomm.all_reduce_mean(nonzero_union(density=υ), scope="leaf")',
        lambda size: nonzero_union(density=size.union_density, granularity=size.granularity,
            overflow=size.overflow), claim="exact if all fits", error="0",
        bytes="2 (n-1)/n (4 υ d + r/8)", letters=ROWS_OF,
        paper="Fei et al. 2021", scope=(None, "leaf")),
    with_feedback("nonzero",
        'jaxcomm.all_gather_mean(error_feedback(nonzero(density=ρ)), scope="leaf")', lambda size:
            nonzero(density=size.of(0.5, size.density), granularity=size.granularity,
            overflow=size.of("drop", size.overflow)), note="; exact if all rows fit", error="ρ",
        bytes="(n-1) (4 ρ d + i r); r nonzero rows of one worker",
        letters={"ρ": (0.5, "density"), "r": "ρ d", "i": "3/8"}, paper="Renggli et al. 2019",
        scope=(None, "leaf")),
    Method("sparcml", "jaxcomm.sparcml(density=ρ)", lambda size, **options: sparcml(
            density=size.density, granularity=size.granularity, scope=size.of("bucket", None),
            **options), "doubling", "exact if all fits", error="0",
        bytes="8 ρ d (n-1) and an index per row; n a power of 2, nρ < 1", letters={"ρ": "density"},
        paper="Renggli et al. 2019", parts=("recursive_doubling_mean",)),
    Method("parallax", "jaxcomm.parallax(sparse=is_sparse, density=ρ, union_density=υ)",
        lambda size, axis_name="data", **_: parallax(axis_name, sparse=lambda updates: jax.tree.map(
            lambda x: x.ndim > size.of(0, 1), updates), density=size.density,
            union_density=size.union_density, granularity=size.granularity), "server",
        "exact if all fits", error="0",
        bytes="(n-1)/n (4 (ρ + υ) d + i r); r nonzero rows, both ways; dense leaves as `mean`",
        letters={"ρ": "density", "υ": "union_density", "r": "2 d", "i": "1/4"},
        paper="Kim et al. 2019"),
    Method("sketched_sgd", "jaxcomm.sketched_sgd(k=k, sketch_ratio=γ)", lambda size, **options:
            sketched_sgd(ratio=size.ratio, sketch_ratio=size.table_ratio, rows=size.of(3, 5),
            hashing=size.of("elements", None), **options), claim="feedback", note=", built in",
        bytes="8 (n-1)/n (γ d + 4 k)",
        letters={"γ": "table_ratio", **K}, paper="Ivkin et al. 2019"),
    Method("fetch_sgd", "jaxcomm.fetch_sgd(k=k, sketch_ratio=γ)", lambda size, **options: fetch_sgd(
            ratio=size.ratio, sketch_ratio=size.table_ratio, rows=size.of(3, 5), hashing=size.of(
            "elements", None), **options), claim="feedback", note=" in the sketch",
        bytes="8 γ d (n-1)/n",
        letters={"γ": "table_ratio"}, paper="Rothchild et al. 2020"),
    summed("count_sketch", "jaxcomm.all_reduce_mean(count_sketch(sketch_ratio=γ))", lambda size:
            count_sketch(sketch_ratio=size.of(0.5, size.table_ratio), hashing=size.of("elements",
            None)), claim="unbiased", error="(d - 1)/(γ d) / n",
        bytes="8 γ d (n-1)/n",
        letters={"γ": (0.5, "table_ratio")}, paper="Charikar et al. 2004"),
]  # fmt: skip

ZEROTH_ORDER = [
    Method("zeroth_order", 'jaxcomm.zeroth_order(K, distribution="rademacher")',
        lambda size, **options: zeroth_order(size.directions, distribution="rademacher", **options),
        claim="unbiased", error="(d-1)/K / n", bytes="8 K (n-1)/n", letters={"K": "directions"},
        paper="Spall 1992"),
    Method("zeroth_order_gaussian", "jaxcomm.zeroth_order(K)",
        lambda size, **options: zeroth_order(size.directions, **options), claim="unbiased",
        note=", for the smoothed loss", error="(d+1)/K / n", bytes="8 K (n-1)/n",
        letters={"K": "directions"}, paper="Malladi et al. 2023"),
]  # fmt: skip

SWITCHED = [
    Method("warmup",
        "jaxcomm.warmup([jaxcomm.all_gather_mean(family(ratio)) for ratio in (0.1, 0.01)], "
            "every=2)", lambda size, **options: warmup([all_gather_mean(family(ratio),
            **options) for ratio in size.of((0.5, 0.25, 0.125), (0.1, 0.01))], every=size.of(1, 2)),
        "all-gather", "feedback", bytes="As the current aggregator",
        kind="wrapper"),
    Method("adaptive_ratio", "jaxcomm.adaptive_ratio(family, [0.01, 0.1], target_error=0.5)",
        lambda size, **options: adaptive_ratio(family, size.of([0.125, 0.25, 0.5], [0.01, 0.1]),
            target_error=size.of(0.3, 0.5), patience=size.of(2, 50), **options), "all-gather",
        "feedback",
        bytes="As the current codec, plus 24 (n-1)/n", kind="wrapper"),
    Method("delayed", "jaxcomm.delayed(aggregator, staleness=2)",
        lambda size, axis_name="data", **_: delayed(mean(axis_name), size.of(1, 2)),
        "as the inner aggregator",
        bytes="As the inner aggregator, two steps late; plus 8 (n-1)/n",
        paper="Li et al. 2018", kind="wrapper"),
]  # fmt: skip
