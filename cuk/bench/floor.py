"""The read bandwidth that floors are computed from: the best of plain and bulk-copy readers over a sweep of grids."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuk.compile import compile
from cuk.launch import Launch, gpu_missing
from cuk.machine import Machine

PROBE_BYTES = 4 << 30
LEAST_BANDWIDTH = {"h200": 4.1e12}
"""Bytes per second that a sound probe reads on a machine: a slower one flatters every ratio, and its record is invalid."""


@dataclass(frozen=True)
class Floor:
    """Read bandwidth in bytes per second: the best median over readers and grids (`rows`), with that reader's quartiles."""

    read_bytes_per_s: float
    low: float
    high: float
    best: str
    rows: tuple[dict[str, Any], ...] = field(repr=False)
    why_invalid: str | None = None

    @property
    def valid(self) -> bool:
        return self.why_invalid is None

    def us(self, num_bytes: int) -> float:
        """Microseconds that so many bytes take at least."""
        return num_bytes / self.read_bytes_per_s * 1e6


@dataclass(frozen=True)
class Probe:
    """A reader of kernels/probe_read.cuh: the call with its template arguments, threads of a CTA, dynamic shared memory."""

    reader: str
    threads: int
    smem_bytes: int = 0

    @property
    def source(self) -> str:
        # Without the bounds the compiler aims for full occupancy: at 32 registers it waits for one load before it issues the fifth.
        return (
            f'#include "kernels/probe_read.cuh"\nextern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"{PROBE_NAME}(const cuk::Vec16* data, long long words, cuk::u32* sums) {{ cuk::{self.reader}(data, words, sums); }}\n"
        )


PROBE_NAME = "cuk_probe_read"
PROBES = (
    Probe("read_plain<8, true>", 512), Probe("read_plain<8, false>", 512), Probe("read_plain<4, true>", 1024), Probe("read_plain<16, true>", 512),
    Probe("read_bulk<6, 16384>", 288, 6 * (16384 + 16)), Probe("read_bulk<12, 16384>", 288, 12 * (16384 + 16)),
    Probe("read_bulk<6, 32768>", 288, 6 * (32768 + 16)),
)  # fmt: skip
CTAS_PER_SM = (1, 2, 4, 8, 16)
FILL_SOURCE = '#include "kernels/probe_read.cuh"\nextern "C" __global__ void cuk_probe_fill(cuk::u32* data, long long count) { cuk::fill_hashed(data, count); }\n'


def measure_floor(num_bytes: int = PROBE_BYTES, repeats: int = 7) -> Floor:
    """Sweeps plain and bulk-copy readers over grids of 1 to 16 CTAs an SM, on `num_bytes` (at least 1 GiB) of hashed data, and checks
    by CuPy's own sum that each read all of it. Takes well under a second of GPU time.

    Raises ValueError for fewer bytes, RuntimeError without a GPU and for a reader that left bytes out, MemoryError with the bytes needed
    and free."""
    if num_bytes < 1 << 30:
        raise ValueError(f"num_bytes={num_bytes}: must be at least {1 << 30}, many times the L2 cache")
    if missing := gpu_missing():
        raise RuntimeError(f"the floor is measured on a GPU: {missing}")
    import cupy

    device, pool = cupy.cuda.Device(), cupy.get_default_memory_pool()
    machine = Machine.from_device(device.id)
    free = device.mem_info[0] + pool.free_bytes()
    if free < num_bytes * 1.02:
        raise MemoryError(f"the read probe needs {num_bytes / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free: give num_bytes=")
    words = num_bytes // 16
    data = cupy.empty(words * 4, np.uint32)
    Launch(compile(FILL_SOURCE, name="cuk_probe_fill").function(), machine.num_sms * 8, 256, (data, np.int64(data.size)))()
    expected = int(data.sum(dtype=np.uint64)) & 0xFFFFFFFF
    sums = cupy.zeros(machine.num_sms * max(CTAS_PER_SM) * 32, np.uint32)
    rows = []
    for probe in PROBES:
        function = compile(probe.source, name=PROBE_NAME).function()
        for each in CTAS_PER_SM:
            if probe.smem_bytes and each * (probe.smem_bytes + machine.smem_reserved_per_cta_bytes) > machine.smem_per_sm_bytes * 2:
                continue  # two waves of rings are enough to see that more do not help
            grid = machine.num_sms * each
            launch = Launch(function, grid, probe.threads, (data, np.int64(words), sums), smem_bytes=probe.smem_bytes)
            times = times_between(launch, repeats)
            read = int(sums[: grid * probe.threads // 32].sum(dtype=np.uint64)) & 0xFFFFFFFF
            if read != expected:
                raise RuntimeError(f"{probe.reader} with {each} CTAs an SM did not read every byte: sum {read:#x}, CuPy's is {expected:#x}")
            sums[...] = 0
            low, median, high = (float(us) for us in np.percentile(times, [25, 50, 75]))
            rows.append({"reader": probe.reader, "ctas_per_sm": each, "median": words * 16e6 / median, "low": words * 16e6 / high,
                         "high": words * 16e6 / low})  # fmt: skip
    del data
    pool.free_all_blocks()
    best = max(rows, key=lambda row: row["median"])
    least = LEAST_BANDWIDTH.get(machine.name, 0)
    why = f"the probe read {best['median'] / 1e12:.2f} TB/s, under {least / 1e12:.1f}" if best["median"] < least else None
    return Floor(best["median"], best["low"], best["high"], f"{best['reader']}, {best['ctas_per_sm']} CTAs an SM", tuple(rows), why)


_floors: dict[int, Floor] = {}


def floor_here() -> Floor:
    """The floor of the current device, measured when first asked for in this process."""
    import cupy

    device = cupy.cuda.Device().id
    if device not in _floors:
        _floors[device] = measure_floor()
    return _floors[device]


def times_between(call: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of each of `count` back-to-back calls, from event to event; one call before them keeps the GPU busy meanwhile."""
    import cupy

    call()
    events = [cupy.cuda.Event() for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) * 1e3 for a, b in itertools.pairwise(events)]
