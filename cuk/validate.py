"""The proof that a schedule computes its program: nothing launches without it. A refusal names its witness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuk.clocks import Clocks, Runs, clock_bytes, execute, partial_steps, runs_of
from cuk.conflicts import Boxes, Conflict, conflicting_ops, inner_conflicts, is_handover, op_conflicts
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import NONE, Schedule
from cuk.target import MAX_STAGES, MAX_TEAMS, THREADS_PER_TEAM, fingerprint, smem_bytes

MAX_PROOF_BYTES = 1 << 32
MAX_PROOF_STEPS = 1 << 31
"""For the clocks of a schedule, in memory and in elements looked at: Llama-3.1-8B on 132 SMs takes 23 MB."""


class Refused(ValueError):
    """A schedule that must not launch. `reason`: "fingerprint", "resource", "tasks", "wait", "deadlock" or "race"; `witness`: the facts, by
    name (the cycle's instructions; the racing pair and its buffer; the resource)."""

    def __init__(self, reason: str, message: str, **witness: Any):
        super().__init__(message)
        self.reason, self.witness = reason, witness


@dataclass(frozen=True)
class Proof:
    """What was proved of a schedule: its size, how many pairs of ops conflict, how many of those had to be looked at tile by tile, and
    the shared memory of its CTA."""

    num_instructions: int
    num_counters: int
    op_pairs: int
    tile_pairs: int
    smem_bytes: int


def validate(schedule: Schedule, program: Program, machine: Machine) -> Proof:
    """Proves that `schedule` runs each task of `program` once, ends, and orders every read, overwrite and reuse of memory after what it
    depends on, on `machine` with one CTA an SM, all resident; raises Refused if not.

    Orders come from counters and from queues (what one team runs of them): a queue orders what consumers do, while what the ring brings of another
    op's output (`Task.dependent_loads`), and what tasks of one op do to each other, is ordered by its instruction's own waits alone. Siblings' hand-overs through scratch order
    those words only. A shared queue is proved for any number of takers, each as early or late as it likes. Exact: what is refused has an
    execution that goes wrong, given the tiles' regions, but for what would take more than MAX_PROOF_BYTES or MAX_PROOF_STEPS to prove. Steps are a
    full edge apart. Raises ValueError for arguments that are not what they are called."""
    for name, value, kind in (("schedule", schedule, Schedule), ("program", program, Program), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, must be a cuk.{kind.__name__}")
    check_made_for(schedule, program, machine)
    memory = check_resources(schedule, program, machine)
    check_tasks(schedule)
    check_waits(schedule)
    runs = runs_of(schedule, program)
    done, stuck = execute(schedule, runs)
    if len(done) < len(runs.chain):
        raise deadlock(schedule, runs, done, stuck)
    check_size(schedule, runs)
    op_pairs, tile_pairs = check_order(schedule, program, Clocks(schedule, runs, done))
    return Proof(schedule.num_instructions, schedule.num_counters, op_pairs, tile_pairs, memory)


def check_made_for(schedule: Schedule, program: Program, machine: Machine) -> None:
    """Raises Refused saying for what else the schedule was made."""
    here = fingerprint(program, machine)
    what = {
        "machine": f"machine (made for {schedule.machine}, this is {machine.name}; limits count, not names)",
        "program": f"program (made for {schedule.program}, this is {program.name}; ops, sizes, views and buffers count)",
        "layout": "argument layout (a struct's arguments or the instruction words have changed since it was made)",
    }
    differ = [name for name, digest in here.items() if schedule.fingerprint.get(name) != digest]
    if differ:
        others = ", and another ".join(what[name] for name in differ)
        raise Refused("fingerprint", f"the schedule is for another {others}; schedule the program again", field=differ[0], fields=differ)
    rows = [(op.name, op.kind, op.task.struct, op.task.num_tasks) for op in program.ops]
    if [(row.name, row.kind, row.struct, row.num_tasks) for row in schedule.ops] != rows:
        raise Refused("fingerprint", "the schedule's list of ops is not the program's; schedule the program again", field="ops")


def check_resources(schedule: Schedule, program: Program, machine: Machine) -> int:
    """The bytes of shared memory of a CTA. Raises Refused naming the resource that the machine has too little of."""
    queues, teams = schedule.num_queues, schedule.teams
    if schedule.dynamic and queues != 1:
        raise Refused("resource", f"queues: a dynamic schedule has one, not {queues}", resource="queues")
    for name, value, high, of in (
        ("SMs", schedule.num_sms, machine.num_sms, machine.name),
        ("queues", queues, schedule.num_sms, "the schedule's SMs"),
        ("teams", teams, min(MAX_TEAMS, machine.max_threads_per_cta // THREADS_PER_TEAM), f"of {THREADS_PER_TEAM} threads in a CTA"),
        ("stages", schedule.stages, MAX_STAGES, "of a ring"),
        ("counters", schedule.num_counters, schedule.num_instructions, "a counter nobody signals orders nothing"),
    ):
        if not (name != "counters") <= value <= high:
            raise Refused(
                "resource", f"{name}: the schedule has {value}, must be from {int(name != 'counters')} to {high} ({of})", resource=name
            )
    memory = smem_bytes(program, teams, schedule.stages)
    if memory > machine.smem_per_cta_bytes:
        raise Refused(
            "resource",
            f"shared memory: {schedule.stages} stages and the scratch of {teams} teams need {memory} bytes, a CTA on {machine.name} can have "
            f"{machine.smem_per_cta_bytes}; take fewer stages or teams",
            resource="shared memory",
        )
    return memory


def check_tasks(schedule: Schedule) -> None:
    """Raises Refused naming an instruction of no task, a task that appears twice, or one that does not."""
    if not schedule.first_task[-1]:
        raise Refused("tasks", f"the program {schedule.program} has no tasks: there is nothing to run")
    counts = np.array([row.num_tasks for row in schedule.ops])
    wrong = (schedule.op < 0) | (schedule.op >= len(counts)) | (schedule.task < 0)
    wrong |= schedule.task >= counts[np.where(wrong, 0, schedule.op)]
    if wrong.any():
        i = int(np.argmax(wrong))
        queue, place = schedule.where(i)
        raise Refused(
            "tasks", f"queue {queue} instruction {place}: there is no task {schedule.task[i]} of op {schedule.op[i]}", instruction=i
        )
    index = schedule.first_task[schedule.op] + schedule.task
    found, times = np.unique(index, return_counts=True)  # of what is there: the ops may claim more tasks than memory has room for
    twice, total = np.flatnonzero(times > 1), int(schedule.first_task[-1])
    if len(twice) or len(found) < total:
        gaps = np.flatnonzero(found != np.arange(len(found)))
        t = int(found[twice[0]]) if len(twice) else int(gaps[0]) if len(gaps) else len(found)
        op = int(np.searchsorted(schedule.first_task, t, side="right")) - 1
        name = f"{schedule.ops[op].name} task {t - schedule.first_task[op]}"
        where = [schedule.describe(int(i)) for i in np.flatnonzero(index == t)[:2]]
        message = f"{name} is in no queue" if not where else f"{name} runs {times[twice[0]]} times: {' and '.join(where)}"
        raise Refused("tasks", message, op=op, task=t - int(schedule.first_task[op]))


def check_waits(schedule: Schedule) -> None:
    """Raises Refused naming an instruction that waits for more than ever comes, or a counter that does not exist."""
    counters = np.concatenate([schedule.signal[:, None], schedule.waits[:, :, 0]], axis=1)
    wrong = ((counters < NONE) | (counters >= schedule.num_counters)).any(axis=1)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise Refused("wait", f"{schedule.describe(i)} names a counter that is not among the {schedule.num_counters}", instruction=i)
    totals = np.append(schedule.totals, np.iinfo(np.int64).max)  # the last is that of no counter
    short = schedule.waits[:, :, 1] > totals[schedule.waits[:, :, 0]]
    if short.any():
        i, j = map(int, np.argwhere(short)[0])
        counter, threshold = map(int, schedule.waits[i, j])
        raise Refused(
            "wait",
            f"{schedule.describe(i)} waits for counter {counter} to reach {threshold}, but only {totals[counter]} instructions signal it",
            instruction=i, counter=counter, threshold=threshold,
        )  # fmt: skip


def check_size(schedule: Schedule, runs: Runs) -> None:
    """Raises Refused for a schedule that would take too long, or too much memory, to prove: thousands of waits that are all different."""
    needed, steps = clock_bytes(schedule, runs), partial_steps(schedule, runs)
    if needed > MAX_PROOF_BYTES:
        raise Refused("resource", f"proof: its clocks would take {needed} bytes, must be at most {MAX_PROOF_BYTES}; let more tasks wait for the same",
                      resource="proof")  # fmt: skip
    if steps > MAX_PROOF_STEPS:
        raise Refused("resource", f"proof: waits for a part of a counter's signals would take {steps} steps, must be at most {MAX_PROOF_STEPS}; let tasks "
                      "wait for all signals of more counters", resource="proof")  # fmt: skip


def deadlock(schedule: Schedule, runs: Runs, done: list[int], stuck: list[tuple[int, int, int]]) -> Refused:
    """The refusal that names a cycle: each of its instructions waits for a signal of an instruction of the next one's chain (its queue, or its
    team's part of it), at it or behind it."""
    ended = np.zeros(len(runs.chain), bool)
    ended[done] = True
    run_of = runs.of_instruction
    signallers: dict[int, int] = {}
    for run in np.flatnonzero(~ended).tolist():
        for counter, _ in runs.signals[run]:
            signallers.setdefault(counter, run)
    held = {int(runs.chain[run]): run for run, _, _ in stuck}
    wants = {run: (counter, threshold) for run, counter, threshold in stuck}
    path: list[int] = []
    run = stuck[0][0]
    while run not in path:
        path.append(run)
        blocker = signallers[wants[run][0]]
        run = held[int(runs.chain[blocker])]
    cycle = path[path.index(run) :]
    firsts = [int(runs.order[runs.bounds[r]]) for r in cycle]
    names = []
    for r, i in zip(cycle, firsts, strict=True):
        counter, threshold = wants[r]
        what = f"counter {counter} to reach {threshold}" if counter < schedule.num_counters else f"{threshold} siblings of lower index"
        blocker = next(
            int(j)
            for j in np.flatnonzero(run_of == signallers[counter])
            if counter >= schedule.num_counters or schedule.signal[j] == counter
        )
        names.append(f"{schedule.describe(i)} waits for {what}, which needs {schedule.describe(blocker)}")
    return Refused("deadlock", f"deadlock: {'; '.join(names[:8])}{'; …' if len(names) > 8 else ''}", cycle=firsts)


def check_order(schedule: Schedule, program: Program, clocks: Clocks) -> tuple[int, int]:
    """(conflicting pairs of ops, those looked at tile by tile). Raises Refused naming two instructions and the buffer that they race on."""
    num_ops, op = len(program.ops), schedule.op.astype(np.int64)
    ends = np.zeros((num_ops, clocks.clock.shape[1]), np.int32)  # how far each chain has come when all of an op has ended
    np.maximum.at(ends, (op, clocks.column), clocks.need.astype(np.int32))
    starts, loads = clocks.least(op, num_ops), clocks.least(op, num_ops, by_waits=True)
    conflicts = conflicting_ops(program)
    instruction = np.empty(schedule.first_task[-1], np.int64)
    instruction[schedule.first_task[op] + schedule.task] = np.arange(schedule.num_instructions)
    looked_at = 0
    for later in range(num_ops):
        before = np.flatnonzero(conflicts[:, later])
        early = bool(program.ops[later].task.dependent_loads)
        ordered = (starts[later] >= ends[before]).all(axis=1)
        if early:
            ordered &= (loads[later] >= ends[before]).all(axis=1)
        for earlier in before[~ordered].tolist():
            looked_at += 1
            for conflict in op_conflicts(program.ops[earlier], program.ops[later]):
                _check_conflict(schedule, program, clocks, instruction, earlier, later, conflict)
    for index, each in enumerate(program.ops):
        for conflict, lower, higher in inner_conflicts(each):
            if is_handover(each, conflict):
                continue
            first = instruction[schedule.first_task[index] + lower]
            second = instruction[schedule.first_task[index] + higher]
            # By waits alone: a team goes from one task of an op to the next without a barrier.
            fine = clocks.after(second, clocks.column[first], clocks.need[first], by_waits=True)
            if not fine.all():
                i = int(np.argmin(fine))
                raise _race(schedule, conflict, int(first[i]), int(second[i]))
    return int(conflicts.sum()), looked_at


def _by_waits(program: Program, later: int, conflict: Conflict) -> bool:
    return conflict.kind == "RAW" and conflict.later_operand in program.ops[later].task.dependent_loads


def _check_conflict(
    schedule: Schedule, program: Program, clocks: Clocks, instruction: np.ndarray, earlier: int, later: int, conflict: Conflict
) -> None:
    """Raises Refused unless each task of the later op starts after those of the earlier one whose boxes meet its own."""
    by_waits = _by_waits(program, later, conflict)
    mine = instruction[schedule.first_task[earlier] + conflict.earlier.tasks]
    theirs = instruction[schedule.first_task[later] + conflict.later.tasks]
    width = clocks.clock.shape[1]
    ends = np.zeros((len(conflict.earlier.low), width), np.int32)  # of each of the earlier op's boxes
    np.maximum.at(ends, (conflict.earlier.index, clocks.column[mine]), clocks.need[mine].astype(np.int32))
    first, second = conflict.pairs
    order = np.argsort(second, kind="stable")
    first, second = first[order], second[order]
    boxes, at = np.unique(second, return_index=True)
    for box, begin, end in zip(boxes, at, np.append(at[1:], len(second)), strict=True):
        needed = ends[first[begin:end]].max(axis=0)
        columns = np.flatnonzero(needed)
        accesses = theirs[conflict.later.index == box]
        fine = clocks.after(accesses[:, None], columns[None, :], needed[columns][None, :], by_waits)
        if fine.all():
            continue
        which, chain = map(int, np.argwhere(~fine)[0])
        touching = mine[np.isin(conflict.earlier.index, first[begin:end])]
        touching = touching[(clocks.column[touching] == columns[chain]) & (clocks.need[touching] == needed[columns[chain]])]
        raise _race(schedule, conflict, int(touching[0]), int(accesses[which]), box=_text(conflict.later, int(box)))


def _text(boxes: Boxes, box: int) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(boxes.low[box], boxes.high[box], strict=True)) + "]"


def _race(schedule: Schedule, conflict: Conflict, first: int, second: int, box: str = "") -> Refused:
    did, does = {"RAW": ("writes", "reads"), "WAR": ("reads", "overwrites"), "WAW": ("writes", "overwrites")}[conflict.kind]
    return Refused(
        "race",
        f"race ({conflict.kind}) on {conflict.buffer}{box}: {schedule.describe(first)} {did} what {schedule.describe(second)} {does}, and no counter "
        "or queue orders the second after the first",
        kind=conflict.kind, buffer=conflict.buffer, first=first, second=second,
    )  # fmt: skip
