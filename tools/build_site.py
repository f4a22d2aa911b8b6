"""Builds the site: collects its pages in one folder, and runs Sphinx on them.

    python tools/build_site.py [ARGUMENTS OF SPHINX]
    python tools/build_site.py --collect          # only collects; needs neither Sphinx nor JAX

The pages are those of `docs/`, the guides, the changelog, the examples, the records of the studies
and the API reference (`site_api.py`). Links between files of the repository become links between
pages; other files that a page links to are copied.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import site_api

ROOT = site_api.ROOT
SOURCE, HTML = ROOT / "build" / "site" / "source", ROOT / "build" / "site" / "html"
RECORDS = "experiments/records"
ANSWER, ANSWER_SOURCE = "answer/index.html", "docs/answer/page.html"  # tools/answer_page.py
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s]+)\)")


def pages(root: pathlib.Path = ROOT) -> dict[str, str]:
    """Where each Markdown file of the repository is on the site."""
    found = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md"}
    found["README.md"] = "index.md"  # Its parts are on the first page.
    for path in sorted((root / "docs").rglob("*.md")):
        name = path.relative_to(root / "docs").as_posix()
        found[f"docs/{name}"] = name.replace("README.md", "index.md")
    for path in sorted((root / RECORDS).glob("*/README.md")):
        found[path.relative_to(root).as_posix()] = f"records/{path.parent.name}.md"
    for path in sorted((root / "docs" / "examples").glob("*.py")):
        found[path.relative_to(root).as_posix()] = f"examples/{path.stem}.md"
    return found


def made(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The pages that no file of the repository is."""
    texts = {f"api/{name}.rst": text for name, text in site_api.pages(root).items()}
    rows = []
    for path in sorted((root / RECORDS).glob("*/README.md"), reverse=True):
        title = re.sub(r"^# ", "", path.read_text(encoding="utf-8").split("\n")[0])
        rows.append(f"| {path.parent.name[:10]} | [{title}]({path.parent.name}.md) |\n")
    head = "# Records\n\nEvery study writes a record: a page of tables, the command, the versions "
    head += "and every raw number.\n[Results](../results.md) summarizes them.\n\n"
    texts["records/index.md"] = head + "| date | study |\n|---|---|\n" + "".join(rows)
    return texts


def below(name: str, sites: dict[str, str], text: str) -> str:
    """A hidden table of contents, for a page that introduces the others of its folder.

    Pages are in the order in which its text links to them, the others behind them.
    """
    folder, _, file = name.rpartition("/")
    if file != "index.md" or not folder:
        return ""
    others = [site for site in sites.values() if site.startswith(f"{folder}/") and site != name]
    if folder == "records":
        others.reverse()
    places = {site: text.find(f"({site.removeprefix(f'{folder}/')})") for site in others}
    others.sort(key=lambda site: places[site] if places[site] >= 0 else len(text))
    listed = "\n".join(site.removeprefix(f"{folder}/").removesuffix(".md") for site in others)
    return f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


def relinked(file: str, text: str, sites: dict[str, str], root: pathlib.Path) -> tuple[str, set]:
    """A page whose links lead to pages of the site, and the other files that it links to.

    Raises:
      SystemExit: If a link leads nowhere, or a figure has no alternative text.
    """
    own, files = pathlib.PurePosixPath(sites[file]).parent, set()

    def relink(link: re.Match[str]) -> str:
        target, mark, anchor = link["target"].partition("#")
        if link["image"] and not link["text"].strip():
            raise SystemExit(f"{file}: the figure {target} has no alternative text.")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = os.path.normpath(os.path.join(os.path.dirname(file), target))
        if path == ANSWER_SOURCE:  # Sphinx does not know the page, so it cannot link to it.
            return f'<a href="{os.path.relpath(ANSWER, own)}">{link["text"]}</a>'
        if path.startswith("docs/") and path.removeprefix("docs/") in MADE:
            site = path.removeprefix("docs/")
        elif path in sites:
            site = sites[path]
        elif (root / path).is_file():
            site = path.replace(f"{RECORDS}/", "records/")
            files.add((path, site))
        else:
            raise SystemExit(f"{file}: the link to {link['target']} leads nowhere.")
        relative = os.path.relpath(site, own)
        return f"{link['image']}[{link['text']}]({relative}{mark}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    changed = [part if part.startswith("```") else LINK.sub(relink, part) for part in parts]
    return "".join(changed), files


MADE = {f"api/{name}.rst" for name in ("index",)} | {"records/index.md"}
"""The pages that are made here and that others may link to."""


def as_page(path: pathlib.Path) -> str:
    """The Markdown of a file: its text, or its code under its name."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path.name}\n\n```python\n{text}```\n"


def collected(root: pathlib.Path = ROOT) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """The text of every page of the site, and the files that are copied beside them."""
    sites, texts, files = pages(root), made(root), set()
    for file, site in sites.items():
        if file == "README.md":
            continue
        texts[site], linked = relinked(file, as_page(root / file), sites, root)
        files |= linked
    return {site: text + below(site, sites, text) for site, text in texts.items()}, files


def write(source: pathlib.Path = SOURCE, root: pathlib.Path = ROOT) -> None:
    """Writes the pages and the files beside them, and removes those of an earlier build."""
    texts, files = collected(root)
    kept = {source / site for site in texts} | {source / site for _, site in files}
    for path in [path for path in source.rglob("*") if path.is_file() and path not in kept]:
        path.unlink()
    for site, text in texts.items():
        path = source / site
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for file, site in files:
        (source / site).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, source / site)


def main(arguments: list[str]) -> int:
    write()
    if arguments == ["--collect"]:
        print(f"the pages of the site are in {SOURCE.relative_to(ROOT)}")
        return 0
    begun = time.monotonic()
    shutil.rmtree(HTML, ignore_errors=True)
    # All pages are read again, since Sphinx warns of a page only when it reads and writes it.
    command = [sys.executable, "-m", "sphinx", "-EaW", "--keep-going", "-b", "html", "-c", "docs"]
    command += ["-d", str(HTML.parent / "doctrees"), *arguments, str(SOURCE), str(HTML)]
    if code := subprocess.run(command, cwd=ROOT, env=environment()).returncode:
        return code
    command = [sys.executable, "tools/answer_page.py", str(HTML / ANSWER)]
    if code := subprocess.run(command, cwd=ROOT, env=environment()).returncode:
        return code
    size = sum(path.stat().st_size for path in HTML.rglob("*") if path.is_file())
    print(f"the site has {size / 1e6:.0f} MB")
    print(f"built in {time.monotonic() - begun:.0f} s: open {HTML.relative_to(ROOT)}/index.html")
    return 0


def environment() -> dict[str, str]:
    """JAX on the CPU, whatever the machine has: the pages describe, and compute nothing."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
