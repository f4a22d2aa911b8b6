"""What a module imports."""

import ast


def imported(source: str) -> set[str]:
    """The dotted names: `from a.b import c` imports `a.b.c`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {start + alias.name for alias in node.names}
    return found
