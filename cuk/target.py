"""What a schedule is made for: the fingerprint of a program, a machine and the layout of arguments, and the shared memory of the CTA that
interprets it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cuk.machine import Machine
from cuk.program import Program
from cuk.task import args_offsets, round_up

HEAD_WORDS = 4
"""Of an instruction: opcode, op, task, signal; then (counter, threshold) for each wait."""
WORDS_VERSION = 2
THREADS_PER_TEAM = 160  # four consumer warps and a producer warp
MAX_TEAMS = 6
MAX_STAGES = 64
MAX_WORDS = 32
"""Of an instruction: a lane fetches one."""
SLOTS = 4
"""Instructions that each team's producer fetches ahead."""
RECORD_HEAD_BYTES = 32
"""Of what an interpreter keeps of an op, before its arguments: where its words are."""


def fingerprint(program: Program, machine: Machine) -> dict[str, str]:
    """SHA-256 of what a schedule depends on: `machine` (limits), `program` (ops, their sizes and views, buffers) and `layout` (each struct's
    arguments and the form of the instruction words)."""
    layout = []
    for task in dict.fromkeys(op.task for op in program.ops):
        offsets, size = args_offsets(task.fields)
        layout.append([task.struct, size, [[f.name, f.kind, offsets[f.name]] for f in task.fields]])
    ops = [
        [op.name, op.kind, repr(op.task), op.task.num_tasks, [[k, v.buffer.name, v.index, v.columns] for k, v in sorted(op.views.items())]]
        for op in program.ops
    ]
    buffers = [[b.name, list(b.shape), b.dtype, b.role] for b in program.buffers.values()]
    return {
        "machine": _digest(limits_of(machine)),
        "program": _digest([program.name, ops, buffers]),
        "layout": _digest([WORDS_VERSION, HEAD_WORDS, layout]),
    }


def limits_of(machine: Machine) -> dict[str, Any]:
    """The machine without what was measured on it."""
    return machine.to_json() | {"constants": {}}


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


# ---- shared memory ----
def record_bytes(program: Program) -> int:
    """What an interpreter keeps of an op: where its words are, and arguments of the largest size."""
    return RECORD_HEAD_BYTES + round_up(max((args_offsets(op.task.fields)[1] for op in program.ops), default=0), 16)


def smem_bytes(program: Program, teams: int, stages: int) -> int:
    """Shared memory of the one CTA that interprets a program on an SM, for each team: a ring of `stages` stages of the largest size, the
    largest staged operands and scratch, and instructions fetched ahead; each stage and each instruction with two barriers."""
    tasks = [op.task for op in program.ops]
    stage, shared, scratch = (
        max((getattr(t, name) for t in tasks), default=0) for name in ("stage_bytes", "shared_bytes", "scratch_bytes")
    )
    slots = SLOTS * (4 * MAX_WORDS + record_bytes(program) + 16)
    return teams * (slots + shared + scratch + stages * (stage + 16))


def most_stages(program: Program, machine: Machine, teams: int) -> int:
    """As many ring stages as fit, at most 64; 1 where not even one does, which `validate` refuses."""
    free = machine.smem_per_cta_bytes - smem_bytes(program, teams, 0)
    each = smem_bytes(program, teams, 1) - smem_bytes(program, teams, 0)
    return max(1, min(MAX_STAGES, free // each))
