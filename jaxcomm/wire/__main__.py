"""Prints what a program sends: `python -m jaxcomm.wire DUMP_OR_MODULE:FUNCTION`."""

import argparse
import importlib
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxcomm.wire._account import Account
from jaxcomm.wire._count import account

_AFTER = "after_optimizations.txt"


def _mesh(text: str) -> dict[str, int]:
    """The axes of `data=4,model=2`."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: int(size) for name, _, size in pairs}


def _reports(target: str, mesh: dict[str, int] | None) -> Iterator[tuple[str, Account]]:
    """The report of each program, with its name."""
    path = pathlib.Path(target)
    if path.is_dir():
        files = sorted(path.rglob(f"*{_AFTER}"))
        if not files:
            raise SystemExit(f"no file *{_AFTER} in {path}, as XLA_FLAGS=--xla_dump_to= writes")
    elif path.is_file():
        files = [path]
    else:
        module, _, function = target.partition(":")
        if not function:
            raise SystemExit(f"{target} is no file or folder, nor MODULE:FUNCTION")
        sys.path.insert(0, "")
        given: Any = getattr(importlib.import_module(module), function)()
        program, *arguments = given if isinstance(given, tuple) else (given,)
        yield target, account(program, *arguments)
        return
    for file in files:
        yield str(file), account(file.read_text(encoding="utf-8"), mesh=mesh)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm.wire", description=__doc__)
    parser.add_argument(
        "target",
        help="the text of a compiled program; a folder of `--xla_dump_to`, of which the programs "
        "that send are printed; or MODULE:FUNCTION, where FUNCTION() returns what "
        "`jaxcomm.wire.account` takes, with arguments as a tuple (run, *arguments)",
    )
    parser.add_argument("--mesh", type=_mesh, help="the mesh of a dump, such as data=4,model=2")
    parser.add_argument("--json", action="store_true", help="print `json()` of the last program")
    given = parser.parse_args(arguments)
    reports = [*_reports(given.target, given.mesh)]
    if given.json:
        print(reports[-1][1].json(), end="")
        return
    sending = [(name, report) for name, report in reports if report.collectives]
    for name, report in sending:
        print(f"{name}\n{report}\n")
    if not sending:
        print("nothing is sent")


if __name__ == "__main__":
    main()
