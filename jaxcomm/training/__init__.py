"""Training steps over the workers of a mesh, or simulated on one device."""

from jaxcomm.training._loss_scale import LossScaled, loss_scaled, loss_scaled_gradients
from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate

__all__ = ["LossScaled", "loss_scaled", "loss_scaled_gradients", "make_step", "simulate"]
