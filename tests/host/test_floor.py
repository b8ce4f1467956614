"""The read probes: each reads every word once, with as many loads in flight as it says; and the sweep, with a made-up GPU."""

import contextlib
import ctypes
import re
import sys
import types

import numpy as np
import pytest

from cuk.bench import floor
from cuk.compile import compile
from cuk.machine import Machine
from tests.emulator import emulate

MACHINE = Machine.load("h200")


@pytest.mark.parametrize("probe", floor.PROBES, ids=lambda probe: probe.reader)
def test_probes_compile_without_spills_and_fit(probe):
    resources = compile(probe.source, name=floor.PROBE_NAME).resources
    assert resources.spill_bytes == 0 and resources.stack_bytes == 0
    assert resources.registers * probe.threads <= MACHINE.registers_per_sm and probe.smem_bytes <= MACHINE.smem_per_cta_bytes
    if probe.smem_bytes:
        stages, stage_bytes = (int(n) for n in re.findall(r"\d+", probe.reader))
        assert probe.smem_bytes == stages * (stage_bytes + 16)  # with two mbarriers a stage


def loads_in_flight(sass: str) -> int:
    """The most 16-byte global loads that are issued before an instruction needs one of their results, in a straight stretch of code."""
    live, most = set(), 0
    for text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([^;]+);", sass):
        registers = [int(r) for r in re.findall(r"\bR(\d+)\b", text)]
        is_load = text.startswith("LDG")
        needed = registers[1:] if is_load else registers
        live = {first for first in live if not any(first <= r < first + 4 for r in needed)}
        if is_load:
            live.add(registers[0])
            most = max(most, len(live))
        if text.startswith("BRA"):
            live = set()
    return most


@pytest.mark.parametrize("probe", [p for p in floor.PROBES if not p.smem_bytes], ids=lambda probe: probe.reader)
def test_as_many_loads_are_in_flight_as_the_probe_says(probe):
    """Fewer would be a slow probe, which flatters everything that is measured against it."""
    try:
        sass = compile(probe.source, name=floor.PROBE_NAME).sass
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert loads_in_flight(sass) >= int(re.search(r"<(\d+)", probe.reader)[1])


# ---- on emulated warps ----
READERS = [
    ("read_plain<8, true>", 0),
    ("read_plain<8, false>", 0),
    ("read_plain<3, true>", 0),
    ("read_bulk<2, 512>", 1),
    ("read_bulk<5, 1024>", 1),
]
WRAPPED = """#include "kernels/probe_read.cuh"
namespace cuk {{
struct LaunchArgs {{}};
struct ProbeArgs {{ const void* data; long long words; u32* sums; }};
}}
void probe(const cuk::ProbeArgs& a, const cuk::LaunchArgs&) {{
  emulator::drop_copies = false;  // all loaded libraries share it, and another test may have left it set
  {call};
}}
"""


def emulated(call: str, grid: int, block: int, data: np.ndarray, count: int, sums: np.ndarray | None, seed: int = 0) -> None:
    class Args(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("words", ctypes.c_longlong), ("sums", ctypes.c_void_p)]

    run = emulate.library(WRAPPED.format(call=call), "probe", "cuk::ProbeArgs").emulate
    run.restype = ctypes.c_char_p
    args = Args(data.ctypes.data, count, sums.ctypes.data if sums is not None else None)
    failure = run(ctypes.byref(args), ctypes.create_string_buffer(1), grid, block, seed)
    assert failure is None, failure.decode()


def aligned(num_words: int) -> np.ndarray:
    room = np.zeros(num_words * 4 + 4, np.uint32)
    start = -room.ctypes.data % 16 // 4
    return room[start : start + num_words * 4]


