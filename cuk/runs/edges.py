"""Edges of a program whose reader need not wait for the whole of the op before it: it takes that op's output word by word.

What orders the words stands in cuda_src/core/sync.cuh: each proves itself, and the op behind the reader empties it for the next step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuk.conflicts import conflicting_ops, overlapping, task_boxes
from cuk.program import Op, Program
from cuk.schedule import NONE, Schedule
from cuk.task import round_up

_ALIGN_WORDS = 16  # 128 bytes: two edges never share a line


@dataclass(frozen=True)
class Words:
    """Where an op's words lie in the run's array of them: (first word, words) to the next op, from the one before, and of the edge that
    it empties; None where there are none."""

    posted: tuple[int, int] | None = None
    polled: tuple[int, int] | None = None
    emptied: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The enumerator of kernels/separate.cuh."""
        return {(False, False): "kNone", (True, False): "kPosts", (False, True): "kPolls", (True, True): "kBoth"}[
            self.posted is not None, self.polled is not None
        ]


NO_WORDS = Words()


def has_words(writer: Op, reader: Op) -> bool:
    """Whether `reader`, the op right behind `writer`, can take its input as the words that `writer` posts."""
    posted = [writer.views[name] for name in writer.task.posts]
    polled = [reader.views[name] for name in reader.task.polls]
    if not posted or len(posted) != len(polled):
        return False
    return all((out.buffer.name, out.index) == (into.buffer.name, into.index) for out, into in zip(posted, polled, strict=True))


def words_of(program: Program) -> tuple[list[Words], int]:
    """The words of each op, and how many there are in all. No edge shares words with another: one that is used again within a
    step would have to be empty before its writer may start, which a programmatic edge does not promise. The last op's edge has
    none, since nobody would empty them within the step."""
    ops = program.ops
    edges: list[tuple[int, int] | None] = []
    total = 0
    for i in range(len(ops) - 2):
        edge = None
        if has_words(ops[i], ops[i + 1]):
            edge = (total, ops[i].task.words)
            total += round_up(edge[1], _ALIGN_WORDS)
        edges.append(edge)

    def edge_from(index: int) -> tuple[int, int] | None:
        return edges[index] if 0 <= index < len(edges) else None

    return [Words(edge_from(i), edge_from(i - 1), edge_from(i - 2)) for i in range(len(ops))], total


def unit_names(ops: Sequence[Op], words: Sequence[Words]) -> list[str]:
    """What each op's kernel is called in tables: its kind, and how it is ordered where not all ops of the kind are alike."""
    kinds: dict[str, dict[str, int]] = {}
    for op, of in zip(ops, words, strict=True):
        counts = kinds.setdefault(op.kind, {})
        counts[of.kind] = counts.get(of.kind, 0) + 1
    described = {"kNone": "waits", "kPosts": "waits, posts", "kPolls": "polls", "kBoth": "polls, posts"}
    names = []
    for op, of in zip(ops, words, strict=True):
        counts = kinds[op.kind]
        usual = max(counts, key=counts.__getitem__)
        names.append(op.kind if of.kind == usual else f"{op.kind} ({described[of.kind]})")
    return names


# ---- a whole step in one kernel: words from any op to any later one ----
Span = tuple[int, int]
"""(first word, words)."""


@dataclass(frozen=True)
class Uses:
    """The words that an op of a persistent run posts, takes its input from, and takes its residual from; None where there are none."""

    posted: Span | None = None
    polled: Span | None = None
    residual: Span | None = None


