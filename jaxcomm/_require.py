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

from jaxcomm._contract import Aggregator, AxisName, Codec

_LEAST_WEIGHT, _MOST_WEIGHT = 2.0**-100, 2.0**100


_Arguments = ParamSpec("_Arguments")


_Result = TypeVar("_Result")


def described(value: Any) -> str:
    """A short description of a value for an error message."""
    if inspect.isfunction(value):
        return f"the function `{value.__name__}`: call it, as in `{value.__name__}(...)`"
    text = repr(value)
    return text if len(text) <= 80 else f"a `{type(value).__name__}`"


def require_axis_name(axis_name: Any, option: str = "axis_name") -> None:
    """Raises unless `axis_name` is a name or a tuple of distinct names."""
    several = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    are_names = all(isinstance(name, str) for name in several)
    if not several or not are_names or len(set(several)) < len(several):
        raise ValueError(
            f"`{option}` must be the name of a mesh axis, or a tuple of several distinct axes, got "
            f"{described(axis_name)}."
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


def require_transformation(tx: Any, option: str = "tx") -> None:
    """Raises unless `tx` is an optax transformation that can contain collectives."""
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(
            f"`{option}` is `optax.MultiSteps`, which would communicate in every mini-step: use "
            "`jaxcomm.accumulate(tx, k)` instead."
        )
    if isinstance(tx, Codec) or not (hasattr(tx, "init") and hasattr(tx, "update")):
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
    if kind is Codec:
        example = "a codec, such as `jaxcomm.compression.quantizers.dither()`"
        return _Rule(lambda x: isinstance(x, Codec), example)
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


_TRANSFORMATIONS = {optax.GradientTransformation, optax.GradientTransformationExtraArgs}


@functools.cache
def annotations_of(construct: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, also of options that `takes_options` lists."""
    own = {name: p.annotation for name, p in inspect.signature(construct).parameters.items()}
    return {**own, **get_type_hints(construct, include_extras=True)}


def named(construct: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Names the scope in which the transformations of a constructor compute after it.

    One that returns what another constructor made renames it.
    """

    @functools.wraps(construct)
    def named_construct(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        made: Any = construct(*args, **kwargs)
        if any(made is given for given in (*args, *kwargs.values())):
            return made
        if isinstance(made, Aggregator):
            made.name = construct.__name__
        elif isinstance(made, optax.GradientTransformation):
            scope = jax.named_scope(construct.__name__)
            made = made._replace(init=scope(made.init), update=scope(made.update))
        return made

    return named_construct


def checked(construct: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Checks the arguments of a constructor by their annotations, and applies `named`.

    An option may be traced if its annotation includes `jax.Array`.
    """
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def checked_construct(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for option, value in signature.bind(*args, **kwargs).arguments.items():
            annotation = annotations_of(construct)[option]
            kinds = {*_members(annotation)} - ({type(None)} if value is not None else set())
            if annotation == AxisName:
                if value != () or signature.parameters[option].default != ():
                    require_axis_name(value, option)
            elif kinds and kinds <= _TRANSFORMATIONS:
                require_transformation(value, option)
            else:
                require_option(value, option, annotation)
        return construct(*args, **kwargs)

    return named(checked_construct)


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
    is_known = not isinstance(weight, jax.core.Tracer)
    if is_known and weight != 0 and not _LEAST_WEIGHT <= float(weight) <= _MOST_WEIGHT:
        raise ValueError(f"`weight` must be 0 or from 2**-100 to 2**100, got {weight}.")
    own = jnp.asarray(weight, jnp.float32)
    # Compares bits, and 0 wraps, because a denormal number equals 0 where denormals are flushed.
    bits, least = (
        lax.bitcast_convert_type(x, jnp.uint32) for x in (own, jnp.float32(_LEAST_WEIGHT))
    )
    tiny = bits - 1 < least - 1
    exactly = own if dtype == jnp.float32 else jnp.asarray(weight, dtype)
    return jnp.where((own >= 0) & (own <= _MOST_WEIGHT) & ~tiny, exactly, jnp.nan)


_PRIVATE, _AGGREGATOR = "differentially_private_aggregate", "an aggregator"


# Transformations of optax without state that are not linear: of the mean over workers they are not
# the mean of those of the workers. Those with state raise, since it differs by worker.
_CLIPS = (
    *("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm"),
    *("keep_params_nonnegative", "normalize", "normalize_by_update_norm", "scale_by_sign"),
    "scale_by_trust_ratio",
)


# What must not come before an aggregator, and why.
_MISPLACED = {
    **{
        name: "would clip each worker's own gradient. Place it after the aggregator; or, if that "
        f"is meant, write `jaxcomm.per_worker(optax.{name}(...))`."
        for name in _CLIPS
    },
    "add_noise": "would add the same noise on all workers. Place it after the aggregator.",
}


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


def _in_turn(parts: Iterable[Any], path: tuple[Any, ...]) -> set[str]:
    found: set[str] = set()
    for part in parts:
        inside = _held(part, path)
        if _AGGREGATOR in inside and (early := sorted(found & {*_MISPLACED})):
            raise ValueError(f"`optax.{early[0]}` before an aggregator {_MISPLACED[early[0]]}")
        found |= inside
    if {_AGGREGATOR, _PRIVATE} <= found:
        raise ValueError(
            f"`optax.contrib.{_PRIVATE}` takes the gradient of each example: return the mean of "
            "clipped ones from `gradients=` of the step, and add noise after the aggregator."
        )
    return found


def _held(node: Any, path: tuple[Any, ...]) -> set[str]:
    """What a transformation or update function consists of, from the variables of its functions.

    Those are the transformations named above, and aggregators. Functions that are neither of optax
    nor of jaxcomm hold nothing.
    """
    if any(node is other for other in path):
        return set()
    path = (*path, node)
    if isinstance(node, optax.GradientTransformation):
        return _held(node.update, path)
    if hasattr(node, "aggregator"):  # The update function of one.
        return {_AGGREGATOR} if node.aggregator.kind == "mean" else set()
    if isinstance(node, Mapping | tuple | list):
        parts = node.values() if isinstance(node, Mapping) else node
        return set().union(*(_held(part, path) for part in parts))
    if not inspect.isfunction(node):
        return set()
    module, (name, *inside) = node.__module__ or "", node.__qualname__.split(".")
    if module.startswith("optax.") and name in (*_MISPLACED, _PRIVATE):
        return {name}
    if not inside or not module.startswith(("optax.", "jaxcomm.")):
        made_later = module.startswith(_AGGREGATORS) and "inner_factory" in path
        return {_AGGREGATOR} if made_later else set()
    if module.startswith(_OF_EACH_WORKER):
        return set()
    cells = zip(node.__code__.co_freevars, node.__closure__ or (), strict=True)
    # An empty cell belongs to a variable that has no value yet.
    variables = {name: x.cell_contents for name, x in cells if x != types.CellType()}
    if name == "chain" and "update_fns" in variables:
        return _in_turn(variables["update_fns"], path)
    if name == "named_chain" and "transforms" in variables:
        return _in_turn([tx for _, tx in variables["transforms"]], path)
    held = _held(variables, (*path, *(["inner_factory"] if name == "inject_hyperparams" else [])))
    if _AGGREGATOR in held and name in _BRANCHES:
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
