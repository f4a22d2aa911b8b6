"""A page in headless Chromium: opened, typed into, clicked, read, and photographed."""

import base64
import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

PHOTOGRAPHS = pathlib.Path(__file__).parents[2] / "build" / "photographs"
"""Where `Page.photograph` writes, to be looked at after the tests."""

WIDE, NARROW, HEIGHT = 1280, 360, 900  # Pixels.


def luminance(color: Sequence[float]) -> float:
    """The relative luminance of WCAG 2.2, of 0 to 1, of red, green and blue of 0 to 255."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(ink: Sequence[float], paper: Sequence[float], opacity: float = 1) -> float:
    """The contrast of WCAG 2.2, of 1 to 21."""
    seen = [opacity * a + (1 - opacity) * b for a, b in zip(ink[:3], paper[:3], strict=True)]
    low, high = sorted([luminance(seen), luminance(paper)])
    return (high + 0.05) / (low + 0.05)


def start_chromium() -> webdriver.Chrome:
    """Starts Debian's Chromium, which reaches no network.

    Raises:
      RuntimeError: If Chromium or its driver is not installed. Tests then fail; none is skipped.
    """
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    absent = [name for name, path in programs.items() if path is None]
    if absent:
        raise RuntimeError(
            f"{' and '.join(absent)} not found: install them with "
            "`apt-get install chromium chromium-driver`."
        )
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # Containers have little of it.
        "--disable-background-networking",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=programs["chromedriver"])
    return webdriver.Chrome(options=options, service=service)


class Page:
    """The page that a browser shows. What it wrote to the console and asked for is kept.

    Attributes:
      driver: Selenium's driver, for everything that has no method here.
    """

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self._requests: list[str] = []
        self._messages: list[str] = []

    def open(
        self,
        path: pathlib.Path,
        *,
        fragment: str = "",
        width: int = WIDE,
        height: int = HEIGHT,
        dark: bool = False,
        reduced_motion: bool = False,
    ) -> None:
        """Opens a file, on a screen of `width` pixels whose user prefers a light or a dark page."""
        self._read_logs()
        self._requests.clear()
        self._messages.clear()
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", screen)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if reduced_motion else "no-preference",
        }
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.command("Emulation.setEmulatedMedia", {"features": listed})
        self.driver.get("about:blank")  # A new fragment alone would not load the page again.
        self.driver.get(path.resolve().as_uri() + (fragment and f"#{fragment}"))

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        """Sends a command of Chromium's own protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript in the page; `return` a value, and read `arguments[0]`."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first element of a CSS selector; an error if there is none."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        """All elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The visible text of each element of a CSS selector."""
        return [element.text for element in self.find_all(selector)]

    @property
    def text(self) -> str:
        """All visible text."""
        return self.find("body").text

    @property
    def focused(self) -> WebElement:
        """The element that the keyboard types into."""
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, wherever the focus is; text is typed."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def color(self, selector: str, name: str = "color") -> tuple[float, ...]:
        """A color of an element as it is shown: red, green, blue, and alpha if it has one."""
        element = self.find(selector)
        value = self.run("return getComputedStyle(arguments[0])[arguments[1]]", element, name)
        return tuple(float(part) for part in value.partition("(")[2].rstrip(")").split(","))

    def is_wider_than_screen(self) -> bool:
        """Whether the whole page has to be scrolled sideways."""
        return self.run(
            "const root = document.documentElement; return root.scrollWidth > root.clientWidth"
        )

    def _read_logs(self) -> None:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requests.append(message["params"]["request"]["url"])
        self._messages += [entry["message"] for entry in self.driver.get_log("browser")]

    @property
    def messages(self) -> list[str]:
        """What the console has since the page was opened: errors, and what failed to load."""
        self._read_logs()
        return [*self._messages]

    @property
    def requests(self) -> list[str]:
        """The addresses beyond this machine that the page asked for, since it was opened."""
        self._read_logs()
        own = ("file:", "data:", "blob:", "about:")
        return [url for url in self._requests if not url.startswith(own)]

    def photograph(self, name: str, *, whole: bool = True) -> pathlib.Path:
        """Writes `build/photographs/NAME.png`: the whole page, or what the screen shows of it."""
        shot = self.command("Page.captureScreenshot", {"captureBeyondViewport": whole})
        PHOTOGRAPHS.mkdir(parents=True, exist_ok=True)
        path = PHOTOGRAPHS / f"{name}.png"
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
