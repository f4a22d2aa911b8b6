"""The implementations of a row and their configs: whether they are right, and what is timed."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _dispatch
from pallas_kernels._configs import Fields, class_of
from pallas_kernels._measurements import Measured, use
from pallas_kernels.arg_specs import Row
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.timing import Candidate


class Session(NamedTuple):
    """What does not change during a run."""

    device: _dispatch.Device
    samples: int
    rehearse: bool = False  # On a CPU, with kernels for GPU in the interpreter.
    tune: bool = False  # Kernels in each of their candidate configs.

    @property
    def queue(self) -> bool:
        """Whether calls are queued on the device."""
        return self.device.platform != "cpu"


class Variant(NamedTuple):
    """What is timed: an implementation and its config; without one, that of the dispatch."""

    name: str
    config: Fields = ()

    @property
    def described(self) -> str:
        """The fields of the config."""
        return ", ".join(f"{name}={value}" for name, value in self.config)


def variants(row: Row, session: Session) -> list[Variant]:
    """The implementations that run on the device, in the configs that are compared."""
    found = []
    for name in ("reference", *row.kernels):
        if _dispatch.reason_against(name, session.device) is not None:
            continue
        workload = row.workload(1)
        if not session.tune or name == "reference" or workload is None:
            found.append(Variant(name))
        else:
            folder, function = row.op.split(".")
            kind = class_of(_dispatch.load(folder, name, function), folder, name)
            found += [Variant(name, config.fields) for config in kind.candidates(workload.dtype)]
    return found


def function(row: Row, size: int, variant: Variant, session: Session) -> Callable[..., Any]:
    """The call of a row in this variant, as a function of the arguments alone."""
    name: Any = variant.name
    call = row.function(size, name)
    if not variant.config:
        return call
    measured = Measured(
        row.op, session.device.kind, 0, name, "", config=variant.config, place="A candidate"
    )

    def configured(*arguments: jax.Array) -> Any:
        with use((measured,)):
            return call(*arguments)

    return configured


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


@functools.lru_cache(maxsize=1)
def _expected(row: Row, size: int) -> tuple[Any, Any]:
    """Arguments, and what the reference on the CPU returns."""
    with _cpu():
        arguments = jax.block_until_ready(jax.jit(lambda: row.arguments(size))())
        return arguments, jax.jit(row.function(size, "reference"))(*arguments)


def check(row: Row, size: int, variant: Variant, session: Session) -> str:
    """What is wrong with a variant at one size; empty if nothing is."""
    arguments, wanted = _expected(row, size)
    arguments = jax.device_put(arguments, jax.devices()[0])
    actual = jax.jit(function(row, size, variant, session))(*arguments)
    return difference(row, actual, wanted)


def _compiled(f: Callable[..., Any], given: Callable[[], Any]) -> Candidate:
    return Candidate(functools.partial(jax.jit(f), *given()), jax.block_until_ready)


def copy_of(size: int) -> Candidate:
    """`x + 1` on float32, the roof of everything that is limited by memory."""
    return _compiled(lambda x: x + 1, lambda: [jnp.zeros(size, jnp.float32)])


def builders(row: Row, size: int, session: Session) -> dict[Variant, Callable[[], Candidate]]:
    """Functions that compile a copy, and every variant that runs here."""
    arguments = functools.cache(
        lambda: jax.block_until_ready(jax.jit(lambda: row.arguments(size))())
    )
    return {
        Variant("copy"): lambda: copy_of(size),
        **{
            variant: functools.partial(_compiled, function(row, size, variant, session), arguments)
            for variant in variants(row, session)
        },
    }


def torch_builders(row: Row, size: int, torch: Any) -> dict[Variant, Callable[[], Candidate]]:
    """Functions that compile a copy, and PyTorch's equivalent of a row that has one."""

    def build() -> Candidate:
        call = torch_equivalents.build(torch, row.label, size)
        return Candidate(call, lambda _: torch_equivalents.wait(torch))

    return {Variant("copy"): lambda: copy_of(size), Variant("torch"): build}
