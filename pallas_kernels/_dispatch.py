"""Runs the implementation of an op, named, preferred, measured or assumed, in its config."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

from pallas_kernels._device import PLATFORMS, Device, reason_against, rehearses, target
from pallas_kernels._measured import Choice, Measured, Workload, choose, workload_of
from pallas_kernels._preference import VARIABLE, Implementation, preferred
from pallas_kernels._probe import config_class, failure, load
from pallas_kernels._tuned import given, table

__all__ = [
    "Choice",
    "Device",
    "Implementation",
    "Measured",
    "Workload",
    "choose",
    "observed",
    "reason_against",
    "run",
    "target",
]

_observed: ContextVar[list[Workload] | None] = ContextVar("observed", default=None)


@contextmanager
def observed() -> Iterator[list[Workload]]:
    """The workloads that are dispatched in this context, in order."""
    seen: list[Workload] = []
    token = _observed.set(seen)
    try:
        yield seen
    finally:
        _observed.reset(token)


def _config(choice: Choice, folder: str, function: str, dtype: Any) -> dict[str, Any]:
    """The config of a row as an option of its kernel; none if the kernel cannot be loaded.

    Raises:
      ValueError: If the kernel has no such field, or if a value is not allowed.
    """
    try:
        kind = config_class(folder, choice.implementation, function)
    except Exception:  # The call of the kernel, or the question whether it works, says why.
        return {}
    try:
        if kind is None:
            name = choice.config[0][0]
            raise ValueError(f"`{name}` is no field: `{folder}.{function}` has no config.")
        return {"config": kind.with_fields(dtype, choice.config)}
    except ValueError as error:
        raise ValueError(
            f"{choice.place}: of {choice.implementation!r}, {error} Correct the row or remove it."
        ) from None


@functools.cache
def _reference(folder: str, function: str, static: tuple[str, ...]) -> Callable[..., Any]:
    """The reference, traced once for arrays of the same shapes; `inline` keeps the program."""
    return jax.jit(load(folder, "reference", function), static_argnames=static, inline=True)


def run(
    folder: str,
    function: str,
    implementation: Implementation | None,
    size: int,
    *arrays: jax.Array,
    **options: Any,
) -> Any:
    """Calls `function` of the requested implementation, or of the one that `choose` selects.

    The config of the row that `choose` selects is that of the row's implementation, also if this
    implementation was requested.

    Args:
      folder: The folder of the op, whose modules are named after the implementations.
      function: The name of the function, which has the same arguments in each module.
      implementation: One of the names, or None.
      size: The number of coordinates, which `choose` depends on.
      *arrays: The array arguments.
      **options: The static arguments, which are hashable.

    Raises:
      ValueError: If `implementation`, or a name from the environment, is not one of the names. If
        a measured row has a wrong config, or an implementation that the device cannot run.
      NotImplementedError: If the device cannot run any of the implementations that were named.

    Warns:
      UserWarning: If no implementation was named and the kernel that `choose` selects is broken.
        The reference runs instead.
    """
    op, device = f"{folder}.{function}", target()
    workload = workload_of(op, size, arrays, options)
    seen = _observed.get()
    if seen is not None:
        seen.append(workload)

    choice = choose(workload, device, table(), given())

    def options_of(name: str) -> dict[str, Any]:
        if name != choice.implementation or not choice.config:
            return options
        return options | _config(choice, folder, function, arrays[0].dtype)

    def bound(name: str) -> Callable[..., Any]:
        if name == "reference":
            return functools.partial(_reference(folder, function, tuple(options)), **options)
        return functools.partial(load(folder, name, function), **options_of(name))

    def with_reference(name: str) -> Any:
        if rehearses():
            return bound(name)(*arrays)
        # A program for an accelerator may have parts that run on the host.
        kernel = {PLATFORMS[name]: bound(name)}
        return lax.platform_dependent(*arrays, **kernel, default=bound("reference"))

    names, source = preferred(implementation)
    if len(names) == 1:
        (name,) = names
        reason = reason_against(name, device)
        if reason:
            raise NotImplementedError(f"{source}={name!r}: {reason}.")
        return bound(name)(*arrays)
    if names:
        reasons = {}
        for name in names:
            if name == "reference":
                return bound(name)(*arrays)
            reason = reason_against(name, device)
            if reason is None:
                failed = failure(folder, name, function, options_of(name), arrays, device)
                if failed is None or not failed.unsupported:
                    return with_reference(name) if "reference" in names else bound(name)(*arrays)
                reason = failed.reason
            reasons[name] = reason
        described = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(
            f"{source} names no implementation of `{op}` that runs here. {described}."
        )
    chosen = choice.implementation
    if chosen == "reference":
        return bound(chosen)(*arrays)
    reason = reason_against(chosen, device)
    if reason:
        raise ValueError(
            f"{choice.place}: `implementation`={chosen!r} of `{op}`: {reason}. Remove the row."
        )
    failed = failure(folder, chosen, function, options_of(chosen), arrays, device)
    if failed is None:
        return with_reference(chosen)
    if not failed.unsupported:
        warnings.warn(
            f"`{op}` uses plain JAX, because its kernel {chosen!r} does not work with JAX "
            f"{jax.__version__} on {device.kind}: {failed.reason}. To silence this, set "
            f"{VARIABLE}=reference.",
            UserWarning,
            stacklevel=2,
        )
    return bound("reference")(*arrays)
