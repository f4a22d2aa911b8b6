"""Proximal steps: weights and updates with exact zeros, which sparsifiers send exactly."""

from jaxcomm.compression.regularizers._penalties import block_lasso, group_lasso, l1
from jaxcomm.compression.regularizers._proximal import (
    Regularizer,
    proximal,
)

__all__ = [
    "Regularizer",
    "block_lasso",
    "group_lasso",
    "l1",
    "proximal",
]
