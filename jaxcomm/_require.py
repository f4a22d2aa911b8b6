"""Argument checks, whose errors name the argument, the rule, the value and the remedy."""

import collections.abc
import dataclasses
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm._axis import names_itself
from jaxcomm._contract import CODEC_IN_CHAIN, AxisName, Codec

_LEAST_WEIGHT, _MOST_WEIGHT = 2.0**-100, 2.0**100


_Arguments = ParamSpec("_Arguments")


_Result = TypeVar("_Result")


def described(value: Any) -> str:
    """A short description of a value for an error message."""
    if isinstance(value, Codec):
        return "a codec"
    if isinstance(value, jax.Array):
        return f"an array, {value.dtype}{[*value.shape]}"
    if isinstance(value, optax.GradientTransformation):
        return "an optax transformation"
    if inspect.isfunction(value):
        return f"the function `{value.__name__}`: call it, as in `{value.__name__}(...)`"
    text = repr(value)
    return text if len(text) <= 80 else f"a `{type(value).__name__}`"


def require_axis_name(axis_name: Any, option: str = "axis_name", keywords: str = "") -> None:
    """Raises unless `axis_name` is a name or a tuple of distinct names; `keywords`: a hint."""
    several = axis_name if isinstance(axis_name, tuple | list) and axis_name else (axis_name,)
    if not all(isinstance(name, str) for name in several):
        raise ValueError(
            f"`{option}` must be the name of a mesh axis, or several in a tuple, got "
            f"{described(axis_name)}.{keywords}"
        )
    if len(set(several)) < len(several):
        raise ValueError(
            f"`{option}` must name one axis or several distinct axes, got {axis_name!r}."
        )


def presence(present: Any, workers: int) -> jax.Array:
    """Which workers are present, bool[workers]; raises unless `present` has one bool for each."""
    present = jnp.asarray(present)  # It may be a list of bools.
    if present.dtype != bool or present.shape != (workers,):
        raise ValueError(
            f"`present` must have one bool per worker, bool[{workers}], got "
            f"{present.dtype}{[*present.shape]}."
        )
    return present


def flag_of_all(flag: Any, option: str) -> jax.Array:
    """A flag that is equal on all workers, bool[]; raises unless it is one bool."""
    flag = jnp.asarray(flag)
    if flag.dtype != bool or flag.shape:
        raise ValueError(
            f"`{option}` must be one bool for all workers, got {flag.dtype}{[*flag.shape]}."
        )
    return flag


def require_codec(codec: Any, option: str = "codec", *, user: str = "") -> None:
    """Raises unless `codec` is a codec."""
    if not isinstance(codec, Codec):
        of = f" of `{user}`" if user else ""
        raise ValueError(
            f"`{option}`{of} must be a codec, such as `jaxcomm.compression.quantizers.dither()`, "
            f"got {described(codec)}."
        )


def require_transformation(tx: Any, option: str = "tx") -> None:
    """Raises unless `tx` is an optax transformation that can contain collectives."""
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(
            f"`{option}` is `optax.MultiSteps`, which would communicate in every mini-step and "
            "discard most of the results: use `jaxcomm.accumulate(tx, k)` instead."
        )
    if isinstance(tx, Codec):
        raise ValueError(CODEC_IN_CHAIN)
    if inspect.isroutine(tx) or not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(f"`{option}` must be an optax transformation, got {described(tx)}.")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option takes, as in `Annotated[int, Range(least=1)]`; never infinity."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and self.above < number < self.below

    def __str__(self) -> str:
        low = f"[{self.least}" if self.least > self.above else f"({self.above}"
        high = f"{self.most}]" if self.most < self.below else f"{self.below})"
        if high == "inf)":
            lower = f" above {self.above}" if self.above > -math.inf else ""
            return f" of at least {self.least}" if low[0] == "[" else lower
        return f" in {low}, {high}"


Positive = Annotated[int, Range(least=1)]


Natural = Annotated[int, Range(least=0)]


