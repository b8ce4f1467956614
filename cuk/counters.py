"""From queues of tasks to a schedule: which counters there are, who signals them, and who waits for how much."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from cuk.conflicts import conflicting_ops, op_conflicts, siblings
from cuk.machine import Machine
from cuk.program import Op, Program
from cuk.schedule import NONE, OpRow, Schedule
from cuk.schedule_file import short
from cuk.target import MAX_STAGES, MAX_TEAMS, fingerprint, limits_of, most_stages
from cuk.task import check_whole, round_up

DEPS = ("op", "tile")
SIGNALS = ("task", "last")
MOST_WAITS = 64
MAX_WAITS = 6
"""Waits of an instruction, so that it takes 64 bytes; where ops depend on more others than that, instructions grow."""


@dataclass
class Relation:
    """What the tasks of op `later` must follow among those of op `earlier`: task t follows the set `which[t]`, a row of `sets` (bool
    [sets, tasks of earlier]); all of them where `full`."""

    earlier: int
    later: int
    full: bool = True
    sets: sparse.csr_matrix | None = None
    which: np.ndarray | None = None
    each: bool = True  # every task of `later` follows at least one
    covers: bool = True  # every task of `earlier` is followed by some
    atoms: list[np.ndarray] = field(default_factory=list)  # for each set, the groups of `earlier`'s tasks that make it up


def op_relations(program: Program, deps: str = "op") -> list[list[Relation]]:
    """For each op what it must be made to wait for: its conflicts with earlier ops, whole ops or tiles, less what the waits of those
    imply."""
    conflicts = conflicting_ops(program)
    before = [0] * len(program.ops)  # bit p: op p has ended before any task of this op starts
    whole = [0] * len(program.ops)  # bit p: op p has ended once this op has
    result: list[list[Relation]] = []
    for c, op in enumerate(program.ops):
        kept = []
        for p in np.flatnonzero(conflicts[:, c])[::-1].tolist():  # the latest first: it implies most
            if before[c] >> p & 1:
                continue
            relation = Relation(p, c) if deps == "op" else tile_relation(program.ops[p], op, p, c)
            if relation is None:
                continue
            kept.append(relation)
            if relation.full:
                before[c] |= whole[p]
            elif relation.each:
                before[c] |= before[p]
        whole[c] = 1 << c | before[c]
        for relation in kept:
            if relation.covers:
                whole[c] |= whole[relation.earlier]
        result.append(kept)
    return result


def tile_relation(earlier: Op, later: Op, p: int = 0, c: int = 1) -> Relation | None:
    """The relation of two ops by what their tiles touch; None where no two tiles meet. Who follows a task that takes what siblings left
    in scratch follows them as well."""
    conflicts = op_conflicts(earlier, later)
    if not conflicts:
        return None
    num_earlier, num_later = earlier.task.num_tasks, later.task.num_tasks
    codes, base, meets = [], 0, []
    for conflict in conflicts:
        touched = np.isin(conflict.later.index, conflict.pairs[1])
        codes.append(np.stack([conflict.later.tasks[touched], conflict.later.index[touched] + base]))
        meets.append((conflict, base))
        base += len(conflict.later.low)
    # Tasks that touch the same boxes follow the same set.
    tasks, boxes = np.unique(np.concatenate(codes, axis=1), axis=1)
    counts = np.bincount(tasks, minlength=num_later)
    place = np.arange(len(tasks)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((num_later, int(counts.max(initial=1))), NONE)
    table[tasks, place] = boxes
    rows, which = np.unique(table, axis=0, return_inverse=True)
    row, column = np.nonzero(rows != NONE)
    touch = _matrix(row, rows[row, column], (len(rows), base))
    sets = sparse.csr_matrix((len(rows), num_earlier), dtype=np.int64)
    for conflict, start in meets:
        boxes_of = touch[:, start : start + len(conflict.later.low)]
        overlap = _matrix(conflict.pairs[1], conflict.pairs[0], (len(conflict.later.low), len(conflict.earlier.low)))
        owners = _matrix(conflict.earlier.index, conflict.earlier.tasks, (len(conflict.earlier.low), num_earlier))
        sets = sets + boxes_of @ overlap @ owners
    posters, takers = siblings(earlier)
    if len(posters):
        sets = sets + sets @ _matrix(takers, posters, (num_earlier, num_earlier))
    sets = sets.tocsr()
    sets.data[:] = 1
    sizes = np.diff(sets.indptr)
    if (sizes == num_earlier).all():
        return Relation(p, c)
    covers = len(np.unique(sets.indices)) == num_earlier
    return Relation(p, c, False, sets, which.reshape(-1), bool((sizes[which] > 0).all()), covers)


def _matrix(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    return sparse.csr_matrix((np.ones(len(rows), np.int64), (rows, columns)), shape=shape)


def group(program: Program, relations: list[list[Relation]], max_waits: int = MAX_WAITS) -> list[np.ndarray]:
    """For each op the group of each of its tasks (-1: nobody follows it), so that tasks of one group have the same followers. Where an
    op's tasks would have to wait for more than `max_waits` groups, relations to the ops that are split finest are made whole."""
    followers: list[list[Relation]] = [[] for _ in program.ops]
    for mine in relations:
        for relation in mine:
            followers[relation.earlier].append(relation)
    groups = [_atoms(op, followers[p]) for p, op in enumerate(program.ops)]
    for mine in relations:
        while (waits := _waits(mine)).size and waits.sum(axis=0).max() > max_waits:
            worst = int(waits.sum(axis=0).argmax())
            p = mine[int(waits[:, worst].argmax())].earlier
            split = [relation for relation in followers[p] if not relation.full]
            if not split or waits[:, worst].max() == 1:
                break  # one wait for each of more than `max_waits` ops
            max(split, key=lambda relation: relation.sets.shape[0]).full = True
            groups[p] = _atoms(program.ops[p], followers[p])
    return groups


