"""The studies without a GPU: bars against rows, what counts as done, figure and table from a record."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from cuk.record import source_sha256, write_record

STUDIES = Path(__file__).parents[2] / "studies"


def load(name):
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


decode, figures = load("decode"), load("figures")


def row(run, us, why=None, at_most=None, model="llama-3.2-1b", context=1024):
    return {"program": model, "run": run, "settings": {"batch": 1, "context": context}, "median_us": us, "iqr_us": us and 1.0, "floor_us": 500.0,
            "ratio_to_floor": us and us / 500, "checked": us and "reference", "at_most": at_most, "invalid": why, "source_sha256": source_sha256()}  # fmt: skip


ROWS = [row("graph", 750.0, at_most=1.42), row("pdl", 575.0, at_most=1.17), row("torch_graph", 1300.0, "set up badly"),
        row("torch_compile", None, "could not be set up: ImportError: no module [torch]")]  # fmt: skip


def record_of(rows):
    return {"study": "decode", "machine": "h200", "driver": "d", "cuda": "c", "cupy": "p", "commit": None, "source_sha256": "s", "date": "d",
            "settings": {}, "rows": rows}  # fmt: skip


# ---- decode ----
def test_bars_are_met_or_missed():
    part = decode.PARTS["1b-1024"]
    assert [line.split(":")[0] for line in decode.verdicts(part, ROWS)] == ["MISSED", "met"]
    lines = decode.verdicts(part, [*ROWS[:2], row("torch_compile", 1000.0)])
    assert lines[2].startswith("met: pdl 1.74 times as fast as torch.compile")
    lines = decode.verdicts(part, [*ROWS[:2], row("torch_compile", 800.0)])
    assert lines[2].startswith("MISSED: pdl 1.39")


def test_a_part_is_done_when_the_record_has_all_its_rows_from_these_sources(tmp_path, monkeypatch):
    part = decode.PARTS["8b-1024"]
    monkeypatch.setattr(decode, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(decode.Machine, "from_device", lambda: decode.Machine.load("h200"))
    assert not decode.is_done(part)
    names = [*part.runs, *part.variants, *part.rivals]
    rows = [row(name, 1.0, model=part.model) for name in names]
    rows[-1] = row(names[-1], None, "could not be set up", model=part.model)  # trying again would fail again
    write_record(tmp_path / "h200" / "decode.json", record_of(rows))
    assert decode.is_done(part) and not decode.is_done(decode.PARTS["1b-1024"])
    write_record(tmp_path / "h200" / "decode.json", record_of(rows[1:]))
    assert not decode.is_done(part)
    write_record(tmp_path / "h200" / "decode.json", record_of([{**r, "source_sha256": "older"} for r in rows]))
    assert not decode.is_done(part)


def test_the_study_lists_its_parts_and_refuses_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--list"])
    assert decode.main() == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in decode.PARTS)
    monkeypatch.setattr(sys, "argv", ["decode.py"])
    monkeypatch.setattr(decode, "has_gpu", lambda: False)
    assert decode.main() == 1
    assert "cuk doctor" in capsys.readouterr().err


def fake_table(rows):
    class Table:
        def print(self):
            print("a table")

        def save(self):
            saved.append(rows)
            return "decode.json"

    saved = []
    table = Table()
    table.rows, table.saved = rows, saved
    return table


@pytest.mark.parametrize("flags, saves", [(["--json"], 1), (["--json", "--quick"], 0)])
def test_json_is_one_document_and_quick_records_nothing(monkeypatch, capsys, flags, saves):
    table = fake_table(ROWS)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--part", "1b-1024", "--again", *flags])
    monkeypatch.setattr(decode, "has_gpu", lambda: True)
    monkeypatch.setattr(decode, "measure_floor", lambda: object())
    monkeypatch.setattr(decode, "run", lambda part, floor, quick: table)
    monkeypatch.setattr(decode, "release_memory", lambda: None)
    assert decode.main() == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == ROWS
    assert "MISSED: graph" in captured.err and len(table.saved) == saves


# ---- figures ----
@pytest.fixture
def root(tmp_path, monkeypatch):
    write_record(tmp_path / "studies/results/h200/decode.json", record_of(ROWS))
    (tmp_path / "README.md").write_text(f"before\n{figures.MARKS[0]}\nold\n{figures.MARKS[1]}\nafter\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    return tmp_path


def test_the_readmes_table_comes_from_the_record(root, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda rows, path: None)
    assert figures.main() == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| llama-3.2-1b, 1, 1024 | pdl | 575 | 1.15 | 1.17 | reference |" in text
    assert "(invalid: set up badly)" in text and "could not be set up" in text


def test_the_figure_leaves_out_what_is_invalid(root):
    pytest.importorskip("matplotlib")
    figures.draw(figures.rows_of(), root / "docs" / "decode.svg")
    drawn = (root / "docs" / "decode.svg").read_text()
    assert "<svg" in drawn