Share = Annotated[float, Range(above=0, most=1)]


BelowOne = Annotated[float, Range(least=0, below=1)]


AboveZero = Annotated[float, Range(above=0)]


AtLeastZero = Annotated[float, Range(least=0)]


_NUMBERS: dict[Any, type | tuple[type, ...]] = {int: int, float: (int, float), bool: bool}


class _Rule(NamedTuple):
    """What the annotation of an option says of its values."""

    accepts: Callable[[Any], bool]
    text: str  # What a value must be; empty if only an array is refused.


def _rule(annotation: Any) -> _Rule:
    """The rule of one member of a union."""
    kind, *ranges = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return _Rule(lambda x: not isinstance(x, jax.Array) and x in choices, f"one of {choices}")
    if isinstance(kind, type) and kind in _NUMBERS:
        types, within = _NUMBERS[kind], "".join(map(str, ranges))
        is_number = lambda x: isinstance(x, types) and (kind is bool) == isinstance(x, bool)  # noqa: E731
        return _Rule(
            lambda x: is_number(x) and all(x in each for each in ranges),
            f"a Python {kind.__name__}{within}",
        )
    if kind is type(None):
        return _Rule(lambda x: x is None, "None")
    if kind is jax.Array:
        return _Rule(lambda x: isinstance(x, jax.Array), "an array")
    if get_origin(kind) is collections.abc.Callable:
        return _Rule(callable, "a function")
    return _Rule(lambda x: not isinstance(x, jax.Array), "")


