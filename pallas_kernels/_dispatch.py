"""Which implementation of an op runs, and in which config: named, measured, or else assumed.

Assumed is the reference on CPUs, on GPUs before Hopper, and below 65,536 coordinates; `mosaic_tpu`
on TPUs; on newer GPUs `mosaic_gpu` for sketches, and the reference for elementwise ops, which XLA
fuses into one pass. It also fuses `dequantize` of unpacked codes, one multiplication, into the pass
that reads the result, on any device.

A kernel raises in two places: while it is traced, and when the program that contains it is lowered.
The second is too late to choose another implementation. Therefore the kernel alone is lowered for
the device first, once for each combination of argument types.
"""

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast, get_args

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import _measurements
from pallas_kernels._configs import Fields, class_of
from pallas_kernels._configs import Implementation as Implementation
from pallas_kernels._measurements import Measured, Workload

VARIABLE = "PALLAS_KERNELS_IMPLEMENTATION"
PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}

# Mosaic GPU supports devices whose kind contains one of these strings.
HOPPER_AND_NEWER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200")

# Below this size, launching a kernel and padding to its blocks costs more than it saves.
FEWEST = 2**16

# JAX keeps one compiled program for each value of a context.
_preference = jax.make_user_context(())
_rehearsal = jax.make_user_context(False)

Rows = Sequence[Measured]


class Device(NamedTuple):
    """The device that a program runs on."""

    platform: str  # "cpu", "cuda" or "tpu"
    kind: str
    cores: int = 1


def target() -> Device:
    """The device of the program that is being traced.

    This is the device of the mesh in the current context, else JAX's default device.
    """
    described: Any = jax.sharding.get_abstract_mesh().abstract_device
    device = described or jax.config.jax_default_device or jax.devices()[0]
    device = jax.devices(device)[0] if isinstance(device, str) else device
    platform = "cuda" if device.platform == "gpu" else device.platform
    return Device(platform, device.device_kind, getattr(device, "num_cores", None) or 1)


