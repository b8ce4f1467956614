"""The runs `stream`, `graph` and `pdl`: one kernel per op, launched one after another, from a graph, or from a graph whose edges
let each kernel start early and fill its ring before it waits."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuk.compile import Cubin, compile
from cuk.launch import Launch, capture, encode_tensor_map, gpu_missing
from cuk.machine import Machine
from cuk.program import Op, Program, View
from cuk.runs.base import Run
from cuk.runs.edges import NO_WORDS, Words, unit_names, words_of
from cuk.runs.memory import gpu_buffers
from cuk.task import Task, ceil_div, pack_args
from cuk.timeline import EVENTS, Timeline

THREADS_PER_TEAM = 160  # four consumer warps and a producer warp
STAGER_THREADS = 128  # of a CTA whose x arrives as words that are used chunk by chunk
MAX_TEAMS = 6
REGISTERS_PER_SM = 65_536
MAX_STAGES = 64
TEAMS_FOR_ONE_ROUND = 3
EVEN_EXTRA_BYTES = 1024
EARLY_BYTES = 48 * 1024
AHEAD_BYTES = 5 << 20
DEPS = ("op", "tile")
TRIGGERS = {"start": "kStart", "loads": "kLoads", "end": "kEnd"}


@dataclass(frozen=True)
class Footprint:
    """The shared memory and threads of one kernel, and the words that tell the device (LaunchArgs of kernels/separate.cuh)."""

    num_tasks: int
    num_stages: int
    stage_bytes: int
    shared_bytes: int
    scratch_bytes: int
    prefetch: int
    teams: int
    in_flight: int = MAX_STAGES
    at_least: int = 0  # shared memory to take even where less is needed
    staged_chunks: int = 0  # of an x that arrives as words, each with a barrier

    @property
    def smem_bytes(self) -> int:
        return max(self.at_least, self.needed_bytes)

    @property
    def needed_bytes(self) -> int:
        barriers = self.teams * self.num_stages * 16
        barriers += 8 * self.staged_chunks
        return barriers + self.shared_bytes + self.teams * (self.scratch_bytes + self.num_stages * self.stage_bytes)

    @property
    def threads(self) -> int:
        return self.teams * THREADS_PER_TEAM + (STAGER_THREADS if self.staged_chunks else 0)

    def pack(
        self, ahead: int = 0, ahead_bytes: int = 0, early: bool = False, pace_ns: int = 0, words: Words = NO_WORDS, words_at: int = 0
    ) -> bytes:
        """`ahead`: the address of so many bytes to ask L2 for; `early`: before the wait; `pace_ns`: nanoseconds between two pieces;
        `words_at`: the address of the run's words."""
        posted, polled, emptied = (words_at + 8 * of[0] if of else 0 for of in (words.posted, words.polled, words.emptied))
        return struct.pack("11i4x4Q", self.num_tasks, self.num_stages, self.stage_bytes, self.shared_bytes, self.scratch_bytes,
                           self.prefetch, self.in_flight, ahead_bytes, early, pace_ns, words.emptied[1] if words.emptied else 0,
                           ahead, posted, polled, emptied)  # fmt: skip


