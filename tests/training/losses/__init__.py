"""Losses that `jax.jit(jax.value_and_grad(loss))` takes: a step has to take them too."""

from tests.training.losses import _libraries, _pallas, _programs  # noqa: F401
from tests.training.losses._pallas import flash_attention
from tests.training.losses._table import LOSSES, WITH_KEY, WITH_STATE, Loss, draw, third_party

__all__ = ["LOSSES", "WITH_KEY", "WITH_STATE", "Loss", "draw", "flash_attention", "third_party"]