def rehearsal(enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    """A context in which a CPU runs the kernels for GPU, in JAX's interpreter, if `enabled`."""
    return cast(contextlib.AbstractContextManager[Any], _rehearsal(enabled))


def rehearses() -> bool:
    """Whether the kernels for GPU are interpreted."""
    return bool(_rehearsal.value)


def _is_hopper(device: Device) -> bool:
    return device.platform == "cuda" and any(part in device.kind for part in HOPPER_AND_NEWER)


def reason_against(implementation: str, device: Device) -> str | None:
    """The reason why `device` cannot run `implementation`; None if it can."""
    if implementation == "mosaic_gpu" and device.platform == "cpu" and rehearses():
        return None
    platform = PLATFORMS.get(implementation, device.platform)
    if platform != device.platform:
        return f"it runs on {platform}, this program is for {device.platform} ({device.kind})"
    if implementation == "mosaic_gpu" and not _is_hopper(device):
        return f"it needs a GPU of the Hopper generation or newer, not {device.kind}"
    return None


def _checked(names: tuple[str, ...], rule: str) -> tuple[Implementation, ...]:
    """The names; `rule` begins the error if one is unknown."""
    for name in names:
        if name not in get_args(Implementation):
            raise ValueError(f"{rule} one of {get_args(Implementation)}, got {name!r}.")
    return cast(tuple[Implementation, ...], names)


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
    with _preference(_checked(names, "A name of the context `implementation` must be")):
        yield


@functools.cache
def _names_of_variable() -> tuple[Implementation, ...]:
    value = os.environ.get(VARIABLE, "").strip()
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    return _checked(names, f"A name in the environment variable {VARIABLE} must be")


def _preferred(argument: Implementation | None) -> tuple[tuple[Implementation, ...], str]:
    """What `argument`, else the context, else the variable names, in order; and which of them."""
    if argument is not None:
        return _checked((argument,), "`implementation` must be None or"), "`implementation`"
    if _preference.value:
        return _preference.value, "The context `implementation`"
    return _names_of_variable(), f"The environment variable {VARIABLE}"


def require_reference(argument: Implementation | None, reason: str) -> None:
    """Raises NotImplementedError for a reason against kernels if no other name is preferred."""
    names, source = _preferred(argument)
    if names and "reference" not in names:
        raise NotImplementedError(f"{source}={', '.join(names)!r} {reason}")


class Choice(NamedTuple):
    """What runs, and where that is written; without a config, the assumed one."""

    implementation: Implementation
    config: Fields = ()
    place: str = ""


def _assumed(workload: Workload, device: Device) -> Implementation:
    is_one_product = workload.op == "quantize.dequantize" and workload.bits in (8, 32)
    if workload.size < FEWEST or is_one_product:
        return "reference"
    if device.platform == "tpu":
        return "mosaic_tpu"
    is_sketch = workload.op.startswith("count_sketch")
    return "mosaic_gpu" if is_sketch and _is_hopper(device) else "reference"


def _workload(op: str, size: int, arrays: Sequence[jax.Array], options: dict[str, Any]) -> Workload:
    first, *others = arrays
    residual = options.get("residual", False) or (size > 2 and size in [x.size for x in others])
    rows = options.get("rows", first.shape[0] if first.ndim == 2 and first.size != size else None)
    return Workload(op, size, first.dtype.name, options.get("bits"), residual, rows)


def choose(workload: Workload, device: Device, measured: Rows = (), given: Rows = ()) -> Choice:
    """What runs on `device` if no implementation is named.

    The row of the largest size that the workload reaches: of `given`, else of `measured`. Below all
    sizes that were `measured` for it, the reference runs. What was not measured is assumed.
    """
    for rows in (given, measured):
        covering = [row for row in rows if row.covers(workload, device.kind)]
        reached = [row for row in covering if row.size <= workload.size]
        if row := max(reached, key=lambda row: row.size, default=None):
            return Choice(row.implementation, row.config, row.place)
    return Choice("reference" if covering else _assumed(workload, device))


def load(folder: str, name: str, function: str) -> Callable[..., Any]:
    """`function` of the kernels `name`. Programs for the CPU never load kernels.

    Raises:
      NotImplementedError: If the op has no such implementation.
    """
    module = importlib.import_module(f"pallas_kernels.{folder}.{name}")
    if not hasattr(module, function):
        raise NotImplementedError(f"`{folder}.{function}` has no implementation {name!r}")
    return cast(Callable[..., Any], getattr(module, function))


def _failure_of(error: BaseException) -> tuple[str, bool]:
    """The reason, and whether the kernel, or JAX, raised NotImplementedError."""
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) and link not in chain:
        chain.append(link)
    refused = [link for link in chain if isinstance(link, NotImplementedError)]
    shown = refused[-1] if refused else error
    first_line = (str(shown).strip().splitlines() or [""])[0]
    return f"{type(shown).__name__}: {first_line}", bool(refused)


@functools.lru_cache(maxsize=1024)
def _failure(
    kernel: Callable[..., Any], options: Any, types: Any, device: Device, rehearsed: bool
) -> tuple[str, bool]:
    """What goes wrong with this kernel on arrays of these types; "" if nothing does."""
    described = AbstractDevice(device.kind, device.cores, device.platform)
    mesh = AbstractMesh((), (), axis_types=(), abstract_device=described)

    def lower() -> None:
        with use_abstract_mesh(mesh), rehearsal(rehearsed):
            traced = jax.jit(functools.partial(kernel, **dict(options))).trace(*types)
            traced.lower(lowering_platforms=(device.platform,))

    # Imported here, because only accelerators need it.
    from concurrent.futures import ThreadPoolExecutor

    # A new thread has none of the meshes, mapped axes and traces of the program around the op.
    with ThreadPoolExecutor(max_workers=1) as executor:
        error = executor.submit(lower).exception()
    return _failure_of(error) if error else ("", False)