def footprint(
    task: Task,
    machine: Machine,
    *,
    index: int = 0,
    teams: int = 2,
    stages: int | None = None,
    ctas_per_sm: int = 2,
    prefetch: bool | int = True,
    early_bytes: int = EARLY_BYTES,
    polls: bool = False,
) -> Footprint:
    """The footprint of a task's kernel, the index-th of its program: `stages` ring stages a team, or as many as leave room for
    `ctas_per_sm` such CTAs on an SM. A team for each task where an SM has up to three; no more stages than a team's tasks fill.

    With two CTAs an SM, kernels of even index take a little over half of the shared memory and those of odd index the rest. Two CTAs of an
    even kernel then never fit one SM, and beside one of them exactly one of an odd kernel does: every kernel of one CTA for each SM
    has exactly one there. With equal footprints a third of the SMs were seen to hold two CTAs of one kernel, and as many none.

    `early_bytes`: of a CTA's loads before its wait, how many may be on their way at once (at least a stage for each team). `polls`: its
    input arrives as words.

    Raises ValueError when the task does not fit, with the bytes needed and allowed."""
    each_sm = ceil_div(task.num_tasks, machine.num_sms)
    teams = each_sm if each_sm <= max(teams, TEAMS_FOR_ONE_ROUND) else teams
    useful = task.stages_of_team(ceil_div(task.num_tasks, machine.num_sms * teams)) if task.stage_bytes else 0
    limit = (
        machine.smem_per_cta_bytes if ctas_per_sm == 1 else machine.smem_per_sm_bytes // ctas_per_sm - machine.smem_reserved_per_cta_bytes
    )
    at_least = 0
    if ctas_per_sm == 2:
        even, odd = limit + EVEN_EXTRA_BYTES, limit - EVEN_EXTRA_BYTES
        limit = even if index % 2 == 0 else odd
        at_least = even if index % 2 == 0 else odd // 2 + 512  # more than half of what is left beside an even one

    def of(count: int) -> Footprint:
        ahead = count if prefetch is True else min(int(prefetch), count)
        at_once = max(1, min(MAX_STAGES, early_bytes // max(1, teams * task.stage_bytes)))
        return Footprint(
            task.num_tasks, count, task.stage_bytes, task.shared_bytes, task.scratch_bytes, ahead, teams, at_once,
            at_least=at_least, staged_chunks=task.staged_chunks if polls else 0,
        )  # fmt: skip

    def most(limit: int) -> int:
        count = 0
        while count < min(useful, MAX_STAGES) and of(count + 1).needed_bytes <= limit:
            count += 1
        return count

    count = 0 if not task.stage_bytes else stages if stages is not None else most(limit)
    if stages is None and count < min(2, useful):  # an operand as large as this leaves no room for company
        count = most(machine.smem_per_cta_bytes)
    if (task.stage_bytes and count < 1) or of(count).smem_bytes > machine.smem_per_cta_bytes:
        raise ValueError(
            f"{type(task).__name__}: {max(count, 1)} stages of {task.stage_bytes} bytes for {teams} teams need {of(max(count, 1)).smem_bytes} bytes "
            f"of shared memory, a CTA can have {machine.smem_per_cta_bytes}; take fewer stages or teams, or a smaller batch"
        )
    return of(count)


@dataclass(frozen=True)
class Ask:
    """What an op asks L2 for: `bytes` of a view from the byte `start` on."""

    view: View
    start: int
    bytes: int


def asked_ahead(
    program: Program, fits: Sequence[Footprint], machine: Machine, ahead_bytes: int | Mapping[str, int], early: bool
) -> list[Ask | None]:
    """What each op asks L2 for. `ahead_bytes`: at most so many each, or for each kind of op.

    An op whose loads all fit its ring leaves memory idle while it runs, unless the next op's ring is large. A run of such small ops asks for
    what the large one behind it will read after its own rings are full. Late: the first of them asks after its wait, if more stand
    between. Early: every op that waits for one of them asks, before that wait, for the bytes behind those already asked for."""
    asks: list[Ask | None] = [None] * len(fits)
    run: list[int] = []  # of small ops
    for i, (op, fit) in enumerate(zip(program.ops, fits, strict=True)):
        task = op.task
        if not task.stage_bytes:
            continue
        if fit.num_stages >= task.stages_of_team(ceil_div(task.num_tasks, machine.num_sms * fit.teams)):
            run.append(i)
            continue
        askers = [*run[1:], i] if early and run else run[:1] if len(run) > 1 else []
        in_rings = fit.num_stages * fit.teams * machine.num_sms // task.stages_of_team(1)
        found = task.weights_from(min(in_rings, task.num_tasks - 1))
        if found:
            operand, start, stop = found
            for asker in askers:
                kind = program.ops[asker].kind
                most = ahead_bytes if isinstance(ahead_bytes, int) else ahead_bytes.get(kind, 0)
                if most and start < stop:
                    asks[asker] = Ask(op.views[operand], start, min(most, stop - start))
                    start += asks[asker].bytes
        run = []
    return asks


def kernel_name(op: Op) -> str:
    """What profilers show: the op's kind, prefixed so that no name of the CUDA library is taken."""
    return f"cuk_{op.kind}"


def source_for(op: Op, *, teams: int, pdl: bool, trigger: str, trace: bool = False, words: Words = NO_WORDS) -> str:
    """The translation unit of one op's kernel, which carries the op's kind in its name."""
    threads = teams * THREADS_PER_TEAM + (STAGER_THREADS if words.polled and op.task.staged_chunks else 0)
    parameter, tracer, argument = (", cuk::u64* events", ", cuk::Trace", ", cuk::Trace{events}") if trace else ("", "", "")
    registers = min(op.task.max_registers, REGISTERS_PER_SM // threads // 8 * 8)
    return (
        '#include "kernels/separate.cuh"\n'
        f'#include "{op.task.header}"\n'
        f'extern "C" __global__ void __maxnreg__({registers})\n'
        f"{kernel_name(op)}(const __grid_constant__ typename {op.task.struct}::Args args, const __grid_constant__ cuk::LaunchArgs launch{parameter}) {{\n"
        f"  cuk::separate<{op.task.struct}, {teams}, {str(pdl).lower()}, cuk::Trigger::{TRIGGERS[trigger]}, cuk::Words::{words.kind}{tracer}>(args, launch{argument});\n"
        "}\n"
    )


def compile_all(ops: Sequence[Op], sources: Sequence[str], units: Sequence[str]) -> dict[str, Cubin]:
    """The cubin of each unit; those that differ are compiled side by side. Raises ValueError for a unit of two sources."""
    wanted: dict[str, tuple[str, str]] = {}
    for op, source, unit in zip(ops, sources, units, strict=True):
        if wanted.setdefault(unit, (source, kernel_name(op)))[0] != source:
            raise ValueError(f"ops of kind {unit!r} have tasks of different types or templates: give them kinds of their own")
    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(lambda one: compile(one[0], name=one[1]), wanted.values()), strict=True))


def address(buffers: Mapping[str, Any], view: View) -> int:
    """Where a view begins on the device."""
    return buffers[view.buffer.name].data.ptr + view.offset_bytes


def tensor_maps(program: Program, buffers: Mapping[str, Any]) -> Any:
    """The table of tensor maps on the device [ops, 128] bytes: an op's operand that has one is passed its row's address."""
    import cupy

    table = np.zeros((len(program.ops), 128), np.uint8)
    for i, op in enumerate(program.ops):
        for key, spec in op.task.tensor_maps.items():
            table[i] = np.frombuffer(encode_tensor_map(address(buffers, op.views[key]), spec.sizes, spec.strides, spec.box), np.uint8)
    return cupy.asarray(table)


def addresses_of(op: Op, buffers: Mapping[str, Any], tensor_map: int) -> dict[str, int | float]:
    """The values of an op's Args: its operands' addresses, null where there is none, that of its tensor map, and its scalars."""
    pointers = {f.name: 0 for f in op.task.fields if f.kind == "ptr"}
    for key, view in op.views.items():
        pointers[key] = tensor_map if key in op.task.tensor_maps else address(buffers, view)
    return {**pointers, **op.task.scalars}


class SeparateRun(Run):
    """One kernel per op. Switches: teams of a CTA, where its SM has more than three tasks (else a team a task); stages of each team's
    ring (None: as many as leave room for `ctas_per_sm` CTAs on an SM, the successor's beside this kernel's own); trace: each CTA
    notes when it started, waited, … (see `timeline`), in kernels of their own: without it there is no trace of tracing."""

    switches = {"teams": 2, "stages": None, "ctas_per_sm": 2, "trace": False}
    programmatic = False

    def __init__(
        self, program: Program, *, buffers: Mapping[str, Any] | None, seed: int, device: int | None, teams: int, stages: int | None,
        ctas_per_sm: int, trace: bool, prefetch: bool | int = True, trigger: str = "start", early_bytes: int = EARLY_BYTES,
        ahead_bytes: int | Mapping[str, int] = 0, ahead_early: bool = False, ahead_pace_ns: int = 0, deps: str = "op",
    ):  # fmt: skip
        _check_switches(teams, stages, ctas_per_sm, prefetch, trigger, early_bytes, ahead_bytes, ahead_pace_ns, deps)
        super().__init__(program, {name: value for name, value in
                                   {"teams": teams, "stages": stages, "ctas_per_sm": ctas_per_sm, "trace": trace, "prefetch": prefetch,
                                    "trigger": trigger, "early_bytes": early_bytes, "ahead_bytes": ahead_bytes,
                                    "ahead_early": ahead_early, "ahead_pace_ns": ahead_pace_ns, "deps": deps}.items()
                                   if name in self.switches})  # fmt: skip
        if missing := gpu_missing():
            raise RuntimeError(f"run {self.name!r} needs a GPU: {missing}")
        import cupy

        self.device = cupy.cuda.Device(device) if device is not None else cupy.cuda.Device()
        with self.device:
            self.machine = Machine.from_device(self.device.id)
            self.buffers = gpu_buffers(program, seed, buffers)
            self._maps = tensor_maps(program, self.buffers)
            words, num_words = words_of(program) if deps == "tile" else ([NO_WORDS] * len(program.ops), 0)
            units = unit_names(program.ops, words)
            self._words = cupy.full(num_words, ~np.uint64(0), np.uint64)
            fits = [footprint(op.task, self.machine, index=i, teams=teams, stages=stages, ctas_per_sm=ctas_per_sm, prefetch=prefetch,
                              early_bytes=early_bytes, polls=words[i].polled is not None) for i, op in enumerate(program.ops)]  # fmt: skip
            sources = [
                source_for(op, teams=fit.teams, pdl=self.programmatic, trigger=trigger, trace=trace, words=of)
                for op, fit, of in zip(program.ops, fits, words, strict=True)
            ]
            self._events = cupy.zeros((len(program.ops), self.machine.num_sms, len(EVENTS)), np.uint64) if trace else None
            self.cubins = compile_all(program.ops, sources, units)
            self.footprints = dict(zip(units, fits, strict=True))
            self.resources = {unit: cubin.resources for unit, cubin in self.cubins.items()}
            asks = [self._locate(ask) for ask in asked_ahead(program, fits, self.machine, ahead_bytes, ahead_early)]
            functions = {unit: cubin.function() for unit, cubin in self.cubins.items()}
            self.launches = [
                Launch(
                    functions[units[i]],
                    grid=self.machine.num_sms,
                    block=fit.threads,
                    args=(
                        self._pack(i, op),
                        fit.pack(*asks[i], ahead_early, ahead_pace_ns, words[i], self._words.data.ptr),
                        *([self._events[i]] if trace else []),
                    ),
                    smem_bytes=fit.smem_bytes,
                    programmatic=self.programmatic and i > 0,
                    name=op.name,
                )
                for i, (op, fit) in enumerate(zip(program.ops, fits, strict=True))
            ]

    def _locate(self, ask: Ask | None) -> tuple[int, int]:
        """(address, bytes) of what an op asks L2 for."""
        return (address(self.buffers, ask.view) + ask.start, ask.bytes) if ask else (0, 0)

    def _pack(self, index: int, op: Op) -> bytes:
        return pack_args(op.task.fields, addresses_of(op, self.buffers, self._maps.data.ptr + 128 * index))

    @property
    def timeline(self) -> Timeline:
        """When each CTA of the last step did what. Raises ValueError unless the run was built with trace=True."""
        if self._events is None:
            raise ValueError("this run was built without tracing: build it with trace=True")
        self.synchronize()
        return Timeline([op.name for op in self.program.ops], self._events.get())

    @property
    def source(self) -> dict[str, str]:
        """CUDA C++ of each kind of op's translation unit."""
        return {kind: cubin.source for kind, cubin in self.cubins.items()}

    @property
    def ptx(self) -> dict[str, str]:
        return {kind: cubin.ptx for kind, cubin in self.cubins.items()}

    @property
    def sass(self) -> dict[str, str]:
        return {kind: cubin.sass for kind, cubin in self.cubins.items()}

    def __call__(self) -> None:
        for launch in self.launches:
            launch()


class StreamRun(SeparateRun):
    name = "stream"


class GraphRun(SeparateRun):
    name = "graph"

    def __init__(self, program: Program, **arguments: Any):
        super().__init__(program, **arguments)
        with self.device:
            self.graph = capture(self.launches)

    def __call__(self) -> None:
        self.graph.launch()


class PdlRun(GraphRun):
    """Further switches. prefetch: stages that load before the wait (True: all, False or 0: none). trigger: where a kernel lets its
    successor start: "start", after its last "loads", or at its "end". early_bytes: how many a CTA may have on their way at once before
    its wait. ahead_bytes: how many of a later op's weights an op has brought into L2, in all or {kind: bytes}; ahead_early: before its
    wait; ahead_pace_ns: nanoseconds between a producer's requests (see `asked_ahead`). deps: what a kernel waits for before it reads what
    the one before it wrote: all of that "op", or the words of each "tile" where both have them (see cuk/runs/edges.py)."""

    name = "pdl"
    switches = {**SeparateRun.switches, "prefetch": True, "trigger": "start", "early_bytes": EARLY_BYTES, "ahead_bytes": AHEAD_BYTES,
                "ahead_early": False, "ahead_pace_ns": 0, "deps": "op"}  # fmt: skip
    programmatic = True


def _check_switches(teams: int, stages: int | None, ctas_per_sm: int, prefetch: bool | int, trigger: str, early_bytes: int,
                    ahead_bytes: int | Mapping[str, int], ahead_pace_ns: int, deps: str) -> None:  # fmt: skip
    if deps not in DEPS:
        raise ValueError(f"deps={deps!r}: must be one of {', '.join(DEPS)}")
    if not 1 <= teams <= MAX_TEAMS:
        raise ValueError(f"teams={teams}: must be from 1 to {MAX_TEAMS} ({THREADS_PER_TEAM} threads each)")
    if stages is not None and not 1 <= stages <= 64:
        raise ValueError(f"stages={stages}: must be from 1 to 64, or None for as many as fit")
    if not 1 <= ctas_per_sm <= 8:
        raise ValueError(f"ctas_per_sm={ctas_per_sm}: must be from 1 to 8")
    if int(prefetch) < 0:
        raise ValueError(f"prefetch={prefetch}: must be True, False or a number of stages")
    if early_bytes < 1:
        raise ValueError(f"early_bytes={early_bytes}: must be 1 or more")
    if any(size < 0 or size % 16 for size in ([ahead_bytes] if isinstance(ahead_bytes, int) else ahead_bytes.values())):
        raise ValueError(f"ahead_bytes={ahead_bytes}: must be 0 or a multiple of 16")
    if not 0 <= ahead_pace_ns <= 100_000:
        raise ValueError(f"ahead_pace_ns={ahead_pace_ns}: must be from 0 to 100000")
    if trigger not in TRIGGERS:
        raise ValueError(f"trigger={trigger!r}: must be one of {', '.join(TRIGGERS)}")
