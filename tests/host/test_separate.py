"""What the runs of separate kernels decide before anything is launched: shared memory, early loads, what is asked of L2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuk.machine import Machine
from cuk.programs import chain, llama
from cuk.runs import build
from cuk.runs.separate import asked_ahead, footprint
from cuk.task import ITEM_BYTES

MACHINE = Machine.load("h200")
PROGRAMS = {
    "1b": llama("llama-3.2-1b"),
    "1b, batch 16": llama("llama-3.2-1b", batch=16),
    "1b, long": llama("llama-3.2-1b", context=16384),
    "8b": llama("llama-3.1-8b"),
    "chain": chain([(3072, 2048), (2048, 3072)], layers=2),
}
programs = st.sampled_from(list(PROGRAMS.values()))


def fits_of(program, **switches):
    return [footprint(op.task, MACHINE, index=i, **switches) for i, op in enumerate(program.ops)]


@given(programs, st.data())
def test_early_loads_keep_to_their_bytes(program, data):
    index, early = data.draw(st.integers(0, len(program.ops) - 1)), data.draw(st.integers(1, 1 << 20))
    task = program.ops[index].task
    fit = footprint(task, MACHINE, index=index, early_bytes=early)
    at_once = fit.in_flight * fit.teams * task.stage_bytes
    assert fit.in_flight >= 1 and at_once <= max(early, fit.teams * task.stage_bytes)
    assert fit.in_flight >= footprint(task, MACHINE, index=index, early_bytes=max(1, early // 2)).in_flight


def test_the_first_of_several_small_ops_asks_for_what_the_next_large_one_reads():
    program = PROGRAMS["1b"]
    asks = dict(zip((op.name for op in program.ops), asked_ahead(program, fits_of(program), MACHINE), strict=True))
    assert {name for name, ask in asks.items() if ask} == {f"layer{i}.qkv" for i in range(16)}
    assert all(str(asks[f"layer{i}.qkv"][0]) == f"w_gate_up[{i}]" for i in range(16))


def test_an_op_right_before_a_large_one_asks_for_nothing():
    """The large one's own ring keeps memory busy then."""
    for name in ("1b, long", "8b"):
        assert not any(asked_ahead(PROGRAMS[name], fits_of(PROGRAMS[name]), MACHINE)), name


@given(programs, st.integers(1, 3), st.integers(1, 2))
def test_what_is_asked_for_is_a_later_ops_and_begins_after_its_rings(program, teams, ctas_per_sm):
    fits = fits_of(program, teams=teams, ctas_per_sm=ctas_per_sm)
    for i, ask in enumerate(asked_ahead(program, fits, MACHINE)):
        if ask is None:
            continue
        view, start = ask
        j = next(j for j in range(i + 1, len(program.ops)) if view in program.ops[j].views.values())
        shape = program.ops[j].task.operands["w"].shape
        assert j > i + 1 and view.buffer.role == "weight"
        assert 0 < start < shape[0] * shape[1] * ITEM_BYTES["bfloat16"] and start % 16 == 0


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"teams": 0}, "teams=0: must be from 1 to 6"),
        ({"stages": 65}, "stages=65: must be from 1 to 64"),
        ({"ctas_per_sm": 9}, "ctas_per_sm=9: must be from 1 to 8"),
        ({"prefetch": -1}, "prefetch=-1: must be True, False or a number of stages"),
        ({"trigger": "late"}, "trigger='late': must be one of start, loads, end"),
        ({"early_bytes": 0}, "early_bytes=0: must be 1 or more"),
        ({"ahead_bytes": 24}, "ahead_bytes=24: must be 0 or a multiple of 16"),
        ({"ring": 3}, "run 'pdl' has no switch ring: its switches and their defaults are teams=2, "),
    ],
)
def test_a_switch_out_of_range_is_named(switches, message):
    with pytest.raises(ValueError, match=message):
        build(PROGRAMS["chain"], "pdl", **switches)
