"""Training steps over the workers of a mesh, or simulated on one device."""

from jaxcomm.training._fully_sharded import fully_sharded_value_and_grad, slice_specs
from jaxcomm.training._loss_scale import loss_scaled, loss_scaled_gradients
from jaxcomm.training._nonfinite import describe_nonfinite
from jaxcomm.training._overlapped_step import make_overlapped_step, second_mesh

__all__ = [
    "describe_nonfinite",
    "fully_sharded_value_and_grad",
    "loss_scaled",
    "loss_scaled_gradients",
    "make_overlapped_step",
    "second_mesh",
    "slice_specs",
]
