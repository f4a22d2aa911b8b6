"""The page "Should I compress?": the numbers of `advise`; use by keyboard, on any screen."""

import importlib
import math
import pathlib
import random
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

import jaxcomm
from jaxcomm.advise import advise
from jaxcomm.advise._advise import Advice, shapes_of_count
from jaxcomm.perf import Link
from jaxcomm.perf._link import DEVICES
from tests.browser.page import NARROW, Page, contrast, luminance

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]
FIELDS = ("params", "workers", "bandwidth", "latency", "step")
MODELS, LINKS_OF_MODEL = 9, 23

# Every branch of the counts: one worker; fields of 8, 10, 16 and 32 bits; a single vector; leaves
# that are joined, and leaves that are not; exact matrices; a model that top-k is too large for.
EDGES = [
    (1_000_000, "float32", 1), (1_000_000, "bfloat16", 1), (7, "float32", 8), (500, "float32", 3),
    (900_000, "bfloat16", 12), (125_000_000, "float32", 64), (3_000_000_000, "bfloat16", 4),
    (50_000_000_000, "float32", 3000),
]  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("answer_page")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def file(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("site") / "answer" / "index.html"
    tool.write(path)
    return path


def drawn_inputs() -> list[dict[str, Any]]:
    """Inputs: few models, since each is traced, with many links and step times each."""
    draw = random.Random(0)
    models = [*EDGES]
    while len(models) < MODELS:
        count, dtype = round(10 ** draw.uniform(2, 9.3)), draw.choice(["float32", "bfloat16"])
        models.append((count, dtype, round(10 ** draw.uniform(0.3, 3.5))))
    return [
        {
            "count": count,
            "itemsize": jnp.dtype(dtype).itemsize,
            "workers": workers,
            "link": {
                "bytesPerSecond": 10 ** draw.uniform(6, 11),
                "latency": draw.choice([0.0, 10 ** draw.uniform(-6, -2)]),
            },
            "step": 10 ** draw.uniform(-3, 1),
            "device": draw.choice([*DEVICES]),
        }
        for count, dtype, workers in models
        for _ in range(LINKS_OF_MODEL)
    ]


def by_python(given: dict[str, Any]) -> Advice:
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[given["itemsize"]]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
                          shapes_of_count(given["count"]))  # fmt: skip
    link = Link(given["link"]["bytesPerSecond"], given["link"]["latency"])
    options: Any = {"step_seconds": given["step"], "device": given["device"]}
    return advise(shapes, given["workers"], link=link, **options)


