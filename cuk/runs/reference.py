"""The run `reference`: NumPy on the CPU, the truth that the others are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuk.program import Op, Program
from cuk.runs.base import Run
from cuk.runs.memory import numpy_buffers
from cuk.task import numpy_dtype, widen


def execute(program: Program, arrays: dict[str, Any], *, exact: bool, progress: Callable[[Op], None] | None = None) -> None:
    """Runs every op of the program on `arrays` in place. exact: activations stay in float64 and nothing is rounded; otherwise each
    stored result is rounded to its buffer's dtype."""
    for op in program.ops:
        operands = {key: view.of(arrays) for key, view in op.views.items()}
        for key, value in op.task.reference(operands, rounded=not exact).items():
            buffer = op.views[key].buffer
            if exact and buffer.dtype in ("bfloat16", "float32"):
                if arrays[buffer.name].dtype != np.float64:
                    arrays[buffer.name] = widen(arrays[buffer.name])
                op.views[key].of(arrays)[...] = value
            else:
                op.views[key].of(arrays)[...] = np.asarray(value).astype(
                    np.float32 if buffer.dtype == "bfloat16" else numpy_dtype(buffer.dtype)
                )
        if progress:
            progress(op)


class ReferenceRun(Run):
    """precision: "float64" (nothing rounded) or "storage" (each result rounded as it is stored)."""

    name = "reference"
    switches = {"precision": "float64"}

    def __init__(self, program: Program, *, buffers: Mapping[str, Any] | None, seed: int, device: int | None, precision: str):
        if precision not in ("float64", "storage"):
            raise ValueError(f"precision={precision!r}: must be 'float64' or 'storage'")
        super().__init__(program, {"precision": precision})
        self.buffers = numpy_buffers(program, seed, buffers)
        self.checked = "reference"

    def __call__(self) -> None:
        execute(self.program, self.buffers, exact=self.settings["precision"] == "float64")

    def synchronize(self) -> None:
        """Nothing is pending: a call returns when the step is done."""
