"""Measuring: rivals interleaved in one process, medians with bootstrap intervals, a floor measured beside them, records."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cuk.compile import compile
from cuk.launch import Launch
from cuk.record import environment, load_record, now, source_sha256, write_record

PROBE_BYTES = 4 << 30
LEAST_BANDWIDTH = {"h200": 4.1e12}
"""Bytes per second that a sound probe reads on a machine: a slower one flatters every ratio, and its record is invalid."""


# ---- the floor ----
@dataclass(frozen=True)
class Floor:
    """Read bandwidth in bytes per second: the best median over readers and grids (`rows`), with that reader's quartiles."""

    read_bytes_per_s: float
    low: float
    high: float
    best: str
    rows: tuple[dict[str, Any], ...] = field(repr=False)
    why_invalid: str | None = None

    def us(self, num_bytes: int) -> float:
        """Microseconds that so many bytes take at least."""
        return num_bytes / self.read_bytes_per_s * 1e6


def _probe_source(reader: str, arguments: str) -> str:
    call = "read_plain" if reader == "plain" else "read_bulk"
    pointer = "const cuk::Vec16*" if reader == "plain" else "const char*"
    return (
        '#include "kernels/probe_read.cuh"\n'
        f'extern "C" __global__ void cuk_probe_read({pointer} data, long long count, cuk::u32* sums) {{ cuk::{call}<{arguments}>(data, count, sums); }}\n'
    )


PROBES = [("plain", "8", 512, 0), ("plain", "4", 1024, 0), ("bulk", "6, 16384", 288, 6 * 16384), ("bulk", "12, 16384", 288, 12 * 16384)]
"""(reader, template arguments, threads, dynamic shared memory)."""


