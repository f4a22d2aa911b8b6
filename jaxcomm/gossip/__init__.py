"""Gossip: workers communicate only with their neighbors in a graph.

Graphs need networkx, and :func:`matcha_plan` needs cvxpy: `pip install "jaxcomm[gossip]"`. A
mixing matrix needs neither.
"""

from jaxcomm.gossip._compressed import choco_sgd, choco_step_size, deep_squeeze
from jaxcomm.gossip._dpsgd import ad_psgd, d2, dpsgd, matcha
from jaxcomm.gossip._gasloc import gasloc
from jaxcomm.gossip._gossiped import Mixed, gossiped, periodic_averaging, require_symmetric
from jaxcomm.gossip._matcha_plan import matcha_plan
from jaxcomm.gossip._mixing import Mixing, mixing_matrix
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._noloco import noloco
from jaxcomm.gossip._sgp import sgp
from jaxcomm.gossip._to_mixing import (
    cyclic,
    draw,
    lazy_mixing,
    random_pairs,
    random_periodic,
    randomized,
    to_mixing,
)
from jaxcomm.gossip._topologies import (
    exponential,
    hypercube,
    one_peer_exponential,
    ring,
    torus,
)

__all__ = [
    "Mixed",
    "Mixing",
    "MixingStep",
    "ad_psgd",
    "randomized",
    "choco_sgd",
    "choco_step_size",
    "d2",
    "deep_squeeze",
    "dpsgd",
    "draw",
    "gossiped",
    "require_symmetric",
    "periodic_averaging",
    "exponential",
    "gasloc",
    "hypercube",
    "cyclic",
    "lazy_mixing",
    "matcha",
    "matcha_plan",
    "mixing_matrix",
    "noloco",
    "random_pairs",
    "random_periodic",
    "one_peer_exponential",
    "ring",
    "sgp",
    "to_mixing",
    "torus",
]
