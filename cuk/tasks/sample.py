"""A token drawn from each row's nucleus, by a seed, the token's position and its sequence: the same in every run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range, round_up
from cuk.tasks.nucleus import BIN_BITS, BINS, KEEP_ALL, MAX_SEGMENT, MAX_SEGMENTS, crossing, keys_of, masses_of, segment_of


def random_bits(seed: int, position: int, sequence: int) -> int:
    """64 bits of Philox4x32-10 with key `seed` and counter (position, sequence, 0, 0): the first two words, low word first."""
    low = 0xFFFFFFFF
    key, counter = [seed & low, seed >> 32], [position, sequence, 0, 0]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b >> 32 ^ counter[1] ^ key[0], b & low, a >> 32 ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter[1] << 32 | counter[0]


@dataclass(frozen=True, kw_only=True)
class Sample(Task):
    """logits [batch, vocab] float32, best, positions [batch] int32, scale [batch] float32, keep [batch] uint64, seed [1] uint64, and what the
    `Nucleus` ops left: found [batch, 2] uint64, low [batch, 2048] uint32 -> chosen [batch] int32; high [batch, 2048] uint64 is cleared where
    something is drawn. A row of scale 0, or without a number above -inf, gives best."""

    batch: int
    vocab: int

    header = "tasks/sample.cuh"
    struct = "cuk::Sample"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("logits", "ptr"), ("best", "ptr"), ("scale", "ptr"), ("keep", "ptr"), ("found", "ptr"), ("low", "ptr"), ("seed", "ptr"),
                           ("positions", "ptr"), ("high", "ptr"), ("words", "ptr"), ("chosen", "ptr"), ("vocab", "i32"), ("segments", "i32"),
                           ("segment", "i32")]
    )  # fmt: skip

    def __post_init__(self):
        check_range("batch", self.batch, 1, 2**10, "tasks are counted in 32 bits")
        check_range("vocab", self.vocab, 1, MAX_SEGMENTS * MAX_SEGMENT, "one task takes the sums of a row's segments")

    @property
    def scratch_bytes(self) -> int:
        return round_up(8 * (6 + self.segments), 128)

    @property
    def segment(self) -> int:
        return segment_of(self.batch, self.vocab)

    @property
    def segments(self) -> int:
        return ceil_div(self.vocab, self.segment)

    @property
    def operands(self) -> dict[str, Operand]:
        each = (self.batch,)
        words = {"words": Operand((self.batch, self.segments - 1), "uint64", "inout", role="scratch")} if self.segments > 1 else {}
        return {
            "logits": Operand((self.batch, self.vocab), "float32"),
            "best": Operand(each, "int32"),
            "scale": Operand(each, "float32", role="state"),
            "keep": Operand(each, "uint64", role="state"),
            "found": Operand((self.batch, 2), "uint64"),
            "low": Operand((self.batch, BINS), "uint32"),
            "seed": Operand((1,), "uint64", role="state"),
            "positions": Operand(each, "int32", role="state"),
            "high": Operand((self.batch, BINS), "uint64", "inout", role="state"),
            **words,
            "chosen": Operand(each, "int32", "out"),
        }

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"vocab": self.vocab, "segments": self.segments, "segment": self.segment}

    @property
    def num_tasks(self) -> int:
        return self.batch * self.segments

    def reads(self, task: int) -> list[Region]:
        """The row's last task reads again the segment that was hit, which may be any."""
        row, segment = divmod(task, self.segments)
        each, last = ((row, row + 1),), segment == self.segments - 1
        columns = (0, self.vocab) if last else (segment * self.segment, (segment + 1) * self.segment)
        return [
            Region("logits", (*each, columns)), *(Region(name, each) for name in ("best", "scale", "keep", "positions")), Region("seed", ((0, 1),)),
            Region("found", (*each, (0, 2))), Region("low", (*each, (0, BINS))),
            *([Region("words", (*each, (0, segment)))] if last and segment else []),
        ]  # fmt: skip

    def writes(self, task: int) -> list[Region]:
        """The bins that a task clears are every so many of 128: the region is all of them, once for the row."""
        row, segment = divmod(task, self.segments)
        each, last = ((row, row + 1),), segment == self.segments - 1
        result = Region("chosen", each) if last else Region("words", (*each, (segment, segment + 1)))
        return [result, *([Region("high", (*each, (0, BINS)))] if last else [])]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.vocab

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        best, scale, keep = (np.asarray(arrays[name]) for name in ("best", "scale", "keep"))
        keys, high = keys_of(arrays["logits"], best, scale), np.array(arrays["high"])
        chosen = np.array(best)
        for row in np.flatnonzero(scale > 0):
            high[row] = 0
            end = (1 << 2 * BIN_BITS) - 1
            if keep[row] != np.uint64(KEEP_ALL):
                first = int(arrays["found"][row, 0]) << BIN_BITS
                masses = np.asarray(arrays["low"][row], np.uint64) * masses_of(first + np.arange(BINS))
                end = first + crossing(masses, int(arrays["found"][row, 1]))[0]
            masses = np.where(keys[row] <= end, masses_of(keys[row]), np.uint64(0))
            if total := int(masses.sum()):
                bits = random_bits(int(arrays["seed"][0]), int(arrays["positions"][row]), int(row))
                chosen[row] = crossing(masses, total * bits >> 64)[0]
        return {"chosen": chosen, "high": high}
