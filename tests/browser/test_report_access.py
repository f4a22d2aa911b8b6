"""Reports for readers who see little, or use a keyboard only: names, contrast and focus."""

import pathlib
import re
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from experiments.report.charts import charts
from experiments.report.page import figures, table
from experiments.report.page import page as written
from experiments.study import panels
from experiments.study.figure import Lines, Points
from experiments.study.forest import Forest, Panel
from experiments.study.panels import Axis
from tests.browser.page import NARROW, Page, contrast
from tests.browser.test_report import DRAWN, wait_until
from tests.experiments.report.figures import results, runs

METHODS = [f"method {n}" for n in range(10)]
MADE = results(*(runs([[9.0, 4.0 + n], [8.0, 5.0 + n]], method=name, split=split)
                 for split in ("iid", "skewed") for n, name in enumerate(METHODS)))  # fmt: skip
COMMON: dict[str, Any] = {"file": "f.png", "by": "method", "across": ("split",)}
LOSS = Axis("loss", "loss")


def tab10(line: Any) -> dict[str, Any]:
    """Ten colors, of which some are too light for white pages, and others for black ones."""
    return {"marker": "o", "color": panels.COLORS[METHODS.index(line["method"])]}


def estimate(line: Any) -> tuple[float, float, float, str]:
    return 0.1, 0.0, 0.2, ("diverged", "agreed")[METHODS.index(line["method"]) % 2]


FIGURES = [
    Lines(**COMMON, caption="Loss against steps", x=(Axis("step", "steps"),), y=LOSS,
          finish=lambda axes, *_: axes.text(0.1, 0.1, "text", transform=axes.transAxes,
                                            color=panels.COLORS[1])),
    Points(**COMMON, caption="Points with a legend", x=Axis("bytes", "bytes"), y=LOSS, mark=tab10,
           finish=panels.color_legend("method", tab10), numbered=True),
    Forest(file="f.png", caption="Estimates", by="method", within="split", group=lambda line: "a",
           panels=[Panel("Title", "slower →", estimate, lambda line: "a note")],
           colors={"agreed": "tab:green", "diverged": "black"}, margin=0.2, limit=1.0),
]  # fmt: skip
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
DRAWINGS = """
return Promise.all([...document.querySelectorAll(".chart")].map((box) => box.view.toSVG()))"""
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
    if color.startswith("#"):
        return [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return [float(part) for part in re.findall(r"[\d.]+", color)[:3]]


def seen(ink: str, paper: str, opacity: float = 1) -> float:
    return contrast(parts(ink), parts(paper), opacity)


def marks(drawing: xml.Element) -> Iterator[tuple[str, float]]:
    """The color and the opacity of lines, symbols and bars, but not of areas."""
    for group in drawing.iter():
        kinds = group.get("class", "").split()
        drawn = {"mark-line", "mark-symbol", "mark-rule"} & {*kinds}
        if not drawn or not {"role-mark", "role-legend-symbol"} & {*kinds}:
            continue
        for each in group:
            color = each.get("stroke") or each.get("fill") or "none"
            opacity = float(each.get("opacity", 1))
            if color not in ("none", "transparent") and opacity > 0:
                yield color, opacity


@pytest.mark.parametrize("dark", [False, True])
def test_texts_and_marks_are_seen(page: Page, file: pathlib.Path, dark: bool) -> None:
    page.open(file, dark=dark)
    wait_until(page, f"{DRAWN} === {len(FIGURES)}")
    texts = page.run(TEXTS)
    assert {"Title", "commit", "abc", "number", "words of a row", "3 of 3 rows"} <= {
        text for text, *_ in texts
    }
    assert [each for each in texts if seen(*each[1:]) < 4.5] == []
    (paper,) = {behind for text, _, behind, _ in texts if text == "Title"}
    assert (sum(parts(paper)) < 255) == dark
    drawings = [xml.fromstring(text) for text in page.run(DRAWINGS)]
    for drawing in drawings:
        shown = [
            (each.text, seen(each.attrib["fill"], paper, float(each.get("opacity", 1))))
            for each in drawing.iter("{http://www.w3.org/2000/svg}text")
            if each.text and each.get("opacity") != "0"  # A label that others would cover.
        ]
        assert len(shown) > 10 and [each for each in shown if each[1] < 4.5] == []
        drawn = {each: seen(each[0], paper, each[1]) for each in marks(drawing)}
        assert drawn and min(drawn.values()) >= 3, drawn
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
        f"Points with a legend. loss against bytes, by method: {names}.",
        f"Estimates. slower →, by method: {names}.",
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
