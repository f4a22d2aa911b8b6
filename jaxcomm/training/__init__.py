"""A training step over the workers of a mesh, or of one device that simulates them."""

from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate

__all__ = ["make_step", "simulate"]
