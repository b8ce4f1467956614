"""The proof: it accepts no schedule that an exhaustive search finds fault with, and refuses none that it finds none in."""

import random
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuk.clocks import Clocks, execute, runs_of
from cuk.conflicts import Boxes, conflicting_ops, inner_conflicts, op_conflicts, overlapping, siblings, task_boxes
from cuk.program import Program
from cuk.programs import chain, llama
from cuk.schedule import Instruction
from cuk.schedulers import SCHEDULERS, balanced, dynamic, round_robin, waves
from cuk.target import fingerprint
from cuk.task import Region
from cuk.tasks import AttentionDecode, Linear
from cuk.validate import Refused, validate
from tests.host.executions import wrong_execution
from tests.toys import H200, MUTATIONS, Toy, aliased, elements, machine, mutate, random_program, with_queues

SEEDS = st.integers(0, 2**32 - 1)
CASES_PER_SEED = 14
ALIASES = (("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"))


def refusal(schedule, program, target) -> Refused | None:
    try:
        validate(schedule, program, target)
    except Refused as refused:
        return refused
    return None


def drawn(rng: random.Random):
    """A schedule, its program and machine, small enough to search."""
    name = rng.choice(list(SCHEDULERS))
    program, target = random_program(rng, 3 if name == "dynamic" else 4), machine(rng.randint(1, 3))
    while name == "dynamic" and program.num_tasks > 6:  # a search of three states a task
        program = random_program(rng, 3)
    options = {} if name == "dynamic" else {"signals": rng.choice(["task", "last"])}
    return SCHEDULERS[name](program, target, deps=rng.choice(["op", "tile"]), teams=rng.choice([1, 1, 2]), **options), program, target


def changed(rng: random.Random, schedule, program, target):
    """(kind, schedule, program) with one or two things changed, an alias put in, or other teams."""
    kind = rng.choice([*MUTATIONS, "alias", "teams"])
    if kind == "alias":
        program = aliased(program, *rng.choice(ALIASES))
        return kind, replace(schedule, fingerprint=fingerprint(program, target)), program
    if kind == "teams":
        return kind, replace(schedule, teams=schedule.teams % 3 + 1, stages=1), program
    for _ in range(rng.choice([1, 1, 2])):
        schedule = mutate(schedule, rng, kind) or schedule
    return kind, schedule, program


def test_no_fault_is_accepted_and_no_sound_schedule_refused(capsys):
    """At least 5,000 mutations, each executed in every possible way. A false refusal is counted, and fails as well: the claim is exactness."""
    count: Counter = Counter()
    kinds: dict[str, Counter] = {}

    def compare(kind: str, schedule, program, target) -> None:
        refused, wrong = refusal(schedule, program, target), wrong_execution(schedule, program)
        name = "mutated" if kind != "unmutated" else kind
        of = kinds.setdefault(kind, Counter())
        for what, so in {
            name: True,
            "bad": wrong,
            "falsely accepted": wrong and not refused,
            "falsely refused": refused and not wrong,
        }.items():
            count[what] += bool(so)
            of["cases" if what == name else what] += bool(so)
        assert refused or not wrong, f"{kind}: {schedule} is accepted, but {wrong}"

    @settings(max_examples=700)
    @given(SEEDS)
    @example(145)  # a chain without an instruction in a run took over what the run had waited for
    @example(41)  # two tasks of an op that race, in a queue's order
    def each(seed):
        rng = random.Random(seed)
        whole, program, target = drawn(rng)
        compare("unmutated", whole, program, target)
        for _ in range(CASES_PER_SEED):
            kind, schedule, other = changed(rng, whole, program, target)
            if schedule is not whole:
                compare(kind, schedule, other, target)

    each()
    with capsys.disabled():
        print(f"\n{dict(count)}", *(f"  {kind}: {dict(kinds[kind])}" for kind in sorted(kinds)), sep="\n")
    assert kinds["unmutated"]["bad"] == kinds["unmutated"]["falsely refused"] == 0
    assert count["mutated"] >= 5000 and count["bad"] >= 1500
    assert all(kinds[kind]["bad"] for kind in (*MUTATIONS, "alias", "teams"))
    assert count["falsely accepted"] == count["falsely refused"] == 0


def started_when_blocked(schedule, program, blocked: int) -> set[int]:
    """The instructions that start when one never ends: the search that clocks stand for, done plainly."""
    lanes = [
        range(schedule.starts[q] + t, schedule.starts[q + 1], schedule.teams)
        for q in range(schedule.num_queues)
        for t in range(schedule.teams)
    ]
    if schedule.dynamic:
        lanes = [[i] for i in range(schedule.num_instructions)]
    at, values, started = [0] * len(lanes), Counter(), set()
    moved = True
    while moved:
        moved = False
        for n, lane in enumerate(lanes):
            while (
                at[n] < len(lane) and lane[at[n]] not in started and all(values[c] >= k for c, k in schedule.waits[lane[at[n]]] if c >= 0)
            ):
                started.add(lane[at[n]])
                moved = True
                if lane[at[n]] != blocked:
                    values[schedule.signal[lane[at[n]]]] += 1
                    at[n] += 1
    return started


