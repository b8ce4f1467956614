"""The studies without a GPU: bars against rows, what counts as done, what a failed part leaves; a decode loop of reference runs; figure and
table from a record."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuk import bench
from cuk.record import load_record, source_sha256, write_record
from cuk.runs import RUNS, CheckFailed, PdlRun
from cuk.runs import build as real_build

STUDIES = Path(__file__).parents[2] / "studies"


def load(name):
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


decode, figures, ahead = load("decode"), load("figures"), load("ahead")
FLOOR = bench.Floor(4.2e12, 4.1e12, 4.3e12, "plain", ())
TINY = dict(
    hidden_size=64, intermediate_size=72, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=97, head_dim=64
)


def row(run, us, why=None, at_most=None, model="llama-3.2-1b", context=1024, part="1b-1024"):
    return {"program": model, "run": run, "part": part, "settings": {"batch": 1, "context": context}, "median_us": us, "iqr_us": us and 1.0, "floor_us": 500.0,
            "ratio_to_floor": us and us / 500, "checked": us and "reference", "at_most": at_most, "invalid": why, "source_sha256": source_sha256()}  # fmt: skip


ROWS = [row("graph", 750.0, at_most=1.42), row("pdl", 575.0, at_most=1.17), row("torch_graph", 1300.0, "set up badly"),
        row("torch_compile", None, "could not be set up: ImportError: no module [torch]")]  # fmt: skip


def record_of(rows):
    return {"study": "decode", "machine": "h200", "driver": "d", "cuda": "c", "cupy": "p", "commit": None, "source_sha256": "s", "date": "d",
            "settings": {}, "rows": rows}  # fmt: skip


# ---- decode ----
def test_bars_are_met_or_missed():
    part = decode.PARTS["1b-1024"].only(("graph", "pdl", "torch_compile"))

    def verdicts(*rows):
        return [line.split(":")[0] for line in decode.verdicts(part, rows)]

    assert verdicts(*ROWS) == ["MISSED", "met", "not measured", "not measured"]  # persistent and loop have bars and no rows
    lines = decode.verdicts(part, [*ROWS[:2], row("torch_compile", 1000.0)])
    assert lines[-1].startswith("met: pdl 1.74 times as fast as torch.compile")
    lines = decode.verdicts(part, [*ROWS[:2], row("torch_compile", 800.0)])
    assert lines[-1].startswith("MISSED: pdl 1.39")
    assert verdicts(ROWS[0], row("pdl", 575.0, "a slow probe"))[1] == "NOT VALID (a slow probe)"


def test_the_bars_of_every_part_are_of_rows_that_it_has():
    for name, part in decode.PARTS.items():
        assert len(set(part.rows)) == len(part.rows), name
        if isinstance(part, decode.Part):
            assert set(part.bars) <= set(part.runs) and set(part.rivals) <= set(decode.RIVALS), name
            for run, switches in part.variants.values():
                assert set(switches) <= set(RUNS[run].switches), name
            assert part.only(("pdl",)).rows == ("pdl", *(n for n, (run, _) in part.variants.items() if run == "pdl")), name


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An H200 whose records are in tmp_path; the path of the study's."""
    monkeypatch.setattr(decode, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(bench, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(decode.Machine, "from_device", lambda: decode.Machine.load("h200"))
    monkeypatch.setattr(bench, "environment", lambda: {"machine": "h200", "driver": "d", "cuda": "c", "cupy": "p", "commit": None})
    return tmp_path / "h200" / "decode.json"


@pytest.mark.parametrize("name", ["8b-1024", "1b-unequal", "decoded"])
def test_a_part_is_done_when_the_record_has_all_its_rows_from_these_sources(machine, name):
    part = decode.PARTS[name]
    assert not decode.is_done(name, part)
    rows = [row(run, 1.0, part=name) for run in part.rows]
    rows[-1] = row(part.rows[-1], None, "could not be set up", part=name)  # trying again would fail again
    write_record(machine, record_of(rows))
    assert decode.is_done(name, part) and not decode.is_done("1b-1024", decode.PARTS["1b-1024"])
    write_record(machine, record_of(rows[1:]))
    assert not decode.is_done(name, part)
    assert decode.is_done(name, SimpleNamespace(rows=part.rows[1:]))
    write_record(machine, record_of([{**r, "source_sha256": "older"} for r in rows]))
    assert not decode.is_done(name, part)
    machine.write_text("{half a rec")
    assert not decode.is_done(name, part)


def test_the_study_lists_its_parts_and_refuses_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--list"])
    assert decode.main() == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in decode.PARTS)
    monkeypatch.setattr(sys, "argv", ["decode.py"])
    monkeypatch.setattr(decode, "has_gpu", lambda: False)
    assert decode.main() == 1
    assert "cuk doctor" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["decode.py", "--runs", "graph,megakernel"])
    assert decode.main() == 2
    assert "unknown run megakernel: the parts have stream, graph, pdl, persistent" in capsys.readouterr().err


