"""Laws of codecs, aggregators, gossip and local methods, for tests of your own ones.

The package needs only NumPy, JAX and optax, and no test runner. A violated law raises an
AssertionError that names it. `import jaxcomm` does not import this package.
"""

from jaxcomm.testing._aggregator import AggregatorTrial
from jaxcomm.testing._gossip import GOSSIP_LAWS, GossipTrial, check_gossip
from jaxcomm.testing._laws import (
    AGGREGATOR_LAWS,
    CODEC_LAWS,
    CodecTrial,
    check_aggregator,
    check_codec,
)
from jaxcomm.testing._local import LOCAL_LAWS, LocalTrial, check_local

__all__ = [
    "AGGREGATOR_LAWS",
    "CODEC_LAWS",
    "GOSSIP_LAWS",
    "LOCAL_LAWS",
    "AggregatorTrial",
    "CodecTrial",
    "GossipTrial",
    "LocalTrial",
    "check_aggregator",
    "check_codec",
    "check_gossip",
    "check_local",
]