@settings(max_examples=150)
@given(SEEDS)
def test_clocks_say_what_blocking_each_task_in_turn_says(seed):
    rng = random.Random(seed)
    whole, program, target = drawn(rng)
    _, schedule, _ = changed(rng, whole, program, target)
    if refusal(schedule, program, target) and refusal(schedule, program, target).reason != "race":
        schedule = whole
    runs = runs_of(schedule, program)
    clocks = Clocks(schedule, runs, execute(schedule, runs)[0])
    everything = np.arange(schedule.num_instructions)
    for blocked in everything:
        started = started_when_blocked(schedule, program, int(blocked))
        after = clocks.after(everything, clocks.column[blocked], clocks.need[blocked])
        for other in everything[everything != blocked]:
            assert after[other] == (other not in started), (schedule.describe(int(blocked)), schedule.describe(int(other)))


# ---- witnesses ----
def two_in_a_row() -> tuple[Program, Linear]:
    return chain([(16, 64), (16, 16)]), machine(2)


def test_the_witness_of_a_missing_wait_is_the_racing_pair_and_the_buffer():
    program, target = two_in_a_row()
    schedule = round_robin(program, target)
    queues = [schedule.queue(q) for q in range(2)]
    queues[1][1] = replace(queues[1][1], waits=())
    refused = refusal(with_queues(schedule, queues), program, target)
    assert refused.reason == "race" and refused.witness == {"kind": "RAW", "buffer": "y0.0", "first": 0, "second": 3}
    assert "race (RAW) on y0.0[0:1, 0:16]: SM 0 instruction 0 (layer0.linear0 task 0) writes what SM 1 instruction 1 (layer0.linear1 task 1) reads" in str(refused)  # fmt: skip


def test_the_witness_of_a_deadlock_is_its_cycle():
    program, target = two_in_a_row()
    schedule = round_robin(program, target, teams=1)
    queues = [schedule.queue(q)[::-1] for q in range(2)]
    refused = refusal(with_queues(schedule, queues), program, target)
    assert refused.reason == "deadlock" and 1 <= len(refused.witness["cycle"]) <= 2
    assert "instruction 0 (layer0.linear1 task" in str(refused) and "waits for counter 0 to reach 2, which needs SM" in str(refused)
    # Two teams take an instruction each: nothing holds the second up.
    validate(replace(with_queues(schedule, queues), teams=2, stages=1), program, target)
    # Two queues that wait for each other: no queue waits for itself.
    first, second = Instruction(0, 0, (), 0), Instruction(0, 1, (), 0)
    crossed = [[Instruction(1, 0, ((0, 1),)), first], [Instruction(1, 1, ((0, 1),)), second]]
    refused = refusal(with_queues(schedule, crossed), program, target)
    assert refused.reason == "deadlock" and len(refused.witness["cycle"]) in (1, 2)


def test_a_sibling_of_lower_index_behind_its_taker_is_a_deadlock():
    attention = AttentionDecode(batch=1, kv_heads=1, group=4, head_dim=64, capacity=512, context=400, splits=4)
    program = Program("alone")
    views = {name: program.buffer(name, o.shape, o.dtype, o.role) for name, o in attention.operands.items() if o.role != "scratch"}
    program.op("attention", attention, **views)
    assert [side.tolist() for side in siblings(program.ops[0])] == [[0, 1, 2], [3, 3, 3]]
    for scheduler in (round_robin, dynamic):
        schedule = scheduler(program, machine(2), teams=1)
        validate(schedule, program, machine(2))
        refused = refusal(with_queues(schedule, [schedule.queue(q)[::-1] for q in range(schedule.num_queues)]), program, machine(2))
        assert refused.reason == "deadlock" and "waits for 3 siblings of lower index" in str(refused)


