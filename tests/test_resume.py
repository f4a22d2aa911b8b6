"""A run of all tests goes on where another ended, and only listed reasons skip a test."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.resume import folder_of

ROOT = pathlib.Path(__file__).parents[1]
TESTS = """
import os
import pytest

def test_passes(): assert not os.environ.get("MENDED")
def test_fails(): assert os.environ.get("MENDED")
def test_lacks(): pytest.skip("no PyTorch")

@pytest.mark.skipif(not os.environ.get("MENDED"), reason="too long")
def test_is_left_out(): pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")])
def test_a_second_run_runs_what_failed(tmp_path: pathlib.Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    record = tmp_path / "folder" / "all.jsonl"

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *workers]
        command += ["--rootdir", ROOT, f"--resume={record}", *arguments]
        command += [ROOT / "tests" / "conftest.py", tmp_path / "test_some.py"]
        environment = {**os.environ, **variables}
        environment.pop("JAXCOMM_TESTS_BEGUN", None)
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    def recorded() -> list[tuple[str, str]]:
        lines = map(json.loads, record.read_text().splitlines())
        return sorted((line["test"].split("::")[1], line["outcome"]) for line in lines)

    late = run("--minutes=0")
    assert late.returncode and "4 left, 0 failed" in late.stdout and not record.exists()

    first = run()
    assert first.returncode == 1, first.stdout
    assert "tests/skips.py" in first.stdout and "1 skipped: no PyTorch" in first.stdout
    ended = [("test_fails", "failed"), ("test_is_left_out", "failed")]
    ended += [("test_lacks", "skipped"), ("test_passes", "passed")]
    assert recorded() == ended

    with record.open("a") as file:
        file.write('{"test": "ki')  # As a run that is killed may leave it.
    second = run(MENDED="1")
    assert second.returncode == 0 and "0 left, 0 failed" in second.stdout, second.stdout
    again = [("test_fails", "passed"), ("test_is_left_out", "passed")]
    assert recorded() == sorted([*ended, *again])
    assert run().returncode == 0 and recorded() == sorted([*ended, *again])


def test_folders() -> None:
    assert folder_of("tests/laws/test_scale.py::test_scale[mean]") == "tests/laws"
    assert folder_of("tests/test_axis.py::test_axis") == "tests"
    assert folder_of("jaxcomm/_axis.py::jaxcomm._axis.f") == "jaxcomm"
