"""Checks docstrings, comments, pages, and names in code, against a short list of rules.

    python tools/check_prose.py [FILE ...]

Spelling is checked by codespell, configured in pyproject.toml.
"""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = (
    "jaxcomm/*.py",
    "pallas_kernels/*.py",
    "experiments/*.py",
    "tools/*.py",
    "docs/*.py",
    "tests/*.py",
    "*.md",
)
EXEMPT = re.compile(r"CHANGELOG\.md|experiments/records/|tools/check_prose\.py")
MOST_WORDS = 35  # of a sentence

AVOID = {  # A pattern, and what to write in its place.
    r"\b(tells?|told(?! apart)|telling)\b": "report, return or pass",
    r"\b(not )?told apart\b": "inconclusive, or distinguished",
    r"\bcoins?\b": "PRNG key, or random bits",
    r"\brooms?\b": "capacity, or space",
    r"\bbill(s|ed|ing)?\b": "count, or cost",
    r"\bmend(s|ed|ing)?\b": "repair, or correct",
    r"\b(apart from|lies? apart|stays? apart|drawn? apart|kept apart|split apart)\b": "separately",
    r"\bsettl(e|es|ed|ing)\b": "finalize",
    r"\bleft out\b": "omitted, skipped, or the residual",
    r"\banew\b": "again",
    r"\balike\b": "equal, the same, or equally",
    r"\bof the fullest\b": "of the largest",
    r"\b(nobody|everybody)\b": "no worker, all workers",
    r"\bin so far as\b": "if, or only when",
    r"\bat hand\b": "available",
    r"\bso (many|much) (workers|steps|coordinates|mini-batches|bytes)\b": "a number of",
    r"\bhands? (it |them )?on\b": "passes",
    r"\b(comes?|came) of\b": "results from",
    r"\bwhat is to be\b": "say what happens",
    r"\bfor ever\b": "forever",
    r"\bbehaviour|neighbour|favour|colour\b": "American spelling",
}
AVOID_IN_NAMES = {**AVOID, r"\bapart\b": "separate, independent or distance"}


def compiled(rules: dict[str, str]) -> dict[re.Pattern[str], str]:
    """The rules with compiled patterns."""
    return {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in rules.items()}


RULES, RULES_OF_NAMES = compiled(AVOID), compiled(AVOID_IN_NAMES)
CODE = re.compile(r"``[^`]*``|`[^`]*`|:math:|\$[^$]*\$|https?://\S+")


def paragraphs_of_python(text: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each paragraph of docstrings and comments."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from paragraphs(value.value, value.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def names_of_python(text: str) -> Iterator[tuple[int, str]]:
    """The line and the words of the name of each function and class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", node.name).strip()


def paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """The first line and the text of each paragraph of prose: no code, equation or table."""
    lines: list[str] = []
    start, fenced = first, False
    beyond: int | None = None  # The indent beyond which lines belong to an equation or an example.
    for number, line in enumerate([*text.split("\n"), ""], first):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if bare.startswith(("```", "===")):  # A table of two rules, or code.
            fenced = not fenced
        ends = not bare or bare.startswith(("|", "#", "- ", "* ", ">>>", "...", "```", "==="))
        item = re.match(r"[\w`*, ]{1,40}: |\d+\. ", bare)
        if (ends or item) and lines:
            yield start, " ".join(lines)
            lines = []
        if bare and beyond is not None and indent > beyond:
            continue
        if bare:
            beyond = indent if bare.startswith(".. math::") else None
        if bare.startswith(">>>") or bare == "References:":
            beyond = indent - 1
        prose = not fenced and beyond is None and not bare.startswith(("|", "```", "#"))
        if bare and prose:
            start = start if lines else number
            lines.append(re.sub(r"^[-*] ", "", bare))


def faults(path: pathlib.Path) -> Iterator[str]:
    """Each breach of a rule in a file, with its line."""
    text = path.read_text(encoding="utf-8")
    python = path.suffix == ".py"
    for line, paragraph in paragraphs_of_python(text) if python else paragraphs(text, 1):
        words = CODE.sub(" x ", paragraph)
        where = f"{path.relative_to(ROOT)}:{line}"
        for pattern, instead in RULES.items():
            if found := pattern.search(words):
                yield f"{where}: {found[0]!r}: write {instead}"
        for sentence in re.split(r"(?<=[.!?:;])\s+", words):
            if (count := len(sentence.split())) > MOST_WORDS:
                yield f"{where}: a sentence of {count} words, at most {MOST_WORDS}"
    for line, name in names_of_python(text) if python else ():
        for pattern, instead in RULES_OF_NAMES.items():
            if found := pattern.search(name):
                yield f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in a name: write {instead}"


def main(names: list[str]) -> int:
    listed = ["git", "ls-files", *SOURCES]
    files = names or subprocess.check_output(listed, cwd=ROOT, text=True).split()
    found = [fault for name in files if not EXEMPT.search(name) for fault in faults(ROOT / name)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
