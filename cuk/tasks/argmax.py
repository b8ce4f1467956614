"""next = argmax(logits): greedy decoding, the lowest index winning a tie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range

SEGMENT = 1024


@dataclass(frozen=True, kw_only=True)
class Argmax(Task):
    """logits [batch, vocab] float32 -> next [batch] int32. NaN never wins; a row without a number above -inf gives 0 or its first -inf."""

    batch: int
    vocab: int

    header = "tasks/argmax.cuh"
    struct = "cuk::Argmax"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("logits", "ptr"), ("words", "ptr"), ("next", "ptr"),
                           ("vocab", "i32"), ("segments", "i32")]
    )  # fmt: skip

    def __post_init__(self):
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")
        check_range("vocab", self.vocab, 1, 2**31 - SEGMENT, "tokens are 32 bits")

    @property
    def scratch_bytes(self) -> int:
        return 128

    @property
    def segments(self) -> int:
        return ceil_div(self.vocab, SEGMENT)

    @property
    def operands(self) -> dict[str, Operand]:
        words = {"words": Operand((self.batch, self.segments - 1), "uint64", "inout", role="scratch")} if self.segments > 1 else {}
        return {
            "logits": Operand((self.batch, self.vocab), "float32"),
            **words,
            "next": Operand((self.batch,), "int32", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"vocab": self.vocab, "segments": self.segments}

    @property
    def num_tasks(self) -> int:
        return self.batch * self.segments

    def reads(self, task: int) -> list[Region]:
        row, segment = divmod(task, self.segments)
        logits = Region("logits", ((row, row + 1), (segment * SEGMENT, min(self.vocab, (segment + 1) * SEGMENT))))
        last = 0 < segment == self.segments - 1
        return [logits, Region("words", ((row, row + 1), (0, segment)))] if last else [logits]

    def writes(self, task: int) -> list[Region]:
        row, segment = divmod(task, self.segments)
        last = segment == self.segments - 1
        return [Region("next", ((row, row + 1),)) if last else Region("words", ((row, row + 1), (segment, segment + 1)))]

    @property
    def flops(self) -> int:
        return self.batch * self.vocab

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        logits = np.asarray(arrays["logits"], dtype=np.float64)
        return {"next": np.argmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)}
