"""Timelines: times from the first start, spans from the op before, SMs that hold two CTAs; and tracing that leaves no trace when off."""

import re

import numpy as np
import pytest

from cuk.compile import compile, layout
from cuk.programs import llama
from cuk.runs.separate import kernel_name, source_for
from cuk.timeline import EVENTS, Timeline


def timeline():
    events = np.zeros((2, 3, len(EVENTS)), np.uint64)
    events[0] = [[1000, 1100, 1200, 2000, 3000, 0], [1000, 1100, 1200, 2500, 3500, 1], [1010, 1100, 1200, 0, 1300, 2]]
    events[1] = [[2000, 4000, 4500, 5000, 6000, 0], [2100, 4000, 4500, 5000, 6500, 2], [2100, 4000, 4500, 5000, 6400, 2]]
    return Timeline(["a", "b"], events)


def test_times_count_from_the_first_start_in_microseconds():
    t = timeline()
    np.testing.assert_allclose(t.of("end")[0], [2.0, 2.5, 0.3])
    assert np.isnan(t.of("first_task")[0, 2])
    with pytest.raises(ValueError, match="unknown event 'stop': known ones are start, waited"):
        t.of("stop")


def test_spans_count_from_the_end_of_the_op_before():
    a, b = timeline().rows()
    assert (a["start_min"], a["end_max"], a["shared_sms"]) == (0.0, 2.5, 0)
    assert b["waited_min"] == pytest.approx(0.5) and b["start_min"] == pytest.approx(-1.5)
    assert b["end_max"] == pytest.approx(3.0) and b["shared_sms"] == 1
    assert "shared SMs" in repr(timeline())


def test_events_are_in_the_order_of_the_device():
    found = layout('#include "core/trace.cuh"\nstruct Count { char order[static_cast<int>(cuk::Event::kCount)]; };', "Count", [])
    assert found.size == len(EVENTS)
    from cuk.compile import cuda_src

    names = re.search(r"enum class Event \{([^}]*)\}", (cuda_src() / "core" / "trace.cuh").read_text())[1]
    snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", n.strip()[1:]).lower() for n in names.split(",")]
    assert snake == [*EVENTS, "count"]


def test_tracing_costs_nothing_when_it_is_off():
    """No instruction reads the timer for it, and no register is taken; the kernel that traces is another one."""
    op = next(op for op in llama("llama-3.2-1b").ops if op.kind == "o_proj")
    plain, traced = (compile(source_for(op, teams=2, pdl=True, trigger="start", trace=t), name=kernel_name(op)) for t in (False, True))
    assert "%smid" not in plain.ptx and "%smid" in traced.ptx
    assert traced.resources.spill_bytes == 0
