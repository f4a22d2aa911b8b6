"""Expected lengths, the entropy, the steps of a program, and what is sent of each."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Codec, Context
from jaxcomm.compression.codes import elias, golomb_rice, measured_room, rans
from jaxcomm.compression.codes._golomb_rice import LEAST_MEANS, _bits_of_levels
from jaxcomm.compression.quantizers import dither
from tests.workers import abstract, aggregator

SIZE, DRAWS = 2**14, 8


def levels_of(codec: Codec, x: jax.Array, seed: int = 0) -> np.ndarray:
    """The levels that dithering sends."""
    context = Context.of(x, seed)
    context = context.replace(statistics=codec.measure(context, x))
    payload, _ = codec.encode(context, x)
    return np.asarray(codec.fast.integers.split(context, payload)[0])


def probabilities(levels: int, spread: float) -> np.ndarray:
    """P(c) of a normal number that is rounded at random, by a sum over a fine grid."""
    y = np.linspace(-8 * spread, 8 * spread, 400_001)
    density = np.exp(-((y / spread) ** 2) / 2)
    density /= density.sum()
    hats = [np.maximum(1 - np.abs(y - c), 0) @ density for c in range(-levels, levels + 1)]
    return np.array(hats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "levels", "norm"), [(elias, 7, "max"), (elias, 3, "l2"), (golomb_rice, 1, "l2")]
)
def test_lengths_are_those_of_the_formulas(code: Any, levels: int, norm: Any) -> None:
    peak = {"max": 6.0, "l2": math.sqrt(SIZE)}[norm]
    x = np.random.default_rng(0).normal(size=(DRAWS, SIZE)).astype(np.float32)
    if norm == "max":
        x = np.clip(x, -peak, peak)
        x[:, 0] = peak
    p = probabilities(levels, levels / peak)
    magnitudes = np.abs(np.arange(-levels, levels + 1))
    if code is elias:
        bits = 2 * np.floor(np.log2(magnitudes + 1)) + 1 + (magnitudes > 0)
        expected, spread = p @ bits, math.sqrt(p @ bits**2 - (p @ bits) ** 2)
        last_gap = 0
    else:
        sent = 1 - p[levels]
        k = max(0, 1 + math.floor(math.log2(math.log(0.6180339887) / math.log(1 - sent))))
        again = (1 - sent) ** 2**k
        expected, spread = sent * (again / (1 - again) + 1 + k + 1), 2 * math.sqrt(sent) * k
        last_gap = 2 + k
    found = measured_room(code(dither(levels=levels, norm=norm)), jnp.asarray(x))
    # A row ends with a part of a word, and with one more gap.
    of_row = (32 + last_gap) / 1024
    noise = 5 * spread / math.sqrt(SIZE)
    assert expected - noise <= found <= expected + of_row + noise


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_the_expected_length_of_golomb_rice_is_that_of_drawn_levels(spread: float) -> None:
    """A coordinate takes bits if it is not 0: those of a gap and of a level."""
    rng, draws, shares = np.random.default_rng(0), 10**6, probabilities(3, spread)
    shares /= shares.sum()
    levels = np.abs(rng.choice(np.arange(-3, 4), size=draws, p=shares))
    gaps = rng.geometric(1 - shares[3], size=draws) - 1
    k = sum(shares[3] / (1 - shares[3]) >= mean for mean in LEAST_MEANS)
    of_level = 2 * np.floor(np.log2(np.maximum(levels, 1))) + 2
    bits = np.where(levels > 0, (gaps >> k) + 1 + k + of_level, 0)
    assert _bits_of_levels(shares) == pytest.approx((bits.mean(), bits.var()), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [3, 7, 15, 127])
def test_rans_is_within_3_percent_of_the_entropy(levels: int) -> None:
    x = np.random.default_rng(1).normal(size=(1, 2**18)).astype(np.float32)
    codes = levels_of(dither(levels=levels), jnp.asarray(x[0]))
    p = np.bincount(codes + levels) / codes.size
    entropy = -np.sum(p[p > 0] * np.log2(p[p > 0]))
    found = measured_room(rans(dither(levels=levels)), jnp.asarray(x))
    with_all = found + (16 * 128 + 16 * (2 * levels + 1)) / codes.size  # headers and counts
    assert entropy < found < with_all < 1.03 * entropy


def steps_of(jaxpr: Any) -> int:
    """The sequential steps of all loops in a program; a loop without a count fails."""
    steps = 0
    for equation in jaxpr.eqns:
        assert equation.primitive.name != "while", "a loop without a trip count"
        within = 0
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                within += steps_of(inner) if hasattr(inner, "eqns") else 0
        is_loop = equation.primitive.name == "scan"
        steps += equation.params["length"] * max(within, 1) if is_loop else within
    return steps


def traced(codec: Codec, size: int) -> tuple[Any, Any]:
    """The programs of both ends."""

    def encode(x: jax.Array) -> Any:
        context = Context.of(x, memory=codec.init(x))
        context = context.replace(statistics=codec.measure(context, x))
        return context.received(), codec.encode(context, x)[0]

    def decode(context: Context, payload: Any) -> jax.Array:
        return codec.decode(context, payload)

    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.make_jaxpr(encode)(x), jax.make_jaxpr(decode)(*jax.eval_shape(encode, x))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "codec",
    [
        elias(dither(levels=7)),
        golomb_rice(dither(levels=1, norm="l2")),
        rans(dither(levels=7)),
    ],
    ids=["elias", "golomb_rice", "rans"],
)
def test_at_most_4096_steps_whatever_the_size(codec: Codec) -> None:
    for size in (10**4, 10**8):
        for end in traced(codec, size):
            assert 100 < steps_of(end.jaxpr) <= 4096


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**24 + 1, 2**20 * 33])
@pytest.mark.parametrize("code", [elias, golomb_rice, rans], ids=lambda code: code.__name__)
def test_large_units_without_running_them(code: Any, size: int) -> None:
    _, decode = traced(code(dither(levels=7)), size)
    assert decode.out_avals[0].shape == (size,)


def test_what_is_sent() -> None:
    """The room, headers and counts by hand: 10,000 levels in 10 rows, or 5 for rANS."""
    x = jax.random.normal(jax.random.key(0), (3, 10_000))
    sizes = {
        elias: math.ceil(3 * 10_000 / 32) + 64 + 10 // 2,
        golomb_rice: math.ceil(3 * 10_000 / 32) + 64 + 10 // 2,
        rans: math.ceil(3 * 10_000 / 32) + 64 + 3 + 8,
    }
    for code, words in sizes.items():
        codec = code(dither(levels=7), room=3.0)
        tx = jaxcomm.all_gather_mean(codec)
        run, state = aggregator(tx, 3, "checked"), abstract(tx, x, "checked")
        sent = jaxcomm.wire.account(run, x, state, jnp.ones(3)).collectives[0].bytes_per_worker
        assert sent == 2 * 4 * (words + 2)  # to 2 workers; the norm and the flag are a word each
