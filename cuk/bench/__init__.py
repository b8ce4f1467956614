"""Measuring: rivals interleaved in one process, medians with bootstrap intervals, a floor measured beside them, records."""

from __future__ import annotations

import contextlib
import html
import os
import random
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cuk.bench.floor import Floor, floor_here, measure_floor
from cuk.record import environment, load_record, now, source_sha256, write_record

__all__ = ["Floor", "Measurement", "Table", "floor_here", "interleave", "measure_floor", "paired_interval", "results_dir", "row_key"]


def _time(call: Callable[[], Any], inner: int) -> float:
    """Microseconds of one of `inner` back-to-back calls on the current stream, by events. An untimed call comes first: the GPU is then
    busy while the host enqueues the others, and the caches hold what the same variant leaves behind, not another one."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    call()
    start.record()
    for _ in range(inner):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e3 / inner


def paired_interval(mine: np.ndarray, theirs: np.ndarray, statistic: Callable[..., np.ndarray], seed: int = 0) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of statistic(mine, theirs, axis), whose pairs are drawn together (scipy.stats.bootstrap)."""
    from scipy.stats import bootstrap

    how = dict(paired=True, vectorized=True, n_resamples=2000, method="percentile")
    try:
        found = bootstrap((mine, theirs), statistic, rng=np.random.default_rng(seed), **how)
    except TypeError:  # SciPy before 1.15 has it under its old name
        found = bootstrap((mine, theirs), statistic, random_state=np.random.default_rng(seed), **how)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


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

        def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
            return np.median(a, axis=axis) / np.median(b, axis=axis)

        return value, *paired_interval(mine, theirs, statistic, seed)