@functools.cache
def _reference(folder: str, function: str, static: tuple[str, ...]) -> Callable[..., Any]:
    """The definition, traced once for arrays of the same shapes; `inline` keeps the program."""
    definition = getattr(importlib.import_module(f"pallas_kernels.{folder}.reference"), function)
    return jax.jit(definition, static_argnames=static, inline=True)


def run(
    folder: str,
    function: str,
    implementation: Implementation | None,
    size: int,
    *arrays: jax.Array,
    **options: Any,
) -> Any:
    """Calls `function` of the requested implementation, or of the one that `choose` selects.

    The op is the function of this name in modules of `folder`, which are named after the
    implementations. It has `size` coordinates and static `options`, which are hashable. The config
    of a row is that of the row's implementation, also if this implementation was requested.

    Raises:
      ValueError: If `implementation`, or a name from the environment, is not one of the names. If
        a measured row has a wrong config, or an implementation that the device cannot run. If there
        are 2**32 coordinates or more, whose positions do not fit in 32 bits.
      NotImplementedError: If the device cannot run any of the implementations that were named.

    Warns:
      UserWarning: If no implementation was named and the kernel that `choose` selects is broken.
        The reference runs instead.
    """
    op, device = f"{folder}.{function}", target()
    if size >= 2**32:
        raise ValueError(f"`{op}` of {size} numbers, 2**32 elements or more: split the leaf.")
    workload = _workload(op, size, arrays, options)
    if (seen := _measurements.seen.get()) is not None:
        seen.append(workload)
    given = _measurements.context.value
    if given is None and _measurements.VARIABLE in os.environ:
        given = _measurements.of_variable()
    choice = choose(workload, device, _measurements.OF_PACKAGE, given or ())

    def bound(name: str) -> functools.partial[Any]:
        if name == "reference":
            return functools.partial(_reference(folder, function, tuple(options)), **options)
        kernel = load(folder, name, function)
        if name != choice.implementation or not choice.config:
            return functools.partial(kernel, **options)
        try:
            config = class_of(kernel, folder, name).with_fields(arrays[0].dtype, choice.config)
        except ValueError as error:
            raise ValueError(f"{choice.place}: of {name!r}, {error} Correct the row.") from None
        return functools.partial(kernel, **options, config=config)

    def failure(name: str) -> tuple[str, bool]:
        try:
            load(folder, name, function)
        except Exception as error:
            return _failure_of(error)
        kernel = bound(name)
        types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        return _failure(kernel.func, (*kernel.keywords.items(),), types, device, rehearses())

    names, source = _preferred(implementation)
    tried, reasons = names or (choice.implementation, "reference"), []
    for name in tried:
        reason, refused = reason_against(name, device), True
        if reason and not names:
            place = f"{choice.place}: remove it. `implementation`={name!r}"
            raise ValueError(f"{place} of `{op}`: {reason}.")
        if not reason:
            if name == "reference" or len(names) == 1:
                return bound(name)(*arrays)
            reason, refused = failure(name)
            if not reason or (names and not refused):
                if rehearses() or "reference" not in tried:
                    return bound(name)(*arrays)
                # A program for an accelerator may have parts that run on the host.
                kernel = {PLATFORMS[name]: bound(name)}
                return jax.lax.platform_dependent(*arrays, **kernel, default=bound("reference"))
        if not refused:
            warnings.warn(
                f"`{op}` uses plain JAX, because its kernel {name!r} does not work with JAX "
                f"{jax.__version__} on {device.kind}: {reason}. To silence this, set "
                f"{VARIABLE}=reference.",
                stacklevel=2,
            )
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"{source}={', '.join(names)!r} names no implementation of `{op}` that runs here. "
        f"{'; '.join(reasons)}."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def nondifferentiable(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays; differentiating with respect to them raises TypeError that names `op`."""
    return arrays


@nondifferentiable.defjvp
def _no_gradient(op: str, primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        f"`{op}` rounds, so it has no gradient. Take the gradient first and quantize it, or hide "
        "the argument behind `jax.lax.stop_gradient`."
    )
