"""One version: that of the package, of the citation, and of the tag of this commit."""

import pathlib
import re
import subprocess
import tomllib

import jaxcomm

ROOT = pathlib.Path(jaxcomm.__file__).parents[1]


def test_the_version_is_stated_once_and_cited() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "jaxcomm/__init__.py"}
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == jaxcomm.__version__


def test_a_tag_of_this_commit_is_its_version() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # Without a repository there is no tag, as in an sdist.
    assert set(ran.stdout.split()) <= {f"v{jaxcomm.__version__}"}
