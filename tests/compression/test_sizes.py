"""Beyond 2**31 coordinates a codec is right, or one line says to split the leaf."""

import inspect
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import Codec, Keys
from jaxcomm.compression import (
    _bits,
    blockwise,
    feedback,
    quantizers,
    rotated,
    scaled,
    sketches,
    sparsifiers,
)
from jaxcomm.compression._means import mean_where
from tests.cases import CASES
from tests.cases._low_rank import padded
from tests.codecs import context_of
from tests.slow import slow

# What is needed, for makers that do not do without; of those with other wire, more than one way.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ada_comp": [{}],
    "adaptive_threshold": [{"ratio": 0.01}],
    "block_coordinate": [
        {"blocks": 10},
        {"blocks": 10, "order": "gauss_southwell"},
        {"blocks": 2**20},
    ],
    "cast": [{"dtype": "bfloat16"}],
    "count_sketch": [{"sketch_ratio": 0.01}, {"sketch_ratio": 0.01, "hashing": "elements"}],
    "coarse_top_k": [{"k": 64}, {"ratio": 0.01}],
    "dither": [{}, {"levels": 1, "norm": "l2"}],
    "fixed_threshold": [{"threshold": 1.0}],
    "min_max_dither": [{"levels": 4}],
    "nonzero": [{"density": 0.1, "granularity": g} for g in ("element", 1024)],
    "nonzero_union": [{"density": 0.1, "granularity": g} for g in ("element", 1024)],
    "sparse_dither": [{"capacity": 9}, {"capacity": 9, "overflow": "drop"}],
    "random_k": [{"k": 3}, {"ratio": 0.1}],
    "s2_codes": [{"density": 0.1, "sketch_ratio": 1.5, "granularity": "element"}],
    "s2_sketch": [{"density": 0.1, "sketch_ratio": 1.5, "granularity": "element"}],
    "sbc": [{"k": 3}],
    "scaled_cast": [{"dtype": "float8_e4m3fn"}],
    "stc": [{"k": 3}],
    "ternary": [{}, {"clip": 2.5}],
    "threshold": [{"threshold": 1.0, "k": 3}],
    "top_k": [
        {"k": 3},
        {"ratio": 0.1},
        {"k": 1, "block_size": 1024},
        {"ratio": 0.1, "sample_ratio": 0.1},
    ],
    "variance_based": [{"k": 3}],
    "wangni": [{"k": 3}],
}

MAKERS = {
    name: getattr(module, name)
    for module in (quantizers, sparsifiers, sketches)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
    and inspect.signature(getattr(module, name)).return_annotation in (Codec, "Codec")
}

CODECS = {
    **{
        f"{name} {options or ''}".strip(): make(**options)
        for name, make in MAKERS.items()
        for options in OPTIONS.get(name, [{}])
    },
    "blockwise": blockwise(quantizers.dither(), 256),
    "rotated": rotated(quantizers.dither()),
    "scaled": scaled(sparsifiers.random_k(k=3)),
    "error_feedback": feedback.error_feedback(sparsifiers.top_k(k=3)),
    **{f"row {case.name}": case.codec for case in CASES if case.codec and case.feedback},
}

# They lay out a vector as a matrix with padding, whose size the message names.
OF_MATRICES = {"row power_sgd_factor_codec"}


def trace(codec: Codec, size: int) -> jax.Array:
    def once(key: jax.Array, x: jax.Array) -> jax.Array:
        context = context_of(codec, x, Keys(key, key))
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    return jax.eval_shape(once, jax.random.key(0), jax.ShapeDtypeStruct((size,), jnp.float32))


QUICK = {"dither", "top_k {'k': 3}", "wangni {'k': 3}", "s2_codes", "ada_comp"}


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in CODECS])
def test_more_than_an_int32_counts(name: str) -> None:
    """Or feedback refuses a codec whose error grows with the size, which it names."""
    for size in (2**31, 5 * 10**9):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                assert trace(CODECS[name], size).shape == (size,)
            except ValueError as error:
                assert re.search(r"split the leaf\.|smaller blocks|more levels", str(error))
                named = padded(size) if name in OF_MATRICES else size
                assert str(named) in str(error) and "\n" not in str(error)


def test_fetch_sgd_refuses_large_sizes_at_init() -> None:
    tx = jaxcomm.fetch_sgd(sketch_ratio=0.1, k=100)
    with pytest.raises(ValueError, match=r"2147483648 coordinates, .* split the leaf"):
        jax.eval_shape(
            lambda x: jaxcomm.init(tx, x, 2), jax.ShapeDtypeStruct((2**31,), jnp.bfloat16)
        )


def test_means_count_beyond_an_int32() -> None:
    counted = jax.make_jaxpr(lambda x: mean_where(x > 0, x))(jnp.zeros(8))
    assert "u32" in str(counted)


def test_every_codec_is_tried() -> None:
    assert len(MAKERS) > 25
    assert {*OPTIONS} <= {*MAKERS}


def test_the_largest_size_is_countable() -> None:
    assert _bits.require_countable(_bits.MOST) == 2**31 - 1
    with pytest.raises(ValueError, match="split the leaf"):
        _bits.require_countable(_bits.MOST + 1)
