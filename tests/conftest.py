"""GPU tests are skipped with the reason where there is no GPU; `--gpu-record` writes down a run of all of them, and every session
says at its end whether the record is of the sources at hand."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

HERE = Path(__file__).resolve().parent
RECORD = HERE / "gpu_record.json"

# Compiling takes as long as it takes; and what CI draws must not change from run to run.
settings.register_profile("cuk", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("cuk")


@cache
def no_gpu() -> str | None:
    """Why GPU tests cannot run, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'cuk[cuda13]' (or cuda12)"
    try:
        if cupy.cuda.runtime.getDeviceCount():
            return None
        return "no NVIDIA GPU is visible"
    except Exception as error:
        return f"no NVIDIA GPU can be used: {error}"


@cache
def record_module() -> ModuleType | None:
    try:
        return importlib.import_module("cuk.record")
    except ModuleNotFoundError:
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="PATH", help="write the outcome of a run of all GPU tests to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuRecord(config), "gpu-record")


class SkippedModule(pytest.Module):
    """A file of GPU tests that is not imported, since it may import CuPy."""

    def collect(self):
        pytest.skip(no_gpu(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HERE / "gpu" in module_path.parents and no_gpu():
        return SkippedModule.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and no_gpu():
            item.add_marker(pytest.mark.skip(reason=no_gpu()))


class GpuRecord:
    """Counts the GPU tests of a session and writes the record at its end."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.counts: Counter[str] = Counter()
        self.deselected = 0
        self.note = ""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += sum(item.get_closest_marker("gpu") is not None for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" in report.keywords and (report.when == "call" or report.outcome != "passed"):
            self.counts["errors" if report.failed and report.when != "call" else report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        given = self.config.getoption("--gpu-record")
        if not given:
            return
        whole = not (self.deselected or session.shouldstop or session.shouldfail) and session.testscollected
        ran = self.counts.total() - self.counts["skipped"]
        if no_gpu() or not whole or not ran or record_module() is None:
            reason = no_gpu() or ("cuk.record is missing" if record_module() is None else "this was not a whole run of the GPU tests")
            self.note = f"{given} is not written: {reason}"
            return
        names = ("passed", "failed", "errors", "skipped")
        write_whole(Path(given), describe_environment() | {name: self.counts[name] for name in names})
        self.note = f"{given} is written"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("GPU tests")
        if self.note:
            terminalreporter.write_line(self.note)
        terminalreporter.write_line(state_of_record())


def describe_environment() -> dict[str, Any]:
    import cupy

    record = record_module()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return {
        **record.environment(),
        "device": name.decode() if isinstance(name, bytes) else name,
        "python": sys.version.split()[0],
        "source_sha256": record.source_sha256(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """The file is the old one or the new one, whenever this is interrupted."""
    handle, temporary = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def state_of_record(path: Path = RECORD) -> str:
    """Whether the GPU tests have passed on the sources at hand, and what to do if they have not."""
    where, how = "tests/gpu_record.json", "run `make gpu` on a machine with a GPU"
    record = record_module()
    if record is None:
        return f"{where}: cuk.record is missing, so nothing can be said of it"
    try:
        found = json.loads(path.read_text())
        counts = {name: int(found[name]) for name in ("passed", "failed", "errors", "skipped")}
        ran = f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} on {found['device']}, {found['date']}"
        recorded = found["source_sha256"]
    except FileNotFoundError:
        return f"{where} is missing: {how}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{where} cannot be read ({error!r}): {how}"
    now = record.source_sha256()
    if recorded != now:
        return f"{where} is stale: it is of sources {recorded[:12]}, these are {now[:12]} ({ran}): {how}"
    return f"{where} is of these sources: {ran}"
