"""One headless Chromium for all tests of a run, and a fresh page for each."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.browser.page import Page, start_chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: webdriver.Chrome) -> Iterator[Page]:
    """A page to `open`; a test fails if its page writes errors, or asks for another machine."""
    page = Page(chromium)
    yield page
    assert page.messages == []
    assert page.requests == []
