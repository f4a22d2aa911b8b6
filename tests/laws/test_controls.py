"""Each law catches its mistake, in methods that are wrong and claim to be right."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from jaxcomm import Codec, Context
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression.quantizers import dither
from jaxcomm.testing import AGGREGATOR_LAWS
from jaxcomm.testing._codec import require_sums
from tests.cases import CASES, Case
from tests.laws.test_draws import check_workers_draw_apart
from tests.laws.test_wire import check_bytes

(HONEST,) = (c for c in CASES if c.name == "global_qsgd_8_bits")


def control(name: str, codec: Codec) -> Case:
    """The row of Global-QSGD at 8 bits, with another codec under the same claims."""
    return HONEST._replace(
        name=name,
        codec=codec,
        make=lambda axis="data", seed=0: jaxcomm.all_reduce_mean(codec, axis_name=axis),
    )


def law(name: str, case: Case, workers: int = 3) -> None:
    AGGREGATOR_LAWS[name](case.trial(workers))


def _truncating() -> Codec:
    def encode(context: Context, x: jax.Array) -> object:
        levels, norm = 127 // context.workers, context.statistics.max_abs
        codes = x / jnp.where(norm > 0, norm, 1) * levels
        return CodesPayload(codes.astype(jnp.int8)), context.memory

    return dither(bits=8).replace(encode=encode)


def _anothers_coins() -> Codec:
    codec = dither(bits=8)
    return codec.replace(encode=lambda context, x: codec.encode(context.received(), x))


def _one_bit_too_narrow() -> Codec:
    codec = dither(bits=8)
    half = lambda count: max(count // 2, 1)  # noqa: E731

    def told_of_half(context: Context) -> Context:
        """Half the workers, so that the codec does not refuse a sum that overflows."""
        return context.replace(workers=half(context.workers), count=half(context.count))

    def decode(context: Context, payload: object) -> jax.Array:
        doubled = codec.decode(told_of_half(context), payload)
        return doubled * half(context.count) / context.count

    return codec.replace(
        encode=lambda context, x: codec.encode(told_of_half(context), x), decode=decode
    )


def _scaled_by_half() -> Case:
    return CASES[0]._replace(
        name="half",
        make=lambda axis="data", seed=0: optax.chain(jaxcomm.mean(axis), optax.scale(0.5)),
    )


def _float_in_disguise() -> Case:
    return HONEST._replace(name="float", make=lambda axis="data", seed=0: jaxcomm.mean(axis))


def _nan_hidden() -> Case:
    def update(updates: object, state: object, params: object = None, **extra: object) -> object:
        clean = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), updates)
        return jaxcomm.mean().update(clean, state)

    tx = optax.GradientTransformationExtraArgs(jaxcomm.mean().init, update)
    return CASES[0]._replace(name="nan_hidden", make=lambda axis="data", seed=0: tx)


def _first_worker_only() -> Case:
    def update(updates: object, state: object, params: object = None, **extra: object) -> object:
        first = jax.lax.axis_index("data") == 0
        mine = jax.tree.map(lambda x: jnp.where(first, x, 0), updates)
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), mine), state

    tx = optax.GradientTransformationExtraArgs(jaxcomm.mean().init, update)
    return CASES[0]._replace(name="first_worker", make=lambda axis="data", seed=0: tx)


FAILURES = {
    "truncating is biased": lambda: law("unbiased", control("truncating", _truncating())),
    "half a mean is biased": lambda: law("unbiased", _scaled_by_half()),
    "half a mean is far": lambda: law("resolution", _scaled_by_half()),
    "another's coins": lambda: check_workers_draw_apart(control("coins", _anothers_coins())),
    "too narrow wraps": lambda: law("overflow", control("narrow", _one_bit_too_narrow()), 8),
    "too narrow sums": lambda: require_sums(_one_bit_too_narrow(), workers=8),
    "float is not 8 bits": lambda: check_bytes(_float_in_disguise(), 8),
    "hidden NaN": lambda: law("nonfinite", _nan_hidden()),
    "one worker is no mean": lambda: law("permutation", _first_worker_only()),
    "weights ignored": lambda: law("weights", _first_worker_only(), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_caught(failure: str) -> None:
    with pytest.raises(AssertionError):
        FAILURES[failure]()


def test_the_honest_row_passes_the_same_laws() -> None:
    law("unbiased", HONEST)
    law("resolution", HONEST)
    check_workers_draw_apart(HONEST)
    law("overflow", HONEST, 8)
    require_sums(HONEST.codec, workers=8)
    check_bytes(HONEST, 8)
