"""Records: whole or absent, validated, and merged by what tells rows apart."""

import json
import os

import pytest

from cuk import record

GOOD = {
    "study": "s", "machine": "h200", "driver": "1", "cuda": "13.0", "cupy": "14.2", "commit": None, "source_sha256": "0", "date": "d", "settings": {},
    "rows": [{"program": "p", "run": "graph", "settings": {}, "median_us": 1.0, "iqr_us": 0.1, "floor_us": 1.0, "ratio_to_floor": 1.0, "checked": "reference"}],
}  # fmt: skip


def test_a_record_round_trips(tmp_path):
    path = tmp_path / "deep" / "s.json"
    record.write_record(path, GOOD)
    assert record.load_record(path) == GOOD
    assert os.listdir(path.parent) == ["s.json"]


def test_a_killed_write_leaves_the_old_record_whole(tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    record.write_record(path, GOOD)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write_record(path, {**GOOD, "study": "other"})
    assert record.load_record(path) == GOOD
    assert os.listdir(tmp_path) == ["s.json"]


@pytest.mark.parametrize("missing", ["rows", "machine", "source_sha256"])
def test_a_missing_field_is_named(tmp_path, missing):
    broken = {k: v for k, v in GOOD.items() if k != missing}
    with pytest.raises(ValueError, match=f"field '{missing}' is missing"):
        record.write_record(tmp_path / "s.json", broken)
    assert not (tmp_path / "s.json").exists()


def test_a_row_without_its_median_is_named(tmp_path):
    rows = [{k: v for k, v in GOOD["rows"][0].items() if k != "median_us"}]
    with pytest.raises(ValueError, match=r"rows\[0\]: field 'median_us' is missing"):
        record.validate({**GOOD, "rows": rows})


@pytest.mark.parametrize(("field", "value"), [("median_us", float("nan")), ("median_us", 0), ("floor_us", float("inf")), ("ratio_to_floor", None),
                                              ("iqr_us", -1.0), ("median_us", "fast"), ("settings", []), ("checked", True)])  # fmt: skip
def test_a_value_that_no_measurement_gives_is_named_and_the_old_record_stays(tmp_path, field, value):
    path = tmp_path / "s.json"
    record.write_record(path, GOOD)
    with pytest.raises(ValueError, match=rf"rows\[0\]: field '{field}' is"):
        record.write_record(path, {**GOOD, "rows": [{**GOOD["rows"][0], field: value}]})
    assert record.load_record(path) == GOOD


def test_a_nan_in_any_field_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        record.write_record(tmp_path / "s.json", {**GOOD, "settings": {"x": float("nan")}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff\xfe", b'{"study": 1}'])
def test_a_file_of_something_else_is_named(tmp_path, content):
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.json: "):
        record.load_record(tmp_path / "s.json")


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(ValueError, match=r"s\.json: not JSON"):
        record.load_record(tmp_path / "s.json")


def test_the_source_hash_sees_an_edit(tmp_path, monkeypatch):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.cuh").write_text("1")
    monkeypatch.setattr(record, "cuda_src", lambda: tmp_path)
    before = record.source_sha256()
    assert before == record.source_sha256()
    (tmp_path / "core" / "a.cuh").write_text("2")
    assert record.source_sha256() != before


def test_records_in_the_repository_are_valid():
    from cuk.bench import results_dir

    for path in results_dir().rglob("*.json"):
        assert json.loads(path.read_text())
        record.load_record(path)


def test_only_a_row_that_says_why_may_lack_its_times():
    failed = {**GOOD["rows"][0], "median_us": None, "iqr_us": None, "ratio_to_floor": None}
    record.validate({**GOOD, "rows": [{**failed, "invalid": "could not be set up"}]})
    for row in (failed, {**failed, "invalid": "slow", "iqr_us": 1.0}, {**failed, "invalid": "slow", "floor_us": None}):
        with pytest.raises(ValueError, match=r"rows\[0\]: field '.*' is None"):
            record.validate({**GOOD, "rows": [row]})
