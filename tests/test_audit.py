"""`make audit` passes only if every package was looked up."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FREEZE = "printf 'numpy==2.0\\njax==0.12\\nlocal @ file:///x\\n'"
SAY = "echo 'No known vulnerabilities found' >&2"
REPORT = """while [ "$1" != --output ]; do shift; done; echo 'numpy 2.0 CVE-1' >"$2"; exit 1"""
UNREACHABLE = "echo 'ERROR: pypi.org is unreachable' >&2; exit 1"


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("audit", "install", "code", "stdout", "stderr"),
    [
        (SAY, "true", 0, "audit: looked up 2 packages of .venv", ""),
        (REPORT, "true", 1, "numpy 2.0 CVE-1\naudit: looked up 2 packages of .venv", ""),
        (UNREACHABLE, "true", 2, "", "dependencies: ERROR: pypi.org is unreachable"),
        (SAY, "echo 'no network'; exit 1", 2, "", "pip-audit cannot be installed: no network"),
    ],
    ids=["clean", "vulnerable", "unreachable", "not installed"],
)
def test_the_audit_fails_without_a_lookup(
    audit: str, install: str, code: int, stdout: str, stderr: str, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "audit", tmp_path / "tools" / "audit")
    script(tmp_path / "tools" / "make_venv", install)
    script(tmp_path / ".venv" / "bin" / "python", FREEZE)
    script(tmp_path / ".venv-audit" / "bin" / "python", audit)
    done = subprocess.run(
        [tmp_path / "tools" / "audit"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code and stdout in done.stdout
    assert done.stderr.count("\n") == (code == 2) and stderr in done.stderr


def test_ci_works_without_a_network() -> None:
    assert "audit" not in (ROOT / ".ci" / "run").read_text()