@pytest.fixture
def study(machine, monkeypatch, capsys):
    """study(flags) runs the study on a made-up GPU: (exit code, output, errors, what each part was asked to run). `fails`: parts that do."""
    fails, asked = {}, {}

    def run(name, part, floor, quick):
        asked[name] = part.rows
        if name in fails:
            raise fails[name]
        table = bench.Table("decode")
        table.rows = [row(run, 500.0, part=name, context=str(part)) for run in part.rows]
        table.print = lambda: print("a table")
        return table

    def call(*flags):
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["decode.py", *flags])
        code = decode.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err, dict(asked)

    monkeypatch.setattr(decode, "run", run)
    monkeypatch.setattr(decode, "has_gpu", lambda: True)
    monkeypatch.setattr(decode, "measure_floor", lambda: FLOOR)
    monkeypatch.setattr(decode, "release_memory", lambda: None)
    call.fails = fails
    return call


def parts_of(path):
    return {r["part"] for r in load_record(path)["rows"]}


@pytest.mark.parametrize("flags, saves", [(["--json"], True), (["--json", "--quick"], False)])
def test_json_is_one_document_and_quick_records_nothing(study, machine, flags, saves):
    code, out, err, _ = study("--part", "1b-16384", *flags)
    assert code == 0 and {r["run"] for r in json.loads(out)} == set(decode.PARTS["1b-16384"].rows)
    assert "met: pdl" in err and machine.exists() is saves


def test_a_part_that_fails_leaves_the_record_of_the_others(study, machine):
    assert study("--part", "8b-1024")[0] == 0
    before = load_record(machine)["rows"]
    study.fails["1b-16384"] = CheckFailed("layer0.down.y[3]: got 1")
    code, out, _, _ = study("--part", "8b-1024", "--part", "1b-16384", "--part", "decoded")
    assert code == 1 and "8b-1024: the record has it" in out
    assert "1b-16384: FAILED: CheckFailed: layer0.down.y[3]: got 1" in out and "failed: 1b-16384; --part takes one alone" in out
    assert load_record(machine)["rows"][: len(before)] == before and parts_of(machine) == {"8b-1024", "decoded"}
    study.fails["8b-1024"] = KeyboardInterrupt()
    whole = machine.read_text()
    with pytest.raises(KeyboardInterrupt):
        study("--part", "8b-1024", "--again")
    assert machine.read_text() == whole


def test_a_part_taken_again_replaces_its_rows_alone(study, machine):
    study("--part", "8b-1024", "--part", "decoded")
    record = load_record(machine)
    record["rows"] = [{**r, "source_sha256": "older"} for r in record["rows"]]
    write_record(machine, record)
    study("--part", "8b-1024", "--runs", "graph,pdl")
    sources = {part: {r["source_sha256"] for r in load_record(machine)["rows"] if r["part"] == part} for part in parts_of(machine)}
    assert sources == {"8b-1024": {source_sha256()}, "decoded": {"older"}}  # what stands together is of one state of the sources
    assert study("--part", "8b-1024", "--runs", "pdl,torch_graph")[3] == {"8b-1024": ("pdl", "pdl no prefetch", "pdl tile", "torch_graph")}
    assert {"graph", "pdl", "torch_graph"} <= {r["run"] for r in load_record(machine)["rows"] if r["part"] == "8b-1024"}


def test_runs_that_cuk_does_not_have_are_left_out_with_a_note(study, monkeypatch):
    monkeypatch.setattr(decode, "RUNS", {name: kind for name, kind in RUNS.items() if name not in ("loop", "persistent")})
    code, out, _, asked = study("--part", "1b-1024", "--part", "1b-unequal")
    assert code == 0 and "loop: left out, since cuk has no run of this name (it has reference, stream" in out
    assert "persistent" not in asked["1b-1024"] and {"stream", "graph", "pdl"} <= set(asked["1b-1024"])
    assert "1b-1024: not measured: loop, at most 1.1 x floor" in out and "1b-unequal: not measured" not in out
    monkeypatch.setattr(decode, "RUNS", {**RUNS, "loop": object})
    code, out, _, asked = study("--part", "1b-1024", "--runs", "loop,persistent")
    assert asked == {"1b-1024": ("persistent", "loop")} and "left out" not in out and "not measured: pdl" in out
    assert "has none of loop" in study("--part", "1b-unequal", "--runs", "loop")[1]


