"""The execution styles of a program, one file each, and `build`, which makes one ready to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuk.program import Program
from cuk.runs.base import Run
from cuk.runs.check import CheckFailed, check
from cuk.runs.persistent import PersistentRun
from cuk.runs.reference import ReferenceRun
from cuk.runs.separate import GraphRun, PdlRun, StreamRun

RUNS: dict[str, type[Run]] = {
    "reference": ReferenceRun, "stream": StreamRun, "graph": GraphRun, "pdl": PdlRun, "persistent": PersistentRun,
}  # fmt: skip


def build(
    program: Program, run: str, *, buffers: Mapping[str, Any] | None = None, seed: int = 0, device: int | None = None, **switches: Any
) -> Run:
    """A Run of `program`: call it to enqueue one step on the current CuPy stream.

    run: a name of RUNS. buffers: another run's buffers, whose weights and inputs are shared and whose caches and states are copied; without
    it the program's random initialisation is made from `seed`. device: a CUDA device, by default the current one. switches: those
    of the run (its `switches` lists them). Raises ValueError naming an unknown run or switch, MemoryError with the bytes
    needed and free before anything is allocated."""
    if run not in RUNS:
        raise ValueError(f"unknown run {run!r}: known ones are {', '.join(RUNS)}")
    kind = RUNS[run]
    unknown = sorted(set(switches) - set(kind.switches))
    if unknown:
        known = ", ".join(f"{name}={value!r}" for name, value in kind.switches.items()) or "none"
        raise ValueError(f"run {run!r} has no switch {', '.join(unknown)}: its switches and their defaults are {known}")
    return kind(program, buffers=buffers, seed=seed, device=device, **{**kind.switches, **switches})


__all__ = ["RUNS", "CheckFailed", "GraphRun", "PdlRun", "PersistentRun", "ReferenceRun", "Run", "StreamRun", "build", "check"]
