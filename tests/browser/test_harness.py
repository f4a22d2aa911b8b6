"""What the other tests of pages rely on: a page is opened, steered, and held to its silence."""

import pathlib

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.browser import page as harness
from tests.browser.page import NARROW, Page

PAGE = """<!doctype html><meta charset="utf-8"><title>A page</title>
<style>:root { color-scheme: light dark } p { color: rgb(1, 2, 3) }
@media (prefers-color-scheme: dark) { p { color: rgb(250, 251, 252) } }</style>
<p>Hello</p><input id="name"><button onclick="document.querySelector('p').textContent =
document.querySelector('#name').value">Show</button>"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "page.html"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_page_is_steered_by_keyboard(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    page.press(Keys.TAB, "jaxcomm", Keys.TAB, Keys.SPACE)
    assert page.focused.tag_name == "button" and page.texts("p") == ["jaxcomm"]


def test_a_user_prefers_light_or_dark_on_a_narrow_screen(page: Page, file: pathlib.Path) -> None:
    for dark, color in ((False, (1, 2, 3)), (True, (250, 251, 252))):
        page.open(file, width=NARROW, dark=dark)
        assert page.color("p") == color
        assert page.run("return innerWidth") == NARROW and not page.is_wider_than_screen()
    assert page.photograph("harness").read_bytes().startswith(b"\x89PNG")


def test_errors_and_requests_of_a_page_are_seen(
    chromium: webdriver.Chrome, tmp_path: pathlib.Path
) -> None:
    loud = tmp_path / "loud.html"
    loud.write_text('<img src="http://example.invalid/a.png"><script>undefined_name()</script>')
    page = Page(chromium)
    page.open(loud)
    assert any("undefined_name" in message for message in page.messages)
    assert page.requests == ["http://example.invalid/a.png"]


def test_without_chromium_the_tests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="chromium and chromedriver not found: install"):
        harness.start_chromium()