@pytest.mark.skipif(not emulate.COMPILER, reason="no g++ to compile the device files with")
@pytest.mark.parametrize(("reader", "is_bulk"), READERS)
@pytest.mark.parametrize("words", [0, 1, 31, 64, 65, 513, 2048, 3001])
@pytest.mark.parametrize("grid", [1, 3])
def test_every_word_is_read_once(reader, is_bulk, words, grid):
    """The sum of distinct powers of a generator would miss nothing; a random word each is as good, but for one chance in 2^32."""
    data, block = aligned(words), 96
    data[...] = np.random.default_rng(words).integers(0, 2**32, data.size, dtype=np.uint32)
    sums = np.full(grid * block // 32, 0xDEADBEEF, np.uint32)  # every one of them must be written
    emulated(f"cuk::{reader}(static_cast<const cuk::Vec16*>(a.data), a.words, a.sums)", grid, block, data, words, sums, seed=words)
    assert int(sums.sum(dtype=np.uint64)) & 0xFFFFFFFF == int(data.sum(dtype=np.uint64)) & 0xFFFFFFFF


@pytest.mark.skipif(not emulate.COMPILER, reason="no g++ to compile the device files with")
def test_no_two_stretches_of_the_data_have_the_same_sum():
    """Reading one stretch twice in another's place must show."""
    data = aligned(1 << 14)
    emulated("cuk::fill_hashed(const_cast<cuk::u32*>(static_cast<const cuk::u32*>(a.data)), a.words)", 2, 64, data, data.size, None)
    assert len(np.unique(data)) == data.size  # the hash is a bijection
    for length in (4, 128, 4096):
        sums = data.reshape(-1, length).sum(axis=1, dtype=np.uint32)
        assert len(np.unique(sums)) >= len(sums) - 1  # 2^14 sums of 32 bits: 0.03 coincidences to expect


# ---- the sweep ----
class MadeUpGpu:
    """CuPy on NumPy arrays and a clock: a launch of `each` CTAs an SM reads at `rate` bytes per second."""

    def __init__(self, monkeypatch, *, rate=lambda reader, each: 4.3e12, forgets="", free=80e9):
        self.now_us, self.launches, self.rate, self.forgets = 0.0, 0, rate, forgets
        gpu = self

        class Event:
            def record(self):
                self.at = gpu.now_us

            def synchronize(self):
                pass

        device = types.SimpleNamespace(id=0, mem_info=(free, free))
        pool = types.SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
        cuda = types.SimpleNamespace(Device=lambda: device, Event=Event, get_elapsed_time=lambda a, b: (b.at - a.at) / 1e3)
        cupy = types.SimpleNamespace(empty=np.zeros, zeros=np.zeros, get_default_memory_pool=lambda: pool, cuda=cuda)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(floor, "gpu_missing", lambda: None)
        monkeypatch.setattr(floor.Machine, "from_device", classmethod(lambda cls, device: MACHINE))
        monkeypatch.setattr(floor, "compile", lambda source, name: types.SimpleNamespace(function=lambda: source))
        monkeypatch.setattr(floor, "Launch", self.launch)

    def launch(self, source, grid, threads, args, smem_bytes=0):
        data = args[0]
        if "fill_hashed" in source:
            return lambda: data.__setitem__(slice(0, 1000), np.arange(1000, dtype=np.uint32))
        reader = re.search(r"cuk::(read_\w+<[^>]*>)", source)[1]
        sums, expected = args[2], int(data[:1000].sum())

        def call():
            self.launches += 1
            sums[: grid * threads // 32] = 0
            sums[0] = expected - (reader == self.forgets)
            self.now_us += data.nbytes / self.rate(reader, grid // MACHINE.num_sms) * 1e6

        return call


def test_the_floor_is_the_best_median(monkeypatch):
    best = ("read_bulk<6, 16384>", 2)
    gpu = MadeUpGpu(monkeypatch, rate=lambda reader, each: 4.35e12 if (reader, each) == best else 4.0e12)
    found = floor.measure_floor(1 << 30, repeats=3)
    assert found.read_bytes_per_s == pytest.approx(4.35e12) and found.low == pytest.approx(found.high)
    assert found.best == "read_bulk<6, 16384>, 2 CTAs an SM" and found.valid
    assert {row["reader"] for row in found.rows} == {probe.reader for probe in floor.PROBES}
    assert gpu.launches == 4 * len(found.rows)
    # 4 GiB at 4.2 TB/s, 7 repeats and the call before them: the sweep must stay under 3 s of GPU time.
    assert len(found.rows) * 8 * floor.PROBE_BYTES / 4.2e12 < 1
    assert found.us(int(4.35e6)) == pytest.approx(1.0)


def test_a_slow_probe_is_invalid_and_says_so(monkeypatch):
    MadeUpGpu(monkeypatch, rate=lambda reader, each: 3.9e12)
    found = floor.measure_floor(1 << 30, repeats=1)
    assert not found.valid and found.why_invalid == "the probe read 3.90 TB/s, under 4.1"


def test_a_reader_that_leaves_something_out_is_caught(monkeypatch):
    MadeUpGpu(monkeypatch, forgets="read_plain<4, true>")
    with pytest.raises(RuntimeError, match=r"read_plain<4, true> with 1 CTAs an SM did not read every byte"):
        floor.measure_floor(1 << 30, repeats=1)


def test_what_cannot_be_measured_is_said_before_anything_is_allocated(monkeypatch):
    with pytest.raises(ValueError, match="must be at least 1073741824"):
        floor.measure_floor(1 << 20)
    with contextlib.suppress(ImportError), monkeypatch.context() as patch:
        patch.setattr(floor, "gpu_missing", lambda: "no driver")
        with pytest.raises(RuntimeError, match="measured on a GPU: no driver"):
            floor.measure_floor()
    MadeUpGpu(monkeypatch, free=2e9)
    with pytest.raises(MemoryError, match=r"needs 4\.3 GB of GPU memory, 2\.0 GB are free"):
        floor.measure_floor()
