"""Files of measurements: which implementation was the fastest for a workload, in which config.

The rows of the file that the context `measured` names, or else of the one that the variable names,
are tried before those of `measured.jsonl` in the package, if records of devices have made one.
"""

import contextlib
import functools
import importlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, get_args

import jax

from pallas_kernels._configs import Fields, Implementation

VARIABLE = "PALLAS_KERNELS_MEASURED"
FILE = pathlib.Path(__file__).with_name("measured.jsonl")

# JAX keeps one compiled program for each value of the context.
context = jax.make_user_context(None)
seen: ContextVar[list["Workload"] | None] = ContextVar("seen", default=None)

TYPES = {
    "op": str,
    "kind": str,
    "size": int,
    "implementation": str,
    "config": dict,
    "record": str,
    "dtype": str,
    "bits": int,
    "residual": bool,
    "rows": int,
}
REQUIRED = ("op", "kind", "size", "implementation")


class Workload(NamedTuple):
    """What decides which implementation of an op is fastest."""

    op: str  # The folder and the function, such as "quantize.quantize".
    size: int  # Coordinates.
    dtype: str  # Of the first array.
    bits: int | None = None  # The width of a field, where the op has fields.
    residual: bool = False  # Whether a second array of this size is read or written in the pass.
    rows: int | None = None  # Of a sketch.


@contextlib.contextmanager
def observed() -> Iterator[list[Workload]]:
    """The workloads that are dispatched in this context, in order."""
    workloads: list[Workload] = []
    token = seen.set(workloads)
    try:
        yield workloads
    finally:
        seen.reset(token)


class Measured(NamedTuple):
    """The implementation that was fastest on this kind of device, from this size on.

    None stands for every value. Fields that `config` does not have are those that are assumed.
    """

    op: str
    kind: str
    size: int
    implementation: Implementation
    record: str
    dtype: str | None = None
    bits: int | None = None
    residual: bool | None = None
    rows: int | None = None
    config: Fields = ()
    place: str = "A row"  # Where the row is written.

    def covers(self, workload: Workload, kind: str) -> bool:
        """Whether the row is of this workload on this kind of device, whatever its size."""
        if (self.op, self.kind) != (workload.op, kind):
            return False
        keys = ("dtype", "bits", "residual", "rows")
        return all(getattr(self, key) in (None, getattr(workload, key)) for key in keys)


def use(rows: tuple[Measured, ...]) -> AbstractContextManager[None]:
    """A context in which these rows are tried before those of the package, and no file is."""
    found: AbstractContextManager[None] = context(rows)
    return found


@contextlib.contextmanager
def measured(file: str | os.PathLike[str]) -> Iterator[None]:
    """Names a file of measurements for every op that is called in this context.

    `python -m pallas_kernels.bench --tune` writes such a file. Each line is a JSON object: from
    `size` coordinates on, `implementation` with `config` was the fastest for `op` on the kind of
    device `kind`; of `dtype`, `bits`, `residual` and `rows`, those that the line has must be equal.
    Its rows are tried before those of the package, the largest size first. Rows of other kinds
    of devices are ignored. A named implementation runs in the config of its row.

    An op traces its implementation, so the context must surround the call of a jitted function, not
    its result. JAX compiles the function once for each content of the file. The environment
    variable `PALLAS_KERNELS_MEASURED=FILE` applies outside of such contexts and in all threads. It
    is read once.

    Args:
      file: The path of the file, which is read at the entrance.

    Returns:
      A context manager, which is a decorator too. In the context, ops raise ValueError if the row
      that they need has a field that the config of its kernel does not have, or a kernel that its
      device cannot run.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If a line is malformed. The message has the file, the line and the remedy.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import measured
      >>> from pallas_kernels.pack import pack
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "measured.jsonl"
      >>> _ = file.write_text(
      ...     '{"op": "pack.pack", "kind": "NVIDIA H200", "size": 1048576, '
      ...     '"implementation": "mosaic_gpu", "config": {"numbers": 8}}\\n'
      ... )
      >>> with measured(file):
      ...     pack(jnp.array([1, 2], jnp.uint32), bits=16).tolist()
      [131073]
    """
    with use(read(file)):
        yield


@functools.cache
def of_variable() -> tuple[Measured, ...]:
    """The rows of the file that the variable names."""
    file = os.environ.get(VARIABLE, "").strip()
    try:
        return read(file) if file else ()
    except OSError as error:
        error.add_note(f"The environment variable {VARIABLE} names this file.")
        raise


def read(file: str | os.PathLike[str]) -> tuple[Measured, ...]:
    """The rows of a file.

    Raises:
      OSError: If it cannot be read.
      ValueError: If a line is malformed.
    """
    lines = pathlib.Path(file).read_bytes().split(b"\n")
    return tuple(
        _row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    )


def write(file: pathlib.Path, rows: Iterable[Measured]) -> None:
    """Writes a file that `read` reads."""
    lines = []
    for row in rows:
        values = row._asdict() | {"config": dict(row.config)}
        found = {name: values[name] for name in TYPES if values[name] not in (None, {})}
        lines.append(json.dumps(found) + "\n")
    file.write_text("".join(lines))


def _is_op(op: str) -> bool:
    folder, _, function = op.partition(".")
    try:
        reference = importlib.import_module(f"pallas_kernels.{folder}.reference")
    except ImportError:
        return False
    return callable(getattr(reference, function, None))


def _row(line: bytes, place: str) -> Measured:
    def refuse(reason: str) -> NoReturn:
        raise ValueError(
            f"{place}: {reason}. Remove the line, or write the file again: "
            "`python -m pallas_kernels.bench --tune`."
        )

    try:
        values: dict[str, Any] = json.loads(line)
    except ValueError:  # Of JSON, or of UTF-8.
        refuse("it is not JSON")
    if not isinstance(values, dict):
        refuse("it is no JSON object")
    for name, value in values.items():
        if name not in TYPES:
            refuse(f"`{name}` is none of its names, {list(TYPES)}")
        if type(value) is not TYPES[name] and (value is not None or name in REQUIRED):
            refuse(f"`{name}` must be {TYPES[name].__name__}, got {value!r}")
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        refuse(f"it has no {missing[0]!r}")
    if values["implementation"] not in get_args(Implementation):
        refuse(f"`implementation` must be one of {get_args(Implementation)}")
    if not _is_op(values["op"]):
        refuse(f"there is no op {values['op']!r}")
    if values["size"] < 0:
        refuse(f"`size` must be at least 0, got {values['size']}")
    fields = values.pop("config", None) or {}
    for name, value in fields.items():
        if type(value) is not int:
            refuse(f"`config` must have integers, got {name}={value!r}")
    if fields and values["implementation"] == "reference":
        refuse("'reference' has no `config`")
    return Measured(**{"record": "", **values}, config=tuple(fields.items()), place=place)


OF_PACKAGE = read(FILE) if FILE.exists() else ()
