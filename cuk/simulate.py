"""An event simulation of a schedule's queues: when each task runs, given how long each takes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from cuk.conflicts import siblings
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import NONE, Schedule
from cuk.validate import check_tasks


@dataclass(frozen=True, eq=False)
class Simulated:
    """When each task ran, by its program-wide index (op after op): `start_us`, `end_us` float64 [tasks]; `sm` int64 [tasks]."""

    start_us: np.ndarray = field(repr=False)
    end_us: np.ndarray = field(repr=False)
    sm: np.ndarray = field(repr=False)

    @property
    def total_us(self) -> float:
        return float(self.end_us.max())


def estimate_us(program: Program, machine: Machine) -> np.ndarray:
    """How long each task would take if memory alone counted, and every SM had its share of the bandwidth: float64 [tasks].

    The bytes of an op are spread evenly over its tasks, and a task costs a tenth of a microsecond at least."""
    share = machine.constants["read_bytes_per_s"].value / machine.num_sms if "read_bytes_per_s" in machine.constants else 3e10
    if not share > 0:
        raise ValueError(f"{machine.name}: constant 'read_bytes_per_s' is {machine.constants['read_bytes_per_s'].value}, must be positive")
    each = [max(0.1, op.min_bytes / op.task.num_tasks / share * 1e6) for op in program.ops]
    return np.repeat(each, [op.task.num_tasks for op in program.ops])


def simulate(schedule: Schedule, program: Program, durations_us: np.ndarray) -> Simulated:
    """Runs the queues in order, each team of an SM its own instructions; a task starts when the one before it on its team has ended, its
    waits are over, and the siblings whose scratch it takes have ended. From a shared queue whoever is free first takes the next.

    durations_us: [tasks], by program-wide index. Raises ValueError for another shape or a negative time, RuntimeError naming the instructions
    that wait when nothing can go on."""
    rows = [(op.name, op.task.num_tasks) for op in program.ops]
    if not isinstance(schedule, Schedule) or [(row.name, row.num_tasks) for row in schedule.ops] != rows:
        raise ValueError(f"schedule {schedule!r}: must be a cuk.Schedule of {program.name}")
    check_tasks(schedule)
    durations_us = np.asarray(durations_us, float)
    if durations_us.shape != (program.num_tasks,) or not (durations_us >= 0).all() or not np.isfinite(durations_us).all():
        raise ValueError(f"durations_us {durations_us.shape}: must be [{program.num_tasks}], each finite and none negative")
    index = (schedule.first_task[schedule.op] + schedule.task).tolist()
    waits = [[(c, k) for c, k in row if c != NONE] for row in schedule.waits.tolist()]
    taken: dict[int, list[int]] = {}
    for first, op in zip(schedule.first_task.tolist(), program.ops, strict=False):
        for poster, taker in zip(*(side.tolist() for side in siblings(op)), strict=True):
            taken.setdefault(first + taker, []).append(first + poster)

    # A worker is a team of an SM: it takes from a queue of its own, or all from one.
    teams, starts = schedule.teams, schedule.starts.tolist()
    if schedule.dynamic:
        queues = [iter(range(schedule.num_instructions))] * (schedule.num_sms * teams)
    else:
        queues = [iter(range(starts[q] + team, starts[q + 1], teams)) for q in range(schedule.num_queues) for team in range(teams)]
    values = [0] * schedule.num_counters
    start, end, sm = np.full(program.num_tasks, np.nan), np.full(program.num_tasks, np.nan), np.zeros(program.num_tasks, np.int64)
    ended = [False] * program.num_tasks
    waiting: dict[int, int] = {}  # worker -> instruction
    events: list[tuple[float, int, int]] = []  # end, worker, instruction
    now = 0.0

    def take(worker: int) -> None:
        instruction = next(queues[worker], None)
        if instruction is not None:
            waiting[worker] = instruction

    def can_start(instruction: int) -> bool:
        task = index[instruction]
        return all(values[c] >= k for c, k in waits[instruction]) and all(ended[poster] for poster in taken.get(task, ()))

    for worker in range(len(queues)):
        take(worker)
    while True:
        for worker, instruction in list(waiting.items()):
            if can_start(instruction):
                del waiting[worker]
                task = index[instruction]
                start[task], sm[task] = now, worker // teams
                heapq.heappush(events, (now + float(durations_us[task]), worker, instruction))
        if not events:
            break
        now, worker, instruction = heapq.heappop(events)
        task = index[instruction]
        end[task], ended[task] = now, True
        if schedule.signal[instruction] != NONE:
            values[schedule.signal[instruction]] += 1
        take(worker)
    if waiting:
        names = "; ".join(f"{schedule.describe(i)} waits for {waits[i] or 'siblings'}" for i in list(waiting.values())[:4])
        raise RuntimeError(f"nothing can go on at {now} us: {names}")
    return Simulated(start, end, sm)
