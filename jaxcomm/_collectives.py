"""Collectives over mesh axes: in every mode, as one message of words, in rounds, in branches."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._units import LARGE
from pallas_kernels._dispatch import target


def _in_words(
    move: Callable[[jax.Array], jax.Array], x: jax.Array, axis_name: AxisName
) -> jax.Array:
    """Moves 16-bit and 8-bit floats as unsigned words: XLA widens them in collectives on CPU."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    if not narrow or _axis.is_simulated(axis_name):
        return move(x)
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    received = lax.bitcast_convert_type(move(words), x.dtype)
    return cast(jax.Array, as_moved(move, x, received))


def gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The values of all workers, `[workers, ...]`, in their order, equal on all workers.

    A worker sends (n - 1) times the bytes of `x`.

    Args:
      x: This worker's array, of any shape and dtype.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The arrays of all workers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import collectives
      >>> of_all = jax.vmap(lambda x: collectives.gather(x, "data"), axis_name="data")
      >>> of_all(jnp.arange(2)).tolist()
      [[0, 1], [0, 1]]
    """
    modes = {_axis.mode(name) for name in _axis.names(axis_name)}

    def move(x: jax.Array) -> jax.Array:
        if modes == {"checked"}:
            return lax.all_gather(x, _axis.names(axis_name), to="invarying")
        if modes == {"unchecked"}:
            return lax.all_gather(x, _axis.names(axis_name))
        gathered = x
        for name in reversed(_axis.names(axis_name)):  # `jax.vmap` gathers over one name at a time.
            options = {"to": "invarying"} if _axis.mode(name) == "checked" else {}
            gathered = lax.all_gather(gathered, name, **options)
        return gathered.reshape(_axis.size(axis_name), *x.shape)

    return _in_words(move, x, axis_name)


def exchange(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends row i of `[workers, ...]` to worker i; returns the received rows, in worker order.

    A worker sends (n - 1) rows.

    Args:
      rows: `[workers, ...]`, of any dtype.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `[workers, ...]`: row i is from worker i.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import collectives
      >>> rows = jnp.array([[1, 2], [3, 4]])
      >>> jax.vmap(lambda x: collectives.exchange(x, "data"), axis_name="data")(rows).tolist()
      [[1, 3], [2, 4]]
    """
    if _axis.size(axis_name) == 1:
        return _axis.as_varying(rows, axis_name)

    def move(rows: jax.Array) -> jax.Array:
        if "vmap" not in {_axis.mode(name) for name in _axis.names(axis_name)}:
            schedule = worth(rows)
            if schedule is not None:
                return exchange_in_rounds(schedule, rows, _axis.names(axis_name))
            return lax.all_to_all(rows, _axis.names(axis_name), 0, 0)
        shape = rows.shape
        rows = rows.reshape(*(lax.axis_size(name) for name in _axis.names(axis_name)), *shape[1:])
        for position, name in enumerate(_axis.names(axis_name)):
            # `jax.vmap` exchanges only what it maps. XLA removes the choice between equals.
            rows = jnp.where(lax.axis_index(name) >= 0, rows, rows)
            rows = lax.all_to_all(rows, name, position, position)
        return rows.reshape(shape)

    return _in_words(move, _axis.as_varying(rows, axis_name), axis_name)


