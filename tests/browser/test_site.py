"""The page "Should I compress?" is one click away from a page of any depth, without a server."""

import pathlib
import re
import sys

import jinja2
import pytest

import jaxcomm
from tests.browser.page import Page

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]
TEMPLATE = ROOT / "docs" / "_templates" / "answer_link.html"


@pytest.mark.parametrize("name", ["index.html", "contributing/release.html"])
def test_the_answer_is_one_click_away(page: Page, tmp_path: pathlib.Path, name: str) -> None:
    """The link of the template, rendered as Sphinx does for a page in a folder."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import answer_page
        import build_site
    finally:
        sys.path.pop(0)
    answer_page.write(tmp_path / build_site.ANSWER)

    def pathto(target: str, resource: bool = False) -> str:
        assert resource  # Sphinx then takes the target as a file from the root of the site.
        return "../" * name.count("/") + target

    text = jinja2.Template(TEMPLATE.read_text(encoding="utf-8")).render(pathto=pathto)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"<!doctype html><title>{name}</title>{text}", encoding="utf-8")
    page.open(file)
    page.find("nav a").click()
    assert re.match(r"Should I compress\?", page.driver.title)
