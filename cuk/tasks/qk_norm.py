"""RMSNorm of each query and key head, RoPE, and the append to the KV cache: what stands between Qwen3's projections and its attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range, widen
from cuk.tasks.qkv import HEAD_DIMS, rotate

HEADS_PER_TASK = 4


@dataclass(frozen=True, kw_only=True)
class QkNorm(Task):
    """qkv [batch, (heads + 2 kv_heads) * head_dim] (queries, keys, values), norm_q and norm_k [head_dim] -> q [batch, heads * head_dim],
    normalised and rotated, K likewise and V as it is at `positions` of the caches [batch, kv_heads, capacity, head_dim]. rope as for Qkv."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    eps: float = 1e-6

    header = "tasks/qk_norm.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("qkv", "ptr"), ("norm_q", "ptr"), ("norm_k", "ptr"), ("rope", "ptr"), ("positions", "ptr"), ("q", "ptr"),
                           ("k_cache", "ptr"), ("v_cache", "ptr"), ("batch", "i32"), ("heads", "i32"), ("kv_heads", "i32"),
                           ("capacity", "i32"), ("eps", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {HEAD_DIMS}")
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")
        check_range("kv_heads", self.kv_heads, 1, self.heads, "each KV head serves at least one query head")
        check_range("capacity", self.capacity, 1, 2**24, "positions are counted in 32 bits")

    @property
    def struct(self) -> str:
        return f"cuk::QkNorm<{self.head_dim}>"

    @property
    def all_heads(self) -> int:
        return self.heads + 2 * self.kv_heads

    @property
    def operands(self) -> dict[str, Operand]:
        cache = Operand((self.batch, self.kv_heads, self.capacity, self.head_dim), "bfloat16", "out", role="cache")
        norm = Operand((self.head_dim,), "bfloat16", role="weight")
        return {
            "qkv": Operand((self.batch, self.all_heads * self.head_dim), "bfloat16"),
            "norm_q": norm,
            "norm_k": norm,
            "rope": Operand((self.capacity, self.head_dim // 2, 2), "float32", role="table"),
            "positions": Operand((self.batch,), "int32", role="index"),
            "q": Operand((self.batch, self.heads * self.head_dim), "bfloat16", "out"),
            "k_cache": cache,
            "v_cache": cache,
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads, "capacity": self.capacity, "eps": self.eps}

    @property
    def num_tasks(self) -> int:
        return ceil_div(self.batch * self.all_heads, HEADS_PER_TASK)

    @property
    def min_bytes(self) -> int:
        return super().min_bytes + 2 * 2 * self.batch * self.kv_heads * self.head_dim

    def _heads(self, task: int) -> list[tuple[int, int]]:
        """(sequence, head) of each of a task's heads."""
        last = min((task + 1) * HEADS_PER_TASK, self.batch * self.all_heads)
        return [divmod(index, self.all_heads) for index in range(task * HEADS_PER_TASK, last)]

    def _columns(self, head: int) -> tuple[int, int]:
        return head * self.head_dim, (head + 1) * self.head_dim

    def reads(self, task: int) -> list[Region]:
        regions = []
        for b, head in self._heads(task):
            regions += [Region("qkv", ((b, b + 1), self._columns(head))), Region("positions", ((b, b + 1),))]
            if head < self.heads + self.kv_heads:
                regions.append(Region("norm_q" if head < self.heads else "norm_k", ((0, self.head_dim),)))
                regions.append(Region("rope", ((0, self.capacity), (0, self.head_dim // 2), (0, 2))))
        return regions

    def writes(self, task: int) -> list[Region]:
        """Cache rows depend on `positions`: the region is the head's whole capacity."""
        regions = []
        for b, head in self._heads(task):
            if head < self.heads:
                regions.append(Region("q", ((b, b + 1), self._columns(head))))
                continue
            kind, kv = divmod(head - self.heads, self.kv_heads)
            regions.append(Region(("k_cache", "v_cache")[kind], ((b, b + 1), (kv, kv + 1), (0, self.capacity), (0, self.head_dim))))
        return regions

    @property
    def flops(self) -> int:
        return 8 * self.batch * (self.heads + self.kv_heads) * self.head_dim

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        """q as a whole; k_cache and v_cache as given with the new rows put in."""
        x = widen(arrays["qkv"]).reshape(self.batch, self.all_heads, self.head_dim)
        q, k, v = np.split(x, [self.heads, self.heads + self.kv_heads], axis=1)
        positions, turn = np.asarray(arrays["positions"]), widen(arrays["rope"])
        q, k = (rotate(self._normed(part) * widen(arrays[norm]), turn[positions]) for part, norm in ((q, "norm_q"), (k, "norm_k")))
        k_cache, v_cache, batch = widen(arrays["k_cache"]), widen(arrays["v_cache"]), np.arange(self.batch)
        k_cache[batch, :, positions], v_cache[batch, :, positions] = k, v
        return {"q": q.reshape(self.batch, -1), "k_cache": k_cache, "v_cache": v_cache}

    def _normed(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(np.square(x), axis=2, keepdims=True) + self.eps)
