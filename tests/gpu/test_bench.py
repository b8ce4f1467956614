"""The floor and the timing of runs, on the GPU itself."""

import cupy
import numpy as np
import pytest

from cuk import bench
from cuk.machine import Machine
from cuk.programs import chain
from cuk.runs import build, check


@pytest.fixture(scope="module")
def floor():
    return bench.measure_floor()


def test_the_floor_is_sound(floor):
    """Every reader read every byte (else it raises); on a known machine the best is fast enough for a record."""
    assert floor.valid, f"{floor.why_invalid}: {floor.rows}"
    assert floor.low <= floor.read_bytes_per_s <= floor.high
    assert {row["reader"].split("<")[0] for row in floor.rows} == {"read_plain", "read_bulk"}


def test_the_floor_is_near_the_stored_one(floor):
    stored = Machine.from_device(cupy.cuda.Device().id).constants.get("read_bytes_per_s")
    if stored is None:
        pytest.skip("no stored machine of this name has a read bandwidth")
    # The stored range is of several sweeps; another sweep may leave it by the 2% that grids differ by.
    assert 0.98 * stored.low <= floor.read_bytes_per_s <= 1.02 * stored.high


def test_a_known_time_is_measured():
    """A copy of 1 GiB cannot go faster than half the read bandwidth of any GPU so far, nor take longer than a millisecond a call more."""
    a, b = cupy.zeros(1 << 28, np.float32), cupy.empty(1 << 28, np.float32)
    measured = bench.interleave(
        {"one": lambda: cupy.copyto(b, a), "two": lambda: (cupy.copyto(b, a), cupy.copyto(a, b))}, repeats=5, inner=3
    )
    ratio, low, high = measured.ratio("two")
    assert low <= ratio <= high and 1.8 < ratio < 2.2  # the same copy twice; events and gaps add microseconds to some 500
    assert 2 * a.nbytes / measured.median("one") * 1e6 < 20e12
    assert "MHz SM" in measured.clocks or measured.clocks == ""


def test_rows_of_real_runs(floor):
    program = chain([(4096, 4096)] * 4)
    runs = {"stream": build(program, "stream")}
    runs |= {name: build(program, name, buffers=runs["stream"].buffers) for name in ("graph", "pdl")}
    with pytest.raises(ValueError, match="has not been checked"):
        bench.interleave(runs)
    check(runs)
    table = bench.Table("t")
    table.add(bench.interleave(runs, baseline="graph", repeats=5, inner=5), floor=floor)
    assert [row["run"] for row in table.rows] == ["stream", "graph", "pdl"]
    assert table.rows[0]["checked"] == "reference" and table.rows[1]["checked"].startswith("bitwise:")
    for row in table.rows:
        assert row["registers"] and row["smem_bytes"] and not any(row["spill_bytes"].values())
