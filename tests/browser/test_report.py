"""The report of a record in a browser: sorted, filtered, pointed at, downloaded, photographed."""

import pathlib
import time

import pytest
from selenium.webdriver.common.action_chains import ActionChains

import experiments
from experiments.report.command import text_of
from tests.browser.page import NARROW, Page

RECORD = pathlib.Path(experiments.__file__).parent / "records" / "2026-11-23_digits"
TEXT = "document.querySelector('#vg-tooltip-element.visible')?.innerText ?? ''"
FIND_A_MARK = """
const canvas = arguments[0], box = canvas.getBoundingClientRect();
for (let x = 40; x < box.width / 2; x += 3) for (let y = 20; y < box.height - 80; y += 3) {
  const place = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
  for (const kind of ["pointermove", "mousemove"])
    canvas.dispatchEvent(new PointerEvent(kind, place));
  if (document.querySelector("#vg-tooltip-element.visible"))
    return [Math.round(x - box.width / 2), Math.round(y - box.height / 2)];
}
return null;"""
"""The first place of a figure, from its center, at which a pointer shows a text."""
DRAWN = "return document.querySelectorAll('.chart[data-drawn=yes]').length"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text_of(RECORD), encoding="utf-8")
    return path


def wait_until(page: Page, script: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not page.run(script):
        assert time.monotonic() < end, script
        time.sleep(0.05)


ROWS = """[...document.querySelectorAll('table:not(#claims) tbody tr')]
    .filter((row) => !row.hidden)"""
"""The visible rows of the main table."""


def column(page: Page, place: int) -> list[str]:
    return page.run(f"return {ROWS}.map((row) => row.cells[arguments[0]].textContent)", place)


def test_the_table_is_sorted_and_filtered(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    heads = page.find_all("table:not(#claims) th button")
    place = [head.text for head in heads].index("bytes/worker/step")
    everything = column(page, place)

    def numbers() -> list[float]:
        heads[place].click()
        cells = column(page, place)
        assert sorted(cells) == sorted(everything)
        return [float(text.split()[0].replace(",", "")) for text in cells if text != "-"]

    first = numbers()
    assert first == sorted(first) == numbers()[::-1] and len({*first}) > 2
    page.find("input[type=search]").send_keys("adam mean")
    rows = page.run(f"return {ROWS}.map((row) => row.textContent)")
    assert 0 < len(rows) < len(everything)
    assert all("adam" in row and "mean" in row for row in rows)


def test_a_figure_shows_run_and_setting(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    wait_until(page, DRAWN)
    page.find(".chart input[type=checkbox]").click()
    canvas = page.find(".chart canvas")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    found = page.run(FIND_A_MARK, canvas)
    assert found, "no place of the figure has a text"
    ActionChains(page.driver).move_to_element_with_offset(canvas, *found).perform()
    wait_until(page, f"return {TEXT}")
    shown = page.run(f"return {TEXT}")
    assert "setting" in shown and "run" in shown and ("sgd" in shown or "adam" in shown)
    page.photograph("report_hover", whole=False)


def test_raw_rows_are_downloaded(page: Page, file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.command("Browser.setDownloadBehavior", folder)
    page.open(file)
    page.find("button[data-name='metrics.jsonl']").click()
    path, end = tmp_path / "metrics.jsonl", time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.read_bytes() == (RECORD / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, NARROW)])
def test_it_is_readable(page: Page, file: pathlib.Path, dark: bool, width: int) -> None:
    page.open(file, width=width, dark=dark)
    wait_until(page, DRAWN)
    assert not page.is_wider_than_screen()
    ink, paper = page.color("body"), page.color("body", "background-color")
    assert abs(sum(ink[:3]) - sum(paper[:3])) > 450
    assert page.find_all("#claims .holds, #claims .fails")
    assert "python -m experiments digits" in page.text and "commit" in page.text
    page.photograph(f"report_{width}_{'dark' if dark else 'light'}")
