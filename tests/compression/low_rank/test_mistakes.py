"""What would diverge, or mean another method, is refused."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import Claims, Codec
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import power_iteration, projection
from jaxcomm.compression.quantizers import cast, dither
from tests.slow import slow


def traced(tx: Any, workers: int = 3, shape: tuple[int, ...] = (12, 7)) -> None:
    def first(x: jax.Array) -> jax.Array:
        return tx.update(x, tx.init(x))[0]

    average = jax.vmap(first, axis_name="data", axis_size=workers, in_axes=None)
    jax.eval_shape(average, jax.ShapeDtypeStruct(shape, jnp.float32))


def alternating(codec: Any, rank: int = 1) -> Any:
    return jaxcomm.power_sgd(rank=rank, alternate=True, factor_codec=codec)


def changing_rank() -> None:
    stages = [jaxcomm.power_sgd(rank=rank) for rank in (4, 1)]
    traced(jaxcomm.warmup(stages, every=2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jaxcomm.power_sgd(rank=1, scope="bucket"), "`scope` must be 'leaf'"),
        (lambda: jaxcomm.power_sgd(rank=2, memory_rank=2, alternate=True), "cannot be combined"),
        (lambda: jaxcomm.power_sgd(rank=1, factor_codec=dither()), "needs `alternate`=True"),
        (lambda: alternating(cast("bfloat16")), "payloads can be summed"),
        (lambda: jaxcomm.all_reduce_mean(projection(1, "right"), scope="tree"), "a single array"),
        slow(changing_rank, "This state has memory of shapes"),
        (
            lambda: traced(jaxcomm.all_reduce_mean(error_feedback(power_iteration(2, drawn=0)))),
            "no bound is known",
        ),
        (
            lambda: traced(alternating(dither(levels=1))),
            "for a factor of 24 numbers, of a leaf of 84, on 3 workers",
        ),
        (
            lambda: traced(alternating(dither(bits=16).replace(claims=Claims()))),
            "no bound is known",
        ),
    ],
)
def test_mistakes(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    ("codec", "accepted", "refused"),
    [(dither(bits=16), 32, 64), (blockwise(dither(bits=16), 64), 128, None)],
)
def test_the_limits_of_the_docstring(codec: Codec, accepted: int, refused: int | None) -> None:
    traced(alternating(codec, rank=4), accepted, (1024, 1024))
    if refused:
        with pytest.raises(ValueError, match=r"blockwise\(dither\(bits=16\), 64\)"):
            traced(alternating(codec, rank=4), refused, (1024, 1024))
