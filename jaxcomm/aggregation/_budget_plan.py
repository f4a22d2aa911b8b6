"""Who sends with which codec to which owners of rows, if workers have different budgets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Codec
from jaxcomm._require import require_codec

CodecOf: TypeAlias = Callable[[Any], Codec]
"""From a budget to the codec of the rows that a worker with this budget sends."""


class Plan(NamedTuple):
    """Who sends with which codec, and who owns rows; static."""

    kinds: tuple[int, ...]  # for each worker, the number of its codec
    codecs: tuple[Codec, ...]
    owners: tuple[int, ...]  # the workers that own a row, ascending

    @property
    def slots(self) -> np.ndarray:
        """For each worker, the number of the row that it owns, or -1; int32[n]."""
        slots = np.full(len(self.kinds), -1, np.int32)
        slots[list(self.owners)] = np.arange(len(self.owners))
        return slots

    def pairs(self, turn: int, kind: int) -> list[tuple[int, int]]:
        """Who sends to which owner in a turn, with one codec; row `(turn - sender) % n` is sent."""
        workers = len(self.kinds)
        senders = [(turn - row) % workers for row in range(len(self.owners))]
        return [
            (sender, owner)
            for sender, owner in zip(senders, self.owners, strict=True)
            if self.kinds[sender] == kind and sender != owner
        ]


def plan_of(codec_for: CodecOf, budget: Any, slow: Mapping[int, Any], workers: int) -> Plan:
    """The plan for a number of workers; if all are slow, all own rows.

    Raises:
      ValueError: If `slow` names a worker that does not exist.
    """
    if beyond := sorted(worker for worker in slow if not 0 <= worker < workers):
        raise ValueError(
            f"`slow` names the workers {beyond}, but there are only {workers}: 0 to {workers - 1}."
        )
    budgets = [slow.get(worker, budget) for worker in range(workers)]
    kinds = [*dict.fromkeys(budgets)]
    owners = [worker for worker in range(workers) if worker not in slow] or [*range(workers)]
    return Plan(
        tuple(map(kinds.index, budgets)), tuple(codec_for(each) for each in kinds), tuple(owners)
    )


def require_slow(slow: Any) -> None:
    """Raises unless `slow` maps workers to budgets."""
    if not isinstance(slow, Mapping) or not all(
        isinstance(worker, int) and not isinstance(worker, bool) for worker in slow
    ):
        raise ValueError(
            f"`slow` must be a dict from the index of a worker to its budget, got {slow!r}."
        )


def require_unbiased_codec(codec: Codec, option: str) -> None:
    """Raises unless the codec is unbiased and has no memory."""
    require_codec(codec, option, user="budgeted_mean")
    if jax.tree.leaves(codec.init(jnp.zeros(4))):
        raise ValueError(
            f"`{option}` of `budgeted_mean` must have no memory, but this codec keeps some."
        )
    if codec.claims.variance is None:
        raise ValueError(
            f"`{option}` of `budgeted_mean` must be unbiased and state its `variance`: what a slow "
            "worker does not send would be missing from every mean. Use `random_k` or `dither`, "
            "and not `top_k`."
        )
