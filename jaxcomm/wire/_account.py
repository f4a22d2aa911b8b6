"""Bytes that a program sends, read from its jaxpr."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

# Of ring schedules: bytes sent per worker over bytes of the operand, and messages in sequence.
_SCHEDULES: dict[str, Callable[[int], tuple[float, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "all_gather": lambda n: (float(n - 1), n - 1),
    "ppermute": lambda n: (1.0, 1) if n > 1 else (0.0, 0),
}

_COLLECTIVES = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "ppermute": "ppermute",
}


class Collective(NamedTuple):
    """One operand of one collective, as often as the program runs it."""

    primitive: str  # "all_reduce", "all_gather", "all_to_all", "reduce_scatter" or "ppermute"
    axes: tuple[str, ...]
    workers: int
    dtype: np.dtype
    shape: tuple[int, ...]
    times: int  # how often it runs; once where a loop is unbounded
    path: tuple[str, ...]  # the control flow around it: "scan x5", "cond 1/2", "while"

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one worker sends, of all `times`."""
        factor, _ = _SCHEDULES[self.primitive](self.workers)
        return self.times * factor * math.prod(self.shape) * self.dtype.itemsize

    @property
    def messages(self) -> int:
        """Messages that one worker sends one after the other, of all `times`."""
        return self.times * _SCHEDULES[self.primitive](self.workers)[1]

    @property
    def unbounded(self) -> bool:
        """Whether it stands in a loop of unknown length."""
        return "while" in self.path


class _Branches(NamedTuple):
    """The alternatives of a conditional, of which one runs."""

    branches: tuple[tuple["Collective | _Branches", ...], ...]


_Node = Collective | _Branches


def _flat(nodes: tuple[_Node, ...]) -> Iterator[Collective]:
    for node in nodes:
        if isinstance(node, Collective):
            yield node
        else:
            for branch in node.branches:
                yield from _flat(branch)


def _amortized(nodes: tuple[_Node, ...], share: float) -> float:
    """Bytes, where every conditional takes its heaviest branch so often, else its lightest."""
    total = 0.0
    for node in nodes:
        if isinstance(node, Collective):
            total += node.bytes_per_worker
        else:
            each = [_amortized(branch, share) for branch in node.branches]
            total += share * max(each) + (1 - share) * min(each)
    return total


def _heaviest(nodes: tuple[_Node, ...], cost: Callable[[Collective], float]) -> list[Collective]:
    """The collectives that run where every conditional takes its most costly branch."""
    taken: list[Collective] = []
    for node in nodes:
        if isinstance(node, Collective):
            taken.append(node)
        else:
            branches = [_heaviest(branch, cost) for branch in node.branches]
            taken += max(branches, key=lambda branch: sum(map(cost, branch)))
    return taken


