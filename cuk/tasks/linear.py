"""y = f(x) @ w.T (+ residual): output and down projections, LM head, plain matrix-vector products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, TensorMap, ceil_div, check_range, matvec, widen
from cuk.tasks.matvec import TILE_ROWS, MatvecTask


@dataclass(frozen=True, kw_only=True)
class Linear(MatvecTask):
    """x [batch, k] bf16, w [n, k] bf16 -> y [batch, n] in `out` ("bfloat16" or "float32"); f is RmsNorm where `norm`."""

    n: int
    residual: bool = False
    out: str = "bfloat16"

    header = "tasks/linear.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("w", "ptr"), ("x", "ptr"), ("norm", "ptr"), ("residual", "ptr"), ("y", "ptr"),
                           ("batch", "i32"), ("n", "i32"), ("k", "i32"), ("eps", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_range("n", self.n, 1, 2**31 - TILE_ROWS, "rows are counted in 32 bits")
        if self.out not in ("bfloat16", "float32"):
            raise ValueError(f"out={self.out!r}: must be 'bfloat16' or 'float32'")

    @property
    def struct(self) -> str:
        out = {"bfloat16": "cuk::bf16", "float32": "float"}[self.out]
        return f"cuk::Linear<{self.matvec_arguments}, {str(self.norm).lower()}, {str(self.residual).lower()}, {out}>"

    @property
    def operands(self) -> dict[str, Operand]:
        residual = {"residual": Operand((self.batch, self.n), "bfloat16")} if self.residual else {}
        return {
            "x": Operand((self.batch, self.k), "bfloat16"),
            "w": Operand((self.n, self.k), "bfloat16", role="weight"),
            **self.norm_operand,
            **residual,
            "y": Operand((self.batch, self.n), self.out, "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch, "n": self.n, "k": self.k, "eps": self.eps}

    @property
    def tensor_maps(self) -> dict[str, TensorMap]:
        return self.weight_map(self.n)

    @property
    def posts(self) -> tuple[str, ...]:
        return ("y",) if self.out == "bfloat16" and self.n % TILE_ROWS == 0 else ()

    @property
    def takes(self) -> tuple[str, ...]:
        return ("residual",) if self.residual and self.n % TILE_ROWS == 0 else ()

    @property
    def staged_chunks(self) -> int:
        return 0 if self.norm or self.stream_x else ceil_div(self.k, self.chunk_k)

    @property
    def num_tasks(self) -> int:
        return ceil_div(self.n, TILE_ROWS)

    def _rows(self, task: int) -> tuple[int, int]:
        return task * TILE_ROWS, min(self.n, (task + 1) * TILE_ROWS)

    def weights_from(self, task: int) -> tuple[str, int, int]:
        return "w", task * TILE_ROWS * self.k * 2, self.n * self.k * 2

    def reads(self, task: int) -> list[Region]:
        rows = self._rows(task)
        regions = [Region("x", ((0, self.batch), (0, self.k))), Region("w", (rows, (0, self.k)))]
        if self.norm:
            regions.append(Region("norm", ((0, self.k),)))
        if self.residual:
            regions.append(Region("residual", ((0, self.batch), rows)))
        return regions

    def writes(self, task: int) -> list[Region]:
        return [Region("y", ((0, self.batch), self._rows(task)))]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.n * self.k

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        x, scale = self.normed(arrays, rounded)
        y = matvec(x, arrays["w"]) * scale
        return {"y": y + widen(arrays["residual"]) if self.residual else y}
