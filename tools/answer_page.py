"""Writes the page "Should I compress?" as one file, with the numbers of jaxcomm.

    python tools/answer_page.py FILE [ADDRESS OF THE FIRST PAGE]

Its sources are in `docs/answer/`. No number of the cost model is typed there: this program exports
them from the modules that define them.
"""

import html
import json
import pathlib
import re
import sys
from typing import Any

from jaxcomm import _collectives, _units
from jaxcomm.advise import _advise
from jaxcomm.compression._bits import MOST
from jaxcomm.compression.quantizers import _dither
from jaxcomm.perf import _predict
from jaxcomm.perf._link import DEVICES, LINKS
from jaxcomm.perf._recommended import recommended

SOURCES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "answer"
SCRIPTS = ("model.js", "inputs.js", "picture.js", "page.js")
HOME = "../index.html"
STATE_BYTES = 12  # Of an aggregator without memory: a key of two words, and the step.
MOST_WORKERS = 10**6
DEFAULT_DEVICE = "a100"

EXCHANGES = (
    (r'jaxcomm\.mean\("data"\)', "exact"),
    (r'jaxcomm\.mean\("data", wire_dtype="bfloat16"\)', "rounded"),
    (r'jaxcomm\.global_qsgd\("data"\)', "summed"),
    (
        r"jaxcomm\.two_stage_mean\(jaxcomm\.compression\.blockwise\("
        r'jaxcomm\.quantizers\.dither\(bits=(?P<bits>\d+)\), (?P<block>\d+)\), axis_name="data"\)',
        "blocks",
    ),
    (r'jaxcomm\.top_k_sgd\("data", ratio=(?P<ratio>[\d.]+)\)', "largest"),
    (r'jaxcomm\.ef_sign_sgd\("data"\)', "signs"),
    (r'jaxcomm\.power_sgd\("data", rank=(?P<rank>\d+)\)', "factors"),
)
"""The line of a method with its parameters, and the function of `model.js` for its bytes."""


def exchange_of(line: str) -> tuple[str, dict[str, float]]:
    """The function of `model.js` for a line of code, and its parameters.

    Raises:
      SystemExit: If there is none: a new method of `advise` needs one.
    """
    for pattern, name in EXCHANGES:
        if found := re.fullmatch(pattern, line):
            return name, {key: json.loads(value) for key, value in found.groupdict().items()}
    raise SystemExit(f"docs/answer/model.js does not count the bytes of {line}.")


def numbers() -> dict[str, Any]:
    """Everything that the page needs of jaxcomm."""
    methods = []
    for method in recommended("data", 1):
        exchange, parameters = exchange_of(method.code)
        each = {"line": method.code, "started": method.paste}
        each |= {"exchange": exchange, "parameters": parameters}
        methods.append(
            {**each, "steps": method.steps, "risk": method.risk, "overlaps": method.overlaps}
        )
    return {
        "methods": methods,
        "devices": {name: device.memory_bytes_per_second for name, device in DEVICES.items()},
        "default_device": DEFAULT_DEVICE,
        "links": {
            name: {
                "bandwidth": f"{8e-9 * link.bytes_per_second:g}Gbit",
                "latency": f"{1e6 * link.latency:g}us",
            }
            for name, link in LINKS.items()
        },
        "layers": _advise.LAYERS,
        "most_params": _advise.MOST,
        "most_of_leaf": _advise.MOST_OF_LEAF,
        "most_of_codec": MOST,
        "most_workers": MOST_WORKERS,
        "bucket_bytes": _units.BUCKET_BYTES,
        "large": _units.LARGE,
        "tile": _collectives._TILE,
        "levels": _dither.DEFAULT_LEVELS,
        "widths": _dither.WIDTHS,
        "state_bytes": STATE_BYTES,
        "efficiency": _predict.EFFICIENCY,
        "backward": _predict.BACKWARD,
        "last_bucket_bytes": _predict.BUCKET_BYTES,
        "near": _advise.NEAR,
    }


def page(home: str = HOME) -> str:
    """The whole page; it asks for no other file."""
    read = {path.name: path.read_text(encoding="utf-8") for path in SOURCES.iterdir()}
    found = numbers()
    # A browser ends a script at `</`, wherever that is.
    parts = {
        "style": read["style.css"].strip(),
        "script": "\n".join(read[name].strip() for name in SCRIPTS),
        "numbers": json.dumps(found).replace("</", "<\\/"),
        "layers": str(found["layers"]),
        "efficiency": f"{found['efficiency']:.0%}",
        "home": html.escape(home),
    }
    text = read["page.html"]
    for name in parts:
        if text.count(f"{{{{{name}}}}}") != 1:
            raise SystemExit(f"docs/answer/page.html must have {{{{{name}}}}} once.")
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], text)


def write(path: pathlib.Path, home: str = HOME) -> None:
    """Writes the page, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(home), encoding="utf-8")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
