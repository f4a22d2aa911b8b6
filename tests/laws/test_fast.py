"""Fast paths change no result, and none survives a wrapper that does not state it."""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Fast, all_gather_mean, all_reduce_mean, compression
from jaxcomm.compression import (
    blockwise,
    chain,
    codes,
    compressed_memory,
    cosine,
    feedback,
    reserved,
    rotated,
    scaled,
)
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.feedback import (
    diana,
    ecq,
    ef21,
    error_feedback,
    local_clip,
    momentum,
    momentum_correction,
)
from jaxcomm.compression.low_rank import power_iteration, projection
from jaxcomm.compression.quantizers import dither, ternary
from jaxcomm.compression.sparsifiers import coarse_top_k, random_k, top_k

# Each wrapper with codecs whose fast paths it might keep.
WRAPPERS: dict[str, tuple[Callable[[Codec], Codec], list[Codec]]] = {
    "none": (
        lambda codec: codec,
        [dither(bits=8), top_k(ratio=0.25), power_iteration(1), projection(1, "right")],
    ),
    "blockwise": (lambda codec: blockwise(codec, 16), [dither(bits=8), top_k(k=3)]),
    "chain": (lambda codec: chain(top_k(ratio=0.5), codec), [dither(bits=8), top_k(ratio=0.5)]),
    "chain, drawn": (lambda codec: chain(random_k(ratio=0.5), codec), [dither(bits=8)]),
    "compressed_memory": (
        lambda codec: compressed_memory(error_feedback(codec), dither(bits=16)),
        [dither(bits=8), top_k(ratio=0.25), power_iteration(1)],
    ),
    "cosine": (lambda codec: cosine(codec, 4), [dither(bits=8), top_k(k=3)]),
    "diana": (diana, [dither(bits=8)]),
    "ecq": (ecq, [dither(bits=8)]),
    "ef21": (ef21, [top_k(ratio=0.25), power_iteration(1)]),
    "elias": (lambda codec: elias(codec, capacity=40.0), [dither(bits=8), ternary(clip=2.5)]),
    "error_feedback": (
        error_feedback,
        [dither(bits=8), top_k(ratio=0.25), coarse_top_k(ratio=0.25), power_iteration(1)],
    ),
    "golomb_rice": (lambda codec: golomb_rice(codec, capacity=40.0), [top_k(ratio=0.25)]),
    "local_clip": (lambda codec: local_clip(codec, 1.0), [dither(bits=8), top_k(ratio=0.25)]),
    "momentum": (lambda codec: momentum(codec, 0.5), [power_iteration(1), top_k(ratio=0.25)]),
    "momentum_correction": (momentum_correction, [top_k(ratio=0.25)]),
    "rans": (lambda codec: rans(codec, capacity=40.0), [dither(bits=8)]),
    "reserved": (lambda codec: reserved(codec, top_k(k=1)), [dither(bits=8)]),
    "rotated": (rotated, [dither(bits=8)]),
    "scaled": (scaled, [dither(bits=8), random_k(ratio=0.5)]),
}
CASES = [
    pytest.param(wrap, codec, id=f"{name}, {number}")
    for name, (wrap, codecs) in WRAPPERS.items()
    for number, codec in enumerate(codecs)
]


def test_every_wrapper_has_a_row() -> None:
    """All wrappers have a row; `measured_capacity` returns a number."""
    wrappers = {
        name
        for package in (compression, feedback, codes)
        for name in package.__all__
        if inspect.isfunction(function := getattr(package, name))
        and {"codec", "codecs"} & inspect.signature(function).parameters.keys()
    }
    here = WRAPPERS.keys() - {"none", "chain, drawn"}
    assert wrappers - {"measured_capacity"} == here


def with_doubled_result(codec: Codec) -> Codec:
    """A wrapper by somebody who knows of no fast path."""
    return codec.replace(
        decode=lambda context, payload: 2 * codec.decode(context, payload),
        drop_overflow=codec.drop_overflow and with_doubled_result(codec.drop_overflow),
    )


def without_fast_paths(codec: Codec) -> Codec:
    """The codec, of which codes and chains still know the integers and the selection."""
    return codec.replace(
        fast=Fast(selection=codec.fast.selection, integers=codec.fast.integers),
        drop_overflow=codec.drop_overflow and without_fast_paths(codec.drop_overflow),
    )


def updates_of(codec: Codec) -> list[np.ndarray]:
    """The updates of two steps of four workers."""
    aggregator = all_reduce_mean if codec.combine == "sum" else all_gather_mean
    tx = aggregator(codec)

    def two_steps(given: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, state = tx.update(given, tx.init(given))
        return first, tx.update(-0.5 * given, state)[0]

    given = jnp.asarray(np.random.default_rng(0).normal(size=(4, 12, 8)), jnp.float32)
    return [np.asarray(x) for x in jax.jit(jax.vmap(two_steps, axis_name="data"))(given)]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "codec"), CASES)
def test_no_fast_path_survives_a_wrapper_that_does_not_state_it(
    wrap: Callable[[Codec], Codec], codec: Codec
) -> None:
    """Of the first step, before memories differ."""
    once, _ = updates_of(wrap(codec))
    twice, _ = updates_of(with_doubled_result(wrap(codec)))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "codec"), CASES)
def test_fast_paths_change_no_result(wrap: Callable[[Codec], Codec], codec: Codec) -> None:
    """Those of a wrapper, and those of the codec in it."""
    fast = updates_of(wrap(codec))
    for slow in (without_fast_paths(wrap(codec)), wrap(without_fast_paths(codec))):
        np.testing.assert_allclose(updates_of(slow), fast, rtol=1e-5, atol=1e-5)
