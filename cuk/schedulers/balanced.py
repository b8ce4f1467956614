"""Each task to the SM that has the fewest bytes to move so far."""

from __future__ import annotations

import heapq
from typing import Any

from cuk.counters import assemble, sm_count
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import Schedule


def balanced(program: Program, machine: Machine, *, deps: str = "op", num_sms: int | None = None, **options: Any) -> Schedule:
    """Tasks in program order, each to the SM with the fewest bytes so far (of equals, the one with the fewest tasks). A task's bytes are its
    op's over its tasks; ops that move none, such as argmax, are balanced by number.

    options: those of `cuk.counters.assemble`."""
    num_sms = sm_count(program, machine, num_sms)
    queues: list[list[int]] = [[] for _ in range(num_sms)]
    least = [(0.0, 0, sm) for sm in range(num_sms)]
    task = 0
    for op in program.ops:
        size = op.min_bytes / op.task.num_tasks
        for _ in range(op.task.num_tasks):
            moved, count, sm = least[0]
            queues[sm].append(task)
            heapq.heapreplace(least, (moved + size, count + 1, sm))
            task += 1
    return assemble(program, machine, queues, scheduler="balanced", deps=deps, num_sms=num_sms, **options)
