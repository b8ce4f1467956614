"""A task of one's own, outside the package: this class, and scale.cuh beside it. It runs in every run that exists.

python examples/scale.py
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cuk
from cuk.program import Init, Program
from cuk.task import Field, Operand, Region, Task, ceil_div

ELEMENTS = 1024


@dataclass(frozen=True)
class Scale(Task):
    """x [n] float32 -> y [n] float32 = factor * x."""

    n: int
    factor: float = 2.0

    header = str(Path(__file__).with_name("scale.cuh"))
    struct = "example::Scale"
    fields = (Field("x", "ptr"), Field("y", "ptr"), Field("n", "i32"), Field("factor", "f32"))

    @property
    def operands(self):
        return {"x": Operand((self.n,), "float32"), "y": Operand((self.n,), "float32", "out")}

    @property
    def scalars(self):
        return {"n": self.n, "factor": self.factor}

    @property
    def num_tasks(self):
        return ceil_div(self.n, ELEMENTS)

    def _span(self, task):
        return ((task * ELEMENTS, min(self.n, (task + 1) * ELEMENTS)),)

    def reads(self, task):
        return [Region("x", self._span(task))]

    def writes(self, task):
        return [Region("y", self._span(task))]

    @property
    def flops(self):
        return self.n

    def reference(self, arrays, rounded=True):
        return {"y": np.asarray(arrays["x"], np.float64) * np.float32(self.factor)}


def program(n=5000):
    """Three scalings in a row."""
    p = Program("scale", {"batch": 1, "context": 0})
    source = p.buffer("x", (n,), "float32", "index", Init("normal"))
    for i in range(3):
        y = p.buffer(f"y{i}", (n,), "float32", "output" if i == 2 else "activation")
        p.op("scale", Scale(n), f"scale{i}", x=source, y=y)
        source = y
    return p


if __name__ == "__main__":
    p = program()
    stream = cuk.build(p, "stream")
    runs = {"stream": stream, **{name: cuk.build(p, name, buffers=stream.buffers) for name in ("graph", "pdl")}}
    cuk.check(runs)
    print(*runs.values(), sep="\n")