def shift(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends `x` to the next worker of the ring; returns the value of the previous worker.

    Args:
      x: This worker's array, of any shape and dtype.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The array of the previous worker; of worker 0, that of the last one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import collectives
      >>> print(jax.vmap(lambda x: collectives.shift(x, "data"), axis_name="data")(jnp.arange(3)))
      [2 0 1]
    """
    if _axis.size(axis_name) == 1:
        return _axis.as_varying(x, axis_name)

    def along(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
        workers = _axis.size(over)
        ring = [(worker, (worker + 1) % workers) for worker in range(workers)]
        if len(over) == 1:
            return lax.ppermute(x, over[0], ring)
        if "vmap" not in {_axis.mode(name) for name in over}:
            return lax.ppermute(x, over, ring)
        # `jax.vmap` permutes over one name at a time. The predecessor of the first worker along
        # the last axis is at the end of the previous row.
        shifted = along(x, over[-1:])
        return jnp.where(_axis.index(over[-1]) == 0, along(shifted, over[:-1]), shifted)

    move = lambda x: along(x, _axis.names(axis_name))  # noqa: E731
    return _in_words(move, _axis.as_varying(x, axis_name), axis_name)


def swap(x: jax.Array, axis_name: AxisName, distance: int) -> jax.Array:
    """Exchanges `x` with worker `index ^ distance`; returns `x` if there is no such worker."""
    workers = _axis.size(axis_name)
    partner = [w ^ distance if w ^ distance < workers else w for w in range(workers)]
    return permute(x, axis_name, [*enumerate(partner)])


def permute(x: jax.Array, axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends `x` along pairs (sender, receiver); a worker that receives nothing gets zeros.

    Args:
      x: This worker's array, of any shape and dtype.
      axis_name: The mesh axis, or axes, of the workers.
      pairs: Each worker sends to one other at most, and receives from one at most.

    Returns:
      The array of the sender.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import collectives
      >>> to_1 = lambda x: collectives.permute(x, "data", [(0, 1)])
      >>> print(jax.vmap(to_1, axis_name="data")(jnp.array([5, 6, 7])))
      [0 5 0]
    """
    over, workers = _axis.names(axis_name), _axis.size(axis_name)
    sender_of = {receiver: sender for sender, receiver in pairs}

    def move(x: jax.Array) -> jax.Array:
        if "vmap" not in {_axis.mode(name) for name in over}:
            return lax.ppermute(x, over if len(over) > 1 else over[0], pairs)
        # `jax.vmap` permutes over one name at a time, and requires that every worker receives.
        idle = iter(sorted(set(range(workers)) - set(sender_of.values())))
        senders = [sender_of[w] if w in sender_of else next(idle) for w in range(workers)]
        if len(over) > 1:
            received = gather(x, axis_name)[jnp.asarray(senders)[_axis.index(axis_name)]]
        else:
            received = lax.ppermute(x, over[0], [(s, w) for w, s in enumerate(senders)])
        if len(sender_of) == workers:
            return received
        receives = jnp.asarray([w in sender_of for w in range(workers)])[_axis.index(axis_name)]
        return jnp.where(receives, received, jnp.zeros((), x.dtype))

    return _in_words(move, _axis.as_varying(x, axis_name), axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_moved(
    move: Callable[[jax.Array], jax.Array], sent: list[jax.Array], received: list[jax.Array]
) -> list[jax.Array]:
    return received


@_as_moved.defjvp
def _moved_tangents(
    move: Callable[[jax.Array], jax.Array],
    primals: tuple[list[jax.Array], list[jax.Array]],
    tangents: tuple[list[jax.Array], list[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    # At least 32 bits, since narrow floats would be moved as words.
    wide = [x if x.dtype.itemsize >= 4 else x.astype(jnp.float32) for x in tangents[0]]
    narrow = [move(x).astype(y.dtype) for x, y in zip(wide, primals[1], strict=True)]
    return primals[1], narrow


def as_moved(move: Callable[[jax.Array], jax.Array], sent: PyTree, received: PyTree) -> PyTree:
    """`received`, with the derivative of `move` applied to each float of `sent`.

    A message consists of words, and a bitcast to them would make each derivative 0.

    Args:
      move: The exchange, linear, of an array of any shape and dtype. It may hold no traced value,
        nor an axis that `jax.vmap` binds: JAX calls it later.
      sent: The tree that was sent.
      received: The tree that `move` makes of it.
    """
    before, (after, treedef) = jax.tree.leaves(sent), jax.tree.flatten(received)
    floats = [i for i, x in enumerate(after) if jnp.issubdtype(x.dtype, jnp.floating)]
    if floats:
        moved = _as_moved(move, [before[i] for i in floats], [after[i] for i in floats])
        for i, x in zip(floats, moved, strict=True):
            after[i] = x
    return jax.tree.unflatten(treedef, after)


LARGE_ROW = 2**17  # Bytes.


class Rounds(NamedTuple):
    """The schedule of an all-to-all in which no two workers send to each other.

    Gloo, which JAX uses between processes on CPUs, holds a connection while it writes to it: of two
    workers that send to each other, one waits, and a full-duplex link takes twice as long.

    Attributes:
      parts: The number of parts of each row; a round moves one part.
      targets: The receiver of each worker's message, int[rounds, workers].
      numbers: The index of the part of the receiver's row that is sent, int[rounds, workers].
    """

    parts: int
    targets: np.ndarray
    numbers: np.ndarray

    @property
    def pairs(self) -> list[list[tuple[int, int]]]:
        """The pairs (sender, receiver) of each round."""
        return [[*enumerate(map(int, targets))] for targets in self.targets]

    @property
    def places(self) -> np.ndarray:
        """The position of each part of a worker's result, int[workers, senders, parts].

        Positions index the list of the parts that the worker keeps, followed by the parts that it
        receives, in the order of rounds.
        """
        rounds, workers = self.targets.shape
        found = np.tile(np.arange(self.parts), (workers, workers, 1))
        for number in range(rounds):
            for sender, receiver in enumerate(self.targets[number]):
                found[receiver, sender, self.numbers[number, sender]] = self.parts + number
        return found


def _cycles(workers: int) -> np.ndarray:
    """n - 1 cycles through all workers for an even n; any two workers are neighbors in two cycles.

    The first cycle zigzags through the numbers below m = n - 1 (0, 1, -1, 2, -2, ...) and closes
    through worker m. Its neighbors differ by 1, 2, ..., m - 1 modulo m. The rotations by 0 to
    m - 1 therefore contain each difference between all workers.
    """
    m = workers - 1
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(m)]
    return np.array([[m, *((step + turn) % m for step in zigzag)] for turn in range(m)])


def rounds(workers: int) -> Rounds | None:
    """The rounds for n workers; `None` for two, who can only send to each other.

    For an odd n, worker i sends to worker i + d in round d. For an even n, workers i and i + n/2
    would send to each other; instead, each worker sends half a row along each of 2 (n - 1) cycles.
    """
    if workers <= 2:
        return None
    if workers % 2:
        targets = (np.arange(workers) + np.arange(1, workers)[:, None]) % workers
        return Rounds(1, targets, np.zeros_like(targets))
    cycles = _cycles(workers)
    targets = np.empty((2 * len(cycles), workers), int)
    for number, cycle in enumerate([*cycles, *cycles[:, ::-1]]):
        targets[number, cycle] = np.roll(cycle, -1)
    sent = np.zeros((workers, workers), int)
    numbers = np.empty_like(targets)
    for number, row in enumerate(targets):
        numbers[number] = sent[np.arange(workers), row]
        sent[np.arange(workers), row] += 1
    return Rounds(2, targets, numbers)


def worth(rows: jax.Array) -> Rounds | None:
    """Rounds, where Gloo would block; rows that fit into the buffers of sockets need none."""
    schedule = rounds(len(rows)) if _axis.by_gloo() else None
    size = rows.size // len(rows)
    large = size * rows.dtype.itemsize >= LARGE_ROW
    return schedule if schedule and large and size % schedule.parts == 0 else None


def exchange_in_rounds(schedule: Rounds, rows: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Sends row i of `[workers, ...]` to worker i; returns the received rows, in worker order."""
    workers, me = len(rows), lax.axis_index(axis_names)
    split = rows.reshape(workers, schedule.parts, -1)
    targets, numbers = jnp.asarray(schedule.targets), jnp.asarray(schedule.numbers)
    received = [
        lax.ppermute(split[targets[number, me], numbers[number, me]], axis_names, pairs)
        for number, pairs in enumerate(schedule.pairs)
    ]
    parts = jnp.concatenate([split[me], jnp.stack(received)])
    return parts[jnp.asarray(schedule.places)[me]].reshape(rows.shape)


_TILE = 2**12
_ROWS, _LANES = 8, 128  # Of one tile of an array in TPU memory.


def _word(arrays: list[jax.Array]) -> np.dtype:
    """The unsigned dtype as wide as the narrowest array; each other item is several such words.

    On TPUs, splitting a word into bytes leaves most of each register empty. Items of 4 bytes
    therefore stay words if no array is narrower.
    """
    width = min((array.dtype.itemsize for array in arrays), default=1)
    return np.dtype(f"uint{8 * min(width, 4)}")


def _fills_tiles(shape: tuple[int, ...]) -> bool:
    """Whether words of this shape fill whole memory tiles, if the target is a TPU."""
    flat = len(shape) == 1
    tiled = flat or (shape != () and shape[-1] % _LANES == shape[-2] % _ROWS == 0)
    return tiled and math.prod(shape) % _TILE == 0 and target().platform == "tpu"


def _to_tiles(words: jax.Array) -> jax.Array:
    """Words in the order of TPU memory, [rows, 128], so that the reshape copies nothing."""
    if words.ndim > 1:
        rows = words.reshape(-1, _ROWS, words.shape[-1] // _LANES, _LANES)
        words = rows.swapaxes(1, 2)
    return words.reshape(-1, _LANES)


def _from_tiles(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_to_tiles` for words of `shape`."""
    if len(shape) > 1:
        tiles = tiles.reshape(-1, shape[-1] // _LANES, _ROWS, _LANES).swapaxes(1, 2)
    return tiles.reshape(shape)


def to_message(tree: PyTree) -> jax.Array:
    """The words of all leaves, concatenated, uint8[...], uint16[...] or uint32[...].

    A large message is [rows, 128], in whole tiles of 4096 words. Leaves that fill tiles come first,
    tile by tile. The words of all other leaves follow, then zeros. For any other size, the TPU
    compiler gathers by a sum over workers, padded with zeros, which sends twice as many bytes. For
    another shape or order, it copies the whole message several times.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    word = _word(arrays)
    parts = [lax.bitcast_convert_type(array, word) for array in arrays]
    size = sum(part.size for part in parts)
    if size < LARGE:
        return jnp.concatenate([part.ravel() for part in parts]) if parts else jnp.zeros(0, word)
    tiles = [_to_tiles(part) for part in parts if _fills_tiles(part.shape)]
    rest = [part.ravel() for part in parts if not _fills_tiles(part.shape)]
    flat = jnp.concatenate([*rest, jnp.zeros(-size % _TILE, word)])
    return jnp.concatenate([*tiles, flat.reshape(-1, _LANES)])


def from_message(message: jax.Array, like: PyTree) -> PyTree:
    """The tree that `to_message` packed; `like` has its structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    words = [leaf.dtype.itemsize // message.dtype.itemsize for leaf in leaves]
    shapes = [
        (*leaf.shape, count) if count > 1 else leaf.shape
        for leaf, count in zip(leaves, words, strict=True)
    ]
    tiled = [message.ndim > 1 and _fills_tiles(shape) for shape in shapes]
    rows = [math.prod(shape) // _LANES for shape in itertools.compress(shapes, tiled)]
    rest = message[sum(rows) :].ravel()
    row, start, arrays = 0, 0, []
    for leaf, shape, in_tiles in zip(leaves, shapes, tiled, strict=True):
        size = math.prod(shape)
        if in_tiles:
            part = _from_tiles(message[row : row + size // _LANES], shape)
            row += size // _LANES
        else:
            part = rest[start : start + size].reshape(shape)
            start += size
        arrays.append(lax.bitcast_convert_type(part, leaf.dtype))
    return jax.tree.unflatten(treedef, arrays)


class Message(NamedTuple):
    """A tree and the words to send for it over an axis."""

    axis_name: AxisName
    contents: PyTree
    words: jax.Array

    def moved(
        self, move: Callable[[jax.Array], jax.Array], like: PyTree = None, *, many: bool = False
    ) -> PyTree:
        """The contents as received, with a derivative.

        Args:
          move: The exchange, as in :func:`jaxcomm._collectives.as_moved`.
          like: A tree like the contents of one message. Default: these contents.
          many: Whether `move` returns several messages, `[senders, words]`.
        """
        if _axis.is_simulated(self.axis_name):
            return jax.tree.map(move, self.contents)
        like = self.contents if like is None else like
        unpack = lambda words: from_message(words, like)  # noqa: E731
        received = (jax.vmap(unpack) if many else unpack)(move(self.words))
        return as_moved(move, self.contents, received)


def gather_contents(contents: PyTree, axis_name: AxisName) -> PyTree:
    """The trees of all workers, leaves `[workers, ...]`, equal on all workers; in one message.

    A worker sends (n - 1) times the bytes of its tree.

    Args:
      contents: This worker's tree of arrays.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A tree like it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import collectives
      >>> both = lambda x: collectives.gather_contents({"x": x, "y": -x}, "data")["y"]
      >>> jax.vmap(both, axis_name="data")(jnp.arange(2)).tolist()
      [[0, -1], [0, -1]]
    """
    message = Message(axis_name, contents, to_message(contents))
    return message.moved(lambda x: gather(x, axis_name), many=True)


def exchange_rows(rows: PyTree, axis_name: AxisName) -> PyTree:
    """Sends row k of all leaves `[workers, ...]` to worker k, in one message.

    A worker sends (n - 1) rows of each leaf.

    Args:
      rows: A tree of arrays `[workers, ...]`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A tree like it: row i is from worker i.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm._collectives import exchange_rows
      >>> send = lambda rows: exchange_rows([rows], "data")[0]
      >>> jax.vmap(send, axis_name="data")(jnp.array([[1, 2], [3, 4]])).tolist()
      [[1, 3], [2, 4]]
    """
    like = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), rows)
    message = Message(axis_name, rows, jax.vmap(to_message)(rows))
    return message.moved(lambda x: exchange(x, axis_name), like, many=True)


def after(updates: PyTree, earlier: PyTree) -> PyTree:
    """`updates`, whose messages start when those that lead to `earlier` have arrived.

    XLA drops barriers before it combines collectives of several groups in one. So one coordinate
    of each leaf depends on all of `earlier`: it adds `0 x`, which XLA does not know to be 0, since
    `x` might be NaN. Here it is not, so that other groups stay finite if one is not. Leaves that
    Explicit axes shard are omitted, since one coordinate of them would have to be sent.
    """
    is_sharded = lambda x: any(jax.typeof(x).sharding.spec)  # noqa: E731
    previous = [x for x in jax.tree.leaves(earlier) if x.size and not is_sharded(x)]
    if not previous:
        return updates
    firsts = jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in previous])
    zero = jnp.sum(jnp.where(jnp.isfinite(firsts), firsts, 0) * 0)

    def depending(x: jax.Array) -> jax.Array:
        if not x.size:
            return x
        return x.at[(0,) * x.ndim].add(_axis.varying_like(zero, x).astype(x.dtype))

    return jax.tree.map(depending, updates)
