"""Without its libraries, the package says what to install."""

import sys

import pytest


@pytest.mark.parametrize("missing", ["networkx", "cvxpy"])
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("jaxcomm.gossip")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "jaxcomm\[gossip\]"'):
        __import__("jaxcomm.gossip")
