"""Low rank: codecs that send thin factors of matrices."""

from jaxcomm.compression.low_rank._power_iteration import LeftFactor, RightFactor, power_iteration
from jaxcomm.compression.low_rank._spectral_sampling import SpectralPayload, spectral_sampling

__all__ = [
    "LeftFactor",
    "RightFactor",
    "SpectralPayload",
    "power_iteration",
    "spectral_sampling",
]
