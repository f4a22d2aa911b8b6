"""What is sent: codecs of one array, in which no mesh axis is named."""

from jaxcomm.compression import quantizers

__all__ = ["quantizers"]