def test_the_witness_of_a_resource_is_its_name():
    program, target = chain([(64, 64)]), machine(2)
    schedule = round_robin(program, target, teams=2)
    for change, message in [
        ({"stages": 64}, r"shared memory: 64 stages and the scratch of 2 teams need \d+ bytes, a CTA on toy2 can have 232448"),
        ({"stages": 0}, "stages: the schedule has 0, must be from 1 to 64"),
        ({"teams": 7}, "teams: the schedule has 7, must be from 1 to 6"),
        ({"num_sms": 3}, r"SMs: the schedule has 3, must be from 1 to 2 \(toy2\)"),
        ({"num_sms": 1}, "queues: the schedule has 2, must be from 1 to 1"),
        ({"dynamic": True}, "queues: a dynamic schedule has one, not 2"),
    ]:
        refused = refusal(replace(schedule, **change), program, target)
        assert refused.reason == "resource"
        with pytest.raises(Refused, match=message):
            raise refused


def test_tasks_and_waits_that_do_not_add_up_are_named():
    program, target = two_in_a_row()
    schedule = round_robin(program, target)
    queues = [schedule.queue(q) for q in range(2)]

    def of(edit) -> Refused:
        mine = [list(queue) for queue in queues]
        edit(mine)
        return refusal(with_queues(schedule, mine), program, target)

    twice = of(lambda q: q[1].append(q[0][0]))
    assert (
        twice.reason == "tasks"
        and "layer0.linear0 task 0 runs 2 times: SM 0 instruction 0" in str(twice)
        and "SM 1 instruction 2" in str(twice)
    )
    assert "layer0.linear1 task 1 is in no queue" in str(of(lambda q: q[1].pop()))
    assert "there is no task 9 of op 0" in str(of(lambda q: q[0].append(Instruction(0, 9))))
    short = of(lambda q: q[1].__setitem__(1, replace(q[1][1], waits=((0, 3),))))
    assert short.reason == "wait" and "(layer0.linear1 task 1) waits for counter 0 to reach 3, but only 2 instructions signal it" in str(
        short
    )
    assert "names a counter that is not among the 1" in str(of(lambda q: q[1].__setitem__(1, replace(q[1][1], waits=((5, 1),)))))
    assert "list of ops is not the program's" in str(refusal(replace(schedule, ops=schedule.ops[:1]), program, target))


# ---- what orders what ----
def producer_and_consumer(ring: tuple[str, ...]) -> Program:
    program = Program("pair")
    a, b = (program.buffer(name, (1,), "float32") for name in "ab")
    box, out = ((0, 1),), ("y", (1,), "out", "activation")
    program.op("write", Toy((out,), (((), (Region("y", box),)),)), "write", y=a)
    program.op("read", Toy((("x", (1,), "in", "activation"), out), (((Region("x", box),), (Region("y", box),)),), ring), "read", x=a, y=b)
    return program


def test_a_queue_orders_what_consumers_do_but_not_what_the_ring_brings():
    for ring, accepted in (((), True), (("x",), False)):
        program = producer_and_consumer(ring)
        schedule = round_robin(program, machine(1), teams=1)
        validate(schedule, program, machine(1))
        bare = with_queues(schedule, [[replace(ins, waits=()) for ins in schedule.queue(0)]])
        refused = refusal(bare, program, machine(1))
        assert (refused is None) == accepted
        # Two teams take an instruction each, so that the queue orders nothing.
        assert refusal(replace(bare, teams=2), program, machine(1)).reason == "race"


def test_every_task_says_which_written_operands_its_ring_brings():
    assert Linear(batch=1, n=64, k=64).dependent_loads == {"w"}
    assert Linear(batch=16, n=64, k=8192).dependent_loads == {"w", "x"}
    assert Toy((("x", (1,), "in", "activation"),), (((), ()),)).dependent_loads == frozenset()


def test_an_op_whose_tasks_race_with_each_other_is_refused():
    program = Program("in place")
    a, box = program.buffer("a", (2,), "float32"), ((0, 2),)
    given_ = (("x", (2,), "in", "activation"), ("y", (2,), "out", "activation"))
    tiles = tuple(((Region("x", box),), (Region("y", ((t, t + 1),)),)) for t in range(2))
    program.op("shift", Toy(given_, tiles), x=a, y=a)
    refused = refusal(round_robin(program, machine(2)), program, machine(2))
    assert refused.reason == "race" and refused.witness["buffer"] == "a"
    # A queue does not help, since a team goes from one task of an op to the next without a barrier; a wait does.
    alone = round_robin(program, machine(1), teams=1)
    assert refusal(alone, program, machine(1)).reason == "race"
    first, second = alone.queue(0)
    waiting = [[replace(first, signal=0), replace(second, waits=((0, 1),))]]
    validate(with_queues(alone, waiting, num_counters=1), program, machine(1))


def test_what_no_region_mentions_counts_as_touched_whole():
    task = Toy((("x", (3, 4), "in", "activation"), ("y", (1,), "out", "activation")), (((), (Region("y", ((0, 1),)),)),) * 2)
    boxes = task_boxes(task, "reads")["x"]
    assert boxes.low.tolist() == [[0, 0]] and boxes.high.tolist() == [[3, 4]] and boxes.tasks.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"Toy.reads\(0\) has a region of 1 dimensions of 'z'"):
        task_boxes(Toy((("x", (1,), "in", "activation"),), (((Region("z", ((0, 1),)),), ()),)), "reads")


