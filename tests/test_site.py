"""Every public name has a page on the site, every link leads somewhere, every figure has a text."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
from types import ModuleType

import pytest

import jaxcomm

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]
SOURCES = [*ROOT.glob("jaxcomm/**/__init__.py"), *ROOT.glob("pallas_kernels/**/__init__.py")]
DESCRIBED = re.compile(r"^\.\. auto(function|class):: ([\w.]+)::(\w+)$", re.MULTILINE)
CONSTANT = re.compile(r"^\.\. py:(data):: (\w+)\n\n   \w", re.MULTILINE)
Tools = tuple[ModuleType, ...]
LISTED = re.compile(r"^- :py:\w+:`(\w+) <([\w.]+)>`", re.MULTILINE)


@pytest.fixture(scope="module")
def tools() -> Tools:
    """`tools/site_api.py`, `tools/build_site.py` and `tools/answer_page.py`."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return tuple(map(importlib.import_module, ("site_api", "build_site", "answer_page")))
    finally:
        sys.path.pop(0)


def descriptions(reference: dict[str, str]) -> list[tuple[str, str, str]]:
    """The kind, the package and the name of each description."""
    found = DESCRIBED.findall("".join(reference.values()))
    for page, text in reference.items():
        found += [(kind, page.split("-")[0], name) for kind, name in CONSTANT.findall(text)]
    return found


@pytest.fixture(scope="module")
def reference(tools: Tools) -> dict[str, str]:
    return tools[0].pages()


def public_names() -> dict[str, list[str]]:
    """What `__all__` states, by package, without the names of packages."""
    found = {}
    for path in SOURCES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        text = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        names = ast.literal_eval(text[1]) if text else []
        found[package] = [name for name in names if not (path.parent / name).is_dir()]
        if package == "jaxcomm":
            shortcuts = path.parent / "compression"
            found[package] = [name for name in found[package] if not (shortcuts / name).is_dir()]
            found[package].append("advise")  # a package, and its function
    return {package: names for package, names in found.items() if names}


def test_every_public_name_is_listed_and_described(reference: dict[str, str]) -> None:
    described = {f"{package}.{name}" for _, package, name in descriptions(reference)}
    assert len(described) > 200
    for package, names in public_names().items():
        text = "".join(reference[page] for page in reference if page.split("-")[0] == package)
        listed = dict(LISTED.findall(text))
        assert sorted(listed) == sorted(set(names)), package
        assert set(listed.values()) <= described, package


def test_a_name_is_described_once_with_its_kind(reference: dict[str, str]) -> None:
    objects = []
    for kind, package, name in descriptions(reference):
        if module := sys.modules.get(package):  # Some packages are slow to import.
            value = getattr(module, name)
            assert (kind == "class") == inspect.isclass(value), name
            objects.append(value)
    assert len({id(value) for value in objects}) == len(objects) > 200


def test_a_name_that_nothing_defines_is_an_error(tools: Tools, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "jaxcomm"
    package.mkdir()
    (package / "_a.py").write_text('def known():\n    """Known."""\n')
    init = package / "__init__.py"
    init.write_text('from jaxcomm._a import known\n\n__all__ = [\n    "known",\n]\n')
    assert "autofunction:: jaxcomm::known" in tools[0].pages(tmp_path)["jaxcomm"]
    (package / "_b.py").write_text("")
    init.with_name("b").mkdir()
    (package / "b" / "__init__.py").write_text('__all__ = ["lost"]\n')
    with pytest.raises(ValueError, match=r"jaxcomm\.b: nothing defines the public name 'lost'"):
        tools[0].pages(tmp_path)


def test_links_lead_to_pages_and_files(tools: Tools) -> None:
    texts, files = tools[1].collected()
    assert {"index.md", "which_method.md", "contributing/index.md", "api/index.rst"} <= set(texts)
    copied = {site for _, site in files}
    links = 0
    for site, text in texts.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in (
            re.findall(r"\[[^\[\]]*\]\(([^)\s#]+)", prose) if site.endswith(".md") else ()
        ):
            if not re.match(r"[a-z]+:", target):
                path = (ROOT / site).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
                assert path in texts or path in copied, f"{site}: {target}"
                links += 1
    assert links > 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[the guide](gide.md)", "the link to gide.md leads nowhere"),
        ("![](figure.png)", "the figure figure.png has no alternative text"),
    ],
)
def test_a_link_or_figure_that_fails_is_named(tools: Tools, text: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        tools[1].relinked("docs/new.md", text, {"docs/new.md": "new.md"}, ROOT)


def test_the_readme_has_working_links_and_figure_texts() -> None:
    text = (ROOT / "README.md").read_text()
    figures = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text)
    assert figures and all(len(words) > 20 for words, _ in figures)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    assert len(local) > 10 and [each for each in local if not (ROOT / each).exists()] == []


def test_a_link_to_the_answer_page_leads_to_the_built_page(
    tools: Tools,
) -> None:
    texts, files = tools[1].collected()
    assert '<a href="answer/index.html">Should I compress?</a>' in texts["index.md"]
    assert not any("answer" in site for _, site in files)


def test_the_answer_page_is_one_file_without_requests(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tools[2]
    monkeypatch.setattr(answer, "numbers", lambda: {"layers": 12, "efficiency": 0.25})
    page = answer.page()
    addresses = re.findall(r"(?:src|href|action)=\"([^\"]*)\"", page)
    assert addresses[:2] == [answer.HOME, "#"]
    assert addresses[1 + len(answer.NAVIGATION) :] == 2 * [f"../{answer.FSDP}"]
    of_site = {"index.html"} | {
        re.sub(r"\.(md|rst)$", ".html", each) for each in tools[1].collected()[0]
    }
    assert {each.removeprefix("../") for each in addresses if each != "#"} <= of_site
    # A namespace of SVG is a name, and nothing loads it.
    external = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert external == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"fetch\(|XMLHttpRequest|import\(|@import|url\(|WebSocket|sendBeacon", page
    )
    assert "{{" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
