"""Save and restore a training run: parameters, state of every worker, keys, and data position."""

from jaxcomm.checkpoint._checkpoints import Checkpoints, Restored
from jaxcomm.checkpoint._manifest import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Restored"]
