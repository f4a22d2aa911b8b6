"""Low rank: codecs that send thin factors of matrices."""

from jaxcomm.compression.low_rank._alternating_projection import Projected, projection
from jaxcomm.compression.low_rank._power_iteration import LeftFactor, RightFactor, power_iteration
from jaxcomm.compression.low_rank._spectral_sampling import SpectralPayload, spectral_sampling

__all__ = [
    "LeftFactor",
    "Projected",
    "RightFactor",
    "SpectralPayload",
    "power_iteration",
    "projection",
    "spectral_sampling",
]
