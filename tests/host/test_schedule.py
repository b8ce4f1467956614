"""Schedules survive words and files unchanged; what is not a schedule, or is of something else, is refused by the field's name."""

import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuk
from cuk.counters import assemble, op_relations
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import chain, llama, rebuild
from cuk.schedule import NONE, Schedule
from cuk.schedulers import SCHEDULERS, balanced, dynamic, round_robin, waves
from cuk.target import fingerprint
from cuk.task import Field, Region
from cuk.validate import Refused, validate
from tests.toys import H200, MUTATIONS, Toy, machine, mutate, random_program

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
         "head_dim": 64}  # fmt: skip
SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int, mutations: int = 0) -> tuple[Schedule, Program, Machine]:
    """Some schedule of some program, and then changed so often."""
    rng = random.Random(seed)
    program, target = random_program(rng), machine(rng.randint(1, 4))
    name = rng.choice(list(SCHEDULERS))
    options = {} if name == "dynamic" else {"signals": rng.choice(["task", "last"])}
    schedule = SCHEDULERS[name](program, target, deps=rng.choice(["op", "tile"]), teams=rng.randint(1, 3), **options)
    for _ in range(mutations):
        schedule = mutate(schedule, rng, rng.choice(MUTATIONS)) or schedule
    return schedule, program, target


@given(SEEDS, st.integers(0, 3))
def test_words_and_files_give_back_the_schedule(seed, mutations):
    schedule, *_ = drawn(seed, mutations)
    words = schedule.encode()
    assert words.dtype == np.int32 and words.shape[2] % 4 == 0
    assert Schedule.decode(words, schedule.header()) == schedule
    with tempfile.TemporaryDirectory() as folder:
        schedule.save(Path(folder) / "s.json")
        loaded = Schedule.load(Path(folder) / "s.json")
    assert loaded == schedule and [loaded.queue(q) for q in range(loaded.num_queues)] == [
        schedule.queue(q) for q in range(schedule.num_queues)
    ]


@given(SEEDS, st.data())
def test_words_that_are_no_schedule_are_refused(seed, data):
    schedule, *_ = drawn(seed)
    words = schedule.encode()
    q = data.draw(st.integers(0, words.shape[0] - 1))
    length = schedule.starts[q + 1] - schedule.starts[q]
    words[q, length, 4] = 7  # behind the end
    with pytest.raises(ValueError, match="words"):
        Schedule.decode(words, schedule.header())
    if length:
        words = schedule.encode()
        words[q, data.draw(st.integers(0, int(length) - 1)), 0] += len(schedule.structs)
        with pytest.raises(ValueError, match="words: an opcode is not its op's"):
            Schedule.decode(words, schedule.header())


def test_the_words_of_an_instruction():
    program = chain([(16, 64), (8, 16)])
    schedule = round_robin(program, machine(2), teams=1)
    # Two tiles of the first product, then one of the second, which waits for both. The sizes are not part of the struct.
    assert schedule.structs == tuple(dict.fromkeys(op.task.struct for op in program.ops))
    assert schedule.encode().tolist() == [
        [[0, 0, 0, 0, -1, -1, -1, -1], [schedule.structs.index(program.ops[1].task.struct), 1, 0, -1, 0, 2, -1, -1], [-1] * 8],
        [[0, 0, 1, 0, -1, -1, -1, -1], [-1] * 8, [-1] * 8],
    ]
    assert schedule.totals.tolist() == [2]


@given(SEEDS)
def test_thresholds_are_the_totals_of_their_counters(seed):
    schedule, *_ = drawn(seed)
    used = schedule.waits[:, :, 0] != NONE
    assert (schedule.waits[:, :, 1][used] == schedule.totals[schedule.waits[:, :, 0][used]]).all()
    assert (schedule.totals > 0).all(), "a counter that nobody signals"


def test_signalling_once_a_queue_saves_signals():
    program = llama(SMALL)
    each, last = (round_robin(program, machine(4), signals=signals, teams=2) for signals in ("task", "last"))
    waited = range(len(program.ops) - 1)  # nobody waits for the last
    assert each.signals == sum(program.ops[op].task.num_tasks for op in waited)
    assert last.signals == sum(min(8, program.ops[op].task.num_tasks) for op in waited)
    for schedule in (each, last):
        validate(schedule, program, machine(4))