def uses_of(program: Program) -> tuple[list[Uses], int, set[tuple[int, int, str]]]:
    """The words of each op of a persistent run, how many there are in all, and what comes as words: (op that posts, op that takes, operand).

    An op posts only what some later one takes. Posts and takes match when both are the same views in the same order, and no op between
    writes them."""
    ops = program.ops
    polls: list[int | None] = [_poster(ops, i, op.task.polls) for i, op in enumerate(ops)]
    takes: list[int | None] = [_poster(ops, i, op.task.takes) for i, op in enumerate(ops)]
    spans: dict[int, Span] = {}
    total = 0
    for i in sorted({i for i in (*polls, *takes) if i is not None}):
        spans[i] = (total, ops[i].task.words)
        total += round_up(spans[i][1], _ALIGN_WORDS)
    covered = {
        (posts, i, name)
        for chosen, attribute in ((polls, "polls"), (takes, "takes"))
        for i, posts in enumerate(chosen)
        if posts is not None
        for name in getattr(ops[i].task, attribute)
    }
    uses = [
        Uses(spans.get(i), spans.get(polls[i]) if polls[i] is not None else None, spans.get(takes[i]) if takes[i] is not None else None)
        for i in range(len(ops))
    ]
    return uses, total, covered


def _poster(ops: Sequence[Op], reader: int, names: Sequence[str]) -> int | None:
    """The op that posts just these operands of the reader."""
    wanted = [ops[reader].views[name] for name in names]
    if not wanted:
        return None
    for i in range(reader - 1, -1, -1):
        written = ops[i].accesses("out", "inout")
        if any(view.overlaps(out) for view in wanted for out in written):
            posted = [ops[i].views[name] for name in ops[i].task.posts]
            return i if posted == wanted else None
    return None


def without_covered(schedule: Schedule, program: Program, covered: set[tuple[int, int, str]]) -> Schedule:
    """A valid schedule's waits and signals, less those that words make needless.

    Of two ops that touch the same memory, the later
    - takes a word: it has read what it wanted when it goes on, and nothing else of that op's output;
    - reads or overwrites (RAW, WAW) something else: it needs a counter, its own or one that an op which it waits for waits for;
    - overwrites what the earlier one read (WAR): a chain of counters and words will do as well, since each word depends on what its
      poster read, and a read cannot return what depends on itself (the model's no-thin-air axiom).

    A counter stands for whole ops here. Waits that are missing, because others which have gone implied them, come back as waits for whole ops.
    Deadlocks cannot come of it: a word is waited for only where the schedule orders its poster before."""
    ops = program.ops
    conflicts = conflicting_ops(program)
    owner = np.full(schedule.num_counters, NONE)  # the op that signals each counter
    signalling = schedule.signal != NONE
    owner[schedule.signal[signalling]] = schedule.op[signalling]
    counters_of = [np.flatnonzero(owner == i) for i in range(len(ops))]
    full = _full_waits(schedule, owner)
    strong, chained = [0] * len(ops), [0] * len(ops)  # bit p: op p has ended before this op starts: by counters; by words, too
    whole = [0] * len(ops)  # bit p: op p has ended, by the chain, once all of this op has
    needed: list[list[int]] = []
    for c in range(len(ops)):
        mine = []
        whole[c] = 1 << c
        for p in {posts for posts, taker, _ in covered if taker == c}:
            everything, by_each = _takes(ops[c], {name for posts, taker, name in covered if (posts, taker) == (p, c)})
            chained[c] |= whole[p] if by_each else chained[p]
            whole[c] |= whole[p] if everything else 0
        for p in np.flatnonzero(conflicts[:, c])[::-1].tolist():
            kinds = _kinds(ops, p, c, covered)
            if not kinds or (strong if kinds & {"RAW", "WAW"} else chained)[c] >> p & 1:
                continue
            mine.append(p)
            if (p, c) in full or not _waits_at_all(schedule, owner, p, c):
                strong[c] |= 1 << p | strong[p]
                chained[c] |= whole[p]
            else:
                strong[c] |= 1 << p  # tile by tile: as the schedule proves
                chained[c] |= 1 << p
        whole[c] |= chained[c]
        needed.append(mine)
    return _with_waits(schedule, needed, owner, counters_of)


