"""What is sent: codecs of one array, in which no mesh axis is named."""

from jaxcomm.compression import quantizers
from jaxcomm.compression._blockwise import blockwise

__all__ = ["blockwise", "quantizers"]
