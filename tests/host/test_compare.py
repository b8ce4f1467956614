"""What `compare` does on a GPU, with the runs, the clock and the floor made up: order of work, rivals that fail or differ, rows."""

import contextlib
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cuk import bench
from cuk.programs import chain, llama

compare = importlib.import_module("cuk.compare")
FLOOR = bench.Floor(4.2e12, 4.1e12, 4.3e12, "plain", ())
LOGITS = np.linspace(-1, 1, 8, dtype=np.float32)[None]


class Fake:
    correct_by_claim = True

    def __init__(self, name, us, settings=None, off=0.0):
        self.name, self.us, self.settings, self.off, self.checked, self.resources = name, us, settings or {}, off, None, {}
        self.buffers = {"logits": LOGITS}

    def __call__(self):
        pass

    def check(self, ours):
        self.checked = "logits"
        return self.off


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that builds, checks and times Fakes; what happened, in order."""
    happened = []

    def build(program, run, *, buffers=None, seed=0, **switches):
        assert (buffers is None) == (run == "stream")
        happened.append(f"build {run}")
        return Fake(run, {"stream": 900.0, "graph": 800.0, "pdl": 650.0}[run], switches)

    def check(runs, progress=None):
        happened.append("check")
        for run in runs.values():
            run.checked = "reference"

    def interleave(runs, **settings):
        happened.append("time")
        return bench.interleave(runs, **settings, timer=lambda call, inner: call.us)

    def broken(program, buffers):
        raise ImportError("no module [torch]\nand more")

    rivals = {"broken": broken, "off": lambda p, b: Fake("off", 700.0, off=0.3), "fine": lambda p, b: Fake("fine", 1000.0, off=0.01)}
    monkeypatch.setattr(compare, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda device: contextlib.nullcontext())))
    for name, value in {"build": build, "check": check, "interleave": interleave, "measure_floor": lambda: FLOOR, "RIVALS": rivals}.items():
        monkeypatch.setattr(compare, name, value)
    return happened


def test_runs_variants_and_rivals_are_rows_of_one_table(gpu):
    told = []
    variants = {"pdl bare": ("pdl", {"prefetch": False})}
    table = compare.compare(llama("llama-3.2-1b"), variants=variants, rivals=["fine"], device=0, repeats=3, progress=told.append)
    assert {row["run"]: row["median_us"] for row in table.rows} == {"stream": 900, "graph": 800, "pdl": 650, "pdl bare": 650, "fine": 1000}
    assert gpu == ["build stream", "build graph", "build pdl", "build pdl", "check", "time"]
    assert table.baseline == "graph" and table.rows[3]["settings"] == {"batch": 1, "context": 1024, "prefetch": False}
    assert all(row["checked"] and row["rounds"] == 3 and row["invalid"] is None for row in table.rows)
    assert told[-1] == "timing, 15 of 15"


def test_a_stream_that_was_not_asked_for_is_checked_but_not_timed(gpu):
    table = compare.compare(llama("llama-3.2-1b"), ["pdl"], rivals=(), repeats=2)
    assert [row["run"] for row in table.rows] == ["pdl"] and gpu == ["build stream", "build pdl", "check", "time"]


def test_the_runs_are_handed_over_before_a_rival_can_take_the_process_with_it(gpu):
    early = []
    table = compare.compare(llama("llama-3.2-1b"), ["graph", "pdl"], rivals=["fine"], repeats=2, on_runs=early.append)
    assert [row["run"] for row in early[0].rows] == ["graph", "pdl"] and len(early) == 1
    assert [row["run"] for row in table.rows] == ["graph", "pdl", "fine"]
    compare.compare(llama("llama-3.2-1b"), ["graph"], rivals=[], repeats=2, on_runs=early.append)
    assert len(early) == 1


def test_a_rival_that_fails_or_differs_spoils_nothing_but_its_row(gpu):
    table = compare.compare(llama("llama-3.2-1b"), ["graph"], rivals=["broken", "off"], repeats=2)
    rows = {row["run"]: row for row in table.rows}
    assert rows["graph"]["invalid"] is None
    assert rows["broken"]["median_us"] is None and rows["broken"]["invalid"] == "could not be set up: ImportError: no module [torch]"
    assert "logits differ by 0.3 of their RMS" in rows["off"]["invalid"] and rows["off"]["median_us"] == 700


def test_the_rivals_that_stand_unasked(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compare.likely_rivals(llama("llama-3.2-1b")) == ("cublas",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert compare.likely_rivals(llama("llama-3.2-1b")) == ("torch_graph", "cublas")
    assert compare.likely_rivals(chain([(64, 64)])) == ("cublas",)


@pytest.mark.parametrize("program", [llama("llama-3.1-8b", batch=16), chain([(3072, 2048), (2048, 2048)], layers=3)], ids=["8b", "chain"])
def test_what_is_scaled_down_is_small_and_of_the_same_shape(program):
    small = compare.scaled_down(program)
    assert small.nbytes < 64e6
    assert {op.kind for op in small.ops} <= {op.kind for op in program.ops} | {"norm"}
