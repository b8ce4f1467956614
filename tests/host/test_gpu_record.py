"""The record of the GPU tests is written by whole runs alone, tells a stale one from a fresh one, and survives a run that dies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


class Project:
    """A small project with this conftest, and stand-ins for CuPy (one GPU, or none) and for cuk.record."""

    def __init__(self, root: Path):
        self.root = root
        for folder in ("tests/gpu", "tests/host", "lib/cuk"):
            (root / folder).mkdir(parents=True)
        shutil.copy(CONFTEST, root / "tests/conftest.py")
        (root / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
        (root / "lib/cuk/__init__.py").write_text("")
        (root / "tests/host/test_host.py").write_text("def test_host(): pass\n")
        (root / "tests/gpu/test_gpu.py").write_text("import cupy\ndef test_one(): pass\ndef test_two(): pass\n")
        self.sources("a" * 64)
        self.gpus(1)

    def sources(self, digest: str) -> None:
        (self.root / "lib/cuk/record.py").write_text(
            f"def source_sha256(): return '{digest}'\ndef environment(): return {{'machine': 'h200', 'driver': '580.1'}}\n"
        )

    def gpus(self, count: int) -> None:
        (self.root / "lib/cupy.py").write_text(
            "class runtime:\n"
            f"    getDeviceCount = staticmethod(lambda: {count})\n"
            "    getDeviceProperties = staticmethod(lambda device: {'name': b'NVIDIA H200'})\n"
            "class cuda:\n"
            "    runtime = runtime\n"
            "    class Device: id = 0\n"
        )

    def pytest(self, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.root / "lib"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False).stdout

    def gpu(self, *arguments: str) -> str:
        return self.pytest("tests", "-m", "gpu", "--gpu-record", "tests/gpu_record.json", *arguments)

    @property
    def record(self) -> dict:
        return json.loads((self.root / "tests/gpu_record.json").read_text())


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_a_whole_run_is_recorded_and_known_as_fresh(project):
    assert "tests/gpu_record.json is missing: run `make gpu`" in project.pytest("tests/host")
    assert "gpu_record.json is written" in project.gpu()
    record = project.record
    assert record["date"].startswith("20") and record["python"].count(".") == 2
    assert {name: record[name] for name in ("device", "machine", "driver", "source_sha256", "passed", "failed", "errors", "skipped")} == {
        "device": "NVIDIA H200", "machine": "h200", "driver": "580.1", "source_sha256": "a" * 64,
        "passed": 2, "failed": 0, "errors": 0, "skipped": 0,
    }  # fmt: skip
    assert "is of these sources: 2 passed on NVIDIA H200" in project.pytest("tests/host")
    project.sources("b" * 64)
    assert "is stale: it is of sources aaaaaaaaaaaa, these are bbbbbbbbbbbb" in project.pytest("tests/host")
    assert sorted(path.name for path in (project.root / "tests").iterdir() if path.is_file()) == ["conftest.py", "gpu_record.json"]


def test_failures_are_counted(project):
    (project.root / "tests/gpu/test_bad.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_fails(): assert False\ndef test_error(broken): pass\n@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    project.gpu()
    assert [project.record[name] for name in ("passed", "failed", "errors", "skipped")] == [2, 1, 1, 1]
    assert "2 passed, 1 failed, 1 errors, 1 skipped on NVIDIA H200" in project.pytest("tests/host")


@pytest.mark.parametrize("arguments", [("-k", "one"), ("-x",), ("--deselect", "tests/gpu/test_gpu.py::test_two")])
def test_a_partial_run_leaves_the_record(project, arguments):
    project.gpu()
    before = project.record
    project.sources("b" * 64)
    if "-x" in arguments:
        (project.root / "tests/gpu/test_a.py").write_text("def test_fails(): assert False\n")
    assert "is not written: this was not a whole run" in project.gpu(*arguments)
    assert project.record == before


def test_without_a_gpu_the_tests_are_skipped_with_the_reason(project):
    project.gpus(0)
    out = project.pytest("tests")
    assert "1 passed, 1 skipped" in out and "no NVIDIA GPU is visible" in out
    assert "is not written: no NVIDIA GPU is visible" in project.gpu()
    (project.root / "lib/cupy.py").write_text("raise ImportError\n")
    out = project.pytest("tests")
    assert "1 passed, 1 skipped" in out and "CuPy is not installed: pip install" in out


def test_a_broken_record_is_said_to_be_broken(project):
    (project.root / "tests/gpu_record.json").write_text('{"passed": 1')
    assert "cannot be read (JSONDecodeError" in project.pytest("tests/host")
