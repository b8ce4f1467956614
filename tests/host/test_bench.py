"""The protocol of measuring, with a made-up clock: order, statistics, refusals, rows."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from cuk import bench
from cuk.programs import chain


class Fake:
    correct_by_claim = True

    def __init__(self, us, checked="reference"):
        self.us, self.checked, self.calls, self.settings, self.resources = us, checked, 0, {}, {}

    def __call__(self):
        self.calls += 1


def timer(call, inner):
    return call.us * (1 + 0.01 * np.sin(call.calls)) + 0 * inner if not call() else 0


FLOOR = bench.Floor(4.2e12, 4.1e12, 4.3e12, "plain", ())


def measure(**runs):
    return bench.interleave(runs, baseline="graph", repeats=20, inner=2, timer=timer)


def test_every_variant_is_sampled_in_every_round():
    m = measure(graph=Fake(10.0), pdl=Fake(8.0))
    assert {name: len(s) for name, s in m.samples.items()} == {"graph": 20, "pdl": 20}


def test_ratio_and_its_interval():
    value, low, high = measure(graph=Fake(10.0), pdl=Fake(8.0)).ratio("pdl")
    assert low <= value <= high
    assert abs(value - 0.8) < 0.02 and high - low < 0.05  # the made-up clock strays by 1%


def test_order_is_drawn_anew():
    order = []
    runs = {name: Fake(1.0) for name in "abcd"}
    bench.interleave(runs, repeats=10, inner=1, timer=timer, progress=order.append)
    rounds = {tuple(order[i : i + 4]) for i in range(0, 40, 4)}
    assert len(rounds) > 1 and all(sorted(r) == list("abcd") for r in rounds)


def test_an_unchecked_run_is_refused():
    with pytest.raises(ValueError, match="'pdl' has not been checked"):
        measure(graph=Fake(10.0), pdl=Fake(8.0, checked=None))


def test_a_run_known_to_be_relaxed_is_timed_unchecked():
    relaxed = Fake(8.0, checked=None)
    relaxed.correct_by_claim = False
    measure(graph=Fake(10.0), relaxed=relaxed)


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"inner": 0}])
def test_bad_counts_are_named(bad):
    with pytest.raises(ValueError, match="must be at least 1"):
        bench.interleave({"graph": Fake(1.0)}, timer=timer, **bad)


def test_rows_carry_the_floor_and_say_what_is_invalid():
    program = chain([(64, 64)])
    table = bench.Table("s")
    table.add(measure(graph=Fake(10.0), rival=Fake(30.0)), floor=FLOOR, program=program, expected_us={"rival": 20.0}, batch=1, context=0)
    graph, rival = table.rows
    assert graph["floor_us"] == pytest.approx(program.min_bytes / 4.2e12 * 1e6)
    assert graph["ratio_to_floor"] == pytest.approx(graph["median_us"] / graph["floor_us"])
    assert graph["invalid"] is None and "1.1 times" in rival["invalid"]
    assert "graph" in repr(table)


def test_a_slow_probe_makes_rows_invalid():
    slow = bench.Floor(3.9e12, 3.8e12, 4.0e12, "plain", (), why_invalid="the probe read 3.90 TB/s, under 4.1")
    table = bench.Table("s")
    table.add(measure(graph=Fake(10.0)), floor=slow, program=chain([(64, 64)]))
    assert "3.90 TB/s" in table.rows[0]["invalid"]


def test_saving_replaces_rows_of_the_same_settings_only(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "environment", lambda: {"machine": "m", "driver": "d", "cuda": "c", "cupy": "p", "commit": None})
    program = chain([(64, 64)])
    for us, context in ((10.0, 0), (20.0, 0), (30.0, 7)):
        table = bench.Table("s")
        table.add(measure(graph=Fake(us)), floor=FLOOR, program=program, context=context)
        table.save(tmp_path / "s.json")
    rows = bench.load_record(tmp_path / "s.json")["rows"]
    assert sorted(round(row["median_us"]) for row in rows) == [20, 30]


def test_the_program_is_that_of_the_first_run_and_the_floor_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "floor_here", lambda: measured.append(1) or FLOOR)
    run = Fake(10.0)
    run.program = chain([(64, 64)])
    table = bench.Table("s")
    table.add(measure(graph=run, rival=Fake(30.0)), batch=1)
    assert [row["program"] for row in table.rows] == ["chain"] * 2 and len(measured) == 1
    with pytest.raises(ValueError, match="variants graph do not tell their program: give program="):
        table.add(measure(graph=Fake(1.0)), floor=FLOOR)


def test_every_reason_against_a_row_is_told():
    slow = bench.Floor(3.9e12, 3.8e12, 4.0e12, "plain", (), why_invalid="a slow probe")
    table = bench.Table("s")
    table.add(measure(graph=Fake(10.0), rival=Fake(30.0)), floor=slow, program=chain([(64, 64)]), expected_us={"rival": 20.0},
              notes={"rival": "wrong [logits]"})  # fmt: skip
    assert table.rows[0]["invalid"] == "a slow probe"
    assert all(reason in table.rows[1]["invalid"] for reason in ("wrong [logits]", "a slow probe", "1.1 times"))
    shown = StringIO()
    Console(file=shown, width=200).print(table)
    for text in (shown.getvalue(), table._repr_html_(), repr(table)):
        assert "wrong [logits]" in text  # brackets are not taken for markup
    assert not slow.valid and "INVALID: a slow probe" in table._repr_html_()


def test_html_is_escaped():
    table = bench.Table("<s>")
    table.add(measure(graph=Fake(10.0)), floor=FLOOR, program=chain([(64, 64)]), note="<b>")
    assert "<s>" not in table._repr_html_() and "<b>" not in table._repr_html_() and "&lt;b&gt;" in table._repr_html_()


def test_a_record_tells_its_floors_and_whether_one_makes_it_invalid(monkeypatch):
    monkeypatch.setattr(bench, "environment", dict)
    table = bench.Table("s")
    table.add(measure(graph=Fake(10.0)), floor=FLOOR, program=chain([(64, 64)]))
    assert table.record()["invalid"] is None
    table.add(measure(graph=Fake(10.0)), floor=bench.Floor(3e12, 3e12, 3e12, "plain", (), why_invalid="slow"), program=chain([(64, 64)]))
    assert table.record()["invalid"] == "slow" and len(table.record()["floors"]) == 2


def test_what_is_no_record_is_put_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "environment", lambda: {"machine": "m", "driver": "d", "cuda": "c", "cupy": "p", "commit": None})
    path = tmp_path / "s.json"
    path.write_text("{half a rec")
    table = bench.Table("s")
    table.add(measure(graph=Fake(10.0)), floor=FLOOR, program=chain([(64, 64)]))
    table.save(path)
    assert len(bench.load_record(path)["rows"]) == 1
    assert (tmp_path / "s.json.broken").read_text() == "{half a rec"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1980, 2619, 0x0000000000000000\n", "1980 MHz SM, 2619 MHz memory, not held back"),
        ("1980, 2619, 0x0000000000000001", "1980 MHz SM, 2619 MHz memory, not held back"),
        ("1455, 2619, 0x0000000000000024", "1455 MHz SM, 2619 MHz memory, held back by power cap, temperature (software)"),
        ("[N/A], 2619, Not Supported", "[N/A], 2619, Not Supported"),
    ],
)
def test_clocks_are_told_in_words(line, told):
    assert bench._read_clocks(line) == told


def test_a_rival_that_could_not_be_set_up_is_a_row_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "environment", lambda: {"machine": "m", "driver": "d", "cuda": "c", "cupy": "p", "commit": None})
    program, table = chain([(64, 64)]), bench.Table("s")
    table.add(measure(graph=Fake(10.0)), floor=FLOOR, program=program, context=0)
    table.add_failed("torch_graph", "ImportError: no module [torch]", program=program, floor=FLOOR, context=0)
    rows = bench.load_record(table.save(tmp_path / "s.json"))["rows"]
    assert rows[1]["run"] == "torch_graph" and rows[1]["median_us"] is None and rows[0]["rounds"] == 20
    shown = StringIO()
    Console(file=shown, width=200).print(table)
    for text in (shown.getvalue(), table._repr_html_(), repr(table)):
        assert "ImportError: no module [torch]" in text and "not timed" in text