@pytest.fixture
def loop_of_references(monkeypatch):
    """Runs are references, a check passes them, and a step takes `us` microseconds; a decode half a microsecond a step more."""

    def build(program, run, *, buffers=None):
        made = real_build(program, "reference", precision="storage", buffers=buffers)
        made.checked = None
        return made

    def check(runs):
        checked.append([int(run.buffers["positions"][0]) for run in runs.values()])
        for run in runs.values():
            run.checked = "reference"

    def timer(call, inner):
        call()
        return call.count * (100.5 if call.call else 100.0)

    checked = []
    for name, value in {"build": build, "check": check}.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(decode, "interleave", lambda runs, **how: bench.interleave(runs, **how, timer=timer))
    return checked


def test_a_decode_loop_stands_beside_its_step_replayed_at_the_mean_position(loop_of_references):
    part = decode.Decoded(TINY, 5, 6, 1.03)
    told = []
    table = decode.marked("decoded", part, decode.decoded(part, FLOOR, 2, told.append))
    assert loop_of_references == [[4, 4], [4, 4]]  # positions 0 to 9, half a position rounded to even
    replayed, looped = table.rows
    assert (replayed["run"], replayed["median_us"], looped["run"], looped["median_us"]) == ("pdl", 100.0, "pdl decoded", 100.5)
    assert looped["ratio_to_baseline"][0] == pytest.approx(1.005) and looped["at_most_to_baseline"] == 1.03 and looped["checked"]
    assert looped["settings"] | {"precision": None} == {"batch": 1, "context": 4, "prompt": 5, "tokens": 6, "precision": None}
    assert replayed["floor_us"] == FLOOR.us(decode.llama(TINY, context=4).min_bytes) and "at_most_to_baseline" not in replayed
    assert decode.verdicts(part, table.rows) == ["met: pdl decoded 1.005 x pdl, at most 1.03"] and told[-1] == "timing, 4 of 4"


def test_a_decode_loop_of_other_tokens_is_not_timed(loop_of_references, monkeypatch):
    monkeypatch.setattr(decode, "by_host", lambda run, prompt, tokens: [0] * tokens)
    with pytest.raises(CheckFailed, match=r"pdl: token \d of the loop is \[\d+\], the host chooses \[0\]"):
        decode.decoded(decode.Decoded(TINY, 5, 6, 1.03), FLOOR, 2, lambda message: None)


# ---- ahead ----
def test_every_variant_of_ahead_is_one_of_pdls():
    for name, switches in ahead.VARIANTS.items():
        assert set(switches) <= set(PdlRun.switches), name
        sizes = switches["ahead_bytes"]
        for size in sizes.values() if isinstance(sizes, dict) else [sizes]:
            assert size % 16 == 0, name


def test_ahead_lists_refuses_and_records(monkeypatch, capsys):
    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["ahead.py", *flags])
        return ahead.main(), *capsys.readouterr()

    code, out, _ = call("--list", "--only", "gate_up 10", "--only", "nothing")
    assert code == 0 and [line.split("  ")[0] for line in out.splitlines()] == ["nothing", "early, gate_up 10", "early, gate_up 10, 200 ns"]
    monkeypatch.setattr(ahead, "has_gpu", lambda: False)
    code, _, err = call()
    assert code == 1 and "cuk doctor" in err
    saved = []

    def compare(program, runs, *, variants, rivals, study, repeats):
        assert runs == ("pdl",) and rivals == () and study == "ahead"
        return SimpleNamespace(rows=[[name, switches, repeats] for name, (_, switches) in variants.items()], save=lambda: saved.append(1))

    monkeypatch.setattr(ahead, "has_gpu", lambda: True)
    monkeypatch.setattr(ahead, "compare", compare)
    code, _, err = call("--only", "sideways")
    assert code == 2 and "no variant holds sideways" in err
    code, out, _ = call("--only", "late, 5", "--json", "--quick")
    assert code == 0 and json.loads(out) == [["late, 5 MB", {"ahead_bytes": 5 << 20}, 5]] and not saved
    assert call("--only", "late, 5", "--json")[0] == 0 and len(saved) == 1


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
    looped = row("pdl decoded", 505.0) | {"at_most_to_baseline": 1.03, "baseline": "pdl", "ratio_to_baseline": [1.012, 1.01, 1.014]}
    assert "| pdl decoded | 505 | 1.01 | 1.03 × pdl (is 1.012) | reference |" in figures.table([looped])


def test_the_figure_leaves_out_what_is_invalid(root):
    pytest.importorskip("matplotlib")
    figures.draw(figures.rows_of(), root / "docs" / "decode.svg")
    drawn = (root / "docs" / "decode.svg").read_text()
    assert "<svg" in drawn