def measure_floor(num_bytes: int = PROBE_BYTES, repeats: int = 5) -> Floor:
    """Sweeps plain and bulk-copy readers over grids of 1 to 16 CTAs an SM, on `num_bytes` (at least 1 GiB) of random data, and checks
    that each read all of it. Takes about a second."""
    import cupy

    if num_bytes < 1 << 30:
        raise ValueError(f"num_bytes={num_bytes}: must be at least {1 << 30}, many times the L2 cache")
    from cuk.machine import Machine

    machine = Machine.from_device(cupy.cuda.Device().id)
    data = cupy.empty(num_bytes // 4, np.uint32)
    chunk = cupy.random.RandomState(7).randint(0, 1 << 31, 1 << 22, dtype=np.int32).view(np.uint32)
    for start in range(0, data.size, chunk.size):
        part = data[start : start + chunk.size]
        part[...] = chunk[: part.size] + np.uint32(start)
    expected = int(data.sum(dtype=np.uint64)) & 0xFFFFFFFF
    sums = cupy.zeros(machine.num_sms * 16, np.uint32)
    rows = []
    for reader, arguments, threads, smem in PROBES:
        function = compile(_probe_source(reader, arguments), name="cuk_probe_read").function()
        count = num_bytes // 16 if reader == "plain" else num_bytes // 16384
        for each in (1, 2, 4, 8, 16):
            if reader == "bulk" and each * (smem + 1024) > machine.smem_per_sm_bytes * 2:
                continue
            launch = Launch(function, machine.num_sms * each, threads, (data, np.int64(count), sums), smem_bytes=smem)
            sums[...] = 0
            launch()
            if int(sums.sum(dtype=np.uint64)) & 0xFFFFFFFF != expected:
                raise AssertionError(f"the {reader} reader <{arguments}> with {each} CTAs an SM did not read every byte")
            times = [_time(launch, 1) for _ in range(repeats)]
            low, median, high = np.percentile(times, [25, 50, 75])
            rows.append({"reader": f"{reader}<{arguments}>", "ctas_per_sm": each, "median": num_bytes / median * 1e6,
                         "low": num_bytes / high * 1e6, "high": num_bytes / low * 1e6})  # fmt: skip
    best = max(rows, key=lambda row: row["median"])
    least = LEAST_BANDWIDTH.get(machine.name, 0)
    why = f"the probe read {best['median'] / 1e12:.2f} TB/s, under {least / 1e12:.1f}" if best["median"] < least else None
    return Floor(best["median"], best["low"], best["high"], f"{best['reader']}, {best['ctas_per_sm']} CTAs an SM", tuple(rows), why)


def _time(call: Callable[[], Any], inner: int) -> float:
    """Microseconds of one of `inner` back-to-back calls on the current stream, by events."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(inner):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e3 / inner


# ---- interleaving ----
@dataclass(frozen=True)
class Measurement:
    """Samples in microseconds of each variant, taken in random order round by round; `baseline` is the one that ratios are to."""

    samples: dict[str, np.ndarray] = field(repr=False)
    baseline: str
    subjects: dict[str, Any] = field(repr=False)
    clocks: str = ""

    def median(self, name: str) -> float:
        return float(np.median(self.samples[name]))

    def iqr(self, name: str) -> float:
        low, high = np.percentile(self.samples[name], [25, 75])
        return float(high - low)

    def ratio(self, name: str, seed: int = 0) -> tuple[float, float, float]:
        """(ratio of medians to the baseline, low, high), a 95% bootstrap interval over rounds (scipy.stats.bootstrap, paired)."""
        mine, theirs = self.samples[name], self.samples[self.baseline]
        value = float(np.median(mine) / np.median(theirs))
        if name == self.baseline or len(mine) < 2:
            return value, value, value
        from scipy.stats import bootstrap

        def statistic(a, b, axis=-1):
            return np.median(a, axis=axis) / np.median(b, axis=axis)

        found = bootstrap((mine, theirs), statistic, paired=True, vectorized=True, n_resamples=2000, method="percentile",
                          rng=np.random.default_rng(seed))  # fmt: skip
        return value, float(found.confidence_interval.low), float(found.confidence_interval.high)


def interleave(
    runs: Mapping[str, Callable[[], Any]], *, baseline: str | None = None, repeats: int = 30, inner: int = 10, warmup: int = 3, seed: int = 0,
    timer: Callable[[Callable[[], Any], int], float] | None = None, progress: Callable[[str], None] | None = None,
) -> Measurement:  # fmt: skip
    """Times each variant `repeats` times, `inner` back-to-back calls a time, in an order drawn anew each round.

    Raises ValueError for a run that is correct by claim and has not been checked in this process: nothing unchecked is timed."""
    if not runs:
        raise ValueError("nothing to time: give at least one run")
    if repeats < 1 or inner < 1:
        raise ValueError(f"repeats={repeats}, inner={inner}: both must be at least 1")
    for name, run in runs.items():
        if getattr(run, "correct_by_claim", False) and getattr(run, "checked", "not a Run") is None:
            raise ValueError(f"run {name!r} has not been checked: call cuk.check({{...}}) with a 'stream' run first")
    baseline = baseline if baseline in runs else next(iter(runs))
    order, rng = list(runs), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with _timing_stream(timer is None):
        timer = timer or _time
        for name in order:
            for _ in range(warmup):
                runs[name]()
        for _ in range(repeats):
            rng.shuffle(order)
            for name in order:
                samples[name].append(timer(runs[name], inner))
                if progress:
                    progress(name)
    return Measurement({name: np.array(values) for name, values in samples.items()}, baseline, dict(runs), _clocks())


@contextlib.contextmanager
def _timing_stream(real: bool):
    """A stream of its own, so that nothing else stands between the events."""
    if not real:
        yield
        return
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield
        stream.synchronize()


def _clocks() -> str:
    """SM clock and why it is held back, as nvidia-smi tells; empty where it cannot."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks_event_reasons.active", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip().splitlines()[0]
    return ""


# ---- tables and records ----
def results_dir() -> Path:
    """studies/results of the checkout, or of the working directory where the package is installed."""
    checkout = Path(__file__).resolve().parent.parent / "studies"
    return (checkout if checkout.is_dir() else Path.cwd() / "studies") / "results"


class Table:
    """Rows of a study. Printed with rich; a plain repr in IPython; saved as a record that keeps rows of other settings."""

    def __init__(self, study: str, baseline: str = "graph", settings: Mapping[str, Any] | None = None):
        self.study, self.baseline, self.settings = study, baseline, dict(settings or {})
        self.rows: list[dict[str, Any]] = []
        self.floors: list[Floor] = []

    def add(self, measurement: Measurement, *, floor: Floor, program: Any, expected_us: Mapping[str, float] | None = None,
            notes: Mapping[str, str] | None = None, **settings: Any) -> None:  # fmt: skip
        """Adds a row for each variant. expected_us: what a rival was measured to take elsewhere; one over 1.1 times that is set up badly, and
        its row says that it is invalid. notes: why a row is invalid, by variant."""
        self.floors.append(floor)
        floor_us = floor.us(program.min_bytes)
        for name, run in measurement.subjects.items():
            ratio, low, high = measurement.ratio(name)
            median = measurement.median(name)
            why = (notes or {}).get(name) or floor.why_invalid
            limit = (expected_us or {}).get(name)
            if limit and median > 1.1 * limit:
                why = f"over 1.1 times the {limit:.0f} us that this rival takes elsewhere: not set up as its users would"
            resources = getattr(run, "resources", {})
            self.rows.append({
                "program": program.name, "run": name, "settings": {**settings, **getattr(run, "settings", {})},
                "median_us": median, "iqr_us": measurement.iqr(name), "floor_us": floor_us, "ratio_to_floor": median / floor_us,
                "baseline": measurement.baseline, "ratio_to_baseline": [ratio, low, high], "checked": getattr(run, "checked", None),
                "registers": {kind: r.registers for kind, r in resources.items()},
                "spill_bytes": {kind: r.spill_bytes for kind, r in resources.items()},
                "smem_bytes": {kind: f.smem_bytes for kind, f in getattr(run, "footprints", {}).items()},
                "min_bytes": program.min_bytes, "read_bytes_per_s": floor.read_bytes_per_s, "clocks": measurement.clocks,
                "source_sha256": source_sha256(), "date": now(), "invalid": why,
            })  # fmt: skip

    def record(self) -> dict[str, Any]:
        """The record of these rows (the schema of docs/design.md)."""
        return {
            "study": self.study,
            **environment(),
            "source_sha256": source_sha256(),
            "date": now(),
            "settings": self.settings,
            "rows": self.rows,
        }

    def save(self, path: str | Path | None = None) -> Path:
        """Writes the record, by default studies/results/<machine>/<study>.json. Rows there of other settings stay."""
        record = self.record()
        path = Path(path) if path else results_dir() / record["machine"] / f"{self.study}.json"
        if path.exists():
            with contextlib.suppress(ValueError):
                mine = {row_key(row) for row in self.rows}
                record["rows"] = [row for row in load_record(path)["rows"] if row_key(row) not in mine] + self.rows
        write_record(path, record)
        return path

    def rich(self) -> Any:
        """The table as a rich renderable."""
        from rich.table import Table as RichTable

        table = RichTable(title=self.study, title_justify="left", header_style="bold")
        for title, justify in [("program", "left"), ("run", "left"), ("settings", "left"), ("us", "right"), ("iqr", "right"),
                               ("x floor", "right"), (f"x {self.baseline}", "right"), ("checked", "left")]:  # fmt: skip
            table.add_column(title, justify=justify)
        for row in self.rows:
            ratio, low, high = row["ratio_to_baseline"]
            mark = f" [red]invalid: {row['invalid']}[/red]" if row["invalid"] else ""
            table.add_row(row["program"], row["run"], _settings(row["settings"]), f"{row['median_us']:.1f}", f"{row['iqr_us']:.1f}",
                          f"{row['ratio_to_floor']:.3f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]", f"{row['checked'] or 'no'}{mark}")  # fmt: skip
        return table

    def print(self) -> None:
        from rich.console import Console

        console = Console()
        console.print(self.rich())
        for floor in {id(f): f for f in self.floors}.values():
            console.print(f"floor: bytes that must move over {floor.read_bytes_per_s / 1e12:.3f} TB/s read ({floor.best})")

    def print_and_save(self) -> None:
        self.print()
        print(f"record: {self.save()}")

    def __repr__(self) -> str:
        lines = [f"{self.study}: {len(self.rows)} rows"]
        for row in self.rows:
            lines.append(
                f"  {row['program']:14s} {row['run']:16s} {row['median_us']:9.1f} us  {row['ratio_to_floor']:6.3f} x floor  {_settings(row['settings'])}"
            )
        return "\n".join(lines)


def row_key(row: Mapping[str, Any]) -> tuple:
    """What tells two rows of a study apart: program, run, and the settings but for those that only describe."""
    return (
        row["program"],
        row["run"],
        tuple(sorted((k, str(v)) for k, v in row["settings"].items() if k in ("batch", "context", "variant"))),
    )


def _settings(settings: Mapping[str, Any]) -> str:
    shown = {k: v for k, v in settings.items() if v is not None and k not in ("teams", "ctas_per_sm", "stages", "trigger", "prefetch")}
    return ", ".join(f"{k}={v}" for k, v in shown.items())
