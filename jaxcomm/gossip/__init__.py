"""Neighbours only: who talks to whom, with which weights, and how often.

Needs networkx and cvxpy: `pip install "jaxcomm[gossip]"`.
"""

try:
    from jaxcomm.gossip._matcha_plan import MatchaPlan, matcha_plan
    from jaxcomm.gossip._mixing import Spectral, mixing_matrix, spectral
    from jaxcomm.gossip._rounds import to_rounds
    from jaxcomm.gossip._topologies import (
        complete,
        erdos_renyi,
        exponential,
        hypercube,
        one_peer_exponential,
        path,
        random_geometric,
        ring,
        star,
        torus,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        f'`jaxcomm.gossip` needs {error.name}: `pip install "jaxcomm[gossip]"`.'
    ) from error

__all__ = [
    "MatchaPlan",
    "Spectral",
    "complete",
    "erdos_renyi",
    "exponential",
    "hypercube",
    "matcha_plan",
    "mixing_matrix",
    "one_peer_exponential",
    "path",
    "random_geometric",
    "ring",
    "spectral",
    "star",
    "to_rounds",
    "torus",
]
