"""Whether to compress, and with which method. `jaxcomm.advise` is the function of this package."""

from jaxcomm.advise._advise import advise

__all__ = ["advise"]
