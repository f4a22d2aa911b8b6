"""What a worker hears from its neighbours in one step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axis
from jaxcomm._base import AxisName, Coins, PyTree
from jaxcomm._when import run_when
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matchings import to_matchings
from jaxcomm.gossip._mixing_plan import Mixing
from jaxcomm.gossip._rounds import Round, to_rounds


class Link(NamedTuple):
    """One round of messages under one matrix."""

    pairs: Round
    senders: np.ndarray  # int32[n], whom a worker hears; itself where nobody
    taken: np.ndarray  # float32[n], with which weight


def to_links(mixing: Mixing, in_pairs: bool = False) -> list[list[Link]]:
    """The rounds of each matrix: as few as there can be, or so that all who talk do so in pairs."""

    def link(matrix: np.ndarray, pairs: Round) -> Link:
        senders, taken = np.arange(len(matrix), dtype=np.int32), np.zeros(len(matrix), np.float32)
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
    present: jax.Array | None  # float32[n], 0 for workers that give and take nothing
    dtype: Any  # in which parameters are sent: that of the widest leaf
    coins: list[Coins]  # of each unit

    def when(self, matrix: int, do: Callable[[], PyTree], otherwise: PyTree) -> PyTree:
        """What `do` returns where the matrix is active; where not, nothing in it is sent."""
        if self.flags is None:
            return do()
        return run_when(self.flags[matrix], do, lambda _: otherwise)

    def receive(self, link: Link, message: PyTree) -> tuple[PyTree, jax.Array]:
        """The message of this round's neighbour, and with which weight it is taken in."""
        me = _axis.index(self.axis_name)
        weight = jnp.asarray(link.taken)[me]
        if self.present is not None:
            weight = weight * self.present[jnp.asarray(link.senders)[me]] * self.present[me]
        return jax.tree.map(lambda x: _axis.permute(x, self.axis_name, link.pairs), message), weight

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

    def differences(self, units: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        r""":math:`\sum_j W_{ij} (x_j - x_i)` of each unit, and this worker's disagreement.

        Both ends of a link take in the same difference, of opposite sign, and of what both know:
        the values as they were sent.
        """
        sent = [x.astype(self.dtype) for x in units]
        own = [x.astype(jnp.float32) for x in sent]

        def take(received: list[jax.Array], weight: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            apart = [x.astype(jnp.float32) - y for x, y in zip(received, own, strict=True)]
            squares = sum(jnp.sum(jnp.square(x)) for x in apart)
            return [weight * x for x in apart], weight * squares

        return self.hear(sent, take, ([*map(jnp.zeros_like, own)], jnp.zeros(())))

    def given_away(self) -> jax.Array:
        r"""The part of itself that this worker sends off: :math:`\sum_{j \ne i} W_{ji}`."""
        off = np.stack([m - np.diag(np.diag(m)) for m in self.mixing.matrices]).astype(np.float32)
        me = _axis.index(self.axis_name)
        to_each = jnp.asarray(off.transpose(0, 2, 1))[:, me]  # [matrices, n]
        if self.present is not None:
            to_each = to_each * self.present[None] * self.present[me]
        if self.flags is not None:
            to_each = jnp.where(self.flags[:, None], to_each, 0)
        return jnp.sum(to_each)
