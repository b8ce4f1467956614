"""y = merge(partials) @ w.T (+ residual): the output projection behind an attention whose ranges it merges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, check_multiple, check_range, round_bf16, widen
from cuk.tasks.linear import Linear
from cuk.tasks.qkv import HEAD_DIMS


@dataclass(frozen=True, kw_only=True)
class MergeLinear(Linear):
    """partials [batch, splits, k] bf16 and lse [batch, k / head_dim, splits] of an `AttentionDecode(merge=False)`, w [n, k] bf16
    -> y [batch, n] in `out`."""

    head_dim: int
    splits: int

    header = "tasks/merge_linear.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("w", "ptr"), ("partials", "ptr"), ("lse", "ptr"), ("residual", "ptr"), ("y", "ptr"),
                           ("batch", "i32"), ("n", "i32"), ("k", "i32"), ("splits", "i32")]
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {HEAD_DIMS}")
        check_multiple("k", self.k, self.head_dim, "whole heads")
        check_range("splits", self.splits, 1, 1024, "ranges of the context")
        if self.norm:
            raise ValueError("norm=True: attention's output is projected as it is")
        if self.stream_x:
            raise ValueError(
                f"batch={self.batch}, k={self.k}: x does not fit in shared memory, where it would be merged; let attention merge (merge=True)"
            )

    @property
    def struct(self) -> str:
        out = {"bfloat16": "cuk::bf16", "float32": "float"}[self.out]
        return f"cuk::MergeLinear<{self.head_dim}, {self.slots}, {self.chunk_k}, {str(self.residual).lower()}, {out}>"

    polls = ()  # looking again at 32 KB of ranges on every SM would take all of L2's bandwidth
    staged_chunks = 0

    @property
    def operands(self) -> dict[str, Operand]:
        rest = super().operands
        del rest["x"]
        return {
            "partials": Operand((self.batch, self.splits, self.k), "bfloat16"),
            "lse": Operand((self.batch, self.k // self.head_dim, self.splits), "float32"),
            **rest,
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch, "n": self.n, "k": self.k, "splits": self.splits}

    def reads(self, task: int) -> list[Region]:
        whole = [Region(name, tuple((0, size) for size in self.operands[name].shape)) for name in ("partials", "lse")]
        return [*whole, *(region for region in super().reads(task) if region.operand != "x")]

    def _merged(self, arrays) -> np.ndarray:
        """x [batch, k] in float64."""
        lse = widen(arrays["lse"])
        weight = np.exp2(lse - lse.max(axis=2, keepdims=True))
        weight /= weight.sum(axis=2, keepdims=True)
        partials = widen(arrays["partials"]).reshape(self.batch, self.splits, -1, self.head_dim)
        return np.einsum("bhs,bshd->bhd", weight, partials).reshape(self.batch, self.k)

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        x = self._merged(arrays)
        return super().reference({**arrays, "x": round_bf16(x) if rounded else x})

    def error_bound(self, arrays, outputs) -> dict[str, np.ndarray]:
        """As for any projection, and an ulp of x wherever the float32 merge may round to the other neighbour."""
        x = self._merged(arrays)
        spread = self._merged({**arrays, "partials": np.abs(widen(arrays["partials"]))})
        slack = np.abs(round_bf16(x + 2.0**-18 * spread) - round_bf16(x - 2.0**-18 * spread))
        bound = super().error_bound(arrays, outputs)["y"]
        return {"y": bound + slack @ np.abs(widen(arrays["w"])).T}
