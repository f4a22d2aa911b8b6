"""Which implementations a user prefers: by an argument, by a context, by the environment."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import jax

Implementation = Literal["reference", "mosaic_gpu", "mosaic_tpu"]

VARIABLE = "PALLAS_KERNELS_IMPLEMENTATION"

# JAX keeps one compiled program for each value of the context.
_context = jax.make_user_context(())


class Preference(NamedTuple):
    """Names in the order in which they are tried, and what named them."""

    names: tuple[Implementation, ...]  # Empty if nothing is preferred.
    source: str


def _require_names(names: tuple[str, ...], rule: str) -> None:
    allowed = get_args(Implementation)
    for name in names:
        if name not in allowed:
            raise ValueError(f"{rule} one of {allowed}, got {name!r}.")


@contextlib.contextmanager
def implementation(*names: Implementation) -> Iterator[None]:
    """Names the implementation of every op that is called in this context.

    With several names, the first one that the device and the arguments allow runs. An op traces its
    implementation, so the context must surround the call of a jitted function, not its result. JAX
    compiles the function once for each preference. The `implementation` argument of an op takes
    precedence. The environment variable `PALLAS_KERNELS_IMPLEMENTATION`, with names separated by
    commas, applies outside of such contexts and in all threads. It is read once.

    Args:
      *names: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, in the order in which they are tried.

    Returns:
      A context manager, which is a decorator too. In the context, ops raise NotImplementedError if
      the device can run none of the names; the message has the reason against each.

    Raises:
      ValueError: If there is no name, or an unknown one.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import implementation
      >>> from pallas_kernels.pack import pack
      >>> with implementation("mosaic_tpu", "mosaic_gpu", "reference"):
      ...     pack(jnp.array([1, 2], jnp.uint32), bits=16).tolist()
      [131073]
    """
    if not names:
        raise ValueError("`implementation` needs at least one name.")
    _require_names(names, "A name of the context `implementation` must be")
    with _context(names):
        yield


@functools.cache
def _of_environment() -> tuple[Implementation, ...]:
    value = os.environ.get(VARIABLE, "").strip()
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    _require_names(names, f"A name in the environment variable {VARIABLE} must be")
    return names  # type: ignore[return-value]


def preferred(argument: Implementation | None) -> Preference:
    """What `argument`, else the context, else the environment names.

    Raises:
      ValueError: If a name is unknown.
    """
    if argument is not None:
        _require_names((argument,), "`implementation` must be None or")
        return Preference((argument,), "`implementation`")
    if _context.value:
        return Preference(_context.value, "The context `implementation`")
    return Preference(_of_environment(), f"The environment variable {VARIABLE}")
