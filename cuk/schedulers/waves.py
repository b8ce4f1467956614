"""Ops in levels, the tasks of a level in rounds over the SMs that their op is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuk.counters import assemble, sm_count
from cuk.machine import Machine
from cuk.program import Program
from cuk.schedule import Schedule
from cuk.schedulers.order import first_tasks, predecessors
from cuk.task import check_whole


def waves(
    program: Program,
    machine: Machine,
    *,
    deps: str = "op",
    num_sms: int | None = None,
    reserved: Mapping[str, int] | None = None,
    **options: Any,
) -> Schedule:
    """An op's level is one more than the highest of those it follows. Each level starts at the first SM, and its tasks go round: as
    separate kernels do, a level takes as many waves as its tasks have SMs.

    reserved: {kind of op: SMs that run nothing else}, taken from the last SM on; all other ops have the rest. options: those of
    `cuk.counters.assemble`. Raises ValueError for a kind that the program lacks, or when no SM is left."""
    num_sms = sm_count(program, machine, num_sms)
    if not isinstance(reserved, Mapping | None):
        raise ValueError(f"reserved={reserved!r}: must be a mapping from a kind of op to SMs")
    reserved = {kind: check_whole(f"reserved[{kind!r}]", count, 1, num_sms, "SMs") for kind, count in (reserved or {}).items()}
    kinds = {op.kind for op in program.ops}
    rest = num_sms - sum(reserved.values())
    if unknown := sorted(map(str, set(reserved) - kinds)):
        raise ValueError(f"reserved: {', '.join(unknown)} is no kind of op of {program.name}; its kinds are {', '.join(sorted(kinds))}")
    if rest < (1 if kinds - set(reserved) else 0):
        raise ValueError(f"reserved={reserved}: must leave some of the {num_sms} SMs for the other ops")
    given, low = {}, rest
    for kind, count in reserved.items():
        given[kind] = range(low, low + count)
        low += count
    levels: list[int] = []
    for before in predecessors(program):
        levels.append(1 + max((levels[p] for p in before), default=-1))
    first = first_tasks(program).tolist()
    queues: list[list[int]] = [[] for _ in range(num_sms)]
    for level in range(max(levels) + 1):
        turn: dict[range, int] = {}
        for op in (i for i, each in enumerate(levels) if each == level):
            sms = given.get(program.ops[op].kind, range(rest))
            for task in range(first[op], first[op + 1]):
                queues[sms[turn.get(sms, 0) % len(sms)]].append(task)
                turn[sms] = turn.get(sms, 0) + 1
    return assemble(program, machine, queues, scheduler="waves", deps=deps, num_sms=num_sms, **options)
