r"""The arrays of a training run, their checksums, and what a checkpoint says of each of them.

.. math:: c(x) = \sum_i m(w_i + (2 k + 1)\, i) \bmod 2^{32}

for the words :math:`w_i` of the array, a mixing bijection :math:`m` of 32-bit words and a constant
:math:`k`. A sum has no order, so each device adds its own part, and the sum does not depend on how
the array is sharded. A changed bit is always found; any other change of the array with probability
:math:`1 - 2^{-32}`."""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcomm._contract import PyTree
from pallas_kernels import _hash

Leaf: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct

_STRIDE = 0x9E3779B9


def named(tree: PyTree, what: str) -> dict[str, Leaf]:
    """The leaves by path, such as `['opt_state'][0].own.per_worker['data']`.

    Raises:
      ValueError: If a leaf is not an array.
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, Leaf):
            raise ValueError(
                f"`{what}{name}` is of type {type(leaf).__name__}, but a checkpoint holds arrays."
            )
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_narrow(leaf: Leaf) -> bool:
    """Whether orbax may not have the dtype."""
    return not _is_key(leaf) and jax.dtypes.itemsize_bits(leaf.dtype) < 8


def stored(leaf: Leaf) -> Any:
    """What is stored of a leaf: integers of keys, and float32 of values of fewer than 8 bits."""
    value: Any = leaf
    if _is_narrow(leaf):
        return value.astype(np.float32)
    return jax.random.key_data(value) if _is_key(leaf) else value


def restored(array: Any, like: Leaf) -> Any:
    """The inverse of `stored`, for a leaf like this one."""
    if isinstance(array, np.ndarray) and isinstance(like, jax.Array):
        array = jnp.asarray(array)
    if not _is_key(like):
        return array.astype(like.dtype) if _is_narrow(like) else array
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=found[0])


def empty(like: Leaf) -> Any:
    """What is stored of a leaf without values: nothing, as orbax refuses it."""
    of_like = jax.eval_shape(stored, like)
    zeros, place = np.zeros(of_like.shape, of_like.dtype), getattr(like, "sharding", None)
    return zeros if place is None else jax.device_put(zeros, place)


def copies(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the host; arrays of which each process has a part are as they were.

    Raises:
      AssertionError: If arrays of one process only differ by process.
    """
    local = {p: x for p, x in arrays.items() if getattr(x, "is_fully_addressable", True)}
    if jax.process_count() > 1:
        multihost_utils.assert_equal(local, "Arrays of one process only differ by process.")
    equal = {p: x for p, x in arrays.items() if getattr(x, "is_fully_replicated", True)}
    # A view would keep a buffer that the next step may overwrite.
    copied = {path: np.array(x) for path, x in jax.device_get(local | equal).items()}
    return {**arrays, **copied}


def _words(x: Any) -> Any:
    """The bits of an array of NumPy or JAX, as unsigned integers with one axis more."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = (np if isinstance(x, np.ndarray) else jnp).stack([x.real, x.imag], axis=-1)
    return x[..., None].view(f"uint{8 * min(x.dtype.itemsize, 4)}")


@jax.jit
def _sum(words: jax.Array) -> jax.Array:
    places = jnp.uint32(_STRIDE) * _hash.positions(words.shape)
    return jnp.sum(_hash.mix(words.astype(jnp.uint32) + places), dtype=jnp.uint32)


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    return _sum(_words(x))


def checksums(arrays: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """Begins to compute the checksum of each array; what it returns waits for them.

    With several processes, all of them call this.
    """

    def begin(x: Any) -> jax.Array:
        if isinstance(x, np.ndarray):
            return _sum(_words(x))  # JAX would make 32 bits of 64.
        # A program on one of the copies costs a quarter of one on eight.
        once = jax.process_count() == 1 and x.is_fully_replicated
        return _checksum(x.addressable_data(0) if once else x)

    begun = {path: begin(x) for path, x in arrays.items()}
    return lambda: {path: int(x) for path, x in begun.items()}


FORMAT = 4
"""The only format that is written and read; those before it were never released."""

_SYSTEM = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore reports an error of the system, at the end of a long line."""

_LONGEST = 300


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, or cannot be restored into this program. One line."""


@contextlib.contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Raises errors of the block as one line: what failed, why, and what to do.

    Raises:
      CheckpointError: If the block raises.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip()
        reason = (text.partition("\n")[0] or type(error).__name__)[:_LONGEST].rstrip(".")
        if found := _SYSTEM.search(text):
            reason = os.strerror(int(found[1]))
        raise CheckpointError(f"{what}: {reason}. {advice}") from error


class Entry(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int = 0  # 0 also if it has no values.

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def entry_of(leaf: Leaf, checksum: int = 0) -> Entry:
    """The description of a leaf."""
    return Entry(tuple(leaf.shape), str(leaf.dtype), checksum)


class Manifest(NamedTuple):
    """A checkpoint's description of itself."""

    position: Any
    leaves: dict[str, Entry]

    def signed(self) -> bytes:
        """A line of JSON, and the CRC-32 of that line."""
        leaves = {path: entry._asdict() for path, entry in self.leaves.items()}
        value = {"format": FORMAT, "position": self.position, "leaves": leaves}
        line = json.dumps(value).encode()
        return line + b"\n%d\n" % zlib.crc32(line)


def verified(written: bytes) -> Manifest:
    """The inverse of `Manifest.signed`.

    Raises:
      ValueError: If it is not what was written, or of another format.
    """
    line, _, crc32 = written.partition(b"\n")
    if crc32 != b"%d\n" % zlib.crc32(line):
        raise ValueError("its manifest is damaged")
    value = json.loads(line)
    if value["format"] != FORMAT:
        raise ValueError(f"it has format {value['format']}, and this release reads format {FORMAT}")
    leaves = {
        path: Entry(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
        for path, leaf in value["leaves"].items()
    }
    return Manifest(value["position"], leaves)
