"""The page "Should I compress?": the numbers of `advise`; use by keyboard, on any screen."""

import itertools
import math
import pathlib
import random
import subprocess
import sys
from typing import Any

import jax
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

import jaxcomm
from jaxcomm.advise import advise
from jaxcomm.advise._advise import NEAR, Advice, shapes_of_count
from jaxcomm.perf import Link
from jaxcomm.perf._link import DEVICES
from tests.browser.page import NARROW, Page, contrast, luminance

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]
TOLERANCE = 0.03  # Of what is interpolated, which the page states.
FIELDS = ("params", "workers", "bandwidth", "latency", "step")
# For each width of summed fields, a number of workers; and a model that top-k is too large for.
MODELS = [
    (10_000_000, "float32", 2), (15_000_000, "bfloat16", 5), (10_000_000, "bfloat16", 12),
    (125_000_000, "float32", 64), (60_000_000_000, "float32", 3000),
]  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("site") / "answer" / "index.html"
    subprocess.run([sys.executable, ROOT / "tools" / "answer_page.py", path], check=True)
    return path


def drawn_inputs() -> list[dict[str, Any]]:
    """Inputs: few models, since each is traced, with many links and step times each."""
    draw = random.Random(0)
    models = [dict(zip(("count", "dtype", "workers"), model, strict=True)) for model in MODELS]
    return [
        {
            **model,
            "link": {
                "bytesPerSecond": 10 ** draw.uniform(6, 11),
                "latency": draw.choice([0.0, 10 ** draw.uniform(-6, -2)]),
            },
            "step": 10 ** draw.uniform(-3, 1),
            "device": draw.choice([*DEVICES]),
        }
        for model in models
        for _ in range(20)
    ]


def by_python(given: dict[str, Any]) -> Advice:
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, given["dtype"]),
        shapes_of_count(given["count"]),
    )
    link = Link(given["link"]["bytesPerSecond"], given["link"]["latency"])
    options: Any = {"step_seconds": given["step"], "device": given["device"]}
    return advise(shapes, given["workers"], link=link, **options)


def test_the_numbers_are_nearly_those_of_advise(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    inputs = drawn_inputs()
    found = page.run(
        """const numbers = JSON.parse(document.getElementById("numbers").textContent);
        const { advise } = costModel(numbers);
        return arguments[0].map(
            (given) => advise({ ...given, memory: numbers.devices[given.device] }))""",
        inputs,
    )
    recommended = set()
    for given, seen in zip(inputs, found, strict=True):
        expected, rows = by_python(given), {row["line"]: row for row in seen["rows"]}
        assert {*rows} == {row.code for row in expected.rows}, given
        for row in expected.rows:
            by, each = row.prediction, rows[row.code]
            exact = by.messages, row.steps, row.risk
            assert (each["messages"], each["steps"], each["risk"]) == exact
            each["codec"] = each["encode"] + each["decode"]
            names = ("state", "codec", "bytes", "network", "seconds", "overlapped")
            close = (by.state_bytes, by.codec_seconds, by.bytes_per_worker, by.network_seconds,
                     by.seconds, by.overlapped)  # fmt: skip
            for name, value in zip(names, close, strict=True):
                slack = 100 if name == "state" else 0
                where = given, row.code, name
                assert each[name] == pytest.approx(value, rel=TOLERANCE, abs=slack), where
        costs = {row.code: row.cost for row in expected.rows}
        ranked = [costs[row["line"]] for row in seen["rows"] if row["steps"]]
        assert all(a <= (1 + 2 * TOLERANCE) * b for a, b in itertools.pairwise(ranked)), given
        line = seen["recommended"]["line"]
        assert costs[line] <= (1 + TOLERANCE) * costs[expected.recommended.code] * NEAR
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
    page.open(file, fragment="params=20M&workers=8&bandwidth=200Mbit&step=0.2s")
    expected = advise(shapes_of_count(2 * 10**7), 8, link="200Mbit", step_seconds=0.2)
    assert page.texts("#verdict") == [expected.verdict]
    assert page.texts("#line") == [expected.line]
    assert page.texts("#levels") == [expected.assumptions[2]]
    cells = shown(page)
    assert len(cells) == len(expected.rows) == 9
    for row, (method, *numbers, _) in zip(expected.rows, cells, strict=True):
        assert method.removesuffix(" recommended") == row.code
        by = row.prediction
        exact = 1e3 * by.seconds, 1e3 * by.overlapped, 1e-6 * by.bytes_per_worker
        assert [float(each.replace(",", "")) for each in numbers[:3]] == pytest.approx(
            exact, rel=TOLERANCE, abs=0.06
        )
    assert [row[0].endswith("recommended") for row in cells].count(True) == 1
    assert "bandwidth=200Mbit" in page.driver.current_url
    assert page.texts("#bandwidth-label") == ["Bandwidth of a worker"]
    assert not page.find("#sharded-note").is_displayed()


def test_by_keyboard_alone(page: Page, file: pathlib.Path) -> None:
    page.open(file)
    visited = []
    typed = {"params": "20M", "workers": "4", "bandwidth": "200Mbit", "step": "80ms"}
    links = len(page.find_all("nav a"))
    for _ in range(links + 13):
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
    assert visited == [*["a"] * links, *order, "sharded", "shards", "copy", "a", "div"]
    assert page.texts("#copied")[0]
    assert page.texts("#bandwidth-label") == ["Bandwidth of each device"]
    line = page.texts("#line")[0]
    stages = 'jaxcomm.mean("data"), jaxcomm.power_sgd("data", rank=4)'
    tx = f"jaxcomm.shard_local(jaxcomm.warmup([{stages}], every=2), param_specs)"
    assert line == f"tx = optax.chain({tx}, optimizer)"
    expected = advise(shapes_of_count(10**7), 4, link="200Mbit", step_seconds=0.08)
    assert float(shown(page)[0][1]) == pytest.approx(
        1e3 * expected.rows[0].prediction.seconds, rel=TOLERANCE
    )


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
def test_invalid_input_has_a_message_beside_its_field(
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
        "params=1&workers=2&bandwidth=1bit&latency=0s&step=1e-9s",
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


def test_local_steps_follow_the_optimizer(page: Page, file: pathlib.Path) -> None:
    inputs = "params=100M&workers=64&bandwidth=25Gbit&step=0.03s"
    page.open(file, fragment=inputs)
    best = advise(shapes_of_count(10**8), 64, link="25Gbit", step_seconds=0.03).recommended
    assert best.period > 1 and page.texts("#line") == [best.line]
    page.open(file, fragment=f"{inputs}&sharded=others&shards=2")
    of_shard = f"jaxcomm.shard_local({best.aggregator}, param_specs)"
    assert page.texts("#line") == [best.line.replace(best.aggregator, of_shard)]


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
    assert len(pictures) == len(rows) == 9


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, NARROW)])
def test_the_page_is_readable(page: Page, file: pathlib.Path, dark: bool, width: int) -> None:
    page.open(file, width=width, dark=dark, fragment="workers=8&bandwidth=1Gbit")
    assert not page.is_wider_than_screen()
    behind = page.color("body", "backgroundColor")
    assert (luminance(behind) < 0.1) == dark
    for selector in ("body", "#verdict", "#params", "nav a", "tbody th", "#copy"):
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
