"""The run `persistent`: one kernel, one CTA an SM, each interpreting its own queue of instructions.

Nothing launches unproved: the schedule is validated with all its counters. Where an op's output comes as words (cuk/runs/edges.py), the
counters that they make needless are then taken out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuk.compile import compile
from cuk.launch import Launch, gpu_missing
from cuk.machine import Machine
from cuk.program import Op, Program
from cuk.runs.base import Run
from cuk.runs.edges import Uses, uses_of, without_covered
from cuk.runs.memory import gpu_buffers
from cuk.runs.separate import REGISTERS_PER_SM, addresses_of, tensor_maps
from cuk.schedule import NONE, Schedule
from cuk.schedulers import SCHEDULERS
from cuk.target import MAX_WORDS, THREADS_PER_TEAM, record_bytes, smem_bytes
from cuk.task import pack_args
from cuk.validate import validate

KERNEL = "cuk_persistent"
ORDERINGS = {"release": "kRelease", "relaxed": "kRelaxed"}
SIGNALS = ("words", "counter")
EVENTS = ("start", "prepared", "end", "op")
"""Of an instruction, in the order of the device's enum: nanoseconds of the global timer, and the op's index."""


@dataclass(frozen=True)
class Plan:
    """What a persistent kernel is made of, and told: its kinds of instruction, the words of its queues, where each op's words lie."""

    program: Program
    schedule: Schedule
    entries: tuple[str, ...]
    instructions: np.ndarray
    uses: tuple[Uses, ...]
    words_of_set: int
    ordering: str
    trace: bool

    @property
    def threads(self) -> int:
        return self.schedule.teams * THREADS_PER_TEAM

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.program, self.schedule.teams, self.schedule.stages)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.program)

    @property
    def source(self) -> str:
        """The kernel's translation unit."""
        headers = "".join(f'#include "{header}"\n' for header in dict.fromkeys(op.task.header for op in self.program.ops))
        registers = min(248, REGISTERS_PER_SM // self.threads // 8 * 8)
        kinds = ",\n                 ".join(self.entries)
        return (
            f'#include "kernels/interpreter.cuh"\n{headers}'
            f'extern "C" __global__ void __maxnreg__({registers})\n'
            f"{KERNEL}(const __grid_constant__ cuk::InterpreterArgs launch) {{\n"
            f"  cuk::interpret<{self.schedule.teams}, {self.instructions.shape[2]}, {self.record_bytes}, cuk::Ordering::{ORDERINGS[self.ordering]}, "
            f"{str(self.trace).lower()},\n                 {kinds}>(launch);\n"
            "}\n"
        )

    def records(self, args: Callable[[int, Op], bytes], words_at: int) -> np.ndarray:
        """What the device keeps of each op, uint8 [ops, record_bytes]: addresses of its words in the first set, its arguments."""
        table = np.zeros((len(self.program.ops), self.record_bytes), np.uint8)
        for i, (op, of) in enumerate(zip(self.program.ops, self.uses, strict=True)):
            spans = (words_at + 8 * span[0] if span else 0 for span in (of.posted, of.polled, of.residual))
            packed = struct.pack("4Q", *spans, 0) + args(i, op)
            table[i, : len(packed)] = np.frombuffer(packed, np.uint8)
        return table

    def pack(self, instructions: int, records: int, counters: int, epochs: int, events: int) -> bytes:
        """InterpreterArgs of kernels/interpreter.cuh; arguments are addresses."""
        tasks = [op.task for op in self.program.ops]
        stage, shared, scratch = (max(getattr(t, name) for t in tasks) for name in ("stage_bytes", "shared_bytes", "scratch_bytes"))
        return struct.pack("5QQ6i", instructions, records, counters, epochs, events, self.words_of_set, self.instructions.shape[1],
                           self.schedule.num_counters, self.schedule.stages, stage, shared, scratch)  # fmt: skip


def plan(program: Program, schedule: Schedule, machine: Machine, *, signal: str, ordering: str, trace: bool = False) -> Plan:
    """Proves the schedule and makes a kernel's plan of it. Raises Refused, and ValueError for instructions of more waits than a warp has lanes
    for."""
    validate(schedule, program, machine)
    if schedule.dynamic:
        raise ValueError("a dynamic schedule, whose SMs take instructions from one queue, has no kernel yet: take another scheduler")
    uses, words, covered = uses_of(program) if signal == "words" else ([Uses()] * len(program.ops), 0, set())
    launched = without_covered(schedule, program, covered) if covered else schedule
    if launched.words > MAX_WORDS:
        raise ValueError(
            f"instructions have {launched.words} words, a producer fetches at most {MAX_WORDS}: schedule with a smaller max_waits"
        )
    kinds = [
        f"cuk::Entry<{op.task.struct}, {', '.join(str(span is not None).lower() for span in (of.posted, of.polled, of.residual))}>"
        for op, of in zip(program.ops, uses, strict=True)
    ]
    entries = tuple(dict.fromkeys(kinds))
    instructions = launched.encode()
    opcodes = np.array([entries.index(kind) for kind in kinds], np.int32)
    present = instructions[:, :, 0] != NONE
    instructions[:, :, 0][present] = opcodes[instructions[:, :, 1][present]]
    return Plan(program, launched, entries, instructions, tuple(uses), words, ordering, trace)


def scheduled(program: Program, machine: Machine, scheduler: Any, **options: Any) -> Schedule:
    """The schedule that a scheduler (its name, or a function of that form) makes; a Schedule is taken as it is."""
    if isinstance(scheduler, Schedule):
        return scheduler
    if isinstance(scheduler, str):
        if scheduler not in SCHEDULERS:
            raise ValueError(f"unknown scheduler {scheduler!r}: known ones are {', '.join(SCHEDULERS)} (or give a function, or a Schedule)")
        scheduler = SCHEDULERS[scheduler]
    made = scheduler(program, machine, **options)
    if not isinstance(made, Schedule):
        raise ValueError(f"scheduler {getattr(scheduler, '__name__', scheduler)} returned a {type(made).__name__}, must be a Schedule")
    return made


class PersistentRun(Run):
    """One kernel a step. Switches. scheduler: a name of cuk.schedulers.SCHEDULERS, a function of their form, or a Schedule of this program and
    machine. deps: what a task waits for: whole ops ("op") or the tiles that it touches ("tile"). signal: "words", outputs that are their own
    flag where ops can take them so, counters for the rest; or "counter" for all. ordering: of the counters: "release", or "relaxed", which is
    not correct and for studies only. teams: of a CTA. stages: of each team's ring (None: as many as fit). trace: each instruction notes when
    it started and ended (see `timeline`)."""

    name = "persistent"
    switches = {
        "scheduler": "round_robin",
        "deps": "op",
        "signal": "words",
        "ordering": "release",
        "teams": 2,
        "stages": None,
        "trace": False,
    }

    def __init__(self, program: Program, *, buffers: Mapping[str, Any] | None, seed: int, device: int | None, scheduler: Any, deps: str,
                 signal: str, ordering: str, teams: int, stages: int | None, trace: bool):  # fmt: skip
        for name, value, known in (("signal", signal, SIGNALS), ("ordering", ordering, tuple(ORDERINGS))):
            if value not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
        shown = scheduler if isinstance(scheduler, str) else getattr(scheduler, "scheduler", getattr(scheduler, "__name__", "?"))
        super().__init__(program, {"scheduler": shown, "deps": deps, "signal": signal, "ordering": ordering, "teams": teams,
                                   "stages": stages, "trace": trace})  # fmt: skip
        self.correct_by_claim = ordering == "release"
        if missing := gpu_missing():
            raise RuntimeError(f"run {self.name!r} needs a GPU: {missing}")
        import cupy

        self.device = cupy.cuda.Device(device) if device is not None else cupy.cuda.Device()
        with self.device:
            self.machine = Machine.from_device(self.device.id)
            self.schedule = scheduled(program, self.machine, scheduler, deps=deps, teams=teams, stages=stages)
            self.plan = plan(program, self.schedule, self.machine, signal=signal, ordering=ordering, trace=trace)
            self.buffers = gpu_buffers(program, seed, buffers)
            self._maps = tensor_maps(program, self.buffers)
            self.cubin = compile(self.plan.source, name=KERNEL)
            self.resources = {KERNEL: self.cubin.resources}
            queues, per_queue, _ = self.plan.instructions.shape
            self._words = cupy.full(2 * self.plan.words_of_set, ~np.uint64(0), np.uint64)
            self._counters = cupy.zeros(2 * max(1, self.schedule.num_counters), np.uint32)
            self._epochs = cupy.zeros(queues, np.uint32)
            self._events = cupy.zeros((queues, per_queue, len(EVENTS)), np.uint64) if trace else None
            self._instructions = cupy.asarray(self.plan.instructions)
            self._records = cupy.asarray(self.plan.records(self._pack, self._words.data.ptr))
            self.launches = [
                Launch(
                    self.cubin.function(),
                    grid=queues,
                    block=self.plan.threads,
                    args=(
                        self.plan.pack(
                            *(a.data.ptr for a in (self._instructions, self._records, self._counters, self._epochs)),
                            self._events.data.ptr if trace else 0,
                        ),
                    ),
                    smem_bytes=self.plan.smem_bytes,
                    resident=True,
                    name=KERNEL,
                )
            ]

    def _pack(self, index: int, op: Op) -> bytes:
        return pack_args(op.task.fields, addresses_of(op, self.buffers, self._maps.data.ptr + 128 * index))

    @property
    def source(self) -> dict[str, str]:
        return {KERNEL: self.cubin.source}

    @property
    def ptx(self) -> dict[str, str]:
        return {KERNEL: self.cubin.ptx}

    @property
    def sass(self) -> dict[str, str]:
        return {KERNEL: self.cubin.sass}

    @property
    def events(self) -> np.ndarray:
        """Of the last step, uint64 [queues, instructions, len(EVENTS)]. Raises ValueError unless the run was built with trace=True."""
        if self._events is None:
            raise ValueError("this run was built without tracing: build it with trace=True")
        self.synchronize()
        return self._events.get()

    def __call__(self) -> None:
        for launch in self.launches:
            launch()
