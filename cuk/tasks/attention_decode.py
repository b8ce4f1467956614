"""Attention of one new token per sequence over its KV cache, split over the context and which its tasks merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range, round_up, widen
from cuk.tasks.qkv import HEAD_DIMS

HEADS_PER_TASK = 8
TARGET_TASKS = 128
"""Tasks to aim for: about one for each SM of a large GPU. A constant, since it fixes the order of the merge."""


@dataclass(frozen=True, kw_only=True)
class AttentionDecode(Task):
    """q [batch, kv_heads * group * head_dim] over k_cache, v_cache [batch, kv_heads, capacity, head_dim] at positions
    0 … positions[b] -> out like q. `context`: the old positions that the cost is computed for, and `splits` is chosen for."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    context: int
    splits: int = 0

    header = "tasks/attention_decode.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("q", "ptr"), ("k_cache", "ptr"), ("v_cache", "ptr"), ("positions", "ptr"), ("words", "ptr"),
                           ("out", "ptr"), ("kv_heads", "i32"), ("group", "i32"),
                           ("heads_per_task", "i32"), ("capacity", "i32"), ("splits", "i32"), ("lanes", "i32"),
                           ("scale_log2", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {HEAD_DIMS}")
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")
        check_range("group", self.group, 1, 2**10, "query heads of one KV head")
        check_range("context", self.context, 0, self.capacity - 1, "the new token needs a row of the cache too")
        if self.splits == 0:
            object.__setattr__(self, "splits", choose_splits(self.batch * self.kv_heads * self.head_blocks, self.context, self.head_dim))
        check_range("splits", self.splits, 1, 1024, "ranges of the context")

    @property
    def heads_per_task(self) -> int:
        return min(self.group, HEADS_PER_TASK)

    @property
    def head_blocks(self) -> int:
        return ceil_div(self.group, self.heads_per_task)

    @property
    def struct(self) -> str:
        return f"cuk::AttentionDecode<{self.head_dim}>"

    @property
    def positions_per_stage(self) -> int:
        return 4096 // self.head_dim

    @property
    def stage_bytes(self) -> int:
        return round_up(2 * self.positions_per_stage * self.head_dim * 2 + 4 * 32, 1024)

    def stages_of_team(self, tasks: int) -> int:
        """For `context` old positions and up to one stage more in each range: a longer context only takes turns in the ring."""
        return tasks * max(2, ceil_div(ceil_div(self.context, self.positions_per_stage), self.splits))

    @property
    def max_registers(self) -> int:
        """What the body needs without spilling: its outputs and operands alone take 60 or 90. At 120 a
        kernel of one team still fits an SM beside a projection of three (registers are counted by SM partition)."""
        return 120 if self.head_dim == 64 else 128

    @property
    def scratch_bytes(self) -> int:
        """Maxima, sums and outputs of four warps, maximum and sum of the new position (see the device file)."""
        return round_up(4 * (5 * 2 * HEADS_PER_TASK + 4 * self.heads_per_task * self.head_dim), 128)

    @property
    def operands(self) -> dict[str, Operand]:
        q = (self.batch, self.kv_heads * self.group * self.head_dim)
        cache = Operand((self.batch, self.kv_heads, self.capacity, self.head_dim), "bfloat16", role="cache")
        outputs = self.batch * self.kv_heads * self.head_blocks
        shape = (outputs, self.heads_per_task * self.head_dim // 2, self.splits, 2)
        words = {"words": Operand(shape, "uint64", "inout", role="scratch")} if self.splits > 1 else {}
        return {
            "q": Operand(q, "bfloat16"),
            "k_cache": cache,
            "v_cache": cache,
            "positions": Operand((self.batch,), "int32", role="index"),
            **words,
            "out": Operand(q, "bfloat16", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"kv_heads": self.kv_heads, "group": self.group, "heads_per_task": self.heads_per_task, "capacity": self.capacity,
                "splits": self.splits, "lanes": min(32, 1 << (self.splits - 1).bit_length()), "scale_log2": math.log2(math.e) / math.sqrt(self.head_dim)}  # fmt: skip

    @property
    def num_tasks(self) -> int:
        return self.batch * self.kv_heads * self.head_blocks * self.splits

    def _where(self, task: int) -> tuple[int, int, tuple[int, int]]:
        """(sequence, KV head, range of columns of q and out) of a task."""
        output = task // self.splits
        rest, block = divmod(output, self.head_blocks)
        b, kv_head = divmod(rest, self.kv_heads)
        low = kv_head * self.group + block * self.heads_per_task
        high = min(low + self.heads_per_task, (kv_head + 1) * self.group)
        return b, kv_head, (low * self.head_dim, high * self.head_dim)

    def reads(self, task: int) -> list[Region]:
        """The cache rows depend on `positions`: the region is the whole capacity."""
        b, kv_head, columns = self._where(task)
        rows = ((b, b + 1), (kv_head, kv_head + 1), (0, self.capacity), (0, self.head_dim))
        regions = [Region("q", ((b, b + 1), columns)), Region("k_cache", rows), Region("v_cache", rows), Region("positions", ((b, b + 1),))]
        output, split = divmod(task, self.splits)
        return [*regions, self._words(output, 0, self.splits)] if 0 < split == self.splits - 1 else regions

    def _words(self, output: int, low: int, high: int) -> Region:
        """What the ranges low … high - 1 of an output post."""
        return Region("words", ((output, output + 1), (0, self.heads_per_task * self.head_dim // 2), (low, high), (0, 2)))

    def writes(self, task: int) -> list[Region]:
        """As where one sibling merges: where all tasks run at once, each writes its share of what is the last one's here."""
        b, _, columns = self._where(task)
        output, split = divmod(task, self.splits)
        out = [Region("out", ((b, b + 1), columns))] if split == self.splits - 1 else []
        return out + ([self._words(output, split, split + 1)] if self.splits > 1 else [])

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.kv_heads * self.group * self.head_dim * (self.context + 1)

    @property
    def min_bytes(self) -> int:
        return 4 * self.batch * self.kv_heads * self.context * self.head_dim

    def _softmax(self, arrays, b: int, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
        """The weights [group, length] and V [length, head_dim] of one KV head, in float64."""
        length = int(arrays["positions"][b]) + 1
        q = widen(arrays["q"][b]).reshape(self.kv_heads, self.group, self.head_dim)[kv_head]
        score = q @ widen(arrays["k_cache"][b, kv_head, :length]).T / math.sqrt(self.head_dim)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        return weight / weight.sum(axis=1, keepdims=True), widen(arrays["v_cache"][b, kv_head, :length])

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        out = np.empty((self.batch, self.kv_heads, self.group, self.head_dim))
        for b in range(self.batch):
            for h in range(self.kv_heads):
                weight, v = self._softmax(arrays, b, h)
                out[b, h] = weight @ v
        return {"out": out.reshape(self.batch, -1)}

    def error_bound(self, arrays, outputs) -> dict[str, np.ndarray]:
        """Half an ulp of the output, and the weights' own rounding to bf16: 2^-9 of sum(weight * |v|), doubled for exp2's and the
        scores' float32 error."""
        spread = np.empty((self.batch, self.kv_heads, self.group, self.head_dim))
        for b in range(self.batch):
            for h in range(self.kv_heads):
                weight, v = self._softmax(arrays, b, h)
                spread[b, h] = weight @ np.abs(v)
        return {"out": 2.0**-8 * np.abs(outputs["out"]) + 2.0**-8 * spread.reshape(self.batch, -1)}


def choose_splits(outputs: int, context: int, head_dim: int) -> int:
    """Ranges of the context for each of `outputs` (sequence, KV head) pairs: one a stage up to eight, then one for four stages, as far
    as a large GPU has SMs for them. Merging more costs more than reading up to four stages in turn."""
    stages = ceil_div(context, 4096 // head_dim)
    return max(1, min(max(min(stages, 8), ceil_div(stages, 4)), ceil_div(TARGET_TASKS, outputs), 32))
