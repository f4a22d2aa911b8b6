"""Reads the bytes that a program sends from its jaxpr."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm.wire._collective import (
    Collective,
    Cost,
    Node,
    amortized,
    bytes_of,
    flat,
    heaviest,
    inserted,
    is_partitioned,
    messages_of,
)
from jaxcomm.wire._program import named_axes, table
from jaxcomm.wire._walk import collectives_of


class Account:
    """The collectives of a program and their cost.

    One branch of a conditional runs. Totals count the one with the largest cost, so they are the
    most that a run sends; `bytes_of_branches` counts all of them.

    Attributes:
      collectives: Every collective, including those of all branches of a conditional.
    """

    def __init__(self, nodes: tuple[Node, ...]):
        self._nodes = nodes
        self.collectives: tuple[Collective, ...] = tuple(flat(nodes))

    @property
    def unbounded(self) -> bool:
        """Whether a loop of unknown length sends; totals then count one iteration only."""
        return any(collective.unbounded for collective in self.collectives)

    @property
    def at_most(self) -> bool:
        """Whether bytes are an upper bound: they count whole operands, which XLA may shard.

        A program does not specify how an array is sharded over an automatic axis of the mesh.
        """
        return any(collective.automatic for collective in self.collectives)

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one device sends; a conditional counts as its heaviest branch."""
        return sum(self.bytes_by_axis.values())

    @property
    def bytes_of_branches(self) -> float:
        """Bytes of all collectives, as if every branch of every conditional ran."""
        return bytes_of([*self.collectives])

    def bytes_sent(self, worker: int) -> float:
        """Bytes that one worker sends, which differ by worker if only some take part in messages.

        A permutation counts for its senders only, where `bytes_per_worker` counts it for all.

        Args:
          worker: The index of the worker on the axes of the collectives.
        """
        return self._of_worker(lambda collective: collective.bytes_sent(worker))

    def bytes_received(self, worker: int) -> float:
        """Bytes that one worker receives; in a ring as many as it sends.

        Args:
          worker: The index of the worker on the axes of the collectives.
        """
        return self._of_worker(lambda collective: collective.bytes_received(worker))

    def _of_worker(self, bytes_of_one: Callable[[Collective], float]) -> float:
        def total(collectives: list[Collective]) -> float:
            return sum(map(bytes_of_one, collectives))

        return total(self.heaviest(total))

    @property
    def messages(self) -> int:
        """Sequential messages of one device; a conditional counts as its branch with the most."""
        return messages_of(heaviest(self._nodes, messages_of))

    def amortized_bytes_per_worker(self, share: float) -> float:
        r"""Returns the average bytes per run that one worker sends, if only some runs send.

        .. math:: b_\text{lightest} + s\, (b_\text{heaviest} - b_\text{lightest})

        over the branches of every conditional: exact for two branches, and for branches that send
        equally much, such as those of random pairs; otherwise an upper bound. For workers that
        synchronize in every H-th step, :math:`s = 1/H`. For MATCHA, :math:`s` is the mean of the
        matchings' probabilities.

        Args:
          share: :math:`s`, the fraction of runs in which a conditional takes its heaviest branch, 0
            to 1.

        Raises:
          ValueError: If `share` is out of range.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"`share` must be from 0 to 1, got {share!r}.")
        return amortized(self._nodes, share)

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes that one device sends over each axis; several axes are joined by commas."""
        totals: dict[str, float] = {}
        for collective in heaviest(self._nodes, bytes_of):
            axis = ",".join(collective.axes)
            totals[axis] = totals.get(axis, 0.0) + collective.bytes_per_worker
        return totals

    def heaviest(self, cost: Cost) -> list[Collective]:
        """The collectives that run if every conditional takes the branch with the largest cost.

        Args:
          cost: `collectives -> number`, for the collectives of a branch.
        """
        return heaviest(self._nodes, cost)

    def seconds(self, bytes_per_second: float, latency: float = 0.0) -> float:
        r"""Returns the time on a link without overlap: messages x latency + bytes / bandwidth.

        Collectives that compilers combine count as one message: all-reduces of one kind and dtype
        over the same axes that do not depend on each other. XLA combines all of them on CPU and
        TPU. On GPU it combines them up to a size (30 MB by default) and sends a few more messages
        above it.

        Args:
          bytes_per_second: The bandwidth of one device.
          latency: The seconds per message; a ring all-reduce has 2 (n - 1) sequential messages.

        Raises:
          ValueError: If a loop of unknown length sends.
        """
        if self.unbounded:
            raise ValueError("A loop of unknown length sends each time, so the time is unknown.")

        def cost(collectives: list[Collective]) -> float:
            return messages_of(collectives) * latency + bytes_of(collectives) / bytes_per_second

        return cost(self.heaviest(cost))

    def __str__(self) -> str:
        rows = [("collective", "axis", "workers", "dtype", "shape", "times", "bytes", "within")]
        rows += [
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
            for c in self.collectives
        ]
        bound = "at least " if self.unbounded else "at most " if self.at_most else ""
        lightest = self.amortized_bytes_per_worker(0)
        lower = "" if lightest == self.bytes_per_worker else f"{lightest:,.0f} to "
        total = f"bytes sent per worker: {bound}{lower}{self.bytes_per_worker:,.0f}"
        return "\n".join([*table(rows), total])

    __repr__ = __str__


