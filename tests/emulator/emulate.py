"""Runs a program's separate kernels on emulated warps: the device files as they are, compiled by g++ against tests/emulator/core/ptx.cuh.

What it can show: wrong indices, swizzles, fragments, tails, sums, barrier counts and phases, deadlocks, and reads of what has not landed (copies land
at random moments, fibers go on in random order). What it cannot: memory order between CTAs, which take turns, and speed."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cuk.compile import cuda_src
from cuk.machine import Machine
from cuk.program import Op, Program
from cuk.runs.edges import NO_WORDS, words_of
from cuk.runs.memory import numpy_buffers
from cuk.runs.persistent import EVENTS, KERNEL, plan, scheduled
from cuk.runs.separate import Footprint, asked_ahead, footprint, kernel_name, source_for
from cuk.task import pack_args

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
CACHE = Path(tempfile.gettempdir()) / f"cuk-emulator-{os.getuid()}"

EMPTY_WORD = ~np.uint64(0)
RUN = """
extern "C" const char* emulate(const {args}* args, const {launch}* launch, int grid, int block, unsigned seed, bool drop_copies) {{
  emulator::drop_copies = drop_copies;
  emulator::body = [&] {{ {kernel}({given}); }};
  return emulator::run_grid(grid, block, seed, cuk::smem) ? nullptr : emulator::failure.c_str();
}}
extern "C" void hooks(void (*start)(int), void (*wait)(int), bool (*stuck)()) {{
  emulator::on_start = start;
  emulator::on_wait = wait;
  emulator::on_stuck = stuck;
}}
"""
Hook = ctypes.CFUNCTYPE(None, ctypes.c_int)
StuckHook = ctypes.CFUNCTYPE(ctypes.c_bool)


def library(source: str, kernel: str, args: str | None, launch: str = "cuk::LaunchArgs") -> ctypes.CDLL:
    """A kernel (its unit, its name, the types of its arguments, of which the first may be missing) as a shared library, compiled once for each
    content of what goes into it."""
    source += RUN.format(args=args or "char", launch=launch, kernel=kernel, given="*args, *launch" if args else "*launch")
    files = [*sorted(cuda_src().rglob("*.cuh")), *sorted(HERE.rglob("*.cuh"))]
    key = hashlib.sha256("\0".join([source, *(f.read_text() for f in files)]).encode()).hexdigest()
    path = CACHE / f"{key}.so"
    if not path.exists():
        CACHE.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unit = Path(folder) / "unit.cpp"
            unit.write_text(source)
            made = Path(folder) / "unit.so"
            command = [
                COMPILER,
                "-std=c++17",
                "-O2",
                "-ffp-contract=off",
                "-w",
                "-shared",
                "-fPIC",
                f"-I{HERE}",
                f"-I{cuda_src()}",
                str(unit),
                "-o",
                str(made),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            os.replace(made, path)
    return ctypes.CDLL(str(path))


class EmulatedRun:
    """Looks to cuk.runs.check like a stream run: `launches` are callables, `buffers` NumPy arrays."""

    name = "stream"
    drop_copies = False  # nothing that is loaded ever lands

    def __init__(
        self,
        program: Program,
        *,
        seed: int = 0,
        num_sms: int = 3,
        pdl: bool = False,
        ahead_bytes: int = 0,
        ahead_early: bool = False,
        deps: str = "op",
        buffers: dict | None = None,
        **switches,
    ):
        self.program = program
        self.machine = dataclasses.replace(Machine.load("h200"), num_sms=num_sms)
        self.seed = seed
        self.buffers = aligned_buffers(program, seed, buffers)
        words, num_words = words_of(program) if deps == "tile" else ([NO_WORDS] * len(program.ops), 0)
        self.words = empty_words(num_words)
        self.words_of = words
        fits = [
            footprint(op.task, self.machine, index=i, polls=words[i].polled is not None, **switches) for i, op in enumerate(program.ops)
        ]
        units = [(source_for(op, teams=fit.teams, pdl=pdl, trigger="start", words=of), kernel_name(op), f"{op.task.struct}::Args")
                 for op, fit, of in zip(program.ops, fits, words, strict=True)]  # fmt: skip
        with ThreadPoolExecutor() as pool:
            different = list(dict.fromkeys(units))
            libraries = dict(zip(different, pool.map(lambda unit: library(*unit), different), strict=True))
        asks = asked_ahead(program, fits, self.machine, ahead_bytes, ahead_early)
        asked = [(self._address(ask.view) + ask.start, ask.bytes, ahead_early, 1) if ask else (0, 0, False, 0) for ask in asks]
        packed = [fit.pack(*ask, of, self.words.ctypes.data) for fit, ask, of in zip(fits, asked, words, strict=True)]
        self.asks = sum(ask is not None for ask in asks)
        self.launches = [
            self._prepare(op, fit, launch_words, libraries[unit])
            for op, fit, launch_words, unit in zip(program.ops, fits, packed, units, strict=True)
        ]

    def __call__(self) -> None:
        """One step."""
        for launch in self.launches:
            launch()

    def synchronize(self) -> None:
        """Nothing is pending: a launch returns when it is done."""

    def _address(self, view) -> int:
        return address(self.buffers, view)

    def _prepare(self, op: Op, fit: Footprint, launch_words: bytes, library: ctypes.CDLL):
        maps: list = []
        args = ctypes.create_string_buffer(packed_args(op, self.buffers, maps))
        words = ctypes.create_string_buffer(launch_words)
        run = library.emulate
        run.restype = ctypes.c_char_p

        def launch() -> None:
            failure = run(args, words, self.machine.num_sms, fit.threads, self.seed, self.drop_copies)
            assert failure is None, f"{op.name}: {failure.decode()}"

        launch.keep, launch.library = maps, library
        return launch


class EmulatedPersistent:
    """A persistent run on emulated warps. `switches`: those of cuk.runs.persistent.plan, and of a scheduler where no schedule is given."""

    name = "persistent"

    def __init__(self, program: Program, *, scheduler="round_robin", seed: int = 0, num_sms: int = 3, signal: str = "words",
                 ordering: str = "release", trace: bool = False, buffers: dict | None = None, **options):  # fmt: skip
        self.program, self.seed = program, seed
        self.machine = dataclasses.replace(Machine.load("h200"), num_sms=num_sms)
        self.buffers = aligned_buffers(program, seed, buffers)
        schedule = scheduled(program, self.machine, scheduler, **options)
        self.plan = plan(program, schedule, self.machine, signal=signal, ordering=ordering, trace=trace)
        queues, per_queue, _ = self.plan.instructions.shape
        self.words = empty_words(2 * self.plan.words_of_set)
        self.counters = np.zeros(2 * schedule.num_counters, np.uint32)
        self.epochs = np.zeros(queues, np.uint32)
        self.events = np.zeros((queues, per_queue, len(EVENTS)), np.uint64)
        self.maps: list = []
        self.records = self.plan.records(lambda i, op: packed_args(op, self.buffers, self.maps), self.words.ctypes.data)
        self.instructions = np.ascontiguousarray(self.plan.instructions)
        addresses = [a.ctypes.data for a in (self.instructions, self.records, self.counters, self.epochs, self.events)]
        self.args = ctypes.create_string_buffer(self.plan.pack(*addresses))
        self.library = library(self.plan.source, KERNEL, None, "cuk::InterpreterArgs")
        self.library.emulate.restype = ctypes.c_char_p

    def __call__(self) -> None:
        """One step."""
        failure = self.library.emulate(None, self.args, self.plan.instructions.shape[0], self.plan.threads, self.seed, False)
        assert failure is None, failure.decode()

    def synchronize(self) -> None:
        """Nothing is pending."""


def aligned_buffers(program: Program, seed: int, shared: dict | None) -> dict[str, np.ndarray]:
    """The program's buffers, aligned as GPU allocations are, with room behind each that belongs to it."""
    made = {}
    for name, array in numpy_buffers(program, seed, shared).items():
        room = np.zeros(array.nbytes + 128 + 256, np.uint8)
        start = -room.ctypes.data % 256
        made[name] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        made[name][...] = array
    return made


def empty_words(count: int) -> np.ndarray:
    room = np.full(count + 32, EMPTY_WORD)
    return room[-room.ctypes.data % 256 // 8 :][:count]


def address(buffers: dict, view) -> int:
    return buffers[view.buffer.name].ctypes.data + view.offset_bytes


def packed_args(op: Op, buffers: dict, maps: list) -> bytes:
    """An op's Args; its tensor map, which they point to, is kept in `maps`."""
    values = {f.name: 0 for f in op.task.fields if f.kind == "ptr"} | {k: address(buffers, v) for k, v in op.views.items()}
    for key, spec in op.task.tensor_maps.items():
        packed = struct.pack("=Q5Q4Q5I28x", values[key], *spec.sizes, *spec.strides, *spec.box)
        buffer = ctypes.create_string_buffer(len(packed) + 128)
        start = -ctypes.addressof(buffer) % 128
        ctypes.memmove(ctypes.addressof(buffer) + start, packed, len(packed))
        values[key] = ctypes.addressof(buffer) + start
        maps.append(buffer)
    return pack_args(op.task.fields, {**values, **op.task.scalars})
