"""Bytes that a program sends, read from its jaxpr."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm.wire._collective import (
    Collective,
    Node,
    amortized,
    bytes_of,
    flat,
    heaviest,
    messages_of,
)
from jaxcomm.wire._walk import collectives_of


class Account:
    """What a program sends.

    Attributes:
      collectives: Every collective, those of all branches of a conditional among them.
    """

    def __init__(self, nodes: tuple[Node, ...]):
        self._nodes = nodes
        self.collectives: tuple[Collective, ...] = tuple(flat(nodes))

    @property
    def unbounded(self) -> bool:
        """Whether a loop of unknown length sends; then totals count one trip, a lower bound."""
        return any(collective.unbounded for collective in self.collectives)

    @property
    def at_most(self) -> bool:
        """Whether bytes are an upper bound: of whole operands, which XLA may have cut.

        Over an automatic axis of the mesh a program does not say how an array is cut.
        """
        return any(collective.automatic for collective in self.collectives)

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one device sends; of a conditional, the heaviest branch."""
        return sum(self.bytes_by_axis.values())

    @property
    def messages(self) -> int:
        """Messages that one device sends one after the other; of a conditional, most of them."""
        return messages_of(heaviest(self._nodes, messages_of))

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
        return amortized(self._nodes, share)

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes that one device sends over each axis, or axes joined by commas."""
        totals: dict[str, float] = {}
        for collective in heaviest(self._nodes, bytes_of):
            axis = ",".join(collective.axes)
            totals[axis] = totals.get(axis, 0.0) + collective.bytes_per_worker
        return totals

    def seconds(self, bytes_per_second: float, latency: float = 0.0) -> float:
        r"""Time on a link, if nothing overlaps: messages x latency + bytes / bandwidth.

        What compilers combine is one message: all-reduces of one kind and dtype over the same axes,
        of which none waits for another. XLA combines all of those on CPU and TPU, and on GPU up to
        a size (30 MB by default), beyond which there are a few messages more.

        Args:
          bytes_per_second: What one device can send.
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

        def cost(collectives: list[Collective]) -> float:
            return messages_of(collectives) * latency + bytes_of(collectives) / bytes_per_second

        return cost(heaviest(self._nodes, cost))

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
                    f"{'<=' if c.automatic else ''}{c.bytes_per_worker:,.0f}",
                    " / ".join(c.path) or "-",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        least = "at least " if self.unbounded else "at most " if self.at_most else ""
        lightest = self.amortized_bytes_per_worker(0)
        differs = "" if lightest == self.bytes_per_worker else f"{lightest:,.0f} to "
        lines.append(f"bytes sent per worker: {least}{differs}{self.bytes_per_worker:,.0f}")
        return "\n".join(lines)

    __repr__ = __str__


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

    Collectives that autodiff inserts are seen, those whose results nothing uses or that are there
    twice are not, loops of known length are multiplied out, conditionals are reported branch by
    branch and billed at the heaviest, loops of unknown length are flagged. Of an operand that is
    cut over an Explicit axis, or in a `jax.shard_map` over that axis, a device sends its part; over
    an automatic axis the program does not say how it is cut, the whole is counted, and the account
    says "at most". Nothing runs.

    Args:
      fn: A function that communicates, such as the step of `jaxcomm.make_step` or
        `jaxcomm.simulate`.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      An :class:`Account`; print it for a table.

    Raises:
      ValueError: If a step of `jaxcomm.simulate` stands inside of `fn`, in which nothing is sent.

    Warns:
      UserWarning: Where an argument is cut over an axis that is automatic where the program sends.

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
    jaxpr = jax.make_jaxpr(getattr(fn, "on_mesh", fn))(*args, **kwargs)
    found = Account(collectives_of(jaxpr.jaxpr))
    automatic = {name for collective in found.collectives for name in collective.automatic}
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        spec = getattr(getattr(leaf, "sharding", None), "spec", ())
        named = {
            name for part in spec for name in ([part] if isinstance(part, str) else part or ())
        }
        if over := sorted(named & automatic):
            warnings.warn(
                f"The argument at {jax.tree_util.keystr(path[1:])} is cut over {over}, and XLA may "
                "put its parts together before it sends: bytes of the whole are counted, an upper "
                "bound. `jaxcomm.shard_local(tx, specs)` sends each part by itself.",
                stacklevel=2,
            )
    return found
