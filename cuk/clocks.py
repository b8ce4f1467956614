"""What a schedule orders, exactly: for every instruction, how far each queue has certainly come before it starts.

A task Y comes after a task X in every execution if and only if Y cannot start when X never ends and everything else runs as far as it
can. Counters only rise and queues only advance, so that farthest point does not depend on the order of execution. Blocking each task in turn
takes a search a task. Here all searches run at once: what one team runs of a queue forms a chain, and blocking one of its tasks blocks the
rest, so what is ordered before Y is a prefix of each chain, and a row of prefix lengths, Y's clock, holds the outcome of every search:

  clock(Y)     = max over Y's waits of guarantee(counter, threshold), and over the instruction before Y in its chain
  guarantee(c, k)[chain] = the k-th smallest of clock(s)[chain] over the instructions s that signal c, each counted with itself in its own chain

since to reach k, c needs a signal of some instruction that is not among the k - 1 least dependent ones. The greatest solution is
sought: the search is a least fixed point and this is its complement. Where every wait is for all signals one pass finds it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from cuk.conflicts import siblings
from cuk.program import Program
from cuk.schedule import NONE, Schedule

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Runs:
    """A schedule cut into runs: instructions of one chain in a row that wait for the same. A chain is what one team of an SM runs, in order; a
    shared queue is one. Chain i holds the instructions order[starts[i]] … order[starts[i + 1] - 1], run r, of chain[r], those of
    order[bounds[r]] … order[bounds[r + 1] - 1].

    waits[i]: the (counter, threshold) of wait set i; `wait_set` [n] of each instruction; `handed`: for the run's first instruction,
    hand-overs that it waits for besides, as (counter behind the schedule's own, threshold); signals[r]: (counter, times)."""

    order: np.ndarray
    starts: np.ndarray
    waits: list[list[tuple[int, int]]]
    wait_set: np.ndarray
    bounds: np.ndarray
    chain: np.ndarray
    handed: dict[int, tuple[int, int]]
    signals: list[list[tuple[int, int]]]

    @property
    def of_instruction(self) -> np.ndarray:
        """The run of each instruction."""
        run = np.empty(len(self.order), np.int64)
        run[self.order] = np.repeat(np.arange(len(self.chain)), np.diff(self.bounds))
        return run


def _chains(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """(the instructions, chain after chain; where each chain starts)."""
    teams = 1 if schedule.dynamic else schedule.teams
    queue = np.repeat(np.arange(schedule.num_queues), np.diff(schedule.starts))
    chain = queue * teams + (np.arange(len(queue)) - schedule.starts[queue]) % teams
    counts = np.bincount(chain, minlength=schedule.num_queues * teams)
    return np.argsort(chain, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def runs_of(schedule: Schedule, program: Program) -> Runs:
    """Every instruction must be of a task of the program, each task appearing once at most."""
    n = schedule.num_instructions
    order, starts = _chains(schedule)
    live = (schedule.waits[:, :, :1] != NONE) & (schedule.waits[:, :, 1:] > 0)  # a threshold of 0 or less is reached at once
    rows = np.ascontiguousarray(np.where(live, schedule.waits, NONE).reshape(n, -1))
    if rows.shape[1]:
        keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
        _, at, wait_set = np.unique(keys, return_index=True, return_inverse=True)
    else:
        at, wait_set = np.zeros(min(n, 1), int), np.zeros(n, int)
    waits = [[(c, k) for c, k in rows[i].reshape(-1, 2).tolist() if c != NONE] for i in at]

    # Hand-overs between siblings are counters of their own here, one for each taker.
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    instruction = np.full(schedule.first_task[-1], NONE, np.int64)
    instruction[schedule.first_task[schedule.op] + schedule.task] = np.arange(n)
    posters, takers = [], []
    for first, op in zip(schedule.first_task, program.ops, strict=False):
        mine, theirs = siblings(op)
        posters.append(instruction[mine + first])
        takers.append(instruction[theirs + first])
    poster, taker = position[np.concatenate(posters)], position[np.concatenate(takers)]
    who, number, count = np.unique(taker, return_inverse=True, return_counts=True)

    cut = np.zeros(n, bool)
    cut[1:] = wait_set[order[1:]] != wait_set[order[:-1]]
    cut[starts[:-1][np.diff(starts) > 0]] = True
    cut[who] = True
    firsts = np.flatnonzero(cut)
    run = np.cumsum(cut) - 1
    signals: list[list[tuple[int, int]]] = [[] for _ in firsts]
    signal = schedule.signal[order]
    has = signal >= 0
    pairs = np.concatenate([
        np.stack([run[has], signal[has]], axis=1), np.stack([run[poster], number.reshape(-1) + schedule.num_counters], axis=1)
    ])  # fmt: skip
    code, times = np.unique(pairs[:, 0] * (schedule.num_counters + len(who) + 1) + pairs[:, 1], return_counts=True)
    for r, c, k in zip(*(a.tolist() for a in (*divmod(code, schedule.num_counters + len(who) + 1), times)), strict=True):
        signals[r].append((c, k))
    handed = {int(run[i]): (schedule.num_counters + j, int(k)) for j, (i, k) in enumerate(zip(who, count, strict=True))}
    return Runs(order, starts, waits, wait_set, np.append(firsts, n), np.searchsorted(starts, firsts, side="right") - 1, handed, signals)


def execute(schedule: Schedule, runs: Runs) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Runs everything as far as it can, chains in order: (runs in the order in which they end, (run, counter, threshold) of those that wait
    for ever). How far it gets does not depend on the order of execution."""
    values = [0] * (schedule.num_counters + len(runs.handed))
    waiting: dict[int, list[tuple[int, int]]] = {}  # counter -> heap of (threshold, run): a signal looks at those alone that it wakes
    blocked: dict[int, tuple[int, int]] = {}
    done: list[int] = []
    chain = [*runs.chain.tolist(), NONE]
    sets = runs.wait_set[runs.order[runs.bounds[:-1]]].tolist()

    def unmet(run: int) -> tuple[int, int] | None:
        wanted = runs.waits[sets[run]]
        if run in runs.handed:
            wanted = [*wanted, runs.handed[run]]
        return next(((c, k) for c, k in wanted if values[c] < k), None)

    def block(run: int, wait: tuple[int, int]) -> None:
        blocked[run] = wait
        heapq.heappush(waiting.setdefault(wait[0], []), (wait[1], run))

    def finish(run: int) -> list[int]:
        """The runs whose wait that ends."""
        done.append(run)
        woken = []
        for c, times in runs.signals[run]:
            values[c] += times
            held = waiting.get(c)
            while held and held[0][0] <= values[c]:
                woken.append(heapq.heappop(held)[1])
        return woken

    # One taker alone must get through a shared queue, since the others may be late; and where one does, so do any number.
    ready = np.searchsorted(runs.chain, np.unique(runs.chain)).tolist()
    while ready:
        run = ready.pop()
        blocked.pop(run, None)
        if wait := unmet(run):
            block(run, wait)
            continue
        ready += finish(run)
        if chain[run + 1] == chain[run]:
            ready.append(run + 1)
    return done, [(run, *wait) for run, wait in blocked.items()]


def clock_bytes(schedule: Schedule, runs: Runs) -> int:
    """Memory that the clocks take."""
    if schedule.dynamic:
        width = len(np.unique(runs.wait_set * (schedule.num_counters + 1) + schedule.signal))
        return 4 * width * 2 * len(runs.waits)
    return 4 * (len(runs.starts) - 1) * (len(runs.chain) + len(runs.waits))


def partial_steps(schedule: Schedule, runs: Runs) -> int:
    """Elements that one pass looks at for waits that are over before a counter's last signal."""
    totals = schedule.totals
    wanted = {(c, k) for waits in runs.waits for c, k in waits if k < totals[c]}
    return int(sum(int(totals[c]) for c, _ in wanted)) * (len(runs.waits) if schedule.dynamic else len(runs.starts) - 1)


class Clocks:
    """Which instructions come before which. `column` and `need` [n]: Y starts after X if clock(Y)[column[X]] >= need[X]."""

    def __init__(self, schedule: Schedule, runs: Runs, done: list[int]):
        self.schedule, self.runs = schedule, runs
        n, self.shared = schedule.num_instructions, schedule.dynamic
        if schedule.dynamic:
            # Nothing but counters orders what any number of SMs take: tasks that wait for and signal the same are alike, and the first
            # of them stands for each of them as the blocked one.
            kinds = np.stack([runs.wait_set, schedule.signal], axis=1)
            _, first, column = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
            self.column, self.need = column.reshape(-1), np.ones(n, np.int64)
            self.marks = np.zeros(n, bool)
            self.marks[first] = True
            self.row, self.own = runs.wait_set, np.full(len(runs.waits), NONE)
            self.place = np.zeros(n, np.int64)
            width, rows = len(first), len(runs.waits)
        else:
            self.column, self.place = np.empty(n, np.int64), np.empty(n, np.int64)
            self.column[runs.order] = np.repeat(np.arange(len(runs.starts) - 1), np.diff(runs.starts))
            self.place[runs.order] = np.arange(n)
            self.place -= runs.starts[self.column]
            self.need, self.marks = self.place + 1, np.ones(n, bool)
            self.row, self.own = runs.of_instruction, runs.chain
            width, rows = len(runs.starts) - 1, len(runs.chain)
        self.clock = np.full((rows, width), NEVER, np.int32)
        self.by_waits = np.full((len(runs.waits), width), NEVER, np.int32)  # of an instruction's own waits alone
        self._signallers()
        self._solve(done)

    def _signallers(self) -> None:
        """The instructions that signal each counter, and for each counter the rows that they are in and how far they are in their chains."""
        signal, c = self.schedule.signal, self.schedule.num_counters
        order = np.argsort(signal, kind="stable")
        bounds = np.searchsorted(signal[order], np.arange(c + 1))
        self.signallers = [order[bounds[i] : bounds[i + 1]] for i in range(c)]
        self.rows_of = [np.unique(self.row[members]) for members in self.signallers]

    def _guarantee(self, counter: int, threshold: int) -> np.ndarray:
        members = self.signallers[counter]
        marked = members[self.marks[members]]
        if threshold >= len(members):
            result = self.clock[self.rows_of[counter]].max(axis=0)
            np.maximum.at(result, self.column[marked], self.need[marked].astype(np.int32))
            return result
        ends = self.clock[self.row[members]]
        at = np.flatnonzero(self.marks[members])
        ends[at, self.column[marked]] = np.maximum(ends[at, self.column[marked]], self.need[marked])
        return np.partition(ends, threshold - 1, axis=0)[threshold - 1]

    def _solve(self, done: list[int]) -> None:
        runs = self.runs
        partial = any(k < len(self.signallers[c]) for wanted in runs.waits for c, k in wanted)
        sets, chain = runs.wait_set[runs.order[runs.bounds[:-1]]].tolist(), runs.chain.tolist()
        before_run = (runs.bounds[:-1] - runs.starts[runs.chain]).tolist()  # instructions of its chain
        while True:
            before = self.clock.copy() if partial else None
            fresh: set[int] = set()
            known: dict[tuple[int, int], np.ndarray] = {}
            for run in done:
                wanted = sets[run]
                if wanted not in fresh:
                    fresh.add(wanted)
                    row = np.zeros(self.clock.shape[1], np.int32)
                    for wait in runs.waits[wanted]:
                        if wait not in known:
                            known[wait] = self._guarantee(*wait)
                        np.maximum(row, known[wait], out=row)
                    self.by_waits[wanted] = row
                    if self.shared:
                        self.clock[wanted] = row
                if self.shared:
                    continue
                mine = self.clock[run]
                if before_run[run]:
                    np.maximum(self.by_waits[wanted], self.clock[run - 1], out=mine)
                    if mine[chain[run]] < before_run[run]:
                        mine[chain[run]] = before_run[run]
                else:
                    mine[:] = self.by_waits[wanted]
            if not partial or np.array_equal(before, self.clock):
                return

    def after(self, later: np.ndarray, column: np.ndarray, need: np.ndarray, by_waits: bool = False) -> np.ndarray:
        """Whether each instruction `later` starts after the chain `column` has come to `need`; `by_waits`: for what it reads as soon as its
        own waits are over."""
        if by_waits:
            return self.by_waits[self.runs.wait_set[later], column] >= need
        return np.maximum(self.clock[self.row[later], column], np.where(self.own[self.row[later]] == column, self.place[later], 0)) >= need

    def least(self, group: np.ndarray, num_groups: int, by_waits: bool = False) -> np.ndarray:
        """The least clock of each group's instructions, int32 [groups, columns]; NEVER for an empty one. group: [n]."""
        row = self.runs.wait_set if by_waits else self.row
        rows = len(self.by_waits if by_waits else self.clock)
        order = np.argsort(group * rows + row, kind="stable")
        code, first = np.unique((group * rows + row)[order], return_index=True)
        groups, which = np.divmod(code, rows)
        clocks = (self.by_waits if by_waits else self.clock)[which]
        if not by_waits and not self.shared:
            own = self.own[which]
            place = np.minimum.reduceat(self.place[order], first)
            at = np.arange(len(which))
            clocks[at, own] = np.maximum(clocks[at, own], place)
        starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
        result = np.full((num_groups, clocks.shape[1]), NEVER, np.int32)
        result[groups[starts]] = np.minimum.reduceat(clocks, starts, axis=0)
        return result
