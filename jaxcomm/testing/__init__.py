"""Laws that every codec and aggregator is held to, for tests of your own."""

from jaxcomm.testing._codec import check_codec

__all__ = ["check_codec"]
