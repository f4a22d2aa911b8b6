"""Training steps over the workers of a mesh, or simulated on one device."""

from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate

__all__ = ["make_step", "simulate"]
