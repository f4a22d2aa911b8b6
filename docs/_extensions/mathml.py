"""Renders math as MathML while the site is built: pages need no script and no network."""

import html
import re

from docutils.nodes import SkipNode
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

# Commands that docutils does not read, and what it reads in their place.
SPELLINGS = {
    r"\\[bB]ig(?![A-Za-z])": "",  # A larger parenthesis.
    r"\\dots(?![A-Za-z])": r"\\ldots",
    r"\\mathbin(?![A-Za-z])": "",
    r"\\textstyle(?![A-Za-z])": "",
    r"\\iff(?![A-Za-z])": r"\\Longleftrightarrow",
}
LOGGER = logging.getLogger(__name__)


def rendered(tex: str, block: bool, node: object) -> str:
    """The MathML of an equation; a warning, and the equation as it is, if it cannot be read."""
    tex = tex.strip()
    for command, known in SPELLINGS.items():
        tex = re.sub(command, known, tex)
    if block and (r"\\" in tex or "&" in tex) and r"\begin{" not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        return latex2mathml.tex2mathml(tex, as_block=block)
    except Exception as error:
        LOGGER.warning("no MathML of %r: %s", tex, error, location=node)
        return f"<code>{html.escape(tex)}</code>"


def inline(translator: object, node: object) -> None:
    translator.body.append(rendered(node.astext(), False, node))
    raise SkipNode


def block(translator: object, node: object) -> None:
    body = rendered(node.astext(), True, node)
    translator.body.append(f'<div class="math">{body}</div>')
    raise SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
