"""Whether to compress, and with which method. `jaxcomm.advise` is the function of this package."""

from jaxcomm.advise._advise import Advice, Row, advise

__all__ = ["Advice", "Row", "advise"]
