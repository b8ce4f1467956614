"""Which tasks of two ops touch the same memory, and in which order they must: what a schedule has to respect, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuk.program import Op, Program, View
from cuk.task import Task

ACCESSES = {"reads": ("in", "inout"), "writes": ("out", "inout")}


@dataclass(frozen=True, eq=False)
class Boxes:
    """What an op's tasks touch of one operand: distinct boxes `low` <= x < `high`, int64 [boxes, d]; access i is of task `tasks[i]` and of
    box `index[i]`."""

    low: np.ndarray
    high: np.ndarray
    tasks: np.ndarray
    index: np.ndarray


@dataclass(frozen=True, eq=False)
class Conflict:
    """Two ops that touch one buffer, at least one of them writing: `kind` is "RAW" (the later reads what the earlier writes), "WAR" or
    "WAW". `pairs`: boxes of the earlier and of the later op that overlap."""

    kind: str
    buffer: str
    earlier_operand: str
    later_operand: str
    earlier: Boxes
    later: Boxes
    pairs: tuple[np.ndarray, np.ndarray]

    def tasks(self) -> tuple[np.ndarray, np.ndarray]:
        """Every pair (task of the earlier op, task of the later op) whose boxes overlap, as two arrays."""
        first, second = self.pairs
        pair, mine = _members(self.earlier, first)
        first_tasks, second = mine, second[pair]
        pair, theirs = _members(self.later, second)
        return first_tasks[pair], theirs


def _members(boxes: Boxes, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which of the wanted boxes, task): the tasks of each wanted box."""
    order = np.argsort(boxes.index, kind="stable")
    counts = np.bincount(boxes.index, minlength=len(boxes.low))
    starts = np.cumsum(counts) - counts
    which, at = spans(starts[wanted], counts[wanted])
    return which, boxes.tasks[order[at]]


def spans(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(span, index) for every index of every span [start, start + count)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - starts, counts)


@lru_cache(maxsize=512)
def task_boxes(task: Task, access: str) -> Mapping[str, Boxes]:
    """What the tasks of an operator touch, by operand; `access` is "reads" or "writes". An operand of that access which no task's
    regions mention counts as touched whole by every task. Raises ValueError for a region that fits no operand."""
    found: dict[str, tuple[list[int], list]] = {}
    operands = task.operands
    for i in range(task.num_tasks):
        for region in getattr(task, access)(i):
            if region.operand not in operands or len(region.box) != len(operands[region.operand].shape):
                raise ValueError(
                    f"{type(task).__name__}.{access}({i}) has a region of {len(region.box)} dimensions of {region.operand!r}, "
                    f"operands are {', '.join(f'{name} {o.shape}' for name, o in operands.items())}"
                )
            tasks, boxes = found.setdefault(region.operand, ([], []))
            tasks.append(i)
            boxes.append(region.box)
    for name, operand in operands.items():
        if operand.access in ACCESSES[access] and name not in found:
            found[name] = (list(range(task.num_tasks)), [tuple((0, size) for size in operand.shape)] * task.num_tasks)
    return {name: _distinct(np.array(tasks), np.array(boxes, np.int64)) for name, (tasks, boxes) in found.items()}


def _distinct(tasks: np.ndarray, boxes: np.ndarray) -> Boxes:
    """From boxes [accesses, d, 2]; empty ones are left out."""
    kept = (boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1)
    flat, index = np.unique(boxes[kept].reshape(int(kept.sum()), -1), axis=0, return_inverse=True)
    split = flat.reshape(len(flat), boxes.shape[1], 2)
    return Boxes(split[:, :, 0].copy(), split[:, :, 1].copy(), tasks[kept], index.reshape(-1))


@lru_cache(maxsize=4096)
def _placed(task: Task, access: str, operand: str, prefix: int | None) -> Boxes:
    """The boxes in a buffer's coordinates, where the operand is slice `prefix` of its first dimension."""
    boxes = task_boxes(task, access)[operand]
    if prefix is None:
        return boxes
    low = np.insert(boxes.low, 0, prefix, axis=1)
    return Boxes(low, np.insert(boxes.high, 0, prefix + 1, axis=1), boxes.tasks, boxes.index)


@lru_cache(maxsize=4096)
def _overlaps(
    earlier: tuple[Task, str, str, int | None], later: tuple[Task, str, str, int | None]
) -> tuple[Boxes, Boxes, tuple[np.ndarray, np.ndarray]]:
    a, b = _placed(*earlier), _placed(*later)
    return a, b, overlapping(a, b)


