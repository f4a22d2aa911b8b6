"""Proximal steps: weights and updates with exact zeros, which sparsifiers send exactly."""

from jaxcomm.compression.regularizers._penalties import block_lasso, group_lasso, l1
from jaxcomm.compression.regularizers._proximal import (
    Regularizer,
    block_soft_threshold,
    group_soft_threshold,
    proximal,
    soft_threshold,
)

__all__ = [
    "Regularizer",
    "block_lasso",
    "block_soft_threshold",
    "group_lasso",
    "group_soft_threshold",
    "l1",
    "proximal",
    "soft_threshold",
]