def _members(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return [*itertools.chain(*map(_members, get_args(annotation)))] if is_union else [annotation]


def require_option(value: Any, option: str, annotation: Any) -> None:
    """Raises unless the annotation of an option admits its value."""
    rules = [*map(_rule, _members(annotation))]
    if any(rule.accepts(value) for rule in rules):
        return
    texts = [rule.text or "known at trace time" for rule in rules if rule.text != "an array"]
    hint = f" Under `optax.inject_hyperparams` pass `static_args=({option!r},)`."
    hint = hint if isinstance(value, jax.Array | Codec) else ""
    raise ValueError(f"`{option}` must be {', or '.join(texts)}, got {described(value)}.{hint}")


def require_arrays(tree: Any, option: str) -> None:
    """Raises unless all leaves are arrays or numbers; frameworks keep other values beside them."""
    if hasattr(tree, "params") and hasattr(tree, "opt_state"):
        raise ValueError(
            f"`{option}` must be a tree of arrays, got a `{type(tree).__name__}`: pass its "
            "attribute `params`, and its `opt_state` as the optimizer state."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        if not is_array and not isinstance(leaf, bool | int | float | complex):
            raise ValueError(
                f"`{option}{jax.tree_util.keystr(path)}` must be an array, got a "
                f"`{type(leaf).__name__}`. Pass only the arrays of a model: "
                "`model.init(...)['params']` of flax.linen, `model.init(...)` of haiku, "
                "`nnx.split(model, nnx.Param, ...)`, or `equinox.partition(model, "
                "equinox.is_inexact_array)`."
            )


_TRANSFORMATIONS = {optax.GradientTransformation, optax.GradientTransformationExtraArgs}


@functools.cache
def annotations_of(construct: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, also of options that `takes_options` lists."""
    own = {name: p.annotation for name, p in inspect.signature(construct).parameters.items()}
    return {**own, **get_type_hints(construct, include_extras=True)}


def checked(construct: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Checks the arguments of a constructor by their annotations.

    An option may be traced if its annotation includes `jax.Array`.
    """
    signature, named = inspect.signature(construct), names_itself(construct)
    names = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    keywords = f" Pass by keyword: {', '.join(f'`{name}=`' for name in names)}." if names else ""

    @functools.wraps(construct)
    def checked_construct(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = keywords if "positional" in str(error) else ""
            raise TypeError(f"`{construct.__name__}`: {error}.{hint}") from None
        for option, value in bound.arguments.items():
            annotation = annotations_of(construct)[option]
            kinds = {*_members(annotation)} - ({type(None)} if value is not None else set())
            if annotation == AxisName:
                if value != () or signature.parameters[option].default != ():
                    require_axis_name(value, option, keywords)
            elif kinds and kinds <= _TRANSFORMATIONS:
                require_transformation(value, option)
            elif kinds == {Codec}:
                require_codec(value, option, user=construct.__name__)
            else:
                require_option(value, option, annotation)
        return named(*args, **kwargs)

    return checked_construct


def weight_dtype(tree: Any) -> Any:
    """The dtype of weights beside these leaves: float64 if one of them is, and else float32."""
    is_double = any(jnp.result_type(x) == np.float64 for x in jax.tree.leaves(tree))
    return jnp.dtype(np.float64 if is_double else np.float32)


def own_weight(weight: jax.Array | float, dtype: Any = jnp.float32) -> jax.Array:
    """This worker's weight, [] of `dtype`; NaN if it is out of range, which makes the mean NaN.

    The range is 0, or from 2^-100 to 2^100. In this range, quotients of weights and sums of weights
    over workers neither overflow nor underflow.

    Raises:
      ValueError: If the weight is not a scalar, or is statically out of range.
    """
    if jnp.shape(weight) != ():
        raise ValueError(
            f"`weight` must be a scalar on each worker, got shape {jnp.shape(weight)}."
        )
    if not isinstance(weight, jax.core.Tracer):
        if not 0 <= float(weight) < math.inf:
            raise ValueError(f"`weight` must be a finite number of at least 0, got {weight}.")
        if float(weight) and not _LEAST_WEIGHT <= float(weight) <= _MOST_WEIGHT:
            raise ValueError(f"`weight` must be 0 or from 2**-100 to 2**100, got {weight}.")
    own = jnp.asarray(weight, jnp.float32)
    # Compares bits, and 0 wraps, because a denormal number equals 0 where denormals are flushed.
    bits, least = (
        lax.bitcast_convert_type(x, jnp.uint32) for x in (own, jnp.float32(_LEAST_WEIGHT))
    )
    tiny = bits - 1 < least - 1
    exactly = own if dtype == jnp.float32 else jnp.asarray(weight, dtype)
    return jnp.where((own >= 0) & (own <= _MOST_WEIGHT) & ~tiny, exactly, jnp.nan)


# Transformations of optax without state that are not linear: of the mean over workers they are not
# the mean of those of the workers. Those with state raise, since it differs by worker.
NOT_LINEAR = {
    *("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm"),
    *("keep_params_nonnegative", "normalize", "normalize_by_update_norm", "scale_by_sign"),
    "scale_by_trust_ratio",
}


# Those that add noise: their keys are equal on all workers.
_NOISE = {"add_noise"}


_PRIVATE = {"differentially_private_aggregate"}


# Those that run what they wrap in a branch, where no collective may be, and what to do instead.
_BRANCHES = {
    "apply_if_finite": "use `jaxcomm.skip_nonfinite(tx)`",
    "conditionally_mask": "place it around the transformations after the aggregator only",
    "conditionally_transform": "place it around the transformations after the aggregator only",
}


# What comes before these is meant for each worker, or is an error of theirs.
_OF_EACH_WORKER = (
    "jaxcomm._workers",
    "jaxcomm.gossip",
    "jaxcomm.synchronization",
    "jaxcomm.scheduling",
)
_AGGREGATORS = ("jaxcomm.aggregation", "jaxcomm.methods")


class _Holds(NamedTuple):
    """What a transformation consists of: its first part of the sets above, and an aggregator."""

    clip: str = ""
    aggregates: bool = False


def _closed_over(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # The variable has no value yet.
            continue
    return found


def _in_turn(parts: Iterable[Any], path: tuple[Any, ...]) -> _Holds:
    clip, aggregates = "", False
    for part in parts:
        holds = _held(part, path)
        if (aggregates or holds.aggregates) and _PRIVATE & {clip, holds.clip}:
            raise ValueError(
                "`optax.contrib.differentially_private_aggregate` takes the gradient of each "
                "example, which workers must not average, and its noise is equal on all of them. "
                "Return the mean of the examples' clipped gradients from `gradients=` of the step, "
                "and add noise after the aggregator, as in `optax.chain(jaxcomm.mean(), "
                "optax.add_noise((noise_multiplier * max_norm / global_batch) ** 2, 0.0, key=key), "
                "...)`."
            )
        if holds.aggregates and clip in _NOISE:
            raise ValueError(
                f"`tx` would add the same noise on all workers, and the mean would have all of it: "
                f"`optax.{clip}` comes before an aggregator. Place it after the aggregator."
            )
        if holds.aggregates and clip:
            raise ValueError(
                f"`tx` would clip each worker's own gradient: `optax.{clip}` comes before an "
                "aggregator, and the mean of what it returns is not what one device computes from "
                "the whole batch. Place it after the aggregator, as in `optax.chain("
                f"jaxcomm.mean(), optax.{clip}(...), ...)`; or, if each worker should clip its "
                f"own, write `jaxcomm.per_worker(optax.{clip}(...))`."
            )
        clip, aggregates = clip or holds.clip, aggregates or holds.aggregates
    return _Holds(clip, aggregates)


def _beside(parts: Iterable[Any], path: tuple[Any, ...]) -> _Holds:
    held = [_held(part, path) for part in parts]
    return _Holds(
        next((each.clip for each in held if each.clip), ""), any(each.aggregates for each in held)
    )


def _held(node: Any, path: tuple[Any, ...]) -> _Holds:
    """What a transformation or update function consists of, from the variables of its functions.

    Functions that are neither of optax nor of jaxcomm hold nothing.
    """
    if any(node is other for other in path):
        return _Holds()
    path = (*path, node)
    if isinstance(node, optax.GradientTransformation):
        return _held(node.update, path)
    if isinstance(node, Codec):
        raise ValueError(CODEC_IN_CHAIN)
    if hasattr(node, "aggregator"):  # The update function of one.
        return _Holds(aggregates=node.aggregator.kind == "mean")
    if isinstance(node, Mapping):
        return _beside(node.values(), path)
    if isinstance(node, tuple | list):
        return _beside(node, path)
    if not inspect.isfunction(node):
        return _Holds()
    module, (name, *inside) = node.__module__ or "", node.__qualname__.split(".")
    if module.startswith("optax.") and name in NOT_LINEAR | _NOISE | _PRIVATE:
        return _Holds(clip=name)
    if not inside or not module.startswith(("optax.", "jaxcomm.")):
        return _Holds(aggregates=module.startswith(_AGGREGATORS) and "inner_factory" in path)
    if module.startswith(_OF_EACH_WORKER):
        return _Holds()
    variables = _closed_over(node)
    if name == "chain" and "update_fns" in variables:
        return _in_turn(variables["update_fns"], path)
    if name == "named_chain" and "transforms" in variables:
        return _in_turn([tx for _, tx in variables["transforms"]], path)
    if name == "inject_hyperparams":
        return _beside([*variables.values()], (*path, "inner_factory"))
    held = _beside(variables.values(), path)
    if held.aggregates and name in _BRANCHES:
        raise ValueError(
            f"An aggregator cannot run inside `optax.{name}`, whose branch some workers may not "
            f"take: {_BRANCHES[name]}."
        )
    return held


def require_clips_of_the_mean(tx: optax.GradientTransformation) -> None:
    """Raises a ValueError if one that is not linear, or adds noise, comes before an aggregator.

    Or if one runs an aggregator in a branch. It is silent about what no chain of optax shows:
    functions of the user.
    """
    _held(tx, ())


def combine_of(codec: Codec) -> str:
    """How payloads combine, for the error message of a function that cannot combine them so."""
    code = codec.fast.code
    reason = f": words of the variable-length code `{code}` cannot be added" if code else ""
    return f"`combine`={codec.combine!r}{reason}"
