"""The lines of docs/methods.md: how a row of the tables of cases is printed.

What a row claims is not written here: `tests.cases.page` takes it from the row. Formulas are
compared with the row (`tests/test_methods_page.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """A line of a table.

    Attributes:
      row: The name of its row.
      code: The call, which a test runs as it is printed.
      bytes: A formula; text may follow a semicolon. "As ..." is no formula.
      paper: Author and year.
      error: A formula of the variance of the mean, without the sum of squares, or of the
        contraction of the codec; text may follow a semicolon.
      at: Letters of the formulas at the numbers of the row; each may be a formula.
      suffix: Text after the code.
      note: What follows the claim, with its punctuation.
      claim: In place of the row's claim, where the row's settings are too small for it.
      tested: The test of `claim`.
      unchecked: Why `bytes` is not compared with the row.
    """

    row: str
    code: str
    bytes: str
    paper: str = ""
    error: str = ""
    at: Mapping[str, float | str] = {}
    suffix: str = ""
    note: str = ""
    claim: str = ""
    tested: str = ""
    unchecked: str = ""


QUARTER = {"k": "d/4"}

MEANS = [
    Line("mean", "jaxcomm.mean()", "8 d (n-1)/n", error="0"),
    Line(
        "ring_mean",
        "jaxcomm.ring_mean()",
        "8 d (n-1)/n; d padded to n chunks",
        "Patarasuk and Yuan 2009",
        error="0",
    ),
    Line("mean_bfloat16", 'jaxcomm.mean(wire_dtype="bfloat16")', "4 d (n-1)/n"),
    Line(
        "mean_float8",
        'jaxcomm.mean(wire_dtype="float8_e4m3fn")',
        "2 (1 + 4/B) d (n-1)/n; blocks of B = 256",
        at={"B": 4},
    ),
    Line(
        "global_qsgd",
        "jaxcomm.global_qsgd()",
        "2 b d (n-1)/n",
        "Xin et al. 2023",
        error="min(d/s², √(d/n)/s) / n",
        at={"s": 15, "b": 1},
    ),
    Line(
        "global_qsgd_exponential",
        'jaxcomm.global_qsgd(dithering="exponential")',
        "2 d (n-1)/n; d padded to n rows",
        "Xin et al. 2023",
        error="((9/8)^(1+⌈log₂ n⌉) - 1) / n",
    ),
    Line(
        "global_qsgd_exponential_two_stage",
        'jaxcomm.global_qsgd(dithering="exponential", reduce="two_stage")',
        "2 (n-1)/n (d + 4 n); d padded to n rows",
        "Xin et al. 2023",
        error="(1/8 + 9/(64 n)) / n",
    ),
    Line(
        "sparse_global_qsgd",
        "jaxcomm.sparse_global_qsgd(capacity=k)",
        "(n-1) k (i + b); i is 2 or 4",
        "Xin et al. 2023",
        error="min(d/s², √(d/n)/s) / n",
        at={"k": 2048, "i": 2, "b": 0.5, "s": 4},
    ),
    Line(
        "qsgd",
        "jaxcomm.qsgd()",
        "b d (n-1)",
        "Alistarh et al. 2017",
        error="min(d/s², √d/s) / n²",
        at={"s": 127, "b": 1},
    ),
    Line(
        "two_stage_4_bits",
        "jaxcomm.two_stage_mean(codec)",
        "2 p (n-1)/n; p = 9/8 d with `natural()`",
        error="(ω/n + ω (1 + ω/n)) / n; ω = 1/8 with `natural()`",
        at={"p": "d", "ω": "min(8/7², √8/7)"},
        note=", if the codec is",
    ),
    Line(
        "budgeted_mean",
        "jaxcomm.budgeted_mean(lambda levels: dither(levels=levels), 127, slow={0: 1})",
        "p + (n-1)/m p' for the slow worker, (m-1)/m p + (n-1)/m p' for each of the m others; "
        "p of a worker's codec, p' of that of the mean",
        "Tang et al. 2020",
        error="((1 + ω) v + n ω) / n²; v of the slow worker's codec, ω of the others', for d/m "
        "coordinates",
        at={"w": "⌈d/7⌉", "ω": "min(w/127², √w/127)", "v": "min(w, √w)"},
        unchecked="differs by worker: tests/aggregation/test_budgeted.py",
    ),
    Line(
        "sharded_server",
        "jaxcomm.sharded_server(optax.identity())",
        "8 d (n-1)/n; each leaf padded to n slices; 2 p (n-1)/n with `push=codec, pull=codec`",
        "Rajbhandari et al. 2020",
        error="0",
        suffix=", with the optimizer as argument",
    ),
    Line(
        "top_k_sgd",
        "jaxcomm.all_gather_mean(error_feedback(top_k(k=k)))",
        "(n-1) k (4 + i)",
        "Stich et al. 2018",
        error="k/d",
        at=QUARTER,
        suffix=", or `jaxcomm.top_k_sgd(k=k)`",
    ),
    Line(
        "coarse_top_k",
        "jaxcomm.all_gather_mean(error_feedback(coarse_top_k(k=64)))",
        "(n-1) d/B (k (1/4 + i) + 8); blocks of B = 4096",
        "Sarfi et al. 2025",
        error="min(k/B, 1/k)",
        at={"k": 2, "B": 4, "i": 0.25},
    ),
    Line(
        "ef21",
        "jaxcomm.all_gather_mean(ef21(top_k(k=k)))",
        "(n-1) k (4 + i)",
        "Richtárik et al. 2021",
        at=QUARTER,
    ),
    Line(
        "diana",
        "jaxcomm.all_reduce_mean(diana(codec))",
        "2 p (n-1)/n",
        "Mishchenko et al. 2019",
        error="ω/n² · Σ|xᵢ - hᵢ|²; ω for a norm shared by n workers; hᵢ the learned shift of "
        "worker i",
        at={"p": "d", "ω": "n min(d/15², √(d/n)/15)"},
    ),
    Line(
        "ecq",
        "jaxcomm.all_gather_mean(ecq(codec))",
        "(n-1) p",
        "Wu et al. 2018",
        at={"p": "d"},
    ),
    Line(
        "chain",
        "jaxcomm.all_gather_mean(error_feedback(chain(scaled(random_k(k=10 * k)), "
        "top_k(k=k), scaled(dither(bits=8)))))",
        "(n-1) k (1 + i); i of k among the coordinates that are drawn",
        "Wang et al. 2023",
        error="k/d / (1 + ω); ω of `dither` for k coordinates",
        at={"k": "d/4", "i": 1 / 4, "ω": "min(k/127², √k/127)"},
    ),
    Line(
        "chain_summed",
        "jaxcomm.all_reduce_mean(chain(random_k(k=k), dither(bits=8)))",
        "2 k (n-1)/n",
        "Wang et al. 2023",
        error="(d/k (1 + ω) - 1) / n; ω = min(k/s², √(k/n)/s)",
        at={"k": "d/2", "s": 15, "ω": "min(k/s², √(k/n)/s)"},
    ),
    Line(
        "reserved",
        "jaxcomm.all_gather_mean(reserved(codec, top_k(k=k)))",
        "(n-1) (p + k (4 + i))",
        "Li et al. 2024",
        error="ω (1 - k/d) / n²",
        at={"k": "d/4", "p": "d/2", "ω": "min(d/7², √d/7)"},
    ),
    Line(
        "demo",
        "jaxcomm.demo()",
        "(n-1) m k (4 + i); m chunks of at most c by c, with k = 32 of each and c = 64",
        "Peng et al. 2024",
        error="min(max(k/c², k/d), 1)",
        at={"k": 3, "c": 4, "m": "d/4", "i": 4 / 3},
    ),
    Line(
        "lazy",
        "jaxcomm.lazy()",
        "8 d (n-1)/n; only 16 (n-1)/n in steps in which all workers skip; 2 p (n-1)/n with a codec",
        "Chen et al. 2018, Sun et al. 2019",
        claim="the exact mean of last uploads",
        tested="tests/aggregation/test_lazy.py"
        "::test_the_aggregate_is_the_mean_of_the_last_uploads_exactly",
    ),
    Line(
        "deep_gradient_compression",
        "jaxcomm.deep_gradient_compression(ratio=k/d)",
        "(n-1) k (4 + i); more during the warm-up",
        "Lin et al. 2018",
        at=QUARTER,
    ),
    Line(
        "gtop_k",
        "jaxcomm.gtop_k(k=k)",
        "(⌈log₂ n⌉ + 2 (n-1)/n) k (4 + i)",
        "Shi et al. 2019",
        at=QUARTER,
    ),
    Line(
        "terngrad",
        "jaxcomm.terngrad()",
        "(n-1) (d/4 + 4 l)",
        "Wen et al. 2017",
        note=", clips at 2.5 standard deviations",
    ),
    Line(
        "terngrad_unclipped",
        "jaxcomm.terngrad(clip=None)",
        "(n-1) (d/4 + 4 l)",
        "Wen et al. 2017",
        error="(√d - 1)/2 / n²; d per leaf",
    ),
    Line(
        "terngrad_shared",
        'jaxcomm.terngrad(clip=None, scale="shared")',
        "2 (n-1)/n (b d + 4 l); b for s = 1",
        "Wen et al. 2017",
        error="(√(n d) - 1)/2 / n²; d per leaf",
        at={"b": "4/6"},
    ),
    Line(
        "natural_compression",
        "jaxcomm.natural_compression()",
        "9/8 d (n-1)",
        "Horváth et al. 2019",
        error="1/8 / n²",
    ),
    Line(
        "e3m0",
        "jaxcomm.all_gather_mean(e3m0())",
        "(n-1) (d/2 + 8)",
        "Douillard et al. 2025",
        error="(1/8 + d/2^14) / n²",
        suffix="; in `blockwise(e3m0(), 256)`, d is 256",
    ),
    Line(
        "mxfp8",
        "jaxcomm.all_gather_mean(block_float())",
        "(n-1) (33/32 d + 4)",
        "Rouhani et al. 2023",
        error="(1/256 + 2^-13/448²) / n²",
        suffix=", MXFP8",
    ),
    Line(
        "block_float_int8",
        'jaxcomm.all_gather_mean(error_feedback(block_float("int8", block_size=256, '
        'rounding="nearest")))',
        "(n-1) (257/256 d + 4)",
        error="1 - 256/127²",
    ),
    Line(
        "ef_sign_sgd",
        "jaxcomm.ef_sign_sgd()",
        "(n-1) (d/8 + 4 l)",
        "Karimireddy et al. 2019",
        error="1/d; d per leaf",
    ),
    Line(
        "one_bit_sgd",
        "jaxcomm.one_bit_sgd()",
        "(n-1) (d/8 + 8 C); C columns of all leaves",
        "Seide et al. 2014",
        error="1/d; d per leaf",
        at={"C": 1},
    ),
    Line(
        "sbc",
        "jaxcomm.all_gather_mean(error_feedback(sbc(k=k)))",
        "(n-1) (i k + 4 l)",
        "Sattler et al. 2018",
        error="1/(k + max(k, (d-1)/k)); k and d per leaf",
        at=QUARTER,
    ),
    Line(
        "stc",
        "jaxcomm.all_gather_mean(error_feedback(stc(k=k)))",
        "(n-1) ((i + 1/8) k + 4 l)",
        "Sattler et al. 2019",
        error="min(k/d, 1/k); k and d per leaf",
        at=QUARTER,
    ),
    Line(
        "stc_two_stage",
        "jaxcomm.two_stage_mean(error_feedback(stc(k=k)))",
        "2 (n-1) ((i + 1/8) k + 4 l); k per part of d/n coordinates",
        "Sattler et al. 2019",
        at={"k": "d/n/4", "i": 0.5},
        note=" at both ends",
    ),
    Line(
        "adaptive_threshold",
        "jaxcomm.all_gather_mean(error_feedback(adaptive_threshold(ratio=k/d)))",
        "(n-1) ((i + 1/8) (k + 1) + 8 l)",
        "Dryden et al. 2016",
        error="min(max(k/(2 d), 1/d), 1/max(k, 1)); k and d per leaf",
        at=QUARTER,
    ),
    Line(
        "fixed_threshold_summed",
        "jaxcomm.all_reduce_mean(error_feedback(fixed_threshold(t)))",
        "2 b d (n-1)/n; b for s = 1",
        "Strom 2015",
        at={"b": "4/6"},
        note="; decodes to sums of ±t",
    ),
    Line(
        "adaptive_levels",
        "jaxcomm.all_gather_mean(adaptive_levels(levels=s))",
        "(n-1) (d/8 ⌈log₂(2 s + 2)⌉ + 4 s)",
        "Faghri et al. 2020",
        error="(√d - 1)/2 / n²; in practice far less",
        at={"s": 3},
    ),
    Line(
        "elias",
        "jaxcomm.all_gather_mean(elias(dither(levels=s)))",
        "(n-1) r d/8",
        "Alistarh et al. 2017",
        error="min(d/s², √d/s) / n²",
        at={"r": 3.5 + 1 / 64, "s": 7},
    ),
    Line(
        "rans",
        "jaxcomm.all_gather_mean(rans(min_max_dither(levels=s)))",
        "(n-1) (r d/8 + 2 (2 s + 1))",
        "Suresh et al. 2017",
        error="min(d/s², √d/s) / n²",
        at={"r": 3.5 + 1 / 128, "s": 7},
    ),
    Line(
        "golomb_rice",
        'jaxcomm.all_gather_mean(golomb_rice(dither(levels=1, norm="l2")))',
        "(n-1) r d/8",
        "Golomb 1966, Rice and Plaunt 1971",
        error="√d / n²",
        at={"r": 1.5 + 1 / 64},
    ),
    Line(
        "golomb_rice_top_k",
        "jaxcomm.all_gather_mean(error_feedback(golomb_rice(top_k(k=k))))",
        "(n-1) k (4 + r/8)",
        "Sattler et al. 2019",
        error="k/d",
        at={**QUARTER, "r": 5 + 1 / 64},
    ),
    Line(
        "min_max_dither",
        "jaxcomm.all_gather_mean(min_max_dither(levels=s))",
        "(n-1) (b d + 8); b for integers 0 to s-1",
        "Suresh et al. 2017",
        error="d / (2 (s-1)²) / n²",
        at={"s": 16, "b": 0.5},
    ),
    Line(
        "min_max_dither_summed",
        "jaxcomm.all_reduce_mean(min_max_dither(levels=s))",
        "2 (n-1)/n (b d + 8); b for integers 0 to n (s-1)",
        "Suresh et al. 2017",
        error="d / (2 (s-1)²) / n",
        at={"s": 5, "b": "4/5"},
    ),
    Line(
        "sign_sgd",
        "jaxcomm.sign_sgd()",
        "d/4 (n-1)/n; d padded to 32 n",
        "Bernstein et al. 2018",
        note=": the majority of signs",
    ),
    Line(
        "signum",
        "jaxcomm.signum()",
        "d/4 (n-1)/n; d padded to 32 n",
        "Bernstein et al. 2018",
        note=": the majority of signs of momenta",
    ),
    Line(
        "votes",
        "jaxcomm.majority_vote()",
        "d/4 (n-1)/n; d padded to 32 n",
        "Bernstein et al. 2018",
        note=": the majority of signs",
    ),
    Line(
        "random_k",
        "jaxcomm.all_reduce_mean(random_k(k=k))",
        "8 k (n-1)/n",
        "Stich et al. 2018",
        error="(d/k - 1) / n",
        at={"k": "d/2"},
    ),
    Line(
        "wangni",
        "jaxcomm.all_gather_mean(wangni(k=k))",
        "(n-1) k (4 + i)",
        "Wangni et al. 2018",
        error="(d/k - 1) / n²; exactly Σⱼ xⱼ²/pⱼ - |x|² per worker, with pⱼ the "
        "probability of sending xⱼ",
        at=QUARTER,
    ),
    Line(
        "threshold",
        "jaxcomm.all_gather_mean(error_feedback(threshold(λ, k=k)))",
        "(n-1) k (4 + i)",
        "Strom 2015",
        at=QUARTER,
    ),
    Line(
        "variance_based",
        "jaxcomm.all_gather_mean(variance_based(k=k))",
        "(n-1) (k (1/2 + i) + l)",
        "Tsuzuku et al. 2018",
        at=QUARTER,
        note=", built in",
    ),
    Line(
        "ada_comp",
        "jaxcomm.all_gather_mean(ada_comp(block_size=m, capacity=c))",
        "(n-1) (c/m d ⌈log₂(2 m + 1)⌉/8 + 4 l)",
        "Chen et al. 2018",
        at={"m": 4, "c": 2},
        note=", built in",
    ),
    Line(
        "block_coordinate",
        "jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B)))",
        "8 d/B (n-1)/n",
        "Wright 2015",
        at={"B": 2},
    ),
    Line(
        "block_coordinate_random",
        'jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B, "random")))',
        "8 d/B (n-1)/n",
        "Nesterov 2012",
        error="1/B",
        at={"B": 2},
    ),
    Line(
        "block_coordinate_southwell",
        'jaxcomm.all_reduce_mean(error_feedback(block_coordinate(B, "gauss_southwell")))',
        "8 (n-1)/n (d/B + 8 B)",
        "Nutini et al. 2015",
        at={"B": 2},
    ),
    Line(
        "power_iteration",
        "jaxcomm.power_sgd(rank=R)",
        "8 (n-1)/n (R (m + p) + p); leaves of m x p, other leaves 8 d (n-1)/n",
        "Vogels et al. 2019",
        error="1/d; d per leaf, in practice far more",
        at={"R": 1, "p": 3, "m": "d/p"},
    ),
    Line(
        "power_sgd_alternate",
        "jaxcomm.power_sgd(rank=R, alternate=True)",
        "8 (n-1)/n (R + 1) m; in odd steps p instead of m; other leaves 8 d (n-1)/n",
        "Zhang et al. 2023",
        error="1/d; d per leaf, in practice far more",
        at={"R": 1, "p": 3, "m": "d/p"},
    ),
    Line(
        "power_sgd_factor_codec",
        "jaxcomm.power_sgd(rank=R, alternate=True, factor_codec=dither(bits=16))",
        "4 (n-1)/n (R + 1) m; in odd steps p instead of m; other leaves 8 d (n-1)/n",
        "Zhang et al. 2023, Xin et al. 2023",
        error="1/(2 d²); d per leaf, in practice far more",
        at={"R": 1, "p": 3, "m": "d/p"},
    ),
    Line(
        "spectral_sampling",
        "jaxcomm.atomo(rank=R)",
        "4 (n-1) R (m + p); leaves of m x p, other leaves 4 d (n-1)",
        "Wang et al. 2018",
        error="(√d/R - 1) / n²; d per leaf; exactly Σⱼ σⱼ²/pⱼ - |x|² per worker, with pⱼ the "
        "probability of sending the singular value σⱼ",
        at={"R": 1, "p": 2, "m": "d/p"},
    ),
    Line(
        "s2_reducer",
        "jaxcomm.s2_reducer(density=υ, sketch_ratio=γ)",
        "2 (n-1)/n (4 γ υ d + r/8); r rows of the leaf",
        "Ge et al. 2021",
        error="(K - 1)/(γ υ d) / n; K coordinates of nonzero rows in the union",
        at={"γ": 1, "υ": 1, "r": "d", "K": "d"},
    ),
    Line(
        "s2_reducer_peel",
        'jaxcomm.s2_reducer(density=υ, sketch_ratio=γ, decode="peel", rows=3)',
        "2 (n-1)/n (4 γ υ d + r/8); r rows of the leaf",
        error="(K - 1)/(γ υ d) / n; 0 if peeling recovers all",
        at={"γ": 1.5, "υ": 1, "r": "d", "K": "d"},
        suffix=", γ ≥ 1.25",
        note=" and peeling recovers them, up to rounding",
    ),
    Line(
        "s2_reducer_8_bits",
        'jaxcomm.s2_reducer(density=υ, sketch_ratio=γ, decode="peel", rows=3, bits=8)',
        "2 (n-1)/n (γ υ d + r/8 + 4); r rows of the leaf",
        at={"γ": 1.5, "υ": 1, "r": "d"},
        claim="as `global_qsgd` for K coordinates, if peeling recovers all",
        tested="tests/compression/sketches/test_s2_sketch.py::"
        "test_codes_have_the_error_of_the_quantizer_alone_however_cells_wrap",
    ),
    Line(
        "nonzero_union",
        'jaxcomm.all_reduce_mean(nonzero_union(density=υ), scope="leaf")',
        "2 (n-1)/n (4 υ d + r/8); r rows of the leaf",
        "Fei et al. 2021",
        error="0",
        at={"υ": 1, "r": "d"},
    ),
    Line(
        "nonzero",
        'jaxcomm.all_gather_mean(nonzero(density=ρ), scope="leaf")',
        "(n-1) (4 ρ d + i r); r nonzero rows of one worker",
        "Renggli et al. 2019",
        error="0",
        at={"ρ": 0.5, "r": "d/2", "i": "3/8"},
    ),
    Line(
        "sparcml",
        "jaxcomm.sparcml(density=ρ)",
        "8 ρ d (n-1) and an index per row, half of it in log₂ n messages, half in an all-gather; "
        "for n a power of 2 and nρ < 1",
        "Renggli et al. 2019",
        error="0",
        unchecked="The row has a density of 1, and n times that is more than all coordinates.",
    ),
    Line(
        "parallax",
        "jaxcomm.parallax(sparse=is_sparse, density=ρ, union_density=υ)",
        "(n-1)/n (4 (ρ + υ) d + i r); r nonzero rows that are sent, in both directions; "
        "dense leaves as `mean`",
        "Kim et al. 2019",
        error="0",
        at={"ρ": 1, "υ": 1, "r": "2 d", "i": "1/4"},
    ),
    Line(
        "sketched_sgd",
        "jaxcomm.sketched_sgd(k=k, sketch_ratio=γ)",
        "8 (n-1)/n (γ d + 4 k); the number of sketch columns is rounded up",
        "Ivkin et al. 2019",
        at={"γ": 2, **QUARTER},
        note=", built in",
    ),
    Line(
        "fetch_sgd",
        "jaxcomm.fetch_sgd(k=k, sketch_ratio=γ)",
        "8 γ d (n-1)/n; the number of sketch columns is rounded up",
        "Rothchild et al. 2020",
        at={"γ": 2},
        note=" in the sketch",
    ),
    Line(
        "zeroth_order",
        'jaxcomm.zeroth_order(K, distribution="rademacher")',
        "8 K (n-1)/n",
        "Spall 1992",
        error="(d-1)/K / n",
        at={"K": 256},
    ),
    Line(
        "zeroth_order_gaussian",
        "jaxcomm.zeroth_order(K)",
        "8 K (n-1)/n",
        "Malladi et al. 2023",
        error="(d+1)/K / n",
        at={"K": 256},
        note=", for the smoothed loss",
    ),
    Line(
        "count_sketch",
        "jaxcomm.all_reduce_mean(count_sketch(sketch_ratio=γ))",
        "8 γ d (n-1)/n; the number of sketch columns is rounded up",
        "Charikar et al. 2004",
        error="(d - 1)/(γ d) / n",
        at={"γ": 0.5},
    ),
]

DEGREE = {"degree": 2}
GOSSIP = [
    Line("dpsgd", "gossip.dpsgd(graph)", "degree P", "Lian et al. 2017", at=DEGREE),
    Line(
        "matcha",
        "gossip.matcha(plan)",
        "active P; active: the number of active matchings, on average at most `budget` "
        "times that of all matchings",
        "Wang et al. 2019",
        at={"active": 2},
    ),
    Line(
        "matcha_periodic",
        "gossip.dpsgd(gossip.random_periodic(graph, budget=0.5))",
        "degree P in half of the steps",
        "baseline in Wang et al. 2019",
        unchecked="The row has the bytes of a step in which all edges are active.",
    ),
    Line(
        "choco_sgd",
        "gossip.choco_sgd(graph, top_k(k=k), step_size=0.1)",
        "degree p",
        "Koloskova et al. 2019",
        at=DEGREE,
    ),
    Line(
        "deep_squeeze",
        "gossip.deep_squeeze(graph, top_k(k=k), step_size=0.1)",
        "degree p",
        "Tang et al. 2019",
        at=DEGREE,
    ),
    Line("d2", "gossip.d2(gossip.lazy_mixing(graph))", "degree P", "Tang et al. 2018", at=DEGREE),
    Line(
        "sgp",
        "gossip.sgp(graphs)",
        "messages (P + 4); messages: the number of receivers in a step",
        "Assran et al. 2018",
        at={"messages": 1},
        suffix="; Overlap SGP with `delay=`",
    ),
    Line(
        "noloco",
        "gossip.noloco(gossip.random_pairs(n), 1)",
        "P",
        "Kolehmainen et al. 2025",
        suffix=", with local steps between exchanges for a larger period",
        unchecked="The row has the bytes of all pairings, of which a step draws one.",
    ),
    Line(
        "ad_psgd",
        "gossip.ad_psgd(graph, staleness=2)",
        "P",
        "Lian et al. 2018",
        unchecked="The row has the bytes of all matchings, of which a step draws one.",
    ),
    Line(
        "periodic_averaging",
        "gossip.periodic_averaging(3, gossip.dpsgd(graph))",
        "As the inner method, plus 8 d (n-1)/n in every third step",
        suffix="; it can wrap any method of this table",
        claim="as the inner method",
        unchecked="The exchange is in a conditional.",
    ),
]

LOCAL = [
    Line(
        "local_sgd",
        "optax.chain(inner, synchronization.local_sgd(period, aggregator=aggregator))",
        "The sum of a worker's updates since the last exchange",
        "Stich 2018",
    ),
    Line(
        "local_sgd",
        "optax.chain(inner, synchronization.local_sgd(synchronization.post_local(10, period)))",
        "The same, and also in each of the first 10 steps",
        "Lin et al. 2018",
    ),
    Line(
        "slowmo",
        "optax.chain(inner, synchronization.slowmo(period, learning_rate=0.1))",
        "The same; a momentum step applies the mean",
        "Wang et al. 2019",
    ),
    Line(
        "diloco",
        "synchronization.diloco(inner, outer, period, aggregator=aggregator)",
        "The same; `outer` applies the mean",
        "Douillard et al. 2023",
    ),
    Line(
        "streaming_diloco",
        "synchronization.streaming_diloco("
        "inner, outer, period, fragments=2, overlap=1, mixing_factor=0.5)",
        "The same for one fragment of the parameters; the mean is applied `overlap` steps later",
        "Douillard et al. 2025",
    ),
    Line(
        "streaming_diloco_4_bits",
        "synchronization.streaming_diloco(inner, outer, period, fragments=2, overlap=1, "
        "aggregator=jaxcomm.all_gather_mean(blockwise(e3m0(), 256)))",
        "The same, in 4 bits",
        "Douillard et al. 2025",
    ),
    Line(
        "eager_diloco",
        "synchronization.eager_diloco(inner, outer, period, aggregator=aggregator)",
        "The displacements of the last period; a worker's own part is of this one",
        "Kale et al. 2025",
    ),
    Line(
        "eager_diloco_delayed",
        "synchronization.eager_diloco(inner, outer, period, aggregator=aggregator, eager=False)",
        "The displacements of the last period",
        "Kale et al. 2025",
    ),
    Line(
        "sparseloco",
        "synchronization.sparseloco(inner, period, k=64, block_size=128)",
        "The largest k coordinates of each block of the residual, in 2 bits",
        "Sarfi et al. 2025",
    ),
    Line(
        "muloco",
        "synchronization.diloco(inner, outer, period, aggregator=jaxcomm.all_gather_mean("
        "error_feedback(blockwise(dither(bits=4), 32))))",
        "As `diloco`, in 4 bits with feedback",
        "Thérien et al. 2025",
        suffix=", with `optax.contrib.muon` as `inner`: MuLoCo",
    ),
    Line(
        "pr_sgd",
        "synchronization.pr_sgd(inner, period)",
        "The same, and the state (momentum) of `inner`",
        "Yu et al. 2019",
    ),
]

AROUND = [
    Line(
        "accumulate",
        "jaxcomm.accumulate(aggregator, every=2)",
        "As the inner aggregator, but only in every second step",
    ),
    Line(
        "skip_nonfinite",
        "jaxcomm.skip_nonfinite(aggregator)",
        "8 (n-1)/n, then as the inner aggregator; skips a step if a gradient or the result is not "
        "finite",
    ),
    Line(
        "gradient_norms",
        "jaxcomm.gradient_norms(aggregator)",
        "8 (n-1)/n, and as the inner aggregator",
    ),
    Line(
        "wait_free",
        "jaxcomm.scheduling.wait_free(aggregator)",
        "As the inner aggregator for each group of leaves and each layer of a stack",
    ),
    Line(
        "hierarchical",
        'jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))',
        "On each axis, as the aggregator of this axis",
    ),
    Line(
        "sliced",
        'jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.sliced(jaxcomm.global_qsgd("dcn"), '
        'axis_name="ici"))',
        "As the inner aggregator for 1/m of the coordinates, with m devices of the axis; plus "
        "4 (m-1)/m d over this axis",
    ),
    Line(
        "warmup",
        "jaxcomm.warmup([jaxcomm.all_gather_mean(family(ratio)) for ratio in (0.1, 0.01)], "
        "every=2)",
        "As the aggregator that is used in the step",
    ),
    Line(
        "adaptive_ratio",
        "jaxcomm.adaptive_ratio(family, [0.01, 0.1], target_error=0.5)",
        "As the codec of the ratio that is used in the step, plus 24 (n-1)/n to measure its error",
    ),
    Line(
        "delayed",
        "jaxcomm.delayed(aggregator, staleness=2)",
        "As the inner aggregator, but of gradients of two steps ago; plus 8 (n-1)/n for a flag",
        "Li et al. 2018",
    ),
    Line(
        "backup",
        "jaxcomm.backup(aggregator, 2, times=synchronization.shifted_exponential(1.0).sample)",
        "As the inner aggregator with a weight; plus 4 (n-1) if each worker measures its own time; "
        "dropped workers send as much as others",
        "Chen et al. 2016",
    ),
    Line(
        "proximal",
        "jaxcomm.proximal(aggregator, regularizers.l1(0.001), learning_rate=1.0)",
        "As the aggregator; weights and updates get exact zeros, which sparsifiers send exactly",
        "Parikh and Boyd 2014",
        suffix=", with the optimizer after the aggregator",
    ),
    Line(
        "proximal_point",
        "optax.chain(aggregator, synchronization.proximal_point(0.1, restart_period=10))",
        "As the aggregator; the proximal term sends nothing",
    ),
]

OPTIONS, CODEC, PART = "other options", "another codec", "a part of it, as a wrapper of any codec"
VARIANTS = {
    "laq": ("lazy", CODEC),
    **{
        f"global_qsgd_{name}": ("global_qsgd", OPTIONS)
        for name in (
            *("8_bits", "l2", "leaf", "buckets", "3_levels"),
            *("10_bits", "16_bits", "32_bits", "tree"),
        )
    },
    **{f"qsgd_{name}": ("qsgd", OPTIONS) for name in ("4_bits", "16_bits", "l2", "leaf")},
    "two_stage_8_bits": ("two_stage_4_bits", CODEC),
    "sharded_server_8_bits": ("sharded_server", CODEC),
    "sharded_server_top_k": ("sharded_server", CODEC),
    "compressed_memory": ("top_k_sgd", OPTIONS),
    "top_k_two_stage": ("two_stage_4_bits", CODEC),
    "top_k_bfloat16": ("top_k_sgd", OPTIONS),
    "top_k_blocks": ("top_k_sgd", OPTIONS),
    "top_k_sampled": ("top_k_sgd", OPTIONS),
    "error_feedback_dither": ("top_k_sgd", CODEC),
    "one_bit": ("one_bit_sgd", "one unit in place of one per column"),
    "fixed_threshold": ("fixed_threshold_summed", "gathered in place of summed"),
    "random_k_feedback": ("random_k", "feedback around its scaled codec"),
    "block_coordinate_alone": ("block_coordinate", "without feedback"),
    "momentum_correction": ("deep_gradient_compression", PART),
    "local_clip": ("deep_gradient_compression", PART),
    "rotated": ("global_qsgd", "a wrapper of any codec"),
    "rotated_blocks": ("qsgd", "a wrapper of any codec"),
    "atomo": ("spectral_sampling", "most leaves of the laws are vectors, which are sent exactly"),
    "power_sgd": ("power_iteration", "most leaves of the laws are vectors, which are sent exactly"),
    "s2_reducer_median": ("s2_reducer", OPTIONS),
    "dpsgd_adapt_then_combine": ("dpsgd", OPTIONS),
    "dpsgd_in_turns": ("dpsgd", "another mixing"),
    "choco_sgd_over_matcha": ("choco_sgd", "another mixing"),
    "sgp_directed": ("sgp", "another mixing"),
    "overlap_sgp": ("sgp", OPTIONS),
}
"""Rows without a line: the row whose line they share, and why."""
