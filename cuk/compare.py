"""Programs in every run, checked, timed beside a measured floor and beside others' decode steps; or sized up where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuk.bench import Floor, Table, interleave, measure_floor
from cuk.launch import gpu_missing
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import llama
from cuk.rivals import EXPECTED_US, RIVALS
from cuk.runs import build, check
from cuk.runs.memory import numpy_buffers, to_numpy
from cuk.runs.reference import execute

RUNS = ("stream", "graph", "pdl")


def has_gpu() -> bool:
    """Whether kernels can be launched here (`cuk.launch.gpu_missing` says why not)."""
    return gpu_missing() is None


def compare(
    program: Program, runs: Sequence[str] = RUNS, *, variants: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
    rivals: Sequence[str] = (), study: str = "compare", floor: Floor | None = None, repeats: int = 20, seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> Table:  # fmt: skip
    """A bench.Table of the program's runs on the current GPU.

    runs: names of cuk.runs.RUNS. variants: further rows, name -> (run, switches). rivals: names of cuk.rivals.RIVALS; one that fails becomes
    a note, not an error. Every run is checked first: `stream` op by op against the NumPy reference at full size, the others bit by bit
    against it. Raises RuntimeError without a GPU (see `size_up`)."""
    if not has_gpu():
        raise RuntimeError(
            "no GPU (or no CuPy): nothing can be timed here; cuk.compare.size_up sizes the program up instead, `cuk doctor` says what is missing"
        )
    unknown = sorted(set(rivals) - set(RIVALS))
    if unknown:
        raise ValueError(f"unknown rival {', '.join(unknown)}: known ones are {', '.join(RIVALS)}")
    progress("building")
    built = {"stream": build(program, "stream", seed=seed)}
    shared = built["stream"].buffers
    for name in runs:
        if name != "stream":
            built[name] = build(program, name, buffers=shared)
    for name, (run, switches) in (variants or {}).items():
        built[name] = build(program, run, buffers=shared, **switches)
    progress("checking against the reference")
    check(built, progress=lambda op: progress(f"checking {op.name}"))
    ours = to_numpy(shared["logits"]) if "logits" in shared else None
    timed: dict[str, Any] = {name: run for name, run in built.items() if name in runs or name in (variants or {})}
    notes: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in rivals:
        progress(f"setting up {name}")
        try:
            rival = RIVALS[name](program, shared)
            error = rival.check(ours) if ours is not None else None
            if error is not None and not error < 5e-2:
                notes[name] = f"its logits differ by {error:.2g} of their RMS"
            timed[name] = rival
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    if floor is None:
        progress("measuring the floor")
        floor = measure_floor()
    baseline = "graph" if "graph" in timed else next(iter(timed))
    progress("timing")
    inner = max(1, min(50, int(2e4 / floor.us(program.min_bytes))))
    measurement = interleave(timed, baseline=baseline, repeats=repeats, inner=inner, seed=seed)
    table = Table(study, baseline)
    meta = program.meta
    expected = (
        EXPECTED_US.get(f"{meta.get('model')}, {meta.get('batch')}, {meta.get('context')}") if floor.read_bytes_per_s > 4e12 else None
    )
    table.add(
        measurement, floor=floor, program=program, expected_us=expected, notes=notes, batch=meta.get("batch"), context=meta.get("context")
    )
    table.settings["rivals_failed"] = failed
    return table


def scaled_down(program: Program) -> Program:
    """A model of the same shape with an eighth of the width, two layers and a short context, for the CPU."""
    m = program.meta
    heads = max(1, m["heads"] // 8)
    kv = max(1, m["kv_heads"] // 8)
    config = {
        "hidden_size": max(8, m["hidden"] // 64 * 8), "intermediate_size": max(8, m["intermediate"] // 64 * 8), "num_hidden_layers": 2,
        "num_attention_heads": heads // kv * kv, "num_key_value_heads": kv, "vocab_size": 1000, "head_dim": m["head_dim"],
        "rope_theta": m["rope_theta"], "rope_scaling": m["rope_scaling"], "tie_word_embeddings": m["tied"],
    }  # fmt: skip
    return llama(config, batch=m["batch"], context=min(m["context"], 64))


def size_up(program: Program, machine: str = "h200") -> dict[str, Any]:
    """What can be said without a GPU: {"machine", "read_bytes_per_s", "reference_difference", "ops": [{"op", "count", "tasks", "bytes", "flops", "floor_us"}]}.

    The scaled-down model runs through the reference in float64 and with every result rounded as it is stored; reference_difference is
    the RMS of their logits' difference over the logits' RMS. Nothing is measured: floors come from the stored machine."""
    stored = Machine.load(machine)
    bandwidth = stored.constants["read_bytes_per_s"].value
    small = scaled_down(program)
    exact, rounded = numpy_buffers(small), numpy_buffers(small)
    execute(small, exact, exact=True)
    execute(small, rounded, exact=False)
    difference = rounded["logits"].astype(np.float64) - exact["logits"]
    ops: dict[str, dict[str, Any]] = {}
    for op in program.ops:
        row = ops.setdefault(op.kind, {"op": op.kind, "count": 0, "tasks": op.task.num_tasks, "bytes": 0, "flops": 0, "floor_us": 0.0})
        row["count"] += 1
        row["bytes"] += op.min_bytes
        row["flops"] += op.task.flops
        row["floor_us"] += op.min_bytes / bandwidth * 1e6
    return {
        "measured": False, "program": program.name, "machine": machine, "read_bytes_per_s": bandwidth,
        "reference_difference": float(np.sqrt(np.mean(difference**2) / np.mean(np.square(exact["logits"])))), "ops": list(ops.values()),
    }  # fmt: skip