class Account:
    """What a program sends.

    Attributes:
      collectives: Every collective, those of all branches of a conditional among them.
    """

    def __init__(self, nodes: tuple[_Node, ...]):
        self._nodes = nodes
        self.collectives: tuple[Collective, ...] = tuple(_flat(nodes))

    @property
    def unbounded(self) -> bool:
        """Whether a loop of unknown length sends; then totals count one trip, a lower bound."""
        return any(collective.unbounded for collective in self.collectives)

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one worker sends; of a conditional, the heaviest branch."""
        return sum(self.bytes_by_axis.values())

    def amortized_bytes_per_worker(self, share: float) -> float:
        r"""Bytes that one worker sends in a run on average, where it does not send in all of them.

        .. math:: b_\text{lightest} + s\, (b_\text{heaviest} - b_\text{lightest})

        of the branches of every conditional; of workers that meet in every H-th step,
        :math:`s = 1/H`.

        Args:
          share: :math:`s`, of the runs in which a conditional takes its heaviest branch, 0 to 1.

        Raises:
          ValueError: If `share` is out of range.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"`share` must be from 0 to 1, got {share!r}.")
        return _amortized(self._nodes, share)

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes that one worker sends over each axis, or axes joined by commas."""
        totals: dict[str, float] = {}
        for collective in _heaviest(self._nodes, lambda c: c.bytes_per_worker):
            axis = ",".join(collective.axes)
            totals[axis] = totals.get(axis, 0.0) + collective.bytes_per_worker
        return totals

    def seconds(self, bytes_per_second: float, latency: float = 0.0) -> float:
        r"""Time on a link, if nothing overlaps: the sum of messages x latency + bytes / bandwidth.

        Args:
          bytes_per_second: What one worker can send.
          latency: Seconds a message; a ring all-reduce has 2 (n - 1) in sequence.

        Raises:
          ValueError: If `bytes_per_second` is not positive or `latency` negative, or if the length
            of a loop that sends is unknown.
        """
        if not bytes_per_second > 0:
            raise ValueError(f"`bytes_per_second` must be positive, got {bytes_per_second}.")
        if not latency >= 0:
            raise ValueError(f"`latency` must not be negative, got {latency}.")
        if self.unbounded:
            raise ValueError("A loop of unknown length sends: its time has no bound.")

        def cost(collective: Collective) -> float:
            return collective.messages * latency + collective.bytes_per_worker / bytes_per_second

        return sum(map(cost, _heaviest(self._nodes, cost)))

    def __str__(self) -> str:
        header = ("collective", "axis", "workers", "dtype", "shape", "times", "bytes", "within")
        rows = [header]
        for c in self.collectives:
            rows.append(
                (
                    c.primitive,
                    ",".join(c.axes),
                    str(c.workers),
                    str(c.dtype),
                    "x".join(map(str, c.shape)) or "scalar",
                    f">={c.times}" if c.unbounded else str(c.times),
                    f"{c.bytes_per_worker:,.0f}",
                    " / ".join(c.path) or "-",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        least = "at least " if self.unbounded else ""
        lightest = self.amortized_bytes_per_worker(0)
        differs = "" if lightest == self.bytes_per_worker else f"{lightest:,.0f} to "
        lines.append(f"bytes sent per worker: {least}{differs}{self.bytes_per_worker:,.0f}")
        return "\n".join(lines)

    __repr__ = __str__


def _jaxprs(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
        yield value.jaxpr
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _jaxprs(item)


def _axes_of(params: dict[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, list | tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _walk(
    jaxpr: Any, sizes: dict[str, int], times: int, path: tuple[str, ...]
) -> tuple[_Node, ...]:
    nodes: list[_Node] = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if kind := _COLLECTIVES.get(name):
            axes = _axes_of(params)
            if not axes:
                continue
            groups = params.get("axis_index_groups")
            workers = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
            for operand in eqn.invars:
                aval = operand.aval
                nodes.append(Collective(kind, axes, workers, aval.dtype, aval.shape, times, path))
        elif name == "cond":
            branches = params["branches"]
            count = len(branches)
            alternatives = tuple(
                _walk(jaxpr, sizes, times, (*path, f"cond {i}/{count}"))
                for i, branch in enumerate(branches, 1)
                for jaxpr in _jaxprs(branch)
            )
            if any(alternatives):
                nodes.append(_Branches(alternatives))
        else:
            inner_sizes, inner_times, inner_path = sizes, times, path
            if name == "shard_map":
                inner_sizes = {**sizes, **dict(params["mesh"].shape)}
            elif name == "scan":
                inner_times, inner_path = (
                    times * params["length"],
                    (*path, f"scan x{params['length']}"),
                )
            elif name == "while":
                inner_path = (*path, "while")
            for value in params.values():
                for inner in _jaxprs(value):
                    nodes += _walk(inner, inner_sizes, inner_times, inner_path)
    return tuple(nodes)


def account(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Account:
    r"""What `fn(*args, **kwargs)` sends, read from the program that JAX traces for it.

    Bytes are those one worker sends under ring schedules, of :math:`n` workers and an operand of
    :math:`B` bytes:

    ==================  ======================
    all-reduce          :math:`2 (n-1)/n\, B`
    reduce-scatter      :math:`(n-1)/n\, B`
    all-to-all          :math:`(n-1)/n\, B`
    all-gather          :math:`(n-1)\, B`
    ppermute            :math:`B`
    ==================  ======================

    Collectives that autodiff inserts are seen, loops of known length are multiplied out,
    conditionals are reported branch by branch and billed at the heaviest, loops of unknown length
    are flagged. Nothing runs.

    Args:
      fn: A function that communicates, such as the step of `jaxcomm.make_step` or
        `jaxcomm.simulate`.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      An :class:`Account`; print it for a table.

    Not seen: what the partitioner adds over automatic mesh axes, and what a backend widens. XLA
    sends bfloat16 as float32 on CPU and int16 as int32 on GPU in an all-reduce; no codec of ours
    uses them there.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.zeros(1000)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x[0]) ** 2), tx, num_workers=8)
      >>> sent = jaxcomm.wire.account(
      ...     step, params, jaxcomm.init(tx, params, 8), jnp.ones((8, 1000))
      ... )
      >>> print(sent)
      collective  axis  workers  dtype    shape   times  bytes  within
      all_reduce  data  8        float32  2       1      14     -
      all_reduce  data  8        int8     1000    1      1,750  -
      all_reduce  data  8        float32  scalar  1      7      -
      bytes sent per worker: 1,771
      >>> sent.seconds(bytes_per_second=1e6, latency=1e-3)
      0.043771
    """
    traceable = getattr(fn, "on_mesh", fn)
    jaxpr = jax.make_jaxpr(traceable)(*args, **kwargs)
    return Account(_walk(jaxpr.jaxpr, {}, 1, ()))
