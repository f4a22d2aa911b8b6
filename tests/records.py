"""The records of the repository, without those that commands have written beside them."""

from pathlib import Path

import experiments

FOLDER = Path(experiments.__file__).parent / "records"


def committed(name: str = "*") -> list[Path]:
    """The folders whose name matches, by name: all that .gitignore makes exceptions of."""
    lines = (FOLDER.parents[1] / ".gitignore").read_text(encoding="utf-8").splitlines()
    rules = [line[1:].strip("/") for line in lines if line.startswith("!experiments/records/")]
    found = {path for rule in rules for path in FOLDER.parents[1].glob(rule)}
    return sorted(path for path in found if path.match(name))
