"""Optional libraries for graphs and solvers, imported at first use."""

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import networkx as networkx
    from scipy import optimize as optimize

    cvxpy: Any
else:

    class _Lazy:
        """A module that is imported at the first attribute access."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            try:
                module = importlib.import_module(self._name)
            except ModuleNotFoundError as error:
                hint = '`pip install "jaxcomm[gossip]"`.'
                raise ImportError(f"`jaxcomm.gossip` needs {error.name}: {hint}") from error
            return getattr(module, name)

    cvxpy = _Lazy("cvxpy")
    networkx = _Lazy("networkx")
    optimize = _Lazy("scipy.optimize")


def is_graph(value: object) -> "TypeGuard[networkx.Graph]":
    """Whether `value` is a networkx graph. Does not import networkx."""
    # A caller that has a graph has imported networkx.
    return sys.modules.get("networkx") is not None and isinstance(value, networkx.Graph)
