"""Attention of one new token per sequence over its KV cache, split over ranges of the context that its tasks merge, or the next op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range, round_up, widen
from cuk.tasks.qkv import HEAD_DIMS

HEADS_PER_TASK = 8
STAGE_ELEMENTS = 4096
"""Of K, and as many of V, in a ring stage: 64 positions of head size 64. Twice as many were no faster."""
TARGET_TASKS = 128
"""Tasks to aim for: about one for each SM of a large GPU. A constant, since it fixes the order of the merge."""


@dataclass(frozen=True, kw_only=True)
class AttentionDecode(Task):
    """q [batch, kv_heads * group * head_dim] over k_cache, v_cache [batch, kv_heads, capacity, head_dim] at positions
    0 … positions[b] -> out like q; or without `merge`, each range's own result: partials [batch, splits, kv_heads * group * head_dim]
    bf16 and lse [batch, kv_heads * group, splits] float32, logarithms to base 2 of its sum of exponentials (-inf where it is empty).
    `context`: the old positions that the cost is computed for, and `splits` is chosen for; where sequences differ the most of them, and
    `contexts` has each one's."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    context: int
    splits: int = 0
    merge: bool = True
    contexts: tuple[int, ...] = ()

    header = "tasks/attention_decode.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("q", "ptr"), ("k_cache", "ptr"), ("v_cache", "ptr"), ("positions", "ptr"), ("words", "ptr"),
                           ("out", "ptr"), ("partials", "ptr"), ("lse", "ptr"), ("kv_heads", "i32"), ("group", "i32"),
                           ("heads_per_task", "i32"), ("capacity", "i32"), ("splits", "i32"), ("lanes", "i32"),
                           ("scale_log2", "f32")]
    )  # fmt: skip

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: must be one of {HEAD_DIMS}")
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")
        check_range("group", self.group, 1, 2**10, "query heads of one KV head")
        check_range("context", self.context, 0, self.capacity - 1, "the new token needs a row of the cache too")
        if self.contexts and (len(self.contexts) != self.batch or max(self.contexts) != self.context or min(self.contexts) < 0):
            raise ValueError(f"contexts={self.contexts}: must be one for each of {self.batch} sequences, from 0 to context={self.context}")
        if self.splits == 0:
            each = self.contexts or (self.context,) * self.batch
            object.__setattr__(self, "splits", choose_splits(each, self.kv_heads * self.head_blocks, self.head_dim))
        check_range("splits", self.splits, 1, 1024, "ranges of the context")

    @property
    def heads_per_task(self) -> int:
        return min(self.group, HEADS_PER_TASK)

    @property
    def head_blocks(self) -> int:
        return ceil_div(self.group, self.heads_per_task)

    @property
    def struct(self) -> str:
        return f"cuk::AttentionDecode<{self.head_dim}, {str(self.merge).lower()}>"

    @property
    def positions_per_stage(self) -> int:
        return STAGE_ELEMENTS // self.head_dim

    @property
    def stage_bytes(self) -> int:
        return round_up(2 * self.positions_per_stage * self.head_dim * 2 + 4 * 32, 1024)

    @property
    def dependent_loads(self) -> frozenset[str]:
        """None: the ring brings old positions only, and the consumers read the new one after their wait."""
        return frozenset()

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
        """Maxima, sums and outputs of four warps, maximum and sum of the new position; q, k and v where they come as words (see the device file)."""
        fresh = (self.heads_per_task + 2) * self.head_dim * 2 if self.polls else 0
        return round_up(4 * (5 * 2 * HEADS_PER_TASK + 4 * self.heads_per_task * self.head_dim) + fresh, 128)

    @property
    def polls(self) -> tuple[str, ...]:
        """Not where siblings exchange words of their own, which all layers share: an early start might find those of the layer before."""
        return () if self.merge else ("q", "k_cache", "v_cache")

    @property
    def operands(self) -> dict[str, Operand]:
        q = (self.batch, self.kv_heads * self.group * self.head_dim)
        cache = Operand((self.batch, self.kv_heads, self.capacity, self.head_dim), "bfloat16", role="cache")
        outputs = self.batch * self.kv_heads * self.head_blocks
        shape = (outputs, self.heads_per_task * self.head_dim // 2, self.splits, 2)
        words = {"words": Operand(shape, "uint64", "inout", role="scratch")} if self._posts else {}
        partials = (self.batch, self.splits, self.kv_heads * self.group * self.head_dim)
        lse = (self.batch, self.kv_heads * self.group, self.splits)
        return {
            "q": Operand(q, "bfloat16"),
            "k_cache": cache,
            "v_cache": cache,
            "positions": Operand((self.batch,), "int32", role="index"),
            **words,
            **({"out": Operand(q, "bfloat16", "out")} if self.merge else
               {"partials": Operand(partials, "bfloat16", "out"), "lse": Operand(lse, "float32", "out")}),
        }  # fmt: skip

    @property
    def _posts(self) -> bool:
        return self.merge and self.splits > 1

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
        return [*regions, self._words(output, 0, self.splits)] if self._posts and split == self.splits - 1 else regions

    def _words(self, output: int, low: int, high: int) -> Region:
        """What the ranges low … high - 1 of an output post."""
        return Region("words", ((output, output + 1), (0, self.heads_per_task * self.head_dim // 2), (low, high), (0, 2)))

    def writes(self, task: int) -> list[Region]:
        """As where one sibling merges: where all tasks run at once, each writes its share of what is the last one's here."""
        b, _, columns = self._where(task)
        output, split = divmod(task, self.splits)
        if not self.merge:
            heads = tuple(column // self.head_dim for column in columns)
            return [Region("partials", ((b, b + 1), (split, split + 1), columns)), Region("lse", ((b, b + 1), heads, (split, split + 1)))]
        out = [Region("out", ((b, b + 1), columns))] if split == self.splits - 1 else []
        return out + ([self._words(output, split, split + 1)] if self._posts else [])

    @property
    def flops(self) -> int:
        return 4 * self.kv_heads * self.group * self.head_dim * (self._old_positions + self.batch)

    @property
    def _old_positions(self) -> int:
        """Of all sequences."""
        return sum(self.contexts) if self.contexts else self.batch * self.context

    @property
    def min_bytes(self) -> int:
        return 4 * self.kv_heads * self._old_positions * self.head_dim

    def _ranges(self, position: int) -> list[tuple[int, int]]:
        """The positions of each range, half-open: whole stages of the old ones; the new one is the last range's. One range if merged."""
        if self.merge:
            return [(0, position + 1)]
        each = ceil_div(ceil_div(position, self.positions_per_stage), self.splits) * self.positions_per_stage
        ranges = [(min(position, i * each), min(position, (i + 1) * each)) for i in range(self.splits)]
        return [*ranges[:-1], (ranges[-1][0], position + 1)]

    def _over_ranges(self, arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """In float64, by range: outputs and, with |v| for v, their spread [batch, ranges, heads, head_dim]; log2 of the sums, and of each
        the largest product |q| . |k| * scale [batch, ranges, heads]."""
        count = 1 if self.merge else self.splits
        shape = (self.batch, count, self.kv_heads, self.group)
        out, spread = np.zeros((*shape, self.head_dim)), np.zeros((*shape, self.head_dim))
        lse, size = np.full(shape, -np.inf), np.zeros(shape)
        scale = math.log2(math.e) / math.sqrt(self.head_dim)
        for b in range(self.batch):
            q = widen(arrays["q"][b]).reshape(self.kv_heads, self.group, self.head_dim)
            for r, (low, high) in enumerate(self._ranges(int(arrays["positions"][b]))):
                if low == high:
                    continue
                for h in range(self.kv_heads):
                    k, v = (widen(arrays[name][b, h, low:high]) for name in ("k_cache", "v_cache"))
                    score = q[h] @ k.T * scale
                    top = score.max(axis=1, keepdims=True)
                    weight = np.exp2(score - top)
                    total = weight.sum(axis=1, keepdims=True)
                    out[b, r, h], spread[b, r, h] = weight / total @ v, weight / total @ np.abs(v)
                    lse[b, r, h] = (top + np.log2(total))[:, 0]
                    size[b, r, h] = (np.abs(q[h]) @ np.abs(k).T).max(axis=1) * scale
        return out, spread, lse, size

    def _stored(self, by_range: np.ndarray) -> np.ndarray:
        """[batch, ranges, kv_heads, group, …] in the shape of the operand that it is for."""
        if by_range.ndim == 4:
            return np.ascontiguousarray(by_range.reshape(self.batch, -1, self.kv_heads * self.group).transpose(0, 2, 1))
        flat = by_range.reshape(self.batch, -1, self.kv_heads * self.group * self.head_dim)
        return flat[:, 0] if self.merge else flat

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        out, _, lse, _ = self._over_ranges(arrays)
        return {"out": self._stored(out)} if self.merge else {"partials": self._stored(out), "lse": self._stored(lse)}

    def error_bound(self, arrays, outputs) -> dict[str, np.ndarray]:
        """Outputs: half an ulp, and the weights' own rounding to bf16: 2^-9 of sum(weight * |v|), doubled for exp2's and the scores' float32
        error. Logarithms: the scores' error, 2^-18 of |q| . |k|, and what exp2, log2 and sums in float32 add."""
        _, spread, _, size = self._over_ranges(arrays)
        name = "out" if self.merge else "partials"
        bounds = {name: 2.0**-8 * np.abs(outputs[name]) + 2.0**-8 * self._stored(spread)}
        if not self.merge:
            lse = np.where(np.isfinite(outputs["lse"]), np.abs(outputs["lse"]), 0.0)
            bounds["lse"] = 2.0**-18 * self._stored(size) + 2.0**-16 * (1.0 + lse)
        return bounds


def choose_splits(contexts: Sequence[int], heads: int, head_dim: int) -> int:
    """Ranges of the context, for sequences of these old positions and so many (KV head, block of query heads) pairs of each.

    Equal sequences: one range a stage up to eight, then one for four stages, as far as a large GPU has SMs for them. Merging more costs more
    than reading up to four stages in turn. Unequal ones: as many as leave a range of the longest a task's equal share of all stages."""
    stages = [ceil_div(context, STAGE_ELEMENTS // head_dim) for context in contexts]
    longest, outputs = max(stages), len(stages) * heads
    if min(stages) == longest:
        wanted = min(max(min(longest, 8), ceil_div(longest, 4)), ceil_div(TARGET_TASKS, outputs))
    else:
        wanted = ceil_div(longest, ceil_div(sum(stages) * heads, TARGET_TASKS))
    return max(1, min(wanted, 32))
