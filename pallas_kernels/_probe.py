"""Whether a kernel can be traced and lowered, asked before a program depends on it.

A kernel raises in two places: while it is traced, and when the program that contains it is lowered.
The second is too late to choose another implementation. Therefore the kernel alone is lowered for
the device first, once for each combination of argument types.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels._configs import Config
from pallas_kernels._device import Device, rehearsal, rehearses


class Failure(NamedTuple):
    """Why a kernel cannot be part of a program."""

    reason: str
    unsupported: bool  # Whether the kernel, or JAX, raised NotImplementedError.


def load(folder: str, name: str, function: str) -> Callable[..., Any]:
    """`function` of the implementation `name`. Programs for the CPU never load kernels.

    Raises:
      NotImplementedError: If the op has no such implementation.
    """
    package = importlib.import_module(f"pallas_kernels.{folder}")
    if name not in {module.name for module in pkgutil.iter_modules(package.__path__)}:
        raise NotImplementedError(f"`{folder}` has no implementation {name!r}")
    module = importlib.import_module(f"pallas_kernels.{folder}.{name}")
    if not hasattr(module, function):
        raise NotImplementedError(f"`{folder}.{function}` has no implementation {name!r}")
    found: Callable[..., Any] = getattr(module, function)
    return found


def is_op(op: str) -> bool:
    """Whether there is such a folder and function."""
    folder, _, function = op.partition(".")
    infos = pkgutil.iter_modules(importlib.import_module("pallas_kernels").__path__)
    if folder not in {info.name for info in infos if info.ispkg}:
        return False
    try:
        return callable(load(folder, "reference", function))
    except NotImplementedError:
        return False


def config_class(folder: str, name: str, function: str) -> type[Config] | None:
    """The class of the configs of a kernel; None if it has none.

    Raises:
      NotImplementedError: If the op has no such implementation.
    """
    kernel = load(folder, name, function)
    if "config" not in inspect.signature(kernel).parameters:
        return None
    found: type[Config] = importlib.import_module(f"pallas_kernels.{folder}.{name}").Config
    return found


def _failure_of(error: BaseException) -> Failure:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    refused = [link for link in chain if isinstance(link, NotImplementedError)]
    shown = refused[-1] if refused else error
    first_line = (str(shown).strip().splitlines() or [""])[0]
    return Failure(f"{type(shown).__name__}: {first_line}", bool(refused))


@functools.lru_cache(maxsize=1024)
def _lower(
    kernel: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    types: tuple[tuple[tuple[int, ...], Any], ...],
    device: Device,
    rehearsed: bool,
) -> Failure | None:
    described = AbstractDevice(
        device_kind=device.kind, num_cores=device.cores, platform=device.platform
    )
    mesh = AbstractMesh((), (), axis_types=(), abstract_device=described)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]

    def lower() -> None:
        with use_abstract_mesh(mesh), rehearsal(rehearsed):
            traced = jax.jit(functools.partial(kernel, **dict(options))).trace(*arguments)
            traced.lower(lowering_platforms=(device.platform,))

    # Imported here, because only accelerators need it.
    from concurrent.futures import ThreadPoolExecutor

    # A new thread has none of the meshes, mapped axes and traces of the program around the op.
    with ThreadPoolExecutor(max_workers=1) as executor:
        try:
            executor.submit(lower).result()
        except Exception as error:
            return _failure_of(error)
    return None


def failure(
    folder: str,
    name: str,
    function: str,
    options: Mapping[str, Any],
    arrays: Sequence[jax.Array],
    device: Device,
) -> Failure | None:
    """What goes wrong with this kernel on arrays of these types; None if nothing does."""
    try:
        kernel = load(folder, name, function)
    except Exception as error:
        return _failure_of(error)
    types = tuple((tuple(x.shape), jax.numpy.dtype(x.dtype)) for x in arrays)
    return _lower(kernel, tuple(sorted(options.items())), types, device, rehearses())
