"""Save and restore a training run: parameters, state of every worker, keys, and data position."""

from jaxcomm.checkpoint._arrays import CheckpointError
from jaxcomm.checkpoint._checkpoints import Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
