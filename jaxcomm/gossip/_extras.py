"""The libraries of graphs and solvers, which are loaded where they are first used."""

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import networkx as networkx
    from scipy import optimize as optimize

    cvxpy: Any
else:

    class _Lazy:
        """A module that is imported when the first of its names is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            try:
                module = importlib.import_module(self._name)
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"This part of `jaxcomm.gossip` needs {error.name}: "
                    '`pip install "jaxcomm[gossip]"`.'
                ) from error
            return getattr(module, name)

    cvxpy = _Lazy("cvxpy")
    networkx = _Lazy("networkx")
    optimize = _Lazy("scipy.optimize")


def is_graph(given: object) -> "TypeGuard[networkx.Graph]":
    """Whether it is a networkx graph; whoever has one has loaded networkx."""
    return sys.modules.get("networkx") is not None and isinstance(given, networkx.Graph)