def _atoms(op: Op, followers: list[Relation]) -> np.ndarray:
    """The groups of an op's tasks by who follows them; tells each relation what its sets are made of."""
    split = [relation for relation in followers if not relation.full]
    anyone = any(relation.full for relation in followers)
    n = op.task.num_tasks
    if not split:
        for relation in followers:
            relation.atoms = [np.zeros(1, np.int64)]
        return np.full(n, 0 if anyone else NONE)
    columns = sparse.vstack([relation.sets for relation in split]).tocsc()
    columns.sort_indices()
    seen: dict[bytes, int] = {} if anyone else {b"": NONE}
    groups = np.empty(n, np.int64)
    starts = columns.indptr
    for task in range(n):
        key = columns.indices[starts[task] : starts[task + 1]].tobytes()
        groups[task] = seen.setdefault(key, len(seen) - (b"" in seen and not anyone))
    for relation in followers:
        if relation.full:
            relation.atoms = [np.unique(groups)]
        else:
            sets = relation.sets
            relation.atoms = [np.unique(groups[sets.indices[a:b]]) for a, b in zip(sets.indptr, sets.indptr[1:], strict=False)]
    return groups


def _waits(relations: list[Relation]) -> np.ndarray:
    """Groups that each task waits for, by relation: [relations, tasks], or [relations, 1] where all tasks do alike."""
    rows = [np.array([len(atoms) for atoms in r.atoms])[0 if r.full else r.which] for r in relations]
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, rows))) if rows else np.zeros((0, 0), int)


def assemble(
    program: Program,
    machine: Machine,
    queues: Sequence[np.ndarray],
    *,
    scheduler: str,
    deps: str = "op",
    dynamic: bool = False,
    num_sms: int | None = None,
    signals: str = "task",
    max_waits: int = MAX_WAITS,
    teams: int = 2,
    stages: int | None = None,
) -> Schedule:
    """The schedule of `queues`, each a sequence of program-wide task indices (op after op), with the counters that the program needs.

    deps: "op", a task waits for whole ops; "tile", for those tasks whose tiles it touches. signals: "task", each task signals; "last",
    the last one of a queue (of a team, where there are several) that counts for a counter does so for all of them, which is as good
    where a waiter needs them all and saves signals; not with `dynamic`. teams, stages: of the interpreting CTA (stages None: as many
    as fit). Raises ValueError naming the option that is out of range."""
    num_sms = sm_count(program, machine, num_sms)
    for name, value, allowed in (("deps", deps, DEPS), ("signals", signals, SIGNALS[:1] if dynamic else SIGNALS)):
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, allowed))}")
    if not isinstance(dynamic, bool) or not isinstance(scheduler, str):
        raise ValueError(f"dynamic={dynamic!r}, scheduler={scheduler!r}: must be true or false, and a name")
    teams = check_whole("teams", teams, 1, MAX_TEAMS, "of a CTA")
    stages = None if stages is None else check_whole("stages", stages, 1, MAX_STAGES, "of a ring")
    max_waits = check_whole("max_waits", max_waits, 1, MOST_WAITS, "of an instruction")
    queues = _task_lists(queues, program, num_sms, dynamic)
    relations = op_relations(program, deps)
    groups = group(program, relations, max_waits)
    rows = tuple(OpRow(op.name, op.kind, op.task.struct, op.task.num_tasks) for op in program.ops)
    first = np.concatenate([[0], np.cumsum([row.num_tasks for row in rows])])
    sizes = [int(g.max(initial=NONE)) + 1 for g in groups]
    base = np.cumsum([0, *sizes])
    counter = np.concatenate([np.where(g < 0, NONE, g + b) for g, b in zip(groups, base, strict=False)])

    starts = np.concatenate([[0], np.cumsum([len(queue) for queue in queues])])
    tasks = np.concatenate(queues)
    signal = counter[tasks]
    if signals == "last":
        place = np.arange(len(tasks)) - np.repeat(starts[:-1], np.diff(starts))
        lane = np.repeat(np.arange(len(queues)), np.diff(starts)) * teams + place % teams
        backwards = (lane * (base[-1] + 1) + signal)[::-1]
        _, found = np.unique(backwards, return_index=True)
        last = np.zeros(len(tasks), bool)
        last[len(tasks) - 1 - found] = True
        signal = np.where(last, signal, NONE)
    totals = np.bincount(signal[signal >= 0], minlength=base[-1])

    wanted = _wait_table(program, relations, base, first)
    width = round_up(max((w.shape[1] for w in wanted), default=0), 2)
    counters = np.full((first[-1], max(2, width)), NONE, np.int64)
    for op_first, mine in zip(first, wanted, strict=False):
        counters[op_first : op_first + len(mine), : mine.shape[1]] = mine
    counters = counters[tasks]
    thresholds = np.where(counters >= 0, np.append(totals, NONE)[counters], NONE)
    return Schedule(
        program=program.name, machine=machine.name, scheduler=scheduler, deps=deps, spec=json.loads(json.dumps(program.meta, default=str)),
        limits=limits_of(machine), fingerprint=fingerprint(program, machine), ops=rows, num_sms=num_sms, num_counters=int(base[-1]),
        teams=teams, stages=stages or most_stages(program, machine, teams), dynamic=dynamic, starts=starts,
        op=np.searchsorted(first, tasks, side="right") - 1, task=tasks - first[np.searchsorted(first, tasks, side="right") - 1],
        signal=signal, waits=np.stack([counters, thresholds], axis=2),
    )  # fmt: skip