def interleave(
    runs: Mapping[str, Callable[[], Any]], *, baseline: str | None = None, repeats: int = 30, inner: int = 10, warmup: int = 3, seed: int = 0,
    timer: Callable[[Callable[[], Any], int], float] | None = None, progress: Callable[[str], None] | None = None,
) -> Measurement:  # fmt: skip
    """Times each variant `repeats` times, `inner` back-to-back calls a time, in an order drawn anew each round. A variant is a Run, a
    rival, or any callable that enqueues its work on the current CuPy stream.

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
    clocks = ""
    with _timing_stream(timer is None):
        real, timer = timer is None, timer or _time
        for name in order:
            for _ in range(warmup):
                runs[name]()
        for _ in range(repeats):
            rng.shuffle(order)
            for name in order:
                samples[name].append(timer(runs[name], inner))
                if progress:
                    progress(name)
        if real:
            clocks = _clocks(lambda: timer(runs[baseline], inner))
    return Measurement({name: np.array(values) for name, values in samples.items()}, baseline, dict(runs), clocks)


@contextlib.contextmanager
def _timing_stream(real: bool):
    """A stream of its own, so that nothing else stands between the events; what was enqueued elsewhere is done before."""
    if not real:
        yield
        return
    import cupy

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield
        stream.synchronize()


def _clocks(load: Callable[[], Any]) -> str:
    """SM and memory clock under `load`, and what holds them back, as nvidia-smi tells; empty where it cannot."""
    import cupy

    query = ["nvidia-smi", "-i", cupy.cuda.Device().pci_bus_id, "--query-gpu=clocks.sm,clocks.mem,clocks_event_reasons.active",
             "--format=csv,noheader,nounits"]  # fmt: skip
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            load()
        return _read_clocks(process.communicate()[0]) if process.poll() == 0 else ""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


CLOCK_REASONS = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "temperature (software)",
    0x40: "temperature (hardware)", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
"""nvmlClocksEventReason* of nvml.h; 0x1, that the GPU is idle, holds nothing back."""


def _read_clocks(line: str) -> str:
    """ "1980 MHz SM, 2619 MHz memory, held back by power cap" from "1980, 2619, 0x0000000000000004"."""
    parts = [part.strip() for part in line.strip().split(",")]
    try:
        sm, memory, active = parts[0], parts[1], int(parts[2], 16)
    except (IndexError, ValueError):
        return line.strip()
    reasons = [name for bit, name in CLOCK_REASONS.items() if active & bit]
    return f"{sm} MHz SM, {memory} MHz memory, {'held back by ' + ', '.join(reasons) if reasons else 'not held back'}"


# ---- tables and records ----
def results_dir() -> Path:
    """studies/results of the checkout, or of the working directory where the package is installed."""
    checkout = Path(__file__).resolve().parents[2] / "studies"
    return (checkout if checkout.is_dir() else Path.cwd() / "studies") / "results"


class Table:
    """Rows of a study. Printed with rich, as text or HTML in IPython; saved as a record that keeps rows of other settings."""

    def __init__(self, study: str, baseline: str = "graph", settings: Mapping[str, Any] | None = None, shown: Iterable[str] = ()):
        """shown: settings of rows that are printed though they are not by themselves (such as teams)."""
        self.study, self.baseline, self.settings, self.shown = study, baseline, dict(settings or {}), frozenset(shown)
        self.rows: list[dict[str, Any]] = []
        self.floors: list[Floor] = []

    def add(self, measurement: Measurement, *, floor: Floor | None = None, program: Any = None, expected_us: Mapping[str, float] | None = None,
            notes: Mapping[str, str] | None = None, **settings: Any) -> None:  # fmt: skip
        """Adds a row for each variant. floor: by default this device's, measured once a process. program: by default that of the first Run.
        expected_us: what a rival was measured to take elsewhere; one over 1.1 times that is set up badly, and its row says that it is
        invalid. notes: why a row is invalid, by variant. Raises ValueError where no variant tells its program and none is given."""
        program = program or next((run.program for run in measurement.subjects.values() if hasattr(run, "program")), None)
        if program is None:
            raise ValueError(f"variants {', '.join(measurement.subjects)} do not tell their program: give program=")
        floor = floor or floor_here()
        self.floors.append(floor)
        floor_us = floor.us(program.min_bytes)
        for name, run in measurement.subjects.items():
            ratio, low, high = measurement.ratio(name)
            median = measurement.median(name)
            limit = (expected_us or {}).get(name)
            reasons = [(notes or {}).get(name), floor.why_invalid]
            if limit and median > 1.1 * limit:
                reasons.append(f"over 1.1 times the {limit:.0f} us that this rival takes elsewhere: not set up as its users would")
            why = "; ".join(reason for reason in reasons if reason) or None
            resources = getattr(run, "resources", {})
            used = {**settings, **getattr(run, "settings", {})}
            self.rows.append({
                "program": program.name, "run": name, "settings": used, **({"unsafe": UNSAFE} if is_unsafe(used) else {}),
                "median_us": median, "iqr_us": measurement.iqr(name), "floor_us": floor_us, "ratio_to_floor": median / floor_us,
                "baseline": measurement.baseline, "ratio_to_baseline": [ratio, low, high], "checked": getattr(run, "checked", None),
                "registers": {kind: r.registers for kind, r in resources.items()},
                "spill_bytes": {kind: r.spill_bytes for kind, r in resources.items()},
                "smem_bytes": {kind: f.smem_bytes for kind, f in getattr(run, "footprints", {}).items()},
                "min_bytes": program.min_bytes, "read_bytes_per_s": floor.read_bytes_per_s, "clocks": measurement.clocks,
                "rounds": len(measurement.samples[name]), "source_sha256": source_sha256(), "date": now(), "invalid": why,
            })  # fmt: skip

    def add_failed(self, name: str, why: str, *, program: Any, floor: Floor, **settings: Any) -> None:
        """Adds a row for a variant that could not be set up: no times, and `why` it is invalid."""
        self.rows.append({
            "program": program.name, "run": name, "settings": settings, "median_us": None, "iqr_us": None, "floor_us": floor.us(program.min_bytes),
            "ratio_to_floor": None, "baseline": self.baseline, "ratio_to_baseline": None, "checked": None, "rounds": 0,
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
            "floors": [{"read_bytes_per_s": f.read_bytes_per_s, "low": f.low, "high": f.high, "best": f.best, "rows": list(f.rows)}
                       for f in self._floors()],
            "invalid": "; ".join(f.why_invalid for f in self._floors() if f.why_invalid) or None,
            "rows": self.rows,
        }  # fmt: skip

    def _settings(self, row: Mapping[str, Any]) -> str:
        return _settings(row["settings"], self.shown)

    def _floors(self) -> list[Floor]:
        return list({id(floor): floor for floor in self.floors}.values())

    def save(self, path: str | Path | None = None) -> Path:
        """Writes the record, by default studies/results/<machine>/<study>.json. Rows there of other settings stay, but of a part (a row's
        `part`, if it has one) only those of the same sources: what stands together was measured from one state. A file there that is no
        record is put aside as <name>.broken."""
        record = self.record()
        path = Path(path) if path else results_dir() / record["machine"] / f"{self.study}.json"
        if path.exists():
            mine, sources = {row_key(row) for row in self.rows}, {row.get("part"): row["source_sha256"] for row in self.rows}

            def stays(row: Mapping[str, Any]) -> bool:
                part = row.get("part")
                return row_key(row) not in mine and (part is None or sources.get(part) in (None, row.get("source_sha256")))

            try:
                record["rows"] = [row for row in load_record(path)["rows"] if stays(row)] + self.rows
            except ValueError:
                os.replace(path, path.with_name(f"{path.name}.broken"))
        write_record(path, record)
        return path

    def rich(self) -> Any:
        """The table as a rich renderable."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=self.study, title_justify="left", header_style="bold")
        for title in self._titles():
            table.add_column(title, justify="right" if title.startswith(("us", "iqr", "x ")) else "left")
        for row in self.rows:
            mark = f" [red]invalid: {escape(row['invalid'])}[/red]" if row["invalid"] else ""
            cells = [escape(cell) for cell in self._cells(row)]
            table.add_row(*cells[:-1], cells[-1] + mark)
        return table

    __rich__ = rich

    def _titles(self) -> tuple[str, ...]:
        return "program", "run", "settings", "us", "iqr", "x floor", f"x {self.baseline}", "checked"

    def _cells(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        if row["median_us"] is None:
            return row["program"], row["run"], self._settings(row), "-", "-", "-", "-", "not timed"
        ratio, low, high = row["ratio_to_baseline"]
        return (row["program"], row["run"], self._settings(row), f"{row['median_us']:.1f}", f"{row['iqr_us']:.1f}",
                f"{row['ratio_to_floor']:.3f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]", row["checked"] or "no")  # fmt: skip

    def _lines_below(self) -> list[str]:
        floors = [f"floor: bytes that must move over {f.read_bytes_per_s / 1e12:.3f} TB/s read ({f.best})"
                  + ("" if f.valid else f"; INVALID: {f.why_invalid}") for f in self._floors()]  # fmt: skip
        return [*floors, *dict.fromkeys(row["unsafe"] for row in self.rows if row.get("unsafe"))]

    def print(self) -> None:
        from rich.console import Console

        console = Console()
        console.print(self)
        for line in self._lines_below():
            console.print(line, markup=False)

    def _repr_html_(self) -> str:
        """What a notebook shows."""

        def line(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = []
        for row in self.rows:
            *cells, checked = self._cells(row)
            rows.append(line((*cells, checked + (f"; invalid: {row['invalid']}" if row["invalid"] else "")), "td"))
        below = "".join(f"<div>{html.escape(text)}</div>" for text in self._lines_below())
        return f"<table><caption>{html.escape(self.study)}</caption>{line(self._titles(), 'th')}{''.join(rows)}</table>{below}"

    def print_and_save(self) -> None:
        self.print()
        print(f"record: {self.save()}")

    def __repr__(self) -> str:
        lines = [f"{self.study}: {len(self.rows)} rows"]
        for row in self.rows:
            if row["median_us"] is None:
                lines.append(f"  {row['program']:14s} {row['run']:16s} not timed: {row['invalid']}")
                continue
            lines.append(
                f"  {row['program']:14s} {row['run']:16s} {row['median_us']:9.1f} us  {row['ratio_to_floor']:6.3f} x floor  {self._settings(row)}"
                + (f"  INVALID: {row['invalid']}" if row["invalid"] else "")
            )
        return "\n".join(lines)


def row_key(row: Mapping[str, Any]) -> tuple:
    """What tells two rows of a study apart: part, program, run, and the settings but for those that only describe."""
    return (
        row.get("part"),
        row["program"],
        row["run"],
        tuple(sorted((k, str(v)) for k, v in row["settings"].items() if k in ("batch", "context", "variant"))),
    )


def is_unsafe(settings: Mapping[str, Any]) -> bool:
    """Whether a run of these settings leaves out what makes it correct."""
    return settings.get("ordering") == "relaxed"


UNSAFE = "UNSAFE: ordering=relaxed does not order memory, so results may be wrong at any time; for studies only"


def setting_text(name: str, value: Any) -> str:
    """A setting as every table and line shows it: "deps=tile"."""
    return f"{name}={value}" + (" (UNSAFE)" if is_unsafe({name: value}) else "")


def _settings(settings: Mapping[str, Any], asked: Collection[str] = ()) -> str:
    hidden = {"teams", "ctas_per_sm", "stages", "trigger", "prefetch"} - set(asked)
    shown = {k: v for k, v in settings.items() if v is not None and k not in hidden}
    return ", ".join(setting_text(k, v) for k, v in shown.items())
