"""What every projection has in common (cuda_src/core/matvec.cuh): tiles of eight weight rows against 1 to 16 rows of x."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Operand, Task, TensorMap, ceil_div, check_multiple, check_range, round_bf16, round_up, widen

TILE_ROWS = 8
BLOCK_K = 64
SEGMENT_K = 256
PAD_BYTES = 64
MAX_BATCH = 16
MAX_RESIDENT_X_BYTES = 66 * 1024
"""x stays in shared memory up to this size (batch 16 of 2048 columns); beyond, it comes through the ring with the weights."""


@dataclass(frozen=True, kw_only=True)
class MatvecTask(Task):
    """A projection of x [batch, k]: sizes, shared memory and the staged norm. `chunk_k` columns make a ring stage."""

    batch: int
    k: int
    norm: bool = False
    eps: float = 1e-5
    chunk_k: int = 0

    def __post_init__(self):
        if self.chunk_k == 0:
            object.__setattr__(self, "chunk_k", choose_chunk(self.batch, self.k))
        check_range("batch", self.batch, 1, MAX_BATCH, "a tensor-core tile has 16 rows")
        check_multiple("k", self.k, 8, "weight rows are read 16 bytes at a time")
        check_multiple("chunk_k", self.chunk_k, 256, "the four warps of a team take 64 columns each")
        if self.norm and self.stream_x:
            raise ValueError(
                f"batch={self.batch}, k={self.k}: x needs {self.batch * self.x_pitch} bytes of shared memory, more than "
                f"{MAX_RESIDENT_X_BYTES}; normalise it with an RmsNorm op of its own"
            )

    @property
    def slots(self) -> int:
        """Columns of a product that the batch takes: a power of two."""
        return 1 << (self.batch - 1).bit_length()

    @property
    def x_pitch(self) -> int:
        return round_up(self.k, 64) * 2 + PAD_BYTES

    @property
    def stream_x(self) -> bool:
        return streams_x(self.batch, self.k)

    @property
    def stage_bytes(self) -> int:
        return round_up(TILE_ROWS * self.chunk_k * 2 + (self.batch * (self.chunk_k * 2 + PAD_BYTES) if self.stream_x else 0), 1024)

    @property
    def dependent_loads(self) -> frozenset[str]:
        return frozenset({"w", "x"} if self.stream_x else {"w"})

    def stages_of_team(self, tasks: int) -> int:
        return tasks * ceil_div(self.k, self.chunk_k)

    @property
    def polls(self) -> tuple[str, ...]:
        return () if self.stream_x else ("x",)

    @property
    def max_registers(self) -> int:
        return 72 if self.slots < 16 else 96

    def weight_map(self, rows: int, halves: int = 1, heads: int = 1) -> dict[str, TensorMap]:
        """w [heads * halves * rows, k] as core/matvec.cuh reads it: (64 columns, rows, halves, blocks of 64 columns, heads). The last
        block of a k that is no multiple of 64 reaches into the next row, and 112 bytes past the last one."""
        row = self.k * 2
        box = (BLOCK_K, TILE_ROWS // halves, halves, self.chunk_k // BLOCK_K, 1)
        strides = (row, rows * row, BLOCK_K * 2, halves * rows * row)
        return {"w": TensorMap((BLOCK_K, rows, halves, ceil_div(self.k, BLOCK_K), heads), strides, box)}

    @property
    def shared_bytes(self) -> int:
        if self.stream_x:
            return 0
        return round_up(self.batch * (self.x_pitch + 4 * ceil_div(self.k, SEGMENT_K)), 128)

    @property
    def scratch_bytes(self) -> int:
        return round_up(4 * (2 * 4 * self.slots * TILE_ROWS + self.slots), 128)

    @property
    def matvec_arguments(self) -> str:
        """The template arguments that core/matvec.cuh takes."""
        return f"{self.slots}, {str(self.stream_x).lower()}, {self.chunk_k}"

    @property
    def norm_operand(self) -> dict[str, Operand]:
        return {"norm": Operand((self.k,), "bfloat16", role="weight")} if self.norm else {}

    def normed(self, arrays, rounded: bool) -> tuple[np.ndarray, np.ndarray]:
        """x times the norm's weight [batch, k], and 1 / rms [batch, 1] (ones without a norm), in float64."""
        x = widen(arrays["x"])
        if not self.norm:
            return x, np.ones((self.batch, 1))
        scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + self.eps)
        x = x * widen(arrays["norm"])
        return (round_bf16(x) if rounded else x), scale


def choose_chunk(batch: int, k: int) -> int:
    """Columns of a ring stage: 1024 (16 KB, more independent work between two barriers) where a small x leaves room for two of them a
    team in half an SM, else 512."""
    return 1024 if k >= 1024 and batch * (round_up(k, 64) * 2 + PAD_BYTES) <= 20 * 1024 else 512


def streams_x(batch: int, k: int) -> bool:
    """Whether x [batch, k] is too large to stay in shared memory."""
    return batch * (round_up(k, 64) * 2 + PAD_BYTES) > MAX_RESIDENT_X_BYTES
