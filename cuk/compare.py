"""Programs in every run, checked, timed beside a measured floor and beside others' decode steps; or sized up where there is no GPU."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuk.bench import Floor, Table, interleave, measure_floor
from cuk.launch import gpu_missing
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import chain, llama
from cuk.rivals import EXPECTED_US, MAX_LOGIT_ERROR, RIVALS
from cuk.runs import RUNS as KNOWN_RUNS
from cuk.runs import CheckFailed, build, check
from cuk.runs.check import check_bitwise, restore, states
from cuk.runs.memory import numpy_buffers, to_numpy
from cuk.runs.reference import execute
from cuk.switches import refuse_values, switches_of

RUNS = ("stream", "graph", "pdl")


def has_gpu() -> bool:
    """Whether kernels can be launched here (`cuk.launch.gpu_missing` says why not)."""
    return gpu_missing() is None


def likely_rivals(program: Program) -> tuple[str, ...]:
    """The rivals that stand in a table unasked: cuBLAS, and for a llama PyTorch's CUDA graph where torch is installed."""
    torch = "head_dim" in program.meta and importlib.util.find_spec("torch") is not None
    return ("torch_graph", "cublas") if torch else ("cublas",)


def compare(
    program: Program, runs: Sequence[str] = RUNS, *, switches: Mapping[str, Any] | None = None,
    variants: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
    rivals: Sequence[str] | None = None, study: str = "compare", floor: Floor | None = None, repeats: int = 20, seed: int = 0,
    device: int | None = None, machine: str = "h200", progress: Callable[[str], None] = lambda message: None,
    on_runs: Callable[[Table], object] | None = None,
) -> Table | Sizes:  # fmt: skip
    """A bench.Table of the program's runs on a GPU (`device`, by default the current one); without a GPU its Sizes on the stored `machine`,
    in which nothing is measured.

    runs: names of cuk.runs.RUNS. switches: for each of these runs that has them, such as {"deps": "tile", "teams": 3}. variants: further rows, name -> (run, switches). rivals: names of cuk.rivals.RIVALS, by default the likely
    ones; one that fails becomes a row that says why, not an error. on_runs: called with the table of the runs alone before any rival is set
    up, since one that faults on the GPU takes the process with it. Every run is checked first: `stream` op by op against the NumPy
    reference at full size, the others bit by bit against it; one that is not correct by claim (ordering="relaxed") is timed whatever its check says, and its
    row says that. Raises ValueError for unknown runs, switches and rivals, CheckFailed."""
    rivals = likely_rivals(program) if rivals is None else rivals
    for what, names, known in (("run", runs, [r for r in KNOWN_RUNS if r != "reference"]), ("rival", rivals, RIVALS)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"unknown {what} {', '.join(unknown)}: known ones are {', '.join(known)}")
    chosen = switches_of(runs, switches or {})
    if not has_gpu():
        refuse_values(program, chosen)
        return size_up(program, machine)
    import cupy

    with cupy.cuda.Device(device) if device is not None else contextlib.nullcontext():
        return _timed(program, chosen, variants or {}, rivals, study, floor, repeats, seed, progress, on_runs)


