"""All pages: their length, their links on GitHub, and that nothing stands on them twice."""

import collections
import csv
import pathlib
import re
import subprocess

import pytest

import jaxcomm

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]
PAGES = sorted(
    {ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
    | {*ROOT.glob("docs/**/*.md")}
)
LAB = ROOT / "experiments/records/2026-11-23_lab/table.csv"
LOSS = ROOT / "experiments/records/2026-11-29_loss/table.csv"
FENCED = re.compile(r"^( *)(```+)[^\n`]*\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)
DEFINED = {
    "a common mistake",
    "how to choose",
    "the problem",
    "read on",
    "references",
    "sources",
    "change something",
}
"""Headings of a page's parts, which define nothing, in lower case."""

MOST_WORDS = {"docs/design.md": 7000, "docs/index.md": 500}
MOST_LINES = {"CHANGELOG.md": 40, "README.md": 70, "docs/concepts.md": 350}


def name(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: pathlib.Path) -> str:
    """The text without blocks of code, whose lines stay, empty."""
    return FENCED.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))


def headings(page: pathlib.Path) -> list[str]:
    return re.findall(r"^#{1,6} +(.*?) *$", prose(page), re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives to headings; a heading that repeats has a number."""
    found, seen = set(), collections.Counter()
    for heading in headings(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text(encoding="utf-8")))


def test_the_docs_have_at_most_45_000_words() -> None:
    words = {name(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(count for page, count in words.items() if page.startswith("docs/")) <= 45_000, words
    assert {page: words[page] for page, most in MOST_WORDS.items() if words[page] > most} == {}


@pytest.mark.parametrize("page", MOST_LINES)
def test_a_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[page]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page: pathlib.Path) -> None:
    """In prose; a row of a table is a line, an alternative text too, and a link may be longer."""
    lines = enumerate(prose(page).splitlines(), 1)
    long = [n for n, line in lines if len(line) > 120 and not line.lstrip().startswith(("|", "!["))
            and len(re.sub(r"\]\([^)]*\)", "]", line)) > 120]  # fmt: skip
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere_on_github(page: pathlib.Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or path.startswith(("api/", "../api/", "records/")):
            continue  # Elsewhere, or a page that only the site has.
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            lost.append(target)
    assert lost == []


def test_no_heading_defines_something_twice() -> None:
    places = collections.defaultdict(set)
    for page in PAGES:
        for heading in headings(page):
            text = heading.lower().strip("`")
            if text not in DEFINED and not re.match(r"(step \d|\d)", text):
                places[text].add(name(page))
    del places["jaxcomm"]  # The title of the README, and of the first page.
    assert {text: pages for text, pages in places.items() if len(pages) > 1} == {}


def test_no_code_stands_twice() -> None:
    places = collections.defaultdict(list)
    for page in PAGES:
        for _, _, code in FENCED.findall(page.read_text(encoding="utf-8")):
            lines = [" ".join(line.split()) for line in code.splitlines() if line.strip()]
            if len(lines) >= 3:
                places["\n".join(lines)].append(name(page))
    assert [(pages, code[:200]) for code, pages in places.items() if len(pages) > 1] == []


METHODS = {
    "`mean()`": ("mean", "ddp"),
    '`mean(wire_dtype="bfloat16")`': ("mean_bfloat16", "ddp_fp16_kept_memory"),
    "`global_qsgd(bits=8)`": ("global_qsgd:8", None),
    "`two_stage_mean`, 4 bits, blocks of 256": ("two_stage:4", None),
    "`power_sgd(rank=4)`": ("power_sgd_rank_4", "ddp_power_sgd_4_kept_memory"),
}


def times_of(table: pathlib.Path, column: str) -> dict[tuple[str, str], float]:
    with table.open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    return {(row["link"], row["method"]): float(row[column]) for row in rows}


def test_the_table_of_the_readme_is_that_of_the_record() -> None:
    times = times_of(LAB, "milliseconds")

    def took(link: str, method: str) -> str:
        return f"{times[link, method]:.0f}"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for shown, (method, peer) in METHODS.items():
        (line,) = re.findall(rf"^\| {re.escape(shown)} \|(.*)\|$", text, re.MULTILINE)
        cells = [re.split(r"[:|]", cell)[0].strip() for cell in line.split("|")]
        links = ("200mbit", "1gbit", "unshaped")
        expected = [took(link, method) for link in links]
        assert cells == [*expected, took("200mbit", peer) if peer else "no such hook"], shown


def test_the_percentages_of_the_readme_are_those_of_the_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    times = times_of(LAB, "milliseconds")
    for percent, link, method, other in (
        (r"takes (\d+) % longer \|", "200mbit", "mean", "ddp"),
        (r"takes (\d+) % longer\*\*", "200mbit", "mean_bfloat16", "ddp_fp16_kept_memory"),
        (r"and (\d+) % at 1 Gbit/s", "1gbit", "mean_bfloat16", "ddp_fp16_kept_memory"),
        (r"takes (\d+) % less", "200mbit", "power_sgd_rank_4", "ddp_power_sgd_4_kept_memory"),
    ):
        (found,) = re.findall(percent, text)
        assert int(found) == round(100 * abs(times[link, method] / times[link, other] - 1)), percent
    assert times["unshaped", "two_stage:4"] / times["unshaped", "mean"] == pytest.approx(
        1.25, abs=0.02
    )


def test_the_seconds_of_the_readme_are_those_of_the_record() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    times = times_of(LOSS, "seconds_to_target")
    shown = re.findall(
        r"DDP takes (\d+) s, its bf16 hook (\d+) s, its PowerSGD hook of rank 8 (\d+) s, and .*? "
        r"(\d+) s\. .*? takes (\d+) s; the others take (\d+), (\d+), (\d+) and (\d+) s",
        text,
    )

    def least(link: str, method: str) -> int:
        both = (method, f"{method}_kept_memory")
        return round(min(times[link, each] for each in both if (link, each) in times))

    methods = ("ddp", "ddp_bf16", "ddp_power_sgd_8", "local_sgd_4_bits_8")
    slow, fast = ([least(link, each) for each in methods] for link in ("200mbit", "unshaped"))
    named = [round(times[link, "advised"]) for link in ("200mbit", "unshaped")]
    assert named == [slow[-1], round(times["unshaped", "mean"])]
    assert [*map(int, shown[0])] == [*slow, named[1], *fast]


def test_every_page_is_committed() -> None:
    """A link may lead to a file that only this machine has."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        assert {name(page) for page in PAGES} <= set(listed.stdout.split())
