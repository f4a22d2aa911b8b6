"""What a worker hears from its neighbours in one step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, Coins, PyTree
from jaxcomm._switch import collective_cond
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matchings import to_matchings
from jaxcomm.gossip._mixing_plan import Mixing
from jaxcomm.gossip._rounds import Round, to_rounds


class Link(NamedTuple):
    """One round of messages under one matrix."""

    pairs: Round
    senders: np.ndarray  # int32[n], whom a worker hears; itself where nobody
    taken: np.ndarray  # float64[n], with which weight


def to_links(mixing: Mixing, in_pairs: bool = False) -> list[list[Link]]:
    """The rounds of each matrix: as few as there can be, or so that all who talk do so in pairs."""

    def link(matrix: np.ndarray, pairs: Round) -> Link:
        senders, taken = np.arange(len(matrix), dtype=np.int32), np.zeros(len(matrix))
        for sender, receiver in pairs:
            senders[receiver], taken[receiver] = sender, matrix[receiver, sender]
        return Link(pairs, senders, taken)

    to = _paired if in_pairs else to_rounds
    return [[link(matrix, pairs) for pairs in to(matrix)] for matrix in mixing.matrices]


def _paired(matrix: np.ndarray) -> list[Round]:
    edges = [(int(i), int(j)) for i, j in np.argwhere(matrix) if i < j]
    matchings = to_matchings(nx.Graph(edges))
    return [(*matching, *((j, i) for i, j in matching)) for matching in matchings]


class Talk(NamedTuple):
    """A step of mixing, as one worker sees it."""

    mixing: Mixing
    links: list[list[Link]]
    axis_name: AxisName
    flags: jax.Array | None  # bool[matrices], which are active; `None`: all
    present: jax.Array | None  # bool[n], false for workers that give and take nothing
    dtype: Any  # in which parameters are sent: that of the widest leaf
    wide: Any  # in which they are mixed: the same, of at least 32 bits
    coins: list[Coins]  # of each unit

    def when(self, matrix: int, do: Callable[[], PyTree], otherwise: PyTree) -> PyTree:
        """What `do` returns where the matrix is active; where not, nothing in it is sent."""
        if self.flags is None:
            return do()
        return collective_cond(self.flags[matrix], do, lambda _: otherwise)

    def receive(self, link: Link, message: PyTree) -> tuple[PyTree, jax.Array]:
        """The message of this round's neighbour, and with which weight it is taken in."""
        me = _axis.index(self.axis_name)
        weight = jnp.where(self.meets(link), jnp.asarray(link.taken, self.wide)[me], 0)
        return jax.tree.map(lambda x: _axis.permute(x, self.axis_name, link.pairs), message), weight

    def meets(self, link: Link) -> jax.Array:
        """Whether this worker and whom it hears are both present."""
        if self.present is None:
            return jnp.array(True)
        me = _axis.index(self.axis_name)
        return self.present[jnp.asarray(link.senders)[me]] & self.present[me]

    def hear(
        self, message: PyTree, take: Callable[[PyTree, jax.Array], PyTree], nothing: PyTree
    ) -> PyTree:
        """The sum of `take(message, weight)` over active neighbours; `nothing` is its zero."""

        def talk(links: list[Link]) -> PyTree:
            total = nothing
            for link in links:
                received, weight = self.receive(link, message)
                # Not 0 times what was received, which may be infinite.
                taken = jax.tree.map(
                    lambda x, weight=weight: jnp.where(weight == 0, 0, x), take(received, weight)
                )
                total = jax.tree.map(jnp.add, total, taken)
            return total

        total = nothing
        for matrix, links in enumerate(self.links):
            heard = self.when(matrix, functools.partial(talk, links), nothing)
            total = jax.tree.map(jnp.add, total, heard)
        return total

    @property
    def zero(self) -> jax.Array:
        """A sum of nothing."""
        return jnp.zeros((), self.wide)

    def mean(self, tree: PyTree) -> PyTree:
        """The exact mean over all workers that are present, in one all-reduce."""
        present = jnp.ones(self.mixing.workers, bool) if self.present is None else self.present
        here = present[_axis.index(self.axis_name)]
        workers = jnp.maximum(jnp.sum(present), 1).astype(self.wide)
        # Divided first: a sum of large parameters may overflow where their mean does not.
        parts = jax.tree.map(lambda x: jnp.where(here, x / workers, 0), tree)
        return lax.psum(parts, self.axis_name)

    def differences(self, units: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        r""":math:`\sum_j W_{ij} (x_j - x_i)` of each unit, and this worker's disagreement.

        Both ends of a link take in the same difference, of opposite sign, and of what both know:
        the values as they were sent.
        """
        sent = [x.astype(self.dtype) for x in units]
        own = [x.astype(self.wide) for x in sent]

        def take(received: list[jax.Array], weight: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            apart = [x.astype(self.wide) - y for x, y in zip(received, own, strict=True)]
            squares = sum(jnp.sum(jnp.square(x)) for x in apart)
            return [weight * x for x in apart], weight * squares

        return self.hear(sent, take, ([*map(jnp.zeros_like, own)], self.zero))

    def given_away(self) -> jax.Array:
        r"""The part of itself that this worker sends off: :math:`\sum_{j \ne i} W_{ji}`."""
        off = np.stack([m - np.diag(np.diag(m)) for m in self.mixing.matrices])
        me = _axis.index(self.axis_name)
        to_each = jnp.asarray(off.transpose(0, 2, 1), self.wide)[:, me]  # [matrices, n]
        if self.present is not None:
            to_each = jnp.where(self.present[None] & self.present[me], to_each, 0)
        if self.flags is not None:
            to_each = jnp.where(self.flags[:, None], to_each, 0)
        return jnp.sum(to_each)
