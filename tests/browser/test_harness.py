"""What the other tests of pages rely on: a page is held to its silence."""

import pathlib

from selenium import webdriver

from tests.browser.page import Page


def test_errors_and_requests_of_a_page_are_seen(
    chromium: webdriver.Chrome, tmp_path: pathlib.Path
) -> None:
    loud = tmp_path / "loud.html"
    loud.write_text('<img src="http://example.invalid/a.png"><script>undefined_name()</script>')
    page = Page(chromium)
    page.open(loud)
    assert any("undefined_name" in message for message in page.messages)
    assert page.requests == ["http://example.invalid/a.png"]
