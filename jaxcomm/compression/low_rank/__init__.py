"""Low rank: codecs that send thin factors of matrices."""

from jaxcomm.compression.low_rank._power_iteration import LeftFactor, RightFactor, power_iteration

__all__ = ["LeftFactor", "RightFactor", "power_iteration"]