# ---- granularity ----
def test_a_tile_of_attention_waits_for_its_kv_head_alone():
    program = llama("llama-3.2-1b")
    schedule = round_robin(program, H200, deps="tile")
    qkv, attention = (next(i for i, op in enumerate(program.ops) if op.name == f"layer3.{kind}") for kind in ("qkv", "attention"))
    signalled = {}
    for op, task, signal in zip(schedule.op, schedule.task, schedule.signal, strict=True):
        if op == qkv:
            signalled.setdefault(int(signal), set()).add(int(program.ops[qkv].task.tile_dims(int(task))[0]))
    at = int(np.flatnonzero((schedule.op == attention) & (schedule.task == program.ops[attention].task.num_tasks - 1))[0])
    counters = [int(c) for c in schedule.waits[at, :, 0] if c != NONE]
    # The last task is of the last KV head: query heads 28 to 31, key head 32 + 7, value head 40 + 7.
    assert len(counters) == 1 and signalled[counters[0]] == {28, 29, 30, 31, 39, 47}


def spread(num_tasks: int) -> Program:
    """Each task of the last op reads one tile of each of the two before: task t those at t and t + 1."""
    program = Program("spread")
    a, b, c = (program.buffer(name, (num_tasks,), "float32") for name in "abc")

    def one(operand, t):
        return Region(operand, ((t, t + 1),))

    shape = (num_tasks,)
    out = (("y", shape, "out", "activation"),)
    program.op("write", Toy(out, tuple(((), (one("y", t),)) for t in range(num_tasks))), "first", y=a)
    program.op("write", Toy(out, tuple(((), (one("y", t),)) for t in range(num_tasks))), "second", y=b)
    both = (("x", shape, "in", "activation"), ("z", shape, "in", "activation"), *out)
    tiles = tuple(((one("x", t), one("z", (t + 1) % num_tasks)), (one("y", t),)) for t in range(num_tasks))
    program.op("join", Toy(both, tiles), "join", x=a, z=b, y=c)
    return program


def test_tiles_fall_back_to_ops_where_an_instruction_would_have_to_wait_too_often():
    program = spread(8)
    fine = round_robin(program, machine(3), deps="tile")
    assert fine.num_counters == 16 and (fine.waits[:, :, 0] != NONE).sum(axis=1).max() == 2
    coarse = [relation for mine in op_relations(program, "tile") for relation in mine]
    assert not any(relation.full for relation in coarse)
    # A reader of everything beside the readers of tiles: it would wait for each tile's counter.
    whole = Program("whole")
    a, b, c = (whole.buffer(name, (8,), "float32") for name in "abc")
    tile, every = [((t, t + 1),) for t in range(8)], ((0, 8),)
    given_ = (("x", (8,), "in", "activation"), ("y", (8,), "out", "activation"))
    whole.op("write", Toy(given_[1:], tuple(((), (Region("y", box),)) for box in tile)), "first", y=a)
    whole.op("tiles", Toy(given_, tuple(((Region("x", box),), (Region("y", box),)) for box in tile)), "tiles", x=a, y=b)
    whole.op("whole", Toy(given_, (((Region("x", every),), (Region("y", every),)),)), "all", x=a, y=c)
    for limit, counters in ((8, 8), (7, 1)):
        schedule = round_robin(whole, machine(2), deps="tile", max_waits=limit)
        assert schedule.num_counters == counters
        validate(schedule, whole, machine(2))


def test_an_op_that_follows_many_waits_for_each_of_them():
    program = Program("wide")
    sources = [program.buffer(f"a{i}", (1,), "float32") for i in range(9)]
    box = ((0, 1),)
    for i, source in enumerate(sources):
        program.op("write", Toy((("y", (1,), "out", "activation"),), (((), (Region("y", box),)),)), f"w{i}", y=source)
    given_ = tuple((f"x{i}", (1,), "in", "activation") for i in range(9))
    sink = program.buffer("y", (1,), "float32")
    tiles = ((tuple(Region(f"x{i}", box) for i in range(9)), (Region("y", box),)),)
    views = {f"x{i}": source for i, source in enumerate(sources)}
    program.op("join", Toy((*given_, ("y", (1,), "out", "activation")), tiles), "join", **views, y=sink)
    for deps in ("op", "tile"):
        schedule = balanced(program, machine(2), deps=deps)
        assert len(next(i for q in range(2) for i in schedule.queue(q) if i.op == 9).waits) == 9 and schedule.words == 24
        validate(schedule, program, machine(2))