@given(SEEDS, st.integers(1, 3))
def test_overlapping_boxes_are_all_found(seed, dims):
    rng = np.random.default_rng(seed)

    def some(n):
        low = rng.integers(0, 5, (n, dims))
        return Boxes(low, low + rng.integers(1, 4, (n, dims)), np.arange(n), np.arange(n))

    a, b = some(rng.integers(0, 12)), some(rng.integers(0, 12))
    found = set(zip(*(side.tolist() for side in overlapping(a, b)), strict=True))
    assert found == {
        (i, j)
        for i in range(len(a.low))
        for j in range(len(b.low))
        if all(np.maximum(a.low[i], b.low[j]) < np.minimum(a.high[i], b.high[j]))
    }


@given(SEEDS)
def test_conflicts_are_those_of_the_elements(seed):
    program = random_program(random.Random(seed))
    cells, found = elements(program), set()
    for i, earlier in enumerate(program.ops):
        for conflict, lower, higher in inner_conflicts(earlier):
            found |= {((i, int(x)), (i, int(y)), conflict.kind) for x, y in zip(lower, higher, strict=True)}
        for j in range(i + 1, len(program.ops)):
            for conflict in op_conflicts(earlier, program.ops[j]):
                found |= {((i, int(x)), (j, int(y)), conflict.kind) for x, y in zip(*conflict.tasks(), strict=True)}
    expected = set()
    for x in cells:
        for y in cells:
            if x < y:
                for kind, one, other in (("RAW", 1, 0), ("WAR", 0, 1), ("WAW", 1, 1)):
                    if cells[x][one] & cells[y][other]:
                        expected.add((x, y, kind))
    assert found == expected


@pytest.mark.parametrize(
    "program", [llama("llama-3.2-1b"), llama("qwen3-0.6b", batch=3), llama("llama-3.2-1b", batch=16, context=5000)], ids=str
)
def test_conflicting_ops_are_the_programs_dependencies(program):
    assert [set(np.flatnonzero(column)) for column in conflicting_ops(program).T] == program.dependencies()


# ---- whole models ----
@pytest.mark.parametrize("deps", ["op", "tile"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("model", [{"model": "llama-3.2-1b"}, {"model": "llama-3.2-1b", "batch": 16, "context": 5000}, {"model": "qwen3-0.6b", "batch": 2}],
                         ids=lambda m: "-".join(map(str, m.values())))  # fmt: skip
def test_whole_steps_are_proved(model, name, deps):
    program = llama(**model)
    proof = validate(SCHEDULERS[name](program, H200, deps=deps), program, H200)
    assert proof.num_instructions == program.num_tasks and (proof.tile_pairs == 0 or deps == "tile")


@pytest.mark.parametrize("deps", ["op", "tile"])
@pytest.mark.parametrize("scheduler", [round_robin, balanced])
def test_a_step_of_8b_is_proved_in_two_seconds(scheduler, deps):
    program = llama("llama-3.1-8b")
    schedule = scheduler(program, H200, deps=deps)
    assert schedule.num_instructions > 100_000
    times = []
    for _ in range(3):  # the best of three, since other work shares the machine
        task_boxes.cache_clear()
        start = time.perf_counter()
        validate(schedule, program, H200)
        times.append(time.perf_counter() - start)
        if times[-1] < 2:
            return
    raise AssertionError(f"{schedule}: {times} s")


@settings(max_examples=15)
@given(SEEDS)
def test_a_wait_dropped_anywhere_in_a_step_is_found(seed):
    rng = random.Random(seed)
    program = llama("llama-3.2-1b", context=300)
    schedule = rng.choice([balanced, waves, dynamic])(program, H200, deps=rng.choice(["op", "tile"]), teams=rng.randint(1, 3))
    # Behind an instruction of the same op, on the same team, a wait is one too many: that one has waited for the same already.
    before = np.arange(schedule.num_instructions) - (1 if schedule.dynamic else schedule.teams)
    follows = (before >= 0) & (schedule.op[before] == schedule.op) & (not schedule.dynamic)
    waiting = np.flatnonzero((schedule.waits[:, 0, 0] >= 0) & ~follows)
    at = int(waiting[rng.randrange(len(waiting))])
    waits = schedule.waits.copy()
    waits[at] = -1
    refused = refusal(replace(schedule, waits=waits), program, H200)
    assert refused is not None and refused.reason == "race", schedule.describe(at)
