"""One queue of all tasks, from which each SM takes the next when it is free."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuk.counters import assemble, sm_count
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import Schedule
from cuk.schedulers.order import by_critical_path, first_tasks


def dynamic(program: Program, machine: Machine, *, deps: str = "op", num_sms: int | None = None, **options: Any) -> Schedule:
    """Ops in an order that respects what they follow, the longest path of work first, their tasks by index: whatever a task waits for has been
    taken before it, whoever takes it.

    options: those of `cuk.counters.assemble`."""
    num_sms = sm_count(program, machine, num_sms)
    first = first_tasks(program)
    queue = np.concatenate([np.arange(first[op], first[op + 1]) for op in by_critical_path(program, machine)])
    return assemble(program, machine, [queue], scheduler="dynamic", deps=deps, num_sms=num_sms, dynamic=True, **options)
