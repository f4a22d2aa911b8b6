"""What codecs state of their error holds for workers together, and no bound half as large would."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm import Codec, Coins, Context
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.quantizers import (
    cast,
    dither,
    exponential_dither,
    scaled_cast,
    sparse_dither,
)
from tests.codecs import context_of
from tests.slow import slow

DRAWS = 500
COMBINED = {"sum": jnp.sum, "max": jnp.max}


def relative_errors(codec: Codec, given: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    """Of [inputs, workers, d]: sum_i |Q(x_i) - x_i|^2 / sum_i |x_i|^2, [inputs, draws].

    Workers agree on statistics. Decoded by NumPy's subtraction, in float64.
    """
    x = jnp.asarray(given, jnp.float32)
    workers, size = x.shape[1:]

    def context(key: jax.Array, statistics: object = ()) -> Context:
        return Context(Coins(key, key), statistics=statistics, workers=workers, shape=(size,))

    def one_worker(key: jax.Array, x: jax.Array, statistics: object) -> jax.Array:
        payload, _ = codec.encode(context(key, statistics), x)
        return codec.decode(context(key, statistics).received(), payload)

    def once(key: jax.Array, x: jax.Array) -> jax.Array:
        measured = jax.vmap(lambda x: codec.measure(context(key), x))(x)
        # A codec in blocks agrees like the one inside, on arrays with one more dimension.
        statistics = jax.tree.map(
            lambda kind, s: COMBINED[kind](s, axis=0), codec.reduce_statistics, measured
        )
        return jax.vmap(one_worker, in_axes=(0, 0, None))(
            jax.random.split(key, workers), x, statistics
        )

    keys = jax.random.split(jax.random.key(0), draws)
    decoded = np.asarray(jax.jit(jax.vmap(jax.vmap(once, (0, None)), (None, 0)))(keys, x))
    exact = np.asarray(x, np.float64)[:, None]
    lost = np.sum((decoded.astype(np.float64) - exact) ** 2, axis=(2, 3))
    return lost / np.sum(exact**2, axis=(2, 3))


def inputs(workers: int, size: int) -> np.ndarray:
    """Unlike vectors, of unlike workers: [inputs, workers, size]."""
    rng = np.random.default_rng(workers * size)
    one_hot = np.zeros((workers, size))
    one_hot[0, 0] = 1
    return np.stack(
        [
            rng.normal(size=(workers, size)),
            rng.normal(size=(workers, size)) * np.logspace(0, -6, workers)[:, None],
            rng.standard_t(1.5, size=(workers, size)) * 1e10,
            np.ones((workers, size)),
            np.where(rng.random((workers, size)) < 0.5, 2 / 3, 4 / 3),
            one_hot,
            one_hot + 0.03,
            one_hot * 2.0**60 + rng.normal(size=(workers, size)) * 2.0**-72,
        ]
    )


def holds(errors: np.ndarray, bound: float) -> bool:
    slack = scipy.stats.norm.isf(1e-7) * errors.std(axis=1) / errors.shape[1] ** 0.5
    return bool(np.all(errors.mean(axis=1) - slack <= bound * (1 + 1e-5) + 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [slow(1), 4])
@pytest.mark.parametrize(
    ("make", "levels"),
    [
        (lambda: dither(levels=1, norm="l2"), 1),
        slow(lambda: dither(levels=3), 3),
        slow(lambda: dither(levels=15, norm="l2"), 15),
        (lambda: dither(bits=6), {1: 31, 4: 7}),
    ],
)
def test_dither(make: Callable[[], Codec], levels: int | dict[int, int], workers: int) -> None:
    s, d, codec = levels if isinstance(levels, int) else levels[workers], 60, make()
    bound = min(workers * d / s**2, (workers * d) ** 0.5 / s)
    assert codec.claims.variance(d, workers) == pytest.approx(bound)
    errors = relative_errors(codec, inputs(workers, d))
    assert holds(errors, bound)
    assert errors.mean(axis=1).max() > bound / 10


@pytest.mark.slow
@pytest.mark.parametrize("workers", [slow(1), 4])
def test_dither_comes_near_its_bound(workers: int) -> None:
    # One level, constant vectors: sum of p (1 - p) of p = 1 / sqrt(n d) is sqrt(n d) - 1.
    bound = (workers * 400) ** 0.5
    assert dither(levels=1, norm="l2").claims.variance(400, workers) == pytest.approx(bound)
    (errors,) = relative_errors(dither(levels=1, norm="l2"), np.ones((1, workers, 400)))
    assert errors.mean() == pytest.approx(bound - 1, rel=0.03)


@pytest.mark.parametrize("workers", [slow(1), 3])
def test_exponential_dither(workers: int) -> None:
    errors = relative_errors(exponential_dither(), inputs(workers, 64))
    assert exponential_dither().claims.variance(64, workers) == 1 / 8
    assert holds(errors, 1 / 8)


def test_exponential_dither_comes_near_its_bound() -> None:
    # Of 4/3 of a power of two, an eighth of its square; the peak, a power of two, is exact.
    x = np.where(np.arange(64) == 0, 1, 1 / 3)
    (errors,) = relative_errors(exponential_dither(), x[None, None])
    assert errors.mean() == pytest.approx(63 / 9 / 8 / (1 + 63 / 9), rel=0.03)


def test_what_is_under_the_smallest_exponent_is_lost_and_still_within_the_bound() -> None:
    x = np.full(64, 2.0**-70)  # 2**-130 of the peak: whatever it is, it becomes zero.
    x[0] = 2.0**60
    (errors,) = relative_errors(exponential_dither(), x[None, None], 1)
    assert errors[0] == pytest.approx(63 * 2.0**-260, rel=1e-6)


def test_cast() -> None:
    delta = cast("bfloat16").claims.contraction(64, 1)
    assert delta == 1 - 2.0**-16
    assert holds(relative_errors(cast("bfloat16"), inputs(2, 64), 1), 1 - delta)
    # A tie, where rounding to nearest loses most.
    (errors,) = relative_errors(cast("bfloat16"), np.full((1, 1, 8), 1 + 2.0**-8), 1)
    assert errors[0] == pytest.approx(2.0**-16, rel=0.01)
    # Where float32 is out of range, rounding gives infinity, and no bound holds.
    assert cast("float16").claims.contraction is None
    assert cast("float8_e4m3fn").claims.contraction is None


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("workers", [slow(1), 3])
def test_scaled_cast(dtype: str, workers: int) -> None:
    codec, limits = scaled_cast(dtype), jnp.finfo(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_normal)
    half = 2.0 ** -(limits.nmant + 1)
    bound = half**2 * (1 + workers * 64 * (smallest / largest) ** 2)
    assert codec.claims.contraction(64, workers) == pytest.approx(1 - bound)
    # Ties of normal numbers, and of those below, where spacing no longer shrinks.
    ties = np.full((workers, 64), (1 + half) * 2.0 ** (limits.maxexp - 2))
    below = np.full((workers, 64), smallest * half)
    ties[0, 0] = below[0, 0] = largest
    errors = relative_errors(codec, np.concatenate([inputs(workers, 64), [ties, below]]), 1)
    assert holds(errors, bound)
    assert errors[-2, 0] > 0.5 * half**2 or limits.nmant > 9


@pytest.mark.slow
def test_blocks_state_what_a_block_does() -> None:
    codec = blockwise(dither(levels=1, norm="l2"), 16)
    assert codec.claims.variance(1000, 2) == pytest.approx(32**0.5)
    assert holds(relative_errors(codec, inputs(2, 50)), 32**0.5)
    (errors,) = relative_errors(codec, np.ones((1, 2, 64)))
    assert errors.mean() == pytest.approx(32**0.5 - 1, rel=0.05)
    x = jnp.ones(64)
    context = context_of(codec, x, workers=2)
    assert codec.diagnose(context, x, context.memory).constants == {"levels": 1}
    assert blockwise(scaled_cast("float8_e5m2"), 4).claims.contraction(10**9, 1) > 0.98
    assert blockwise(cast("float16"), 4).claims.contraction is None


def test_nonzeros_states_nothing() -> None:
    # Beyond its capacity it is NaN.
    codec = sparse_dither(capacity=8)
    assert codec.claims.variance is None and codec.claims.contraction is None
    with pytest.raises(ValueError, match="`scaled` takes an unbiased codec that states"):
        scaled(codec)


def test_scaled_is_the_contraction_it_states() -> None:
    codec = scaled(dither(levels=1, norm="l2"))
    assert codec.claims.contraction(60, 4) == pytest.approx(1 / (1 + 240**0.5))
    assert holds(relative_errors(codec, inputs(4, 60)), 1 - 1 / (1 + 240**0.5))