def test_the_numbers_are_those_of_advise(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    inputs = drawn_inputs()
    assert len(inputs) > 200
    found = page.run(
        """const numbers = JSON.parse(document.getElementById("numbers").textContent);
        const { advise } = costModel(numbers);
        return arguments[0].map(
            (given) => advise({ ...given, memory: numbers.devices[given.device] }))""",
        inputs,
    )
    recommended = set()
    for given, seen in zip(inputs, found, strict=True):
        expected = by_python(given)
        lines = [row["line"] for row in seen["rows"]]
        assert lines == [row.code for row in expected.rows], given
        assert len(seen["omitted"]) == len(expected.assumptions) - 4
        for row, each in zip(expected.rows, seen["rows"], strict=True):
            by, where = row.prediction, (given, row.code)
            exact = by.state_bytes, by.messages, row.steps, row.risk
            assert [each[name] for name in ("state", "messages", "steps", "risk")] == [*exact], (
                where
            )
            codec = each["encode"] + each["decode"]
            numbers = [each[name] for name in ("bytes", "network", "seconds", "overlapped")]
            close = by.bytes_per_worker, by.network_seconds, by.seconds, by.overlapped
            assert [codec, *numbers] == pytest.approx([by.codec_seconds, *close], rel=1e-9), where
        line = seen["recommended"]["started"]
        assert line == expected.recommended.paste and seen["compress"] == expected.compress
        recommended.add(line)
    assert len(recommended) > 3  # The inputs are not all of one kind.


def shown(page: Page) -> list[list[str]]:
    """The cells of the table."""
    return [
        page.run("return [...arguments[0].cells].map((cell) => cell.textContent)", row)
        for row in page.find_all("#rows tr")
    ]


def boxes_of(page: Page, element: WebElement) -> list[tuple[str, float, float]]:
    """The kind, the left side and the width of the boxes of a picture."""
    return page.run(
        "return [...arguments[0].querySelectorAll('rect')].map((each) => "
        "[each.getAttribute('class'), +each.getAttribute('x'), +each.getAttribute('width')])",
        element,
    )


def test_the_page_shows_what_the_command_prints(page: Page, file: pathlib.Path) -> None:
    page.open(file, fragment="params=2M&workers=8&bandwidth=200Mbit&step=0.1s")
    expected = advise(shapes_of_count(2 * 10**6), 8, link="200Mbit", step_seconds=0.1)
    assert page.texts("#verdict") == [expected.verdict]
    assert page.texts("#line") == [expected.line]
    assert page.texts("#levels") == [expected.assumptions[2]]
    cells = shown(page)
    assert len(cells) == len(expected.rows) == 8
    for row, (method, seconds, overlapped, sent, *_) in zip(expected.rows, cells, strict=True):
        assert method.removesuffix(" recommended") == row.code
        assert seconds == f"{1e3 * row.prediction.seconds:,.1f}"
        assert overlapped == f"{1e3 * row.prediction.overlapped:,.1f}"
        assert sent == f"{1e-6 * row.prediction.bytes_per_worker:,.1f}"
    assert [row[0].endswith("recommended") for row in cells].count(True) == 1
    assert "bandwidth=200Mbit" in page.driver.current_url


def test_by_keyboard_alone(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    visited = []
    typed = {"params": "10M", "workers": "4", "bandwidth": "200Mbit", "step": "80ms"}
    for _ in range(13):
        page.press(Keys.TAB)
        name = page.focused.get_attribute("id") or page.focused.tag_name
        visited.append(name)
        assert page.run("return document.activeElement.matches(':focus-visible')"), name
        if name in typed:
            page.press(typed[name])
        if name == "sharded":
            page.press(Keys.ARROW_DOWN)
        if name == "shards":
            page.press("2")
        if name == "copy":
            page.press(Keys.ENTER)
    order = ["params", "dtype", "step", "device", "workers", "preset", "bandwidth", "latency"]
    assert visited == ["a", *order, "sharded", "shards", "copy", "div"]
    assert page.texts("#copied")[0]
    line = page.texts("#line")[0]
    stages = 'jaxcomm.mean("data"), jaxcomm.power_sgd("data", rank=4)'
    tx = f"jaxcomm.shard_local(jaxcomm.warmup([{stages}], every=2), param_specs)"
    assert line == f"tx = optax.chain({tx}, optimizer)"
    expected = advise(shapes_of_count(5 * 10**6), 4, link="200Mbit", step_seconds=0.08)
    assert shown(page)[0][1] == f"{1e3 * expected.rows[0].prediction.seconds:,.1f}"


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("params", "2T", "from 1 to 1T"),
        ("params", "1.2.3M", "such as 125M"),
        ("workers", "2.5", "whole number of workers"),
        ("bandwidth", "0Gbit", "above 0"),
        ("latency", "-1us", "at least 0"),
        ("step", "1e999", "such as 0.3s"),
    ],
)
def test_wrong_input_has_a_message_beside_its_field(
    page: Page, file: pathlib.Path, field: str, text: str, message: str
) -> None:
    page.open(file)
    given, error = page.find(f"#{field}"), page.find(f"#{field}-error")
    given.clear()
    given.send_keys(text)
    assert message in error.text and error.is_displayed()
    assert error.get_attribute("id") in given.get_attribute("aria-describedby")
    assert given.get_attribute("aria-invalid") == "true"
    assert [page.find(f"#{name}-error").text != "" for name in FIELDS].count(True) == 1
    assert page.texts("#no-answer") == ["Correct the marked fields to see an answer."]
    assert not page.find("#answer").is_displayed() and "NaN" not in page.text
    given.clear()
    given.send_keys({"params": "1M", "workers": "2", "bandwidth": "1GB/s"}.get(field, "1ms"))
    assert page.find("#answer").is_displayed() and not error.is_displayed()


