"""The records of the repository."""

from pathlib import Path

import experiments

FOLDER = Path(experiments.__file__).parent / "records"


def committed(name: str = "*") -> list[Path]:
    """The folders of records whose name matches, by name."""
    return sorted(path.parent for path in FOLDER.glob(f"{name}/README.md"))
