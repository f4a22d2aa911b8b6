"""Functions that are imported when they are called: a study imports no JAX before it runs."""

import importlib
from collections.abc import Callable
from typing import Any


def late(name: str) -> Callable[..., Any]:
    """The function `name`, such as `"gossip.train"`, of `experiments.training`."""
    module, _, function = name.rpartition(".")

    def call(*arguments: Any) -> Any:
        loaded = importlib.import_module(f"experiments.training.{module}")
        return getattr(loaded, function)(*arguments)

    return call
