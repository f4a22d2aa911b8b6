"""Sphinx's configuration of the site. `make docs` builds it: tools/build_site.py."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_extensions"))

_INIT = pathlib.Path(__file__).parent.parent / "jaxcomm" / "__init__.py"

project = "jaxcomm"
author = "The jaxcomm authors"
copyright = "The jaxcomm authors. Apache License 2.0"
release = re.findall(r'^__version__ = "(.*)"', _INIT.read_text(encoding="utf-8"), re.MULTILINE)[0]
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "mathml",
    "references",
]
nitpicky = True
default_role = "code"  # Docstrings mark code with single backticks.

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # Fields are listed once, in the docstring of their class.

myst_heading_anchors = 4  # Links such as `concepts.md#feedback`, as GitHub has them.

html_theme = "pydata_sphinx_theme"
html_title = "jaxcomm"
html_math_renderer = "mathml"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
# The page "Should I compress?" is not of Sphinx, so `answer_link` links to it from every page.
html_sidebars = {"**": ["site_nav"]}
html_theme_options = {
    "navbar_center": ["answer_link", "navbar-nav"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "header_links_before_dropdown": 4,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