def account(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Account:
    r"""Counts the bytes that `fn(*args, **kwargs)` sends, from its traced JAX program.

    Bytes are those that one worker sends in ring schedules, with :math:`n` workers and an operand
    of :math:`B` bytes:

    ==================  ======================
    all-reduce          :math:`2 (n-1)/n\, B`
    reduce-scatter      :math:`(n-1)/n\, B`
    all-to-all          :math:`(n-1)/n\, B`
    all-gather          :math:`(n-1)\, B`
    ppermute            :math:`B`
    ==================  ======================

    The account includes collectives that autodiff inserts. It excludes collectives with unused
    results and counts duplicates once. The bytes of a loop of known length are multiplied by the
    length. Conditionals are reported branch by branch and counted as the heaviest branch. Loops of
    unknown length are flagged.

    If an operand is sharded over an Explicit axis, or in a `jax.shard_map` over that axis, a device
    sends its own shard. For an automatic axis, the program does not specify the sharding: the whole
    operand is counted, and the account prints "at most". The function does not run.

    Args:
      fn: A function that communicates, such as the step of `jaxcomm.make_step` or
        `jaxcomm.simulate`.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments, also arrays or `jax.ShapeDtypeStruct`.

    Returns:
      The account; print it for a table. Bytes of one worker: `bytes_per_worker`;
      `bytes_by_axis`, a dict; `bytes_of_branches`, as if all branches ran;
      `amortized_bytes_per_worker(share)`, if only this share of the runs takes the heaviest branch;
      `bytes_sent(worker)` and `bytes_received(worker)`, which differ if only some workers take part
      in messages. `messages` counts sequential messages, and `seconds(bytes_per_second, latency)`
      is their time without overlap. `unbounded`: a loop of unknown length sends, and counts once;
      `at_most`: XLA may shard an operand that is counted whole. `collectives` has one entry per
      collective of every branch, and `heaviest(cost)` those of the branches with the largest
      `cost(collectives)`. An entry has `primitive`, such as `"all_reduce"`; `axes`; `workers`;
      `dtype` and `shape` of the operand; `times`, how often it runs; `path`, the control flow
      around it; `bytes_per_worker`; and `messages`.

    Raises:
      ValueError: If `fn` contains a step of `jaxcomm.simulate`, which sends nothing; or if XLA
        inserts collectives, because `fn` computes with sharded arrays outside of `jax.shard_map`.
        Only a program that does so is compiled, to find out.

    Warns:
      UserWarning: If an argument is sharded over an axis that is automatic where the program sends.

    The account has the collectives that the program asks for. It does not include those that XLA
    inserts within a `jax.shard_map`, over the axes that it leaves to XLA, such as the `shard_axes`
    of a step; a scalar that XLA sends beside counted collectives, such as a global norm of sharded
    gradients; and wider dtypes of a backend. In an all-reduce, XLA sends bfloat16 as float32 on CPU
    and int16 as int32 on GPU; no codec of this library uses them there.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.zeros(1000)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x[0]) ** 2), tx, workers=8)
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
    run = getattr(fn, "on_mesh", fn)
    jaxpr = jax.make_jaxpr(run)(*args, **kwargs)
    found = Account(collectives_of(jaxpr.jaxpr))
    _require_counted(run, jaxpr, found, args, kwargs)
    automatic = {name for collective in found.collectives for name in collective.automatic}
    sharded = []
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        spec = getattr(getattr(leaf, "sharding", None), "spec", ())
        if over := sorted(automatic.intersection(sum(named_axes(spec), ()))):
            sharded.append(f"at {jax.tree_util.keystr(path[1:])} is sharded over {over}")
    if sharded:
        others = f" (and {len(sharded) - 1} other arguments)" if len(sharded) > 1 else ""
        warnings.warn(
            f"The argument {sharded[0]}{others}: the account counts the whole array, an upper "
            "bound. `jaxcomm.shard_local(tx, specs)` sends each shard separately.",
            stacklevel=2,
        )
    return found


def _require_counted(run: Any, jaxpr: Any, found: Account, *given: Any) -> None:
    """Raises if XLA inserts collectives outside of `shard_map`; compiles only if it may."""
    leaves = jax.tree.leaves(given)
    # A step that places its arguments before it starts moves them once, not in its program.
    inputs = [None] * len(leaves) if getattr(run, "places_arguments", False) else leaves
    if not is_partitioned(jaxpr, inputs):
        return
    args, kwargs = given
    lower = getattr(run, "lower", None) or jax.jit(run).lower
    others = inserted(lower(*args, **kwargs).compile().as_text() or "")
    if found.collectives:  # Beside them, a scalar such as a global norm is nothing.
        others = [each for each in others if not each.endswith("[]")]
    if others:
        raise ValueError(
            "XLA partitions this program and inserts collectives that its trace does not have: "
            f"{', '.join(others[:3])}{' and others' * (len(others) > 3)}. Account for a program "
            "that sends in `jax.shard_map` only, such as the step of `jaxcomm.make_step`."
        )
