"""What schedulers have in common: the ops' dependencies, and orders of ops that respect them."""

from __future__ import annotations

import heapq

import numpy as np

from cuk.counters import op_relations
from cuk.machine import Machine
from cuk.program import Program
from cuk.simulate import estimate_us


def predecessors(program: Program) -> list[list[int]]:
    """For each op those that it waits for, none that others imply."""
    return [[relation.earlier for relation in mine] for mine in op_relations(program, "op")]


def first_tasks(program: Program) -> np.ndarray:
    """The program-wide index of each op's task 0; behind the last op, the number of tasks."""
    return np.concatenate([[0], np.cumsum([op.task.num_tasks for op in program.ops], dtype=np.int64)])


def task_us(program: Program, machine: Machine) -> list[float]:
    """How long a task of each op is expected to take."""
    return estimate_us(program, machine)[first_tasks(program)[:-1]].tolist()


def by_critical_path(program: Program, machine: Machine) -> list[int]:
    """The ops, each after those that it follows; of those that could come next, the one with the longest path of work behind it."""
    each, before = task_us(program, machine), predecessors(program)
    work = [us * op.task.num_tasks / machine.num_sms for us, op in zip(each, program.ops, strict=True)]
    path = list(work)
    for op in range(len(program.ops) - 1, -1, -1):
        for p in before[op]:
            path[p] = max(path[p], work[p] + path[op])
    missing = [len(mine) for mine in before]
    after: list[list[int]] = [[] for _ in before]
    for op, mine in enumerate(before):
        for p in mine:
            after[p].append(op)
    ready = [(-path[op], op) for op in range(len(before)) if not missing[op]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for follower in after[op]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (-path[follower], follower))
    return order
