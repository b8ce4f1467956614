"""Tasks dealt to SMs in turn, op after op."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuk.counters import assemble, sm_count
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import Schedule


def round_robin(program: Program, machine: Machine, *, deps: str = "op", num_sms: int | None = None, **options: Any) -> Schedule:
    """Task i of the program, counted through its ops, goes to SM i % num_sms: queues differ by one instruction at most.

    options: those of `cuk.counters.assemble`."""
    num_sms = sm_count(program, machine, num_sms)
    queues = [np.arange(sm, program.num_tasks, num_sms) for sm in range(num_sms)]
    return assemble(program, machine, queues, scheduler="round_robin", deps=deps, num_sms=num_sms, **options)