def _task_lists(queues: Any, program: Program, num_sms: int, dynamic: bool) -> list[np.ndarray]:
    """The queues as arrays. Raises ValueError naming one that is not a sequence of tasks of the program."""
    try:
        queues = list(queues)
    except TypeError:
        raise ValueError(f"queues is a {type(queues).__name__}: must be a sequence of queues of tasks") from None
    if not 1 <= len(queues) <= (1 if dynamic else num_sms):
        allowed = "one, which all SMs take from" if dynamic else f"from 1 to {num_sms}, one for each SM"
        raise ValueError(f"queues: there are {len(queues)}, must be {allowed}")
    made = []
    for q, queue in enumerate(queues):
        try:
            tasks = np.asarray(queue)
        except (ValueError, TypeError):
            tasks = np.asarray(None)
        if tasks.ndim != 1 or (tasks.size and tasks.dtype.kind not in "iu"):
            raise ValueError(f"queues[{q}] is {short(queue)}: must be a sequence of whole numbers, the program-wide indices of tasks")
        if tasks.size and not (tasks.min() >= 0 and tasks.max() < program.num_tasks):
            wrong = tasks[(tasks < 0) | (tasks >= program.num_tasks)][0]
            raise ValueError(f"queues[{q}] has task {wrong}: must be from 0 to {program.num_tasks - 1}, the tasks of {program.name}")
        made.append(tasks.astype(np.int64))
    return made


def _wait_table(program: Program, relations: list[list[Relation]], base: np.ndarray, first: np.ndarray) -> list[np.ndarray]:
    """For each op the counters that each of its tasks waits for: [tasks, W], -1 behind the last."""
    result = []
    for op, mine in zip(program.ops, relations, strict=True):
        n = op.task.num_tasks
        columns = []
        for relation in mine:
            width = max(len(atoms) for atoms in relation.atoms)
            table = np.full((len(relation.atoms), width), NONE)
            for i, atoms in enumerate(relation.atoms):
                table[i, : len(atoms)] = atoms + base[relation.earlier]
            columns.append(np.broadcast_to(table[0], (n, width)) if relation.full else table[relation.which])
        waits = np.concatenate([np.zeros((n, 0), np.int64), *columns], axis=1)
        waits = np.take_along_axis(waits, np.argsort(waits < 0, axis=1, kind="stable"), axis=1)
        result.append(waits[:, : int((waits >= 0).sum(axis=1).max(initial=0))])
    return result


def sm_count(program: Program, machine: Machine, num_sms: int | None) -> int:
    """The SMs to use, by default all. Raises ValueError for more than there are, none, a program without tasks, or what is no program or machine."""
    for name, value, kind in (("program", program, Program), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, must be a cuk.{kind.__name__}")
    if not program.num_tasks:
        raise ValueError(f"program {program.name!r} has no tasks: there is nothing to schedule")
    if num_sms is None:
        return machine.num_sms
    return check_whole("num_sms", num_sms, 1, machine.num_sms, f"the SMs of {machine.name}")
