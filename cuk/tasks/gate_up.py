"""y = silu(gate) * up of the two halves of w @ f(x): the first half of a SwiGLU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, TensorMap, ceil_div, check_range, matvec
from cuk.tasks.matvec import MatvecTask

PAIRS = 4  # of a gate and an up row, in a tile


@dataclass(frozen=True, kw_only=True)
class GateUp(MatvecTask):
    """x [batch, k] bf16, w [2 n, k] bf16 (gate rows, then up rows) -> y [batch, n] bf16; f is RmsNorm where `norm`."""

    n: int

    header = "tasks/gate_up.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("w", "ptr"), ("x", "ptr"), ("norm", "ptr"), ("y", "ptr"),
                           ("batch", "i32"), ("n", "i32"), ("k", "i32"), ("eps", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_range("n", self.n, 1, 2**30, "rows are counted in 32 bits")

    @property
    def struct(self) -> str:
        return f"cuk::GateUp<{self.matvec_arguments}, {str(self.norm).lower()}>"

    @property
    def operands(self) -> dict[str, Operand]:
        return {
            "x": Operand((self.batch, self.k), "bfloat16"),
            "w": Operand((2 * self.n, self.k), "bfloat16", role="weight"),
            **self.norm_operand,
            "y": Operand((self.batch, self.n), "bfloat16", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch, "n": self.n, "k": self.k, "eps": self.eps}

    @property
    def tensor_maps(self) -> dict[str, TensorMap]:
        return self.weight_map(self.n, 2)

    @property
    def posts(self) -> tuple[str, ...]:
        return ("y",) if self.n % PAIRS == 0 else ()

    @property
    def num_tasks(self) -> int:
        return ceil_div(self.n, PAIRS)

    def _columns(self, task: int) -> tuple[int, int]:
        return task * PAIRS, min(self.n, (task + 1) * PAIRS)

    def weights_from(self, task: int) -> tuple[str, int, int]:
        """Of the gate's rows: half of what the tasks read."""
        return "w", task * PAIRS * self.k * 2, self.n * self.k * 2

    def reads(self, task: int) -> list[Region]:
        low, high = self._columns(task)
        regions = [
            Region("x", ((0, self.batch), (0, self.k))),
            Region("w", ((low, high), (0, self.k))),
            Region("w", ((self.n + low, self.n + high), (0, self.k))),
        ]
        return regions + ([Region("norm", ((0, self.k),))] if self.norm else [])

    def writes(self, task: int) -> list[Region]:
        return [Region("y", ((0, self.batch), self._columns(task)))]

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.n * self.k

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        x, scale = self.normed(arrays, rounded)
        z = matvec(x, arrays["w"]) * scale
        gate, up = z[:, : self.n], z[:, self.n :]
        with np.errstate(over="ignore"):
            return {"y": gate / (1.0 + np.exp(-gate)) * up}