def _timed(
    program: Program, runs: Mapping[str, Mapping[str, Any]], variants: Mapping[str, tuple[str, Mapping[str, Any]]], rivals: Sequence[str], study: str,
    floor: Floor | None, repeats: int, seed: int, progress: Callable[[str], None], on_runs: Callable[[Table], object] | None,
) -> Table:  # fmt: skip
    progress("building")
    built = {"stream": build(program, "stream", seed=seed, **runs.get("stream", {}))}
    shared = built["stream"].buffers
    for name, switches in runs.items():
        if name != "stream":
            built[name] = build(program, name, buffers=shared, **switches)
    for name, (run, switches) in variants.items():
        built[name] = build(program, run, buffers=shared, **switches)
    progress("checking against the reference")
    claimed = {name: run for name, run in built.items() if run.correct_by_claim}
    check(claimed, progress=lambda op: progress(f"checking {op.name}"))
    for name, run in built.items():
        if name not in claimed:
            run.checked = _check_of_unsafe(run, built["stream"])
    timed: dict[str, Any] = {name: run for name, run in built.items() if name in runs or name in variants}
    notes: dict[str, str] = {}
    if floor is None:
        progress("measuring the floor")
        floor = measure_floor()
    meta = program.meta
    settings = {"batch": meta.get("batch"), "context": meta.get("context")}
    expected = (
        EXPECTED_US.get(f"{meta.get('model')}, {meta.get('batch')}, {meta.get('context')}") if floor.read_bytes_per_s > 4e12 else None
    )

    def measure() -> Table:
        asked = {name for switches in runs.values() for name in switches}
        table = Table(study, "graph" if "graph" in timed else next(iter(timed)), shown=asked)
        inner = max(1, min(50, int(2e4 / floor.us(program.min_bytes))))
        done, total = iter(range(1, repeats * len(timed) + 1)), repeats * len(timed)
        measurement = interleave(
            timed,
            baseline=table.baseline,
            repeats=repeats,
            inner=inner,
            seed=seed,
            progress=lambda name: progress(f"timing, {next(done)} of {total}"),
        )
        table.add(measurement, floor=floor, program=program, expected_us=expected, notes=notes, **settings)
        return table

    if on_runs and timed and rivals:
        on_runs(measure())
    failed: dict[str, str] = {}
    for name in rivals:
        progress(f"setting up {name}")
        try:
            timed[name] = _checked_rival(name, program, shared, notes)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    table = measure()
    for name, why in failed.items():
        table.add_failed(name, f"could not be set up: {why}", program=program, floor=floor, **settings)
    return table


def _check_of_unsafe(run: Any, stream: Any) -> str:
    """What the check of a run said that is not correct by claim."""
    before = [(one, states(one)) for one in (run, stream)]
    try:
        check_bitwise(run, stream)
    except CheckFailed as error:
        for one, saved in before:
            restore(one, saved)
        return f"FAILED: {error}"
    return f"bitwise:{stream.name}, this once"


def _checked_rival(name: str, program: Program, buffers: Mapping[str, Any], notes: dict[str, str]) -> Any:
    """The rival; a note why it is invalid if its logits are not those of a checked run."""
    rival = RIVALS[name](program, buffers)
    error = rival.check(to_numpy(buffers["logits"])) if "logits" in buffers else None
    if error is not None and not error < MAX_LOGIT_ERROR:
        notes[name] = f"its logits differ by {error:.2g} of their RMS: not the same step"
    return rival


# ---- without a GPU ----
@dataclass(frozen=True)
class Sizes:
    """What can be said of a program without a GPU: bytes, flops and floor of its ops on a stored machine. Nothing in it is measured.

    ops: {"op", "count", "tasks", "bytes", "flops", "floor_us"} for each kind of op. reference: what ran on the CPU. reference_difference: RMS
    of how far its outputs move when every result is rounded as it is stored, over their RMS; None where nothing ran."""

    program: str
    machine: str
    read_bytes_per_s: float
    ops: list[dict[str, Any]]
    reference: str
    reference_difference: float | None

    def to_json(self) -> dict[str, Any]:
        return {"measured": False, **vars(self)}

    @property
    def _notes(self) -> list[str]:
        ran = f"not measured: {self.reference}"
        if self.reference_difference is not None:
            ran += f"; rounding every result as it is stored moves its outputs by {self.reference_difference:.2%} of their RMS"
        return [
            f"not measured: floors are bytes over {self.read_bytes_per_s / 1e12:.2f} TB/s, the {self.machine}'s stored read bandwidth",
            ran,
            f"not measured: {gpu_missing() or 'sized up without using the GPU that is here'}",
        ]

    def _cells(self) -> list[list[str]]:
        whole = {
            "op": "whole step",
            "tasks": "",
            **{key: sum(row[key] for row in self.ops) for key in ("count", "bytes", "flops", "floor_us")},
        }
        return [
            [row["op"], str(row["count"]), str(row["tasks"]), f"{row['bytes'] / 1e6:.2f}", f"{row['flops'] / 1e9:.3f}", f"{row['floor_us']:.2f}"]
            for row in [*self.ops, whole]
        ]  # fmt: skip

    def rich(self) -> Any:
        """The table as a rich renderable."""
        from rich.table import Table as RichTable

        title = f"{self.program}: computed for the stored machine {self.machine}; NOTHING WAS MEASURED"
        table = RichTable(title=title, title_justify="left", header_style="bold")
        for name in ("op (not measured)", "count", "tasks each", "MB a step", "GFLOP a step", "floor us (computed)"):
            table.add_column(name, justify="left" if name.startswith("op") else "right")
        for cells in self._cells():
            table.add_row(*cells, style="bold" if cells[0] == "whole step" else None)
        return table

    def print(self) -> None:
        from rich.console import Console

        console = Console()
        console.print(self.rich())
        for note in self._notes:
            console.print(note, markup=False)  # it may name an extra in brackets

    def __repr__(self) -> str:
        rows = [f"not measured: {op:12s} {mb:>10s} MB  floor {us:>9s} us, computed" for op, _, _, mb, _, us in self._cells()]
        return "\n".join([f"{self.program} on the stored machine {self.machine}: nothing was measured", *rows, *self._notes])


