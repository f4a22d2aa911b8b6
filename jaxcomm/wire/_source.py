"""The user's line of source from which an operation comes."""

import functools
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

# With the separator: after an installation the name of JAX's folder begins this package's.
_OURS = str(pathlib.Path(__file__).parent.parent) + os.sep
_JAX = str(pathlib.Path(jax.__file__).parent) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARIES = ("site-packages", "dist-packages")


class Line(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        """The file, relative to the folder of work if it lies in it, and the number."""
        inside = self.file.startswith(os.getcwd() + os.sep)
        return f"{os.path.relpath(self.file) if inside else self.file}:{self.number}"


@functools.cache
def _is_of_user(file: str) -> bool:
    """Whether a file belongs to neither a library nor Python."""
    installed = any(part in pathlib.PurePath(file).parts for part in _LIBRARIES)
    return bool(file) and not installed and not file.startswith((_OURS, _JAX, _PYTHON, "<frozen"))


def user_line(lines: Iterable[Line]) -> str:
    """The innermost line that is in no library; without one, the innermost outside of JAX.

    Args:
      lines: The calls that led to an operation, the innermost first.
    """
    outside = [line for line in lines if line.file and not line.file.startswith(_JAX)]
    return str(next(filter(lambda line: _is_of_user(line.file), outside), next(iter(outside), "")))


def lines_of(eqn: Any) -> list[Line]:
    """The lines that led to an equation of a traced program, the innermost first."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return [Line(frame.file_name, frame.line_num) for frame in getattr(traceback, "frames", ())]


def is_ours(lines: Iterable[Line]) -> bool:
    """Whether the innermost line outside of JAX is in this package."""
    outside = (line.file for line in lines if not line.file.startswith(_JAX))
    return next(outside, "").startswith(_OURS)


_JITTED = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORM = re.compile(r"\b(?:jvp|transpose|vmap|pmap|remat|checkpoint)\(|\)")
_PLAIN = re.compile(
    r"while|body|cond|closed_call|shard_map|checkpoint|remat\d?|rematted_computation|eval_jaxpr"
    r"|core_call|custom_[jv][jv]p_call(_jaxpr)?|branch_\d+_fun|"
)


def scope_of(name_stack: str) -> str:
    """The named scopes of an operation, without JAX's transformations and control flow."""
    names = _TRANSFORM.sub("", _JITTED.sub("", name_stack)).split("/")
    return "/".join(name for name in names if not _PLAIN.fullmatch(name))


def first_of(op_name: str) -> str:
    """The first of the operations that XLA has merged: `a/(b/dot:c/dot)` and `a/b/dot;c`."""
    begin = re.search(r"(?:^|/)\((?=.*:)", op_name)
    if not begin:
        return op_name.split(";")[0]
    depth, merged = 0, op_name[begin.end() :]
    for place, letter in enumerate(merged):
        if depth == 0 and letter in ":)":
            return f"{op_name[: begin.start()]}/{merged[:place]}"
        depth += (letter == "(") - (letter == ")")
    return op_name