# ---- bad input ----
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sms": 133}, r"num_sms=133: must be from 1 to 132 \(the SMs of h200\)"),
        ({"num_sms": 0}, "num_sms=0: must be from 1 to 132"),
        ({"deps": "layer"}, "deps='layer': must be 'op' or 'tile'"),
        ({"signals": "never"}, "signals='never': must be 'task' or 'last'"),
        ({"teams": 0}, "teams=0: must be from 1 to 6"),
        ({"stages": 65}, "stages=65: must be from 1 to 64"),
        ({"max_waits": 0}, "max_waits=0: must be from 1 to 64"),
    ],
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_options_out_of_range_are_named(name, options, message):
    if name == "dynamic" and "signals" in options:
        message = "signals='never': must be 'task'"
    with pytest.raises(ValueError, match=message):
        SCHEDULERS[name](chain([(64, 64)]), H200, **options)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_empty_program_is_refused(name):
    with pytest.raises(ValueError, match="program 'nothing' has no tasks"):
        SCHEDULERS[name](Program("nothing"), H200)


def test_reservations_must_leave_sms():
    program = chain([(64, 64)], layers=2)
    with pytest.raises(ValueError, match="reserved: norm is no kind of op of chain; its kinds are linear0"):
        waves(program, H200, reserved={"norm": 4})
    with pytest.raises(ValueError, match=r"reserved=.*must leave some of the 132 SMs"):
        waves(chain([(64, 64), (64, 64)]), H200, reserved={"linear0": 132})


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "s.json"
    balanced(llama(SMALL, context=100), machine(3)).save(path)
    return path


def edited(path: Path, edit) -> Path:
    given = json.loads(path.read_text())
    edit(given)
    path.write_text(json.dumps(given))
    return path


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda s: s.pop("teams"), "field 'teams' is missing"),
        (lambda s: s.update(teams="two"), "field 'teams' is 'two', must be a whole number from 0"),
        (lambda s: s.update(stages=True), "field 'stages' is True"),
        (lambda s: s.update(num_counters=-1), "field 'num_counters' is -1"),
        (lambda s: s.update(num_sms=2**40), "field 'num_sms' is 1099511627776"),
        (lambda s: s.update(color=1), "unknown field 'color'"),
        (lambda s: s.update(format="cuk-schedule-0"), "field 'format' is 'cuk-schedule-0', must be 'cuk-schedule-1'"),
        (lambda s: s.update(fingerprint=[]), "field 'fingerprint' is"),
        (lambda s: s["ops"].__setitem__(2, ["a", "b"]), r"field 'ops\[2\]' is \['a', 'b'\], must be \[name, kind, struct"),
        (lambda s: s.update(queues=[]), "field 'queues' is empty"),
        (lambda s: s["queues"].__setitem__(1, 5), r"field 'queues\[1\]' is 5"),
        (lambda s: s["queues"][1].__setitem__(3, [0, 0]), r"field 'queues\[1\]\[3\]' is \[0, 0\]"),
        (lambda s: s["queues"][1].__setitem__(3, [0, 0, 0, 1]), r"field 'queues\[1\]\[3\]' .*up to 2 times counter, threshold"),
        (lambda s: s["queues"][1].__setitem__(3, [0, 0.5, 0]), r"field 'queues\[1\]\[3\]' .*whole numbers"),
        (lambda s: s["queues"][1].__setitem__(3, [99, 0, 0]), r"field 'queues\[1\]\[3\]' .*no such op or task"),
        (lambda s: s["queues"][1].__setitem__(3, [1, 10**6, 0]), r"field 'queues\[1\]\[3\]' .*no such op or task"),
        (lambda s: s["queues"][1].__setitem__(3, [1, 0, 500]), r"field 'queues\[1\]\[3\]' .*there are \d+ counters"),
    ],
)
def test_a_corrupted_file_is_refused_by_its_field(saved, edit, field):
    with pytest.raises(ValueError, match=field):
        Schedule.load(edited(saved, edit))


