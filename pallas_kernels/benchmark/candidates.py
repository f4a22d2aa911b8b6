"""The implementations of a row: whether they are right, and what is timed."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _dispatch
from pallas_kernels.arg_specs import Row
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.timing import Candidate


class Session(NamedTuple):
    """What does not change during a run."""

    device: _dispatch.Device
    samples: int
    torch: Any
    rehearse: bool = False  # On a CPU, with kernels for GPU in the interpreter.

    @property
    def queue(self) -> bool:
        """Whether calls are queued on the device."""
        return self.device.platform != "cpu"


def implementations(row: Row, session: Session) -> list[_dispatch.Implementation]:
    """Those that run on the device."""
    names: tuple[_dispatch.Implementation, ...] = ("reference", *row.kernels)
    return [name for name in names if _dispatch.reason_against(name, session.device) is None]


def _cpu() -> Any:
    with contextlib.suppress(RuntimeError):
        return jax.default_device(jax.devices("cpu")[0])
    return contextlib.nullcontext()


def difference(row: Row, actual: Any, wanted: Any) -> str:
    """How results differ from those of the reference on the CPU; empty if they do not."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
    for index, (a, b) in enumerate(leaves):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {index} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        floating = jnp.issubdtype(b.dtype, jnp.floating)
        if row.exact or not floating:
            x, y = np.asarray(a), np.asarray(b)  # The sign of zero is free.
            unequal = (x != y) & ~((x != x) & (y != y))
        else:
            x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
            unequal = ~np.isclose(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)
        if unequal.any():
            first = int(np.flatnonzero(unequal)[0])
            return f"result {index} differs at {int(unequal.sum())} places, first at {first}"
    return ""


def check(row: Row, size: int, implementation: _dispatch.Implementation) -> str:
    """What is wrong with an implementation at one size; empty if nothing is."""
    with _cpu():
        arguments = jax.block_until_ready(jax.jit(lambda: row.arguments(size))())
        wanted = jax.jit(row.function(size, "reference"))(*arguments)
    arguments = jax.device_put(arguments, jax.devices()[0])
    actual = jax.jit(row.function(size, implementation))(*arguments)
    return difference(row, actual, wanted)


def builders(row: Row, size: int, session: Session) -> dict[str, Callable[[], Candidate]]:
    """Functions that compile a copy, every implementation that runs here, and PyTorch's."""
    arguments = functools.cache(
        lambda: jax.block_until_ready(jax.jit(lambda: row.arguments(size))())
    )

    def compiled(f: Callable[..., Any], given: Callable[[], Any]) -> Candidate:
        return Candidate(functools.partial(jax.jit(f), *given()), jax.block_until_ready)

    found: dict[str, Callable[[], Candidate]] = {
        "copy": lambda: compiled(lambda x: x + 1, lambda: [jnp.zeros(size, jnp.float32)]),
        **{
            name: functools.partial(compiled, row.function(size, name), arguments)
            for name in implementations(row, session)
        },
    }
    # The equivalents view the array as words of fields.
    if session.torch is not None and row.label in torch_equivalents.EQUIVALENTS and size % 32 == 0:

        def torch_candidate() -> Candidate:
            call = torch_equivalents.build(session.torch, row.label, size)
            return Candidate(call, lambda _: session.torch.cuda.synchronize())

        found["torch"] = torch_candidate
    return found
