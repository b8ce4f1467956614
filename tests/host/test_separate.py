"""What the runs of separate kernels decide before anything is launched: shared memory, early loads, what is asked of L2."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuk.machine import Machine
from cuk.programs import chain, llama
from cuk.runs import build
from cuk.runs.edges import unit_names, words_of
from cuk.runs.separate import asked_ahead, footprint
from cuk.task import ITEM_BYTES
from cuk.tasks import GateUp, Linear

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


def asks_of(program, *, ahead_bytes=5 << 20, early=False, **switches):
    asks = asked_ahead(program, fits_of(program, **switches), MACHINE, ahead_bytes, early)
    return {op.name: ask for op, ask in zip(program.ops, asks, strict=True) if ask}


def test_late_the_first_of_several_small_ops_asks_for_what_the_next_large_one_reads():
    asks = asks_of(PROGRAMS["1b"])
    assert {name: str(ask.view) for name, ask in asks.items()} == {f"layer{i}.qkv": f"w_gate_up[{i}]" for i in range(16)}


def test_late_an_op_right_before_a_large_one_asks_for_nothing():
    """The large one's own ring keeps memory busy then."""
    for name in ("1b, long", "8b"):
        assert not asks_of(PROGRAMS[name]), name


def test_early_all_that_wait_for_a_small_op_ask():
    asks = asks_of(PROGRAMS["1b"], early=True)
    assert set(asks) == {f"layer{i}.{kind}" for i in range(16) for kind in ("attention", "o_proj", "gate_up")}
    assert set(asks_of(PROGRAMS["8b"], early=True)) == {f"layer{i}.o_proj" for i in range(32)}
    assert set(asks_of(PROGRAMS["1b"], early=True, ahead_bytes={"o_proj": 16})) == {f"layer{i}.o_proj" for i in range(16)}
    assert not asks_of(PROGRAMS["1b"], early=True, ahead_bytes=0)


@given(programs, st.integers(1, 3), st.integers(1, 2), st.booleans(), st.integers(1, 1 << 22))
def test_what_is_asked_for_lies_behind_the_rings_within_the_weights_and_apart(program, teams, ctas_per_sm, early, size):
    fits = {op.name: fit for op, fit in zip(program.ops, fits_of(program, teams=teams, ctas_per_sm=ctas_per_sm), strict=True)}
    taken = {}
    for ask in asks_of(program, teams=teams, ctas_per_sm=ctas_per_sm, early=early, ahead_bytes=16 * size).values():
        reader = next(op for op in program.ops if ask.view in op.views.values())
        shape = reader.task.operands["w"].shape
        fit = fits[reader.name]
        assert ask.view.buffer.role == "weight" and ask.start % 16 == 0 and 0 < ask.bytes <= 16 * size
        assert ask.start + ask.bytes <= shape[0] * shape[1] * ITEM_BYTES["bfloat16"]
        in_rings = fit.num_stages * fit.teams * MACHINE.num_sms * fit.stage_bytes
        assert ask.start >= taken.get(reader.name, 0) and ask.start * 2 >= in_rings - 2 * fit.stage_bytes * fit.num_stages
        taken[reader.name] = ask.start + ask.bytes


@given(programs)
def test_every_edge_has_words_of_its_own_which_are_emptied_once_all_have_taken_them(program):
    words, total = words_of(program)
    ranges = [of.posted for of in words if of.posted]
    assert all(first % 16 == 0 and first + count <= total for first, count in ranges)
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    for i, of in enumerate(words):
        assert of.polled == (words[i - 1].posted if i else None), "only the op right behind takes them"
        assert of.emptied == (words[i - 1].polled if i else None), "by the op behind that, within the step"
    assert words[-1].polled is None, "nobody would empty them"


def test_where_a_decode_step_has_words():
    program = PROGRAMS["1b"]
    words, _ = words_of(program)
    assert {op.kind for op, of in zip(program.ops, words, strict=True) if of.polled} == {
        *("qkv", "attention", "gate_up", "down", "lm_head")
    }
    assert unit_names(program.ops, words)[:6] == ["embed", "qkv", "attention", "o_proj", "gate_up", "down"]
    assert {of.kind for op, of in zip(program.ops, words, strict=True) if op.kind == "down"} == {"kBoth"}
    wide = PROGRAMS["1b, batch 16"]  # whose down projection has its x from the ring
    assert not any(of.polled for op, of in zip(wide.ops, words_of(wide)[0], strict=True) if op.kind == "down")


@given(st.sampled_from([Linear, GateUp]), st.integers(1, 16), st.integers(1, 400))
def test_each_word_is_posted_by_one_task(kind, batch, n):
    task = kind(batch=batch, n=n, k=64)
    if not task.posts:
        assert n % 4 or (kind is Linear and n % 8)
        return
    rows, columns = task.operands["y"].shape
    assert task.posts == ("y",) and task.words * 4 == rows * columns
    posted = np.zeros((rows, columns // 4), int)
    for i in range(task.num_tasks):
        (region,) = task.writes(i)
        (r0, r1), (c0, c1) = region.box
        assert c0 % 4 == c1 % 4 == 0
        posted[r0:r1, c0 // 4 : c1 // 4] += 1
    assert (posted == 1).all()


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
        ({"ahead_bytes": {"qkv": -16}}, "ahead_bytes={'qkv': -16}: must be 0 or a multiple of 16"),
        ({"ahead_pace_ns": -1}, "ahead_pace_ns=-1: must be from 0 to 100000"),
        ({"deps": "row"}, "deps='row': must be one of op, tile"),
        ({"ring": 3}, "run 'pdl' has no switch ring: its switches and their defaults are teams=2, "),
    ],
)
def test_a_switch_out_of_range_is_named(switches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(PROGRAMS["chain"], "pdl", **switches)
