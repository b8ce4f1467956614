"""The next token takes its place: what stands between two steps of a decode loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, check_range


@dataclass(frozen=True, kw_only=True)
class Advance(Task):
    """Moves each sequence on by one token, while it has one to come: chosen [batch] int32 (what the step chose), history [columns, batch] (a
    token for each position: the prompt, then what was decoded), lengths and ends [batch] (tokens of the prompt, and in all) -> positions
    and tokens [batch], which the next step reads. At p = positions[b]: if p + 1 < ends[b], position p + 1 is next, its token the prompt's
    or the chosen one. A sequence that has come to its end stays there: a further step writes what the one before wrote.

    0 <= positions[b] < columns, ends[b] <= columns."""

    batch: int
    columns: int

    header = "tasks/advance.cuh"
    struct = "cuk::Advance"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("chosen", "ptr"), ("lengths", "ptr"), ("ends", "ptr"), ("history", "ptr"), ("positions", "ptr"), ("tokens", "ptr"),
                           ("batch", "i32")]
    )  # fmt: skip

    def __post_init__(self):
        check_range("batch", self.batch, 1, 128, "a sequence a thread of one team")
        check_range("columns", self.columns, 1, 2**24, "positions are counted in 32 bits")

    @property
    def operands(self) -> dict[str, Operand]:
        each = (self.batch,)
        return {
            "chosen": Operand(each, "int32"),
            "lengths": Operand(each, "int32", role="state"),
            "ends": Operand(each, "int32", role="state"),
            "history": Operand((self.columns, self.batch), "int32", "inout", role="state"),
            "positions": Operand(each, "int32", "inout", role="state"),
            "tokens": Operand(each, "int32", "out", role="state"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"batch": self.batch}

    @property
    def num_tasks(self) -> int:
        return 1

    def reads(self, task: int) -> list[Region]:
        every = (0, self.batch)
        return [
            *(Region(name, (every,)) for name in ("chosen", "lengths", "ends", "positions")),
            Region("history", ((0, self.columns), every)),
        ]

    def writes(self, task: int) -> list[Region]:
        """A row of the history depends on `positions`: the region is all of it."""
        every = (0, self.batch)
        return [Region("history", ((0, self.columns), every)), Region("positions", (every,)), Region("tokens", (every,))]

    @property
    def flops(self) -> int:
        return 0

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        chosen, lengths, ends, positions = (np.asarray(arrays[name]) for name in ("chosen", "lengths", "ends", "positions"))
        history, batch = np.array(arrays["history"]), np.arange(self.batch)
        following = positions + (positions + 1 < ends)
        decoded = (following > positions) & (following >= lengths)
        history[following[decoded], batch[decoded]] = chosen[decoded]
        return {"history": history, "positions": following, "tokens": history[following, batch]}
