"""x = table[tokens]: the token embedding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, check_multiple, check_range, widen


@dataclass(frozen=True, kw_only=True)
class Embed(Task):
    """tokens [batch] int32, table [vocab, hidden] bf16 -> x [batch, hidden] bf16."""

    batch: int
    vocab: int
    hidden: int

    header = "tasks/embed.cuh"
    struct = "cuk::Embed"
    fields = tuple(Field(name, kind) for name, kind in [("tokens", "ptr"), ("table", "ptr"), ("x", "ptr"), ("hidden", "i32")])

    def __post_init__(self):
        check_multiple("hidden", self.hidden, 8, "rows are copied 16 bytes at a time")
        check_range("batch", self.batch, 1, 2**16, "tasks are counted in 32 bits")
        check_range("vocab", self.vocab, 1, 2**31 - 1, "tokens are 32 bits")

    @property
    def operands(self) -> dict[str, Operand]:
        return {
            "tokens": Operand((self.batch,), "int32", role="index"),
            "table": Operand((self.vocab, self.hidden), "bfloat16", role="table"),
            "x": Operand((self.batch, self.hidden), "bfloat16", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"hidden": self.hidden}

    @property
    def posts(self) -> tuple[str, ...]:
        return ("x",)

    @property
    def num_tasks(self) -> int:
        return self.batch

    def reads(self, task: int) -> list[Region]:
        """The row of the table depends on the token: the region is the whole table."""
        return [Region("tokens", ((task, task + 1),)), Region("table", ((0, self.vocab), (0, self.hidden)))]

    def writes(self, task: int) -> list[Region]:
        return [Region("x", ((task, task + 1), (0, self.hidden)))]

    @property
    def flops(self) -> int:
        return 0

    @property
    def min_bytes(self) -> int:
        return 2 * self.batch * self.hidden

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        return {"x": widen(np.asarray(arrays["table"])[np.asarray(arrays["tokens"])])}
