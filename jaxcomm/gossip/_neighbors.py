"""The messages between a worker and its neighbors in one step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis, _collectives
from jaxcomm._collectives import Message
from jaxcomm._contract import AxisName, Keys, PyTree
from jaxcomm._mesh import collective_cond, collective_switch
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matchings import Round, to_matchings, to_rounds
from jaxcomm.gossip._mixing import Mixing, off_diagonal


class MessageRound(NamedTuple):
    """One round of messages for one mixing matrix."""

    pairs: Round
    senders: np.ndarray  # int32[n], the sender for each receiver; its own index if there is none
    weights: np.ndarray  # float64[n], the weight of the received message


def to_links(mixing: Mixing, in_pairs: bool = False) -> list[list[MessageRound]]:
    """The rounds of each matrix: the fewest possible, or with `in_pairs` only two-way pairs."""

    def link(matrix: np.ndarray, pairs: Round) -> MessageRound:
        senders, weights = np.arange(len(matrix), dtype=np.int32), np.zeros(len(matrix))
        for sender, receiver in pairs:
            senders[receiver], weights[receiver] = sender, matrix[receiver, sender]
        return MessageRound(pairs, senders, weights)

    rounds_of = _paired_rounds if in_pairs else to_rounds
    return [[link(matrix, pairs) for pairs in rounds_of(matrix)] for matrix in mixing.matrices]


def _paired_rounds(matrix: np.ndarray) -> list[Round]:
    edges = [(int(i), int(j)) for i, j in np.argwhere(matrix) if i < j]
    matchings = to_matchings(nx.Graph(edges))
    return [(*matching, *((j, i) for i, j in matching)) for matching in matchings]


def toward(local: PyTree, received: PyTree, weight: jax.Array) -> tuple[PyTree, jax.Array]:
    r""":math:`W_{ij} (x_j - x_i)` of each array, and :math:`W_{ij} \|x_j - x_i\|^2`."""
    differences = jax.tree.map(jnp.subtract, received, local)
    squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(differences))
    return jax.tree.map(lambda x: weight * x, differences), weight * squares


class MixingStep(NamedTuple):
    """The view of one worker on one mixing step."""

    mixing: Mixing
    links: list[list[MessageRound]]
    axis_name: AxisName
    flags: jax.Array | None  # bool[matrices], the active matrices; `None` if all are active
    present: jax.Array | None  # bool[n], false for workers that neither send nor receive
    dtype: Any  # the dtype of messages: that of the widest leaf
    wide: Any  # the dtype of mixing: the same, but at least 32 bits
    keys: list[Keys]  # one per unit
    weight: jax.Array | None  # float32[], of this worker's step; `None` if steps have none

    def over_matrices(
        self, add: Callable[[int, Any, Any], tuple[Any, Any]], memory: Sequence[Any], total: Any
    ) -> tuple[list[Any], Any]:
        """Applies `memory[k], total = add(k, memory[k], total)` for each active matrix k.

        The others send nothing. If one matrix at a time is active, they are the branches of one
        conditional, so that compilers and accounts know that only one of them sends.
        """

        def after(matrix: int) -> tuple[list[Any], Any]:
            own, added = add(matrix, memory[matrix], total)
            return [*memory[:matrix], own, *memory[matrix + 1 :]], added

        if self.flags is not None and self.mixing.exclusive:
            each = [functools.partial(after, matrix) for matrix in range(len(memory))]
            none = [lambda: ([*memory], total)] if self.mixing.pauses else []
            return collective_switch(jnp.argmax(jnp.append(self.flags, True)), [*each, *none])
        kept = [*memory]
        for matrix, own in enumerate(memory):
            before = own, total
            do = functools.partial(add, matrix, *before)
            if self.flags is None:
                kept[matrix], total = do()
            else:
                unchanged = lambda _, before=before: before  # noqa: E731
                kept[matrix], total = collective_cond(self.flags[matrix], do, unchanged)
        return kept, total

    def receive(self, link: MessageRound, message: PyTree) -> tuple[PyTree, jax.Array]:
        """The message of this round's neighbor, or its contents, and the weight of the message."""
        me = _axis.index(self.axis_name)
        weight = jnp.where(self.both_present(link), jnp.asarray(link.weights, self.wide)[me], 0)
        permute = lambda x: _collectives.permute(x, self.axis_name, link.pairs)  # noqa: E731
        with jax.named_scope("mixing"):
            if isinstance(message, Message):
                return message.moved(permute), weight
            return jax.tree.map(permute, message), weight

    def both_present(self, link: MessageRound) -> jax.Array:
        """Whether this worker and its sender are both present."""
        if self.present is None:
            return jnp.array(True)
        me = _axis.index(self.axis_name)
        return self.present[jnp.asarray(link.senders)[me]] & self.present[me]

    def sum_over_neighbors(
        self, message: PyTree, contribution: Callable[[PyTree, jax.Array], PyTree], zeros: PyTree
    ) -> PyTree:
        """The sum of `contribution(message, weight)` over active neighbors; `zeros` is its zero."""

        def add(matrix: int, memory: Any, total: PyTree) -> tuple[Any, PyTree]:
            for link in self.links[matrix]:
                received, weight = self.receive(link, message)
                # A product with weight 0 would be NaN for an infinite message.
                masked = jax.tree.map(
                    lambda x, weight=weight: jnp.where(weight == 0, 0, x),
                    contribution(received, weight),
                )
                total = jax.tree.map(jnp.add, total, masked)
            return memory, total

        return self.over_matrices(add, [()] * len(self.links), zeros)[1]

    @jax.named_scope("weight")
    def relative(self, weight: jax.Array) -> jax.Array:
        r"""This worker's weight over the mean of its own and those that it receives in this step.

        .. math:: \frac{(1 + d)\, w_i}{w_i + \sum_j w_j}

        for `d` neighbors; 0 if the weight is 0, and NaN if one of the weights is. Each message is
        one float32.
        """
        own = weight.astype(self.wide)
        differences, neighbors = self.sum_over_neighbors(
            weight,
            lambda received, _: (received.astype(self.wide) - own, jnp.ones((), self.wide)),
            (self.zero, self.zero),
        )
        # Differences make the quotient exactly 1 if all weights are equal.
        return jnp.where(own == 0, 0, own / (own + differences / (1 + neighbors)))

    @property
    def zero(self) -> jax.Array:
        """A scalar zero in the dtype of mixing."""
        return jnp.zeros((), self.wide)

    def mean(self, tree: PyTree) -> PyTree:
        """The exact mean over all present workers, in one all-reduce."""
        present = jnp.ones(self.mixing.workers, bool) if self.present is None else self.present
        here = present[_axis.index(self.axis_name)]
        workers = jnp.maximum(jnp.sum(present), 1).astype(self.wide)
        # Division comes first: the sum of large parameters may overflow where the mean does not.
        parts = jax.tree.map(lambda x: jnp.where(here, x / workers, 0), tree)
        with jax.named_scope("average"):
            return lax.psum(parts, self.axis_name)

    def weighted_differences(self, units: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        r""":math:`\sum_j W_{ij} (x_j - x_i)` of each unit, and the disagreement of this worker.

        Both ends of a link add the same difference with opposite signs. They compute it from the
        values as sent, which both ends have.
        """

        def widened(received: list[jax.Array]) -> list[jax.Array]:
            return [x.astype(self.wide) for x in received]

        sent = [x.astype(self.dtype) for x in units]
        return self.sum_of_differences(sent, widened(sent), widened)

    def sum_of_differences(
        self, message: PyTree, local: PyTree, decode: Callable[[PyTree], PyTree] = lambda x: x
    ) -> tuple[PyTree, jax.Array]:
        r""":math:`\sum_j W_{ij} (x_j - x_i)`, and of squares; :math:`x_j` is a decoded message."""
        return self.sum_over_neighbors(
            message,
            lambda received, weight: toward(local, decode(received), weight),
            (jax.tree.map(jnp.zeros_like, local), self.zero),
        )

    def outgoing_weight(self) -> jax.Array:
        r"""The fraction of its value that this worker sends: :math:`\sum_{j \ne i} W_{ji}`."""
        off = np.stack([*map(off_diagonal, self.mixing.matrices)])
        me = _axis.index(self.axis_name)
        to_each = jnp.asarray(off.transpose(0, 2, 1), self.wide)[:, me]  # [matrices, n]
        if self.present is not None:
            to_each = jnp.where(self.present[None] & self.present[me], to_each, 0)
        if self.flags is not None:
            to_each = jnp.where(self.flags[:, None], to_each, 0)
        return jnp.sum(to_each)
