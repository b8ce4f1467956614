"""y = x * rsqrt(mean(x^2) + eps) * w, as an op of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_multiple, check_range, round_up, widen
from cuk.tasks.matvec import SEGMENT_K


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Task):
    """x [batch, k] bf16, w [k] bf16 -> y [batch, k] bf16."""

    batch: int
    k: int
    eps: float = 1e-5

    header = "tasks/rms_norm.cuh"
    struct = "cuk::RmsNorm"
    fields = tuple(Field(name, kind) for name, kind in [("x", "ptr"), ("w", "ptr"), ("y", "ptr"), ("k", "i32"), ("eps", "f32")])

    def __post_init__(self):
        check_multiple("k", self.k, 8, "rows are read 16 bytes at a time")
        check_range("k", self.k, 8, 2**20, "the sums of a row's segments share a few KB")
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")

    @property
    def scratch_bytes(self) -> int:
        return round_up(4 * ceil_div(self.k, SEGMENT_K), 128)

    @property
    def operands(self) -> dict[str, Operand]:
        return {
            "x": Operand((self.batch, self.k), "bfloat16"),
            "w": Operand((self.k,), "bfloat16", role="weight"),
            "y": Operand((self.batch, self.k), "bfloat16", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"k": self.k, "eps": self.eps}

    @property
    def num_tasks(self) -> int:
        return self.batch

    def reads(self, task: int) -> list[Region]:
        return [Region("x", ((task, task + 1), (0, self.k))), Region("w", ((0, self.k),))]

    def writes(self, task: int) -> list[Region]:
        return [Region("y", ((task, task + 1), (0, self.k)))]

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.k

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        x = widen(arrays["x"])
        return {"y": x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + self.eps) * widen(arrays["w"])}
