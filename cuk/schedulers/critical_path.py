"""List scheduling: ops by the longest path of work behind them, each task to the SM that is free first."""

from __future__ import annotations

import heapq
from typing import Any

from cuk.counters import assemble, sm_count
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import Schedule
from cuk.schedulers.order import by_critical_path, first_tasks, predecessors, task_us


def critical_path(program: Program, machine: Machine, *, deps: str = "op", num_sms: int | None = None, **options: Any) -> Schedule:
    """Graham's list scheduling (Bounds on certain multiprocessing anomalies, 1966) with expected times from bytes and bandwidth: ops that
    nothing orders share the SMs, the one that more work depends on first.

    options: those of `cuk.counters.assemble`."""
    num_sms = sm_count(program, machine, num_sms)
    each, first, before = task_us(program, machine), first_tasks(program).tolist(), predecessors(program)
    queues: list[list[int]] = [[] for _ in range(num_sms)]
    free = [(0.0, sm) for sm in range(num_sms)]
    ended = [0.0] * len(program.ops)
    for op in by_critical_path(program, machine):
        ready = max((ended[p] for p in before[op]), default=0.0)
        for task in range(first[op], first[op + 1]):
            at, sm = free[0]
            end = max(at, ready) + each[op]
            heapq.heapreplace(free, (end, sm))
            queues[sm].append(task)
            ended[op] = max(ended[op], end)
    return assemble(program, machine, queues, scheduler="critical_path", deps=deps, num_sms=num_sms, **options)
