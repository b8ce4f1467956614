"""RMSNorm, the fused query/key/value projection, RoPE, and the append to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, TensorMap, check_range, matvec, round_up, widen
from cuk.tasks.matvec import TILE_ROWS, MatvecTask

HEAD_DIMS = (64, 128)


def rotate(heads: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """RoPE of heads [batch, heads, head_dim] by turn [batch, head_dim / 2, 2] (cos, sin)."""
    cos, sin = turn[:, None, :, 0], turn[:, None, :, 1]
    low, high = np.split(heads, 2, axis=2)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)


@dataclass(frozen=True, kw_only=True)
class Qkv(MatvecTask):
    """x [batch, k] -> q [batch, heads * head_dim], rotated, and K (rotated) and V at `positions` of the caches
    [batch, kv_heads, capacity, head_dim]. w [(heads + 2 kv_heads) * head_dim, k]; rope [capacity, head_dim / 2, 2] (cos, sin);
    the pairs of RoPE are (i, i + head_dim / 2), as in Hugging Face's checkpoints."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    header = "tasks/qkv.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("w", "ptr"), ("x", "ptr"), ("norm", "ptr"), ("rope", "ptr"), ("positions", "ptr"), ("q", "ptr"),
                           ("k_cache", "ptr"), ("v_cache", "ptr"), ("batch", "i32"), ("k", "i32"), ("heads", "i32"),
                           ("kv_heads", "i32"), ("capacity", "i32"), ("eps", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {HEAD_DIMS}")
        check_range("kv_heads", self.kv_heads, 1, self.heads, "each KV head serves at least one query head")
        check_range("capacity", self.capacity, 1, 2**24, "positions are counted in 32 bits")

    @property
    def struct(self) -> str:
        return f"cuk::Qkv<{self.matvec_arguments}, {str(self.norm).lower()}, {self.head_dim}>"

    @property
    def shared_bytes(self) -> int:
        """x and its sums, the positions' rows of the rope table and the positions, with room for a batch of whole fours."""
        return super().shared_bytes + round_up(16 + round_up(self.batch, 4) * (4 * self.head_dim + 4), 128)

    @property
    def rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def posts(self) -> tuple[str, ...]:
        return "q", "k_cache", "v_cache"

    @property
    def words(self) -> int:
        """Of the new position's rows alone: [batch, heads of q, of k, of v, head_dim]."""
        return self.batch * self.rows // 4

    @property
    def operands(self) -> dict[str, Operand]:
        cache = Operand((self.batch, self.kv_heads, self.capacity, self.head_dim), "bfloat16", "out", role="cache")
        return {
            "x": Operand((self.batch, self.k), "bfloat16"),
            "w": Operand((self.rows, self.k), "bfloat16", role="weight"),
            **self.norm_operand,
            "rope": Operand((self.capacity, self.head_dim // 2, 2), "float32", role="table"),
            "positions": Operand((self.batch,), "int32", role="index"),
            "q": Operand((self.batch, self.heads * self.head_dim), "bfloat16", "out"),
            "k_cache": cache,
            "v_cache": cache,
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch, "k": self.k, "heads": self.heads, "kv_heads": self.kv_heads,
                "capacity": self.capacity, "eps": self.eps}  # fmt: skip

    @property
    def tensor_maps(self) -> dict[str, TensorMap]:
        return self.weight_map(self.head_dim // 2, 2, self.heads + 2 * self.kv_heads)

    @property
    def num_tasks(self) -> int:
        return self.rows // TILE_ROWS

    @property
    def min_bytes(self) -> int:
        return super().min_bytes + 2 * 2 * self.batch * self.kv_heads * self.head_dim

    def tile_dims(self, task: int) -> tuple[int, list[tuple[int, int]]]:
        """The head of a task (queries, keys, then values) and its two ranges of dimensions within the head."""
        head, tile = divmod(task, self.head_dim // TILE_ROWS)
        return head, [(low, low + 4) for low in (tile * 4, tile * 4 + self.head_dim // 2)]

    def reads(self, task: int) -> list[Region]:
        head, ranges = self.tile_dims(task)
        first = head * self.head_dim
        regions = [Region("w", ((first + low, first + high), (0, self.k))) for low, high in ranges]
        regions += [Region("x", ((0, self.batch), (0, self.k))), Region("positions", ((0, self.batch),))]
        if self.norm:
            regions.append(Region("norm", ((0, self.k),)))
        if head < self.heads + self.kv_heads:
            regions.append(Region("rope", ((0, self.capacity), ranges[0], (0, 2))))
        return regions

    def writes(self, task: int) -> list[Region]:
        """Cache rows depend on `positions`: the region is the whole capacity of the head's dimensions."""
        head, ranges = self.tile_dims(task)
        if head < self.heads:
            first = head * self.head_dim
            return [Region("q", ((0, self.batch), (first + low, first + high))) for low, high in ranges]
        cache, head = (
            ("k_cache", head - self.heads) if head < self.heads + self.kv_heads else ("v_cache", head - self.heads - self.kv_heads)
        )
        return [Region(cache, ((0, self.batch), (head, head + 1), (0, self.capacity), span)) for span in ranges]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.k

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        """q as a whole; k_cache and v_cache as given with the new rows put in."""
        x, scale = self.normed(arrays, rounded)
        y = (matvec(x, arrays["w"]) * scale).reshape(self.batch, self.heads + 2 * self.kv_heads, self.head_dim)
        positions = np.asarray(arrays["positions"])
        rotated = rotate(y[:, : -self.kv_heads], widen(arrays["rope"])[positions])
        k_cache, v_cache = widen(arrays["k_cache"]), widen(arrays["v_cache"])
        batch = np.arange(self.batch)
        k_cache[batch, :, positions] = rotated[:, self.heads :]
        v_cache[batch, :, positions] = y[:, -self.kv_heads :]
        return {"q": rotated[:, : self.heads].reshape(self.batch, -1), "k_cache": k_cache, "v_cache": v_cache}
