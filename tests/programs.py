"""The programs of the folder `tools`, as modules."""

import importlib.util
import pathlib
from types import ModuleType

TOOLS = pathlib.Path(__file__).parent.parent / "tools"


def program(name: str) -> ModuleType:
    """A new module each time, which a test may change."""
    specification = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