def _kinds(ops: Sequence[Op], p: int, c: int, covered: set[tuple[int, int, str]]) -> set[str]:
    """How op c depends on op p other than by words."""
    found = set()
    for mine, theirs, kind in (("writes", "reads", "RAW"), ("reads", "writes", "WAR"), ("writes", "writes", "WAW")):
        for a in task_boxes(ops[p].task, mine):
            for b in task_boxes(ops[c].task, theirs):
                if ops[p].views[a].overlaps(ops[c].views[b]) and not (kind == "RAW" and (p, c, b) in covered):
                    found.add(kind)
    return found


def _takes(op: Op, names: set[str]) -> tuple[bool, bool]:
    """Whether all the tasks of an op together, and whether each of them, take all the words of these operands."""
    together, each = True, True
    for name in names:
        boxes, shape = task_boxes(op.task, "reads")[name], op.task.operands[name].shape
        apart = len(overlapping(boxes, boxes)[0]) == len(boxes.low)
        together &= apart and int((boxes.high - boxes.low).prod(axis=1).sum()) == math.prod(shape)
        each &= len(boxes.low) == 1 and len(np.unique(boxes.tasks)) == op.task.num_tasks
    return together, together and each


def _full_waits(schedule: Schedule, owner: np.ndarray) -> set[tuple[int, int]]:
    """(p, c) where every task of op c waits for all the counters of op p, in full."""
    totals = schedule.totals
    counters, thresholds = schedule.waits[:, :, 0], schedule.waits[:, :, 1]
    whole = (counters != NONE) & (thresholds >= totals[np.maximum(counters, 0)])
    found = set()
    number = np.bincount(owner[owner >= 0], minlength=len(schedule.ops))
    for c, row in enumerate(schedule.ops):
        at = schedule.op == c
        for p in np.unique(owner[counters[at][whole[at]]]).tolist():
            if (whole[at] & (owner[np.maximum(counters[at], 0)] == p)).sum() == row.num_tasks * number[p]:
                found.add((p, c))
    return found


def _waits_at_all(schedule: Schedule, owner: np.ndarray, p: int, c: int) -> bool:
    counters = schedule.waits[schedule.op == c, :, 0]
    return bool(((counters != NONE) & (owner[np.maximum(counters, 0)] == p)).any())


def _with_waits(schedule: Schedule, needed: Sequence[Sequence[int]], owner: np.ndarray, counters_of: Sequence[np.ndarray]) -> Schedule:
    """The schedule in which op c waits only for ops needed[c]: as it did, or for all of an op where it did not."""
    counters = schedule.waits[:, :, 0].astype(np.int64)
    thresholds = schedule.waits[:, :, 1].astype(np.int64)
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    kept = np.zeros(counters.shape, bool)
    for c, mine in enumerate(needed):
        at = np.flatnonzero(schedule.op == c)
        owners = np.where(counters[at] == NONE, NONE, owner[np.maximum(counters[at], 0)])
        kept[at] = np.isin(owners, mine) & (owners != NONE)
        added = [k for p in mine if not (owners == p).any() for k in counters_of[p]]
        for column, k in enumerate(added):
            if column == len(columns):
                columns.append((np.full(len(counters), NONE), np.full(len(counters), NONE)))
            columns[column][0][at], columns[column][1][at] = k, schedule.totals[k]
    counters, thresholds = np.where(kept, counters, NONE), np.where(kept, thresholds, NONE)
    counters = np.concatenate([counters, *(c[:, None] for c, _ in columns)], axis=1)
    thresholds = np.concatenate([thresholds, *(t[:, None] for _, t in columns)], axis=1)
    order = np.argsort(counters == NONE, axis=1, kind="stable")
    counters, thresholds = np.take_along_axis(counters, order, axis=1), np.take_along_axis(thresholds, order, axis=1)
    width = max(2, round_up(int((counters != NONE).sum(axis=1).max(initial=0)), 2))
    waits = np.stack([counters, thresholds], axis=2)[:, :width]
    used = np.unique(waits[:, :, 0])
    return replace(schedule, waits=waits, signal=np.where(np.isin(schedule.signal, used), schedule.signal, NONE))
