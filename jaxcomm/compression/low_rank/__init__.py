"""Low rank: codecs that send thin factors of matrices."""

from jaxcomm.compression.low_rank._power_iteration import power_iteration, projection
from jaxcomm.compression.low_rank._spectral_sampling import spectral_sampling

__all__ = ["power_iteration", "projection", "spectral_sampling"]
