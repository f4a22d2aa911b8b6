"""The error that an axis is not bound, which names the function that the axis was given to."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core

from jaxcomm._base import AxisName

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _GivenTo(str):
    """The name of an axis, and the function that it was given to."""

    user: str


def _given_to(user: str, axis_name: Any) -> Any:
    """The axis name, or names, which know the function that they were given to first."""
    if isinstance(axis_name, tuple):
        return tuple(_given_to(user, name) for name in axis_name)
    if not isinstance(axis_name, str) or isinstance(axis_name, _GivenTo):
        return axis_name
    known = _GivenTo(axis_name)
    known.user = user
    return known


def names_itself(fn: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Lets an error that `axis_name` is not bound name the function that has this argument."""
    signature = inspect.signature(fn)
    if "axis_name" not in signature.parameters:
        return fn

    @functools.wraps(fn)
    def named(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return fn(*args, **kwargs)  # It raises an error that names the function.
        bound.apply_defaults()
        axis_name = bound.arguments["axis_name"]
        bound.arguments["axis_name"] = _given_to(fn.__name__, axis_name)
        return fn(*bound.args, **bound.kwargs)

    return named


def _axes() -> list[str]:
    """The bound axes; if JAX does not list them, those of the mesh."""
    manual = lambda: jax.sharding.get_abstract_mesh().manual_axes  # noqa: E731
    return sorted(getattr(jax.extend.core, "unsafe_get_axis_names_DO_NOT_USE", manual)())


def unbound(axis_name: AxisName, nowhere: str, state: str = "") -> ValueError:
    """The error if an axis is not bound: the others, if any are; else `state` and `nowhere`."""
    first, *others = (axis_name,) if isinstance(axis_name, str) else axis_name
    found, user = _axes(), getattr(first, "user", None)
    message = f"`axis_name`={tuple(axis_name) if others else first!r} is not bound here"
    if not found:
        return ValueError(f"{state}{message}. {nowhere}")
    given = f" to `{user}`" if user else ""
    or_others = " (or others of them)" if len(found) > 1 else ""
    return ValueError(
        f"{message}, where the axes are {found}: pass `axis_name={found[0]!r}`{or_others}{given}."
    )