@pytest.mark.parametrize(
    "fragment",
    [
        "params=1&workers=1&bandwidth=1bit&latency=0s&step=1e-9s",
        "params=1T&workers=1000000&bandwidth=1000Tbit&sharded=others&shards=1000000",
    ],
)
def test_extremes_have_numbers(page: Page, file: pathlib.Path, fragment: str) -> None:
    page.open(file, fragment=fragment)
    assert page.find("#answer").is_displayed()
    assert not [word for word in ("NaN", "Infinity", "undefined", "null", "∞") if word in page.text]
    boxes = boxes_of(page, page.find("body"))
    assert boxes and all(x >= 0 and width > 0 and x + width <= 1002 for _, x, width in boxes)


def test_an_address_with_wrong_inputs_is_safe(page: Page, file: pathlib.Path) -> None:
    page.open(file, fragment="params=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E&device=abacus&answer=1")
    assert page.find("#params-error").text and page.find_all("img") == []
    assert page.find("#device").get_attribute("value") == "a100"
    page.open(file, fragment="sharded=workers")
    assert not page.find("#answer").is_displayed()
    assert "fully_sharded_value_and_grad" in page.find("#among-workers").text


def test_the_picture_is_to_scale_and_has_a_text(page: Page, file: pathlib.Path) -> None:
    page.open(file, fragment="params=100M&workers=8&bandwidth=1Gbit&step=0.3s")
    pictures, rows = page.find_all("#timelines svg"), shown(page)
    plain, beside = ([float(row[n].replace(",", "")) for row in rows] for n in (1, 2))
    is_mean = ["jaxcomm.mean(" in row[0] for row in rows]
    scale = max(b if each else a for a, b, each in zip(plain, beside, is_mean, strict=True))
    for n, picture in enumerate(pictures):
        text, boxes = picture.get_attribute("aria-label"), boxes_of(page, picture)
        overlaps = "with overlap" in text
        assert rows[n][2 if overlaps else 1] in text
        assert {kind for kind, _, _ in boxes} <= {"compute", "encode", "link", "decode"}
        end = max(x + width for _, x, width in boxes)
        own = (beside if overlaps else plain)[n]
        assert math.isclose(end, 1000 * own / scale, abs_tol=3)
    assert len(pictures) == len(rows) == 8


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, NARROW)])
def test_it_is_readable(page: Page, file: pathlib.Path, dark: bool, width: int) -> None:
    page.open(file, width=width, dark=dark, fragment="workers=8&bandwidth=1Gbit")
    assert not page.is_wider_than_screen()
    behind = page.color("body", "backgroundColor")
    assert (luminance(behind) < 0.1) == dark
    for selector in ("body", "#verdict", "#params", "header a", "tbody th", "#copy"):
        assert contrast(page.color(selector), behind) >= 4.5, selector
    assert contrast(page.color("#line"), page.color("#line", "backgroundColor")) >= 4.5
    soft = page.color("#timelines svg", "backgroundColor")
    for kind in ("compute", "link"):
        assert contrast(page.color(f"rect.{kind}", "fill"), soft) >= 3, kind
    small = [
        element.get_attribute("id")
        for element in page.find_all("input, select, button")
        if element.is_displayed() and element.rect["height"] < 24
    ]
    assert small == []
    page.photograph(f"answer-{width}-{'dark' if dark else 'light'}")
    page.find("#workers").send_keys("x")
    assert contrast(page.color("#workers-error"), behind) >= 4.5
    assert not page.is_wider_than_screen()
    page.photograph(f"answer-wrong-{width}-{'dark' if dark else 'light'}")
