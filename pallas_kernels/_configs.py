"""What changes the speed of a kernel, and never its result.

A module of kernels has a frozen dataclass `Config`, and the functions that it concerns have an
argument `config`. None stands for the assumption, `Config.of`. What is part of a definition, such
as the order in which a sketch adds, does not belong in a config.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Container
from typing import Any, Literal, Self

import jax

Implementation = Literal["reference", "mosaic_gpu", "mosaic_tpu"]

Fields = tuple[tuple[str, int], ...]
"""A config, or some fields of one, as pairs of name and value."""

THREADS = 128  # Of a block on a GPU: one warpgroup.
TILE = 32  # Rows of a tile of 8-bit numbers on a TPU; those of wider numbers divide it.


def require_field(name: str, value: Any, allowed: Container[int], rule: str) -> None:
    """Raises ValueError unless `value` is an integer that is allowed."""
    if type(value) is not int or value not in allowed:
        raise ValueError(f"`{name}` must be {rule}, got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Config:
    """A config of some kernel. Its fields are integers, whose defaults are assumptions."""

    @classmethod
    def of(cls, dtype: jax.typing.DTypeLike) -> Self:
        """What is assumed to be fast if the first array of the op has this dtype."""
        return cls()

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple[Self, ...]:
        """The configs that are timed for a first array of this dtype, the assumption first."""
        return (cls.of(dtype),)

    @property
    def fields(self) -> Fields:
        """The names and values of all fields."""
        return tuple(dataclasses.asdict(self).items())

    def require_for(self, dtype: jax.typing.DTypeLike) -> None:
        """Raises ValueError if no first array of this dtype can have the config."""

    @classmethod
    def with_fields(cls, dtype: jax.typing.DTypeLike, fields: Fields) -> Self:
        """The assumption with some of its fields replaced.

        Raises:
          ValueError: If there is no such field, or if a value is not allowed for the dtype.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, _ in fields:
            if name not in known:
                raise ValueError(f"`{name}` is no field of its config, which has {known}.")
        config = dataclasses.replace(cls.of(dtype), **dict(fields))
        config.require_for(dtype)
        return config


def class_of(kernel: Callable[..., Any], folder: str, name: str) -> type[Config]:
    """The class of the configs of a kernel of the module `name`; without fields if it has none."""
    if "config" not in inspect.signature(kernel).parameters:
        return Config
    found: type[Config] = importlib.import_module(f"pallas_kernels.{folder}.{name}").Config
    return found


def _first_and_others(first: Any, others: list[Any]) -> tuple[Any, ...]:
    return first, *(other for other in others if other != first)


@dataclasses.dataclass(frozen=True)
class PerThread(Config):
    """Of an elementwise kernel for GPU."""

    numbers: int = 8  # That each thread of a block has: 4, 8, 16 or 32.

    def __post_init__(self) -> None:
        require_field("numbers", self.numbers, (4, 8, 16, 32), "4, 8, 16 or 32")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple[Self, ...]:
        """More numbers have more loads under way, and need more registers."""
        default = cls.of(dtype)
        others = [dataclasses.replace(default, numbers=numbers) for numbers in (4, 8, 16)]
        return _first_and_others(default, others)

    @property
    def block(self) -> int:
        """Numbers of a block of threads."""
        return THREADS * self.numbers


@dataclasses.dataclass(frozen=True)
class PerBlock(Config):
    """Of an elementwise kernel for TPU."""

    rows: int = 1024  # Of 128 numbers, in a block of all planes: a multiple of 32, at most 4096.

    def __post_init__(self) -> None:
        allowed = range(TILE, 4096 + 1, TILE)
        require_field("rows", self.rows, allowed, "a multiple of 32 in 32 to 4096")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple[Self, ...]:
        """Larger blocks start fewer copies, and leave less space in VMEM."""
        default = cls.of(dtype)
        others = [dataclasses.replace(default, rows=rows) for rows in (256, 512, 1024, 2048)]
        return _first_and_others(default, others)

    def rows_of_plane(self, planes: int, columns: int = 128) -> int:
        """The most rows of one of `planes` planes in a block of this many columns."""
        return max(TILE, self.rows * 128 // (planes * columns) // TILE * TILE)
