"""Every option of a constructor takes what its annotation says, and nothing else."""

import itertools
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcomm import Codec, mean
from jaxcomm._require import Positive, Range, Share, annotations_of, checked, require_option
from jaxcomm.compression.quantizers import dither
from tests.test_complete import PACKAGES, functions, is_method

METHODS = {name: function for name, function in functions(PACKAGES).items() if is_method(function)}


@checked
def constructor(
    count: Positive = 1,
    *,
    share: Share | jax.Array = 1.0,
    name: Literal["a", "b"] | None = None,
    flag: bool = False,
    function: Callable[[int], int] = abs,
    codec: Codec | None = None,
    tx: optax.GradientTransformation | None = None,
    anything: Any = None,
) -> dict[str, Any]:
    return dict(locals())


@pytest.mark.parametrize(
    "options",
    [
        {"count": 3, "share": 0.5, "name": "b", "flag": True, "function": print},
        {"share": 1, "codec": dither(), "tx": mean(), "anything": "x"},
        {"share": jnp.float32(0.5), "name": None, "codec": None},
    ],
)
def test_accepted_values(options: dict[str, Any]) -> None:
    taken = constructor(**options)
    assert all(taken[name] is value for name, value in options.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2.0}, "`count` must be a Python int of at least 1, got 2.0."),
        ({"count": True}, "`count` must be a Python int of at least 1, got True."),
        (
            {"count": jnp.int32(3)},
            "`count` must be a Python int of at least 1, got Array(3, dtype=int32). Under "
            "`optax.inject_hyperparams` pass `static_args=('count',)`.",
        ),
        ({"share": math.nan}, "`share` must be a Python float in (0, 1], got nan."),
        ({"name": "c"}, "`name` must be one of ('a', 'b'), or None, got 'c'."),
        ({"flag": 1}, "`flag` must be a Python bool, got 1."),
        ({"codec": mean()}, "must be a codec, such as"),
        ({"tx": dither()}, "`tx` must be an optax transformation, got a `Codec`."),
        ({"tx": optax.MultiSteps(optax.sgd(0.1), 2)}, "`tx` is `optax.MultiSteps`"),
        ({"anything": jnp.float32(1)}, "`anything` must be known at trace time, got Array("),
        ({"function": 3}, "`function` must be a function, got 3."),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        constructor(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("numbers", "text", "inside", "outside"),
    [
        (Range(least=1), " of at least 1", [1, 2], [0.9, math.inf, math.nan]),
        (Range(above=0), " above 0", [1e-30, 2], [0, -1, math.inf]),
        (Range(above=0, most=1), " in (0, 1]", [0.5, 1], [0, 1.1]),
        (Range(least=0, below=1), " in [0, 1)", [0, 0.5], [1, -0.1]),
        (Range(), "", [-1e30, 1e30], [math.inf, -math.inf, math.nan]),
    ],
)
def test_ranges(numbers: Range, text: str, inside: list[float], outside: list[float]) -> None:
    assert str(numbers) == text
    assert all(x in numbers for x in inside) and not any(x in numbers for x in outside)


def members(annotation: Any) -> list[Any]:
    is_union = isinstance(annotation, types.UnionType) or str(annotation).startswith("typing.Union")
    parts = map(members, get_args(annotation)) if is_union else [[annotation]]
    return [*itertools.chain(*parts)]


def wrong_values(annotation: Any) -> list[Any]:
    """Values that none of the kinds of an option are."""
    kinds = [get_args(x)[0] if get_origin(x) is Annotated else x for x in members(annotation)]
    known = [x for x in kinds if x in (int, float, bool, types.NoneType, jax.Array)]
    names = [x for x in kinds if get_origin(x) is Literal]
    if len(known) + len(names) < len(kinds) or set(known) <= {types.NoneType, jax.Array}:
        return ["no such name"] if names and len(known) + len(names) == len(kinds) else []
    return ["no number", *([] if bool in known else [True])]


@pytest.mark.parametrize("name", METHODS)
def test_methods_check_what_they_take(name: str) -> None:
    kinds = annotations_of(METHODS[name])
    wrong = {option: wrong_values(kind) for option, kind in kinds.items() if option != "return"}
    assert METHODS[name].__code__ is constructor.__code__ or not any(wrong.values())
    for option, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"`{option}` must be"):
                require_option(value, option, kinds[option])