def scaled_down(program: Program) -> Program | None:
    """A llama of an eighth of the width, two layers and a short context, or a chain of an eighth of the sizes, for the CPU; None for
    other programs."""
    m = program.meta

    def eighth(size: int) -> int:
        return max(8, size // 64 * 8)

    if "shapes" in m:
        return chain([(eighth(n), eighth(k)) for n, k in m["shapes"]], batch=m["batch"], layers=min(m["layers"], 2))
    if "head_dim" not in m:
        return None
    kv = max(1, m["kv_heads"] // 8)
    config = {
        "hidden_size": eighth(m["hidden"]), "intermediate_size": eighth(m["intermediate"]), "num_hidden_layers": min(m["layers"], 2),
        "num_attention_heads": kv * (m["heads"] // m["kv_heads"]), "num_key_value_heads": kv, "vocab_size": min(m["vocab"], 1000),
        "head_dim": m["head_dim"], "rope_theta": m["rope_theta"], "rope_scaling": m["rope_scaling"], "tie_word_embeddings": m["tied"], "qk_norm": m["qk_norm"],
    }  # fmt: skip
    return llama(config, batch=m["batch"], context=[min(context, 64) for context in m["contexts"]])


def size_up(program: Program, machine: str = "h200") -> Sizes:
    """The program's Sizes on a stored machine. A scaled-down program runs through the reference, in float64 and with every result
    rounded as it is stored. Raises ValueError for an unknown machine."""
    stored = Machine.load(machine)
    bandwidth = stored.constants["read_bytes_per_s"].value
    ops: dict[str, dict[str, Any]] = {}
    for op in program.ops:
        row = ops.setdefault(op.kind, {"op": op.kind, "count": 0, "tasks": op.task.num_tasks, "bytes": 0, "flops": 0, "floor_us": 0.0})
        row["count"] += 1
        row["bytes"] += op.min_bytes
        row["flops"] += op.task.flops
        row["floor_us"] += op.min_bytes / bandwidth * 1e6
    small, difference = scaled_down(program), None
    ran = f"{program.name} has no scaled-down form, so nothing ran through the NumPy reference"
    if small is not None:
        difference = _rounding_difference(small)
        ran = f"a scaled-down {program.name} ({len(small.ops)} ops) ran through the NumPy reference here"
    return Sizes(program.name, machine, bandwidth, list(ops.values()), ran, difference)


def _rounding_difference(program: Program) -> float:
    exact, rounded = numpy_buffers(program), numpy_buffers(program)
    execute(program, exact, exact=True)
    execute(program, rounded, exact=False)
    output = next(b.name for b in program.buffers.values() if b.role == "output" and b.dtype != "int32")
    difference = rounded[output].astype(np.float64) - exact[output]
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.square(exact[output]))))