def overlapping(a: Boxes, b: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Every pair (box of a, box of b) that overlaps, as two arrays."""
    if not len(a.low) or not len(b.low):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Along the dimension that tells a's boxes apart best, only a run of them, sorted by their lower ends, can reach a box of b.
    dim = max(range(a.low.shape[1]), key=lambda d: len(np.unique(a.low[:, d])))
    order = np.argsort(a.low[:, dim], kind="stable")
    reach = np.maximum.accumulate(a.high[order, dim])
    first = np.searchsorted(reach, b.low[:, dim], side="right")
    last = np.searchsorted(a.low[order, dim], b.high[:, dim], side="left")
    in_b, at = spans(first, np.maximum(last - first, 0))
    in_a = order[at]
    meet = ((a.low[in_a] < b.high[in_b]) & (b.low[in_b] < a.high[in_a])).all(axis=1)
    return in_a[meet], in_b[meet]


def _relative(a: View, b: View) -> tuple[int | None, int | None]:
    """The slices to tell two overlapping views apart by: none where both are the same slice."""
    return (None, None) if a.index == b.index else (a.index, b.index)


def op_conflicts(earlier: Op, later: Op) -> list[Conflict]:
    """The conflicts of an op with a later one."""
    found = []
    for mine, theirs, kind in (("writes", "reads", "RAW"), ("reads", "writes", "WAR"), ("writes", "writes", "WAW")):
        for a in task_boxes(earlier.task, mine):
            for b in task_boxes(later.task, theirs):
                one, other = earlier.views[a], later.views[b]
                if not one.overlaps(other):
                    continue
                slices = _relative(one, other)
                first, second, pairs = _overlaps((earlier.task, mine, a, slices[0]), (later.task, theirs, b, slices[1]))
                if len(pairs[0]):
                    found.append(Conflict(kind, one.buffer.name, a, b, first, second, pairs))
    return found


def inner_conflicts(op: Op) -> list[tuple[Conflict, np.ndarray, np.ndarray]]:
    """Between tasks of one op: (conflict, tasks, tasks of a higher index that conflict with them). RAW of scratch is what siblings hand
    to each other, each waiting by itself for those of lower index."""
    found = []
    for conflict in op_conflicts(op, op):
        lower, higher = conflict.tasks()
        apart = lower < higher
        if apart.any():
            found.append((conflict, lower[apart], higher[apart]))
    return found


def siblings(op: Op) -> tuple[np.ndarray, np.ndarray]:
    """(tasks, task of a higher index that waits for what each of them leaves in scratch), as two arrays."""
    pairs = [
        np.stack([lower, higher])
        for conflict, lower, higher in (inner_conflicts(op) if any(o.role == "scratch" for o in op.task.operands.values()) else [])
        if is_handover(op, conflict)
    ]
    both = np.unique(np.concatenate(pairs, axis=1), axis=1) if pairs else np.zeros((2, 0), np.int64)
    return both[0], both[1]


def is_handover(op: Op, conflict: Conflict) -> bool:
    """Whether an op's inner conflict is a hand-over through scratch."""
    return conflict.kind == "RAW" and op.task.operands[conflict.later_operand].role == "scratch" and (
        conflict.earlier_operand == conflict.later_operand
    )  # fmt: skip


def conflicting_ops(program: Program) -> np.ndarray:
    """Whether ops i < j have overlapping views, at least one written: bool [ops, ops]. Their tiles may still be apart."""
    touched: dict[str, list[tuple[int, int, bool]]] = {}
    for i, op in enumerate(program.ops):
        for access in ("reads", "writes"):
            for operand in task_boxes(op.task, access):
                view = op.views[operand]
                touched.setdefault(view.buffer.name, []).append((i, -1 if view.index is None else view.index, access == "writes"))
    result = np.zeros((len(program.ops),) * 2, bool)
    for entries in touched.values():
        op, index, writes = (np.array(column) for column in zip(*entries, strict=True))
        if not writes.any():
            continue
        same = (index[:, None] == index) | (index[:, None] < 0) | (index < 0)
        first, second = np.nonzero(same & (writes[:, None] | writes) & (op[:, None] < op))
        result[op[first], op[second]] = True
    return result
