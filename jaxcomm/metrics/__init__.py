"""How workers reduce a metric of the loss: by its sum or an extreme, in place of the mean."""

from jaxcomm.metrics._reduced import max, min, sum

__all__ = ["max", "min", "sum"]
