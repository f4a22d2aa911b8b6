"""Reports for readers who see little, or use a keyboard only: names, contrast and focus."""

import pathlib
import re
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from experiments.report.charts import charts
from experiments.report.page import figures, table
from experiments.report.page import page as written
from experiments.study.figure import Lines, Points
from experiments.study.panels import Axis
from tests.browser.page import NARROW, Page, contrast
from tests.browser.test_report import DRAWN, wait_until
from tests.experiments.report.figures import results, runs

METHODS = [f"method {n}" for n in range(10)]
MADE = results(*(runs([[9.0, 4.0 + n], [8.0, 5.0 + n]], method=name, split=split)
                 for split in ("iid", "skewed") for n, name in enumerate(METHODS)))  # fmt: skip
COMMON: dict[str, Any] = {"file": "f.png", "by": "method", "across": ("split",)}
LOSS = Axis("loss", "loss")


FIGURES = [
    Lines(**COMMON, caption="Loss against steps", x=(Axis("step", "steps"),), y=LOSS),
    Points(**COMMON, caption="Points", x=Axis("bytes", "bytes"), y=LOSS, numbered=True),
]
TEXTS = """
const found = [];
for (const each of document.querySelectorAll("body *")) {
  const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own && !each.placeholder || !each.checkVisibility() || each.tagName === "SCRIPT") continue;
  let behind = each;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
    behind = behind.parentElement;
  const style = getComputedStyle(each, each.placeholder ? "::placeholder" : null);
  found.push([each.textContent || each.placeholder, style.color,
    getComputedStyle(behind).backgroundColor, Number(style.opacity)]);
}
return found;"""
FOCUSABLE = "a[href], button, input, summary, [tabindex]"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    drawn = [chart for figure in FIGURES for chart in charts(figure, MADE)]
    cells: list[list[tuple[str, Any]]] = [[(f"{'wide ' * 9}{n}", n) for _ in range(9)]
                                          for n in range(3)]  # fmt: skip
    tables = "<h2>First</h2>{0}{0}<h2>Second</h2>{0}".format(table(["number"] * 9, cells))
    text = written("Title", {"commit": "abc"}, tables + figures(drawn), drawn, {"a.csv": b"1"})
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def parts(color: str) -> list[float]:
    """Red, green and blue, from 0 to 255."""
    return [float(part) for part in re.findall(r"[\d.]+", color)[:3]]


def seen(ink: str, paper: str, opacity: float = 1) -> float:
    return contrast(parts(ink), parts(paper), opacity)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_are_seen(page: Page, file: pathlib.Path, dark: bool) -> None:
    page.open(file, dark=dark)
    wait_until(page, f"{DRAWN} === {len(FIGURES)}")
    texts = page.run(TEXTS)
    assert {"Title", "commit", "abc", "number", "words of a row", "3 of 3 rows"} <= {
        text for text, *_ in texts
    }
    assert [each for each in texts if seen(*each[1:]) < 4.5] == []
    (paper,) = {behind for text, _, behind, _ in texts if text == "Title"}
    assert (sum(parts(paper)) < 255) == dark
    page.photograph(f"report_access_{'dark' if dark else 'light'}")


def test_a_screen_reader_has_names(page: Page, file: pathlib.Path) -> None:
    """As Chromium tells them."""
    page.open(file)
    wait_until(page, f"{DRAWN} === {len(FIGURES)}")
    nodes = page.command("Accessibility.getFullAXTree", {})["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        if not node["ignored"]:
            name = node.get("name", {}).get("value", "")
            named.setdefault(node["role"]["value"], []).append(name)
    names = ", ".join(METHODS)
    assert named["image"] == [
        f"Loss against steps. loss against steps, by method: {names}.",
        f"Points. loss against bytes, by method: {names}.",
    ]
    assert named["searchbox"] == ["Filter First", "Filter First, table 2", "Filter Second"]
    assert named["checkbox"] == ["Single runs"]
    opened = [name for role in named for name in named[role] if name.startswith("Save the figure")]
    assert len({*opened}) == len(FIGURES)
    assert "" not in named["button"] and "Download a.csv, 1 bytes" in named["button"]
    assert page.find_all(f"[role=img] :is({FOCUSABLE})") == []


def test_all_is_reached_by_keyboard(page: Page, file: pathlib.Path) -> None:
    page.open(file, width=NARROW)
    wait_until(page, f"{DRAWN} === {len(FIGURES)}")
    scrolled = page.run(
        "return [...document.querySelectorAll('.frame, .chart')]"
        ".filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.tabIndex)"
    )
    assert len(scrolled) >= 3 and {*scrolled} == {0}
    page.press(Keys.TAB, Keys.TAB)
    assert page.focused.get_attribute("aria-label") == "First"
    page.press(Keys.TAB, Keys.ENTER, Keys.ENTER)
    assert page.focused.tag_name == "button" and page.focused.text == "number"
    assert page.find("th").get_attribute("aria-sort") == "descending"
    assert page.find("tbody tr td").text.endswith("2")