@given(cut=st.floats(0, 0.999))
def test_a_file_cut_short_is_refused(cut):
    schedule, *_ = drawn(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.json"
        schedule.save(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * (len(content) - 2))])
        with pytest.raises(ValueError, match=r"s\.json: not JSON"):
            Schedule.load(path)


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    old = saved.read_bytes()
    schedule = round_robin(chain([(64, 64)]), machine(1))
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            schedule.save(saved)
    assert saved.read_bytes() == old and [p.name for p in saved.parent.iterdir()] == [saved.name]


# ---- what it was made for ----
def test_a_schedule_for_something_else_is_refused():
    program, target = llama(SMALL, context=100), machine(3)
    schedule = balanced(program, target)
    validate(schedule, program, target)
    validate(schedule, llama(SMALL, context=100), replace(target, constants={}))  # the same, made anew; measurements do not count
    with pytest.raises(Refused, match=r"for another machine \(made for toy3, this is h200; limits count, not names\); schedule"):
        validate(schedule, program, H200)
    with pytest.raises(Refused, match="for another program"):
        validate(schedule, llama(SMALL, context=200, capacity=256), target)

    @dataclass(frozen=True)
    class Wider(Toy):
        fields = (Field("x", "ptr"),)

    one = Program("p")
    task = Toy((("y", (1,), "out", "activation"),), (((), ()),))
    one.op("k", task, y=one.buffer("y", (1,), "float32"))
    other = Program("p")
    other.op("k", Wider(task.given, task.tiles), y=other.buffer("y", (1,), "float32"))
    assert {k for k, v in fingerprint(one, target).items() if v != fingerprint(other, target)[k]} >= {"layout"}


@pytest.mark.parametrize("build", [lambda: llama(SMALL, batch=2, context=70), lambda: llama(SMALL | {"qk_norm": True}), lambda: llama("llama-3.2-1b", batch=16), lambda: chain([(64, 32), (32, 48)], layers=3)])  # fmt: skip
def test_a_file_carries_all_that_rebuilds_its_program(build, tmp_path):
    program = build()
    schedule = dynamic(program, H200)
    schedule.save(tmp_path / "s.json")
    loaded = Schedule.load(tmp_path / "s.json")
    again, target = rebuild(loaded.program, loaded.spec), Machine.from_json(dict(loaded.limits))
    assert fingerprint(again, target) == fingerprint(program, H200) == dict(loaded.fingerprint)
    validate(loaded, again, target)


def test_what_cannot_be_rebuilt_says_so():
    with pytest.raises(ValueError, match="that of no known workload"):
        rebuild("scale", {"batch": 1})
    with pytest.raises(ValueError, match="lacks capacity"):
        meta = dict(llama(SMALL).meta)
        del meta["capacity"]
        rebuild("llama", meta)
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        rebuild("chain", {"shapes": 5})


# ---- looks ----
def test_it_tells_what_it_is():
    schedule = balanced(llama(SMALL), machine(3), deps="tile")
    assert repr(schedule).startswith("<Schedule balanced(deps=tile) of llama for toy3: ") and "3 queues of" in repr(schedule)
    assert "one queue that 3 SMs take from" in repr(dynamic(llama(SMALL), machine(3)))
    assert schedule.describe(0) == "SM 0 instruction 0 (embed task 0)"
    assert isinstance(schedule, cuk.Schedule)
    with pytest.raises(IndexError, match="queue 3: must be from 0 to 2"):
        schedule.queue(3)


@pytest.mark.parametrize("scheduler", [balanced, dynamic])
def test_it_plots(scheduler, tmp_path):
    pytest.importorskip("matplotlib")
    scheduler(llama(SMALL), machine(3)).plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_arrays_that_do_not_fit_are_named():
    schedule = balanced(llama(SMALL), machine(3))
    with pytest.raises(ValueError, match="waits"):
        replace(schedule, task=schedule.task[1:])
    with pytest.raises(ValueError, match="starts"):
        replace(schedule, starts=schedule.starts + 1)
    with pytest.raises(ValueError, match="read-only"):
        schedule.task[0] = 1


def test_queues_of_ones_own_become_a_schedule():
    program = chain([(64, 64), (64, 64)])
    schedule = assemble(program, machine(2), [np.arange(0, 16, 2), np.arange(1, 16, 2)], scheduler="mine", deps="op", num_sms=2)
    assert validate(schedule, program, machine(2)).num_instructions == 16
