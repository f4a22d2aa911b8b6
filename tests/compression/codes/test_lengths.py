"""The expected length, the entropy, the steps of a program, and what is sent of each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context
from jaxcomm.compression.codes import elias, golomb_rice, measured_capacity, rans
from jaxcomm.compression.codes._golomb_rice import LEAST_MEANS, _bits_of_levels
from jaxcomm.compression.quantizers import dither
from tests.slow import slow


def probabilities(levels: int, spread: float) -> np.ndarray:
    """P(c) of a normal number that is rounded at random, by a sum over a fine grid."""
    y = np.linspace(-8 * spread, 8 * spread, 400_001)
    density = np.exp(-((y / spread) ** 2) / 2)
    density /= density.sum()
    hats = [np.maximum(1 - np.abs(y - c), 0) @ density for c in range(-levels, levels + 1)]
    return np.array(hats)


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
@pytest.mark.parametrize("levels", [7, 127])
def test_rans_is_within_3_percent_of_the_entropy(levels: int) -> None:
    x = np.random.default_rng(1).normal(size=(1, 2**18)).astype(np.float32)
    inner, context = dither(levels=levels), Context.of(jnp.asarray(x[0]), 0)
    context = context.replace(statistics=inner.measure(context, x[0]))
    payload, _ = inner.encode(context, jnp.asarray(x[0]))
    codes = np.asarray(inner.fast.integers.split(context, payload)[0])
    p = np.bincount(codes + levels) / codes.size
    entropy = -np.sum(p[p > 0] * np.log2(p[p > 0]))
    found = measured_capacity(rans(inner), jnp.asarray(x))
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

    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    return jax.make_jaxpr(encode)(x), jax.make_jaxpr(codec.decode)(*jax.eval_shape(encode, x))


@pytest.mark.parametrize("code", [elias, slow(golomb_rice), slow(rans)])
def test_encoding_takes_at_most_4096_steps(code: Any) -> None:
    for size in (10**4, 2**24 + 1, 10**8):
        encode, decode = traced(code(dither(levels=7)), size)
        assert 100 < steps_of(encode.jaxpr) <= 4096 and 100 < steps_of(decode.jaxpr) <= 4096
        assert decode.out_avals[0].shape == (size,)


@pytest.mark.parametrize("k", range(1, 6))
def test_golomb_rice_has_the_best_parameter(k: int) -> None:
    """Where it changes, geometric gaps take equal bits with the next smaller parameter."""
    share = 1 / (1 + LEAST_MEANS[k - 1])  # P(gap = 0); a gap takes (gap >> k) + 1 + k bits.
    lengths = [each + 1 / (1 - (1 - share) ** 2**each) for each in (k - 1, k, k + 1)]
    assert lengths[0] == pytest.approx(lengths[1]) and lengths[1] < lengths[2]
