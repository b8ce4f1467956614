"""The tokens that a draw is from: the most probable ones, as few as have a given share of the probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuk.task import Field, Operand, Region, Task, ceil_div, check_range, round_up

OCTAVE_BITS, BIN_BITS = 17, 11
BINS, NO_KEY = 1 << BIN_BITS, (1 << 32) - 1
KEEP_ALL = (1 << 64) - 1
TARGET_TASKS = 128
"""Tasks to aim for: about one for each SM of a large GPU. A constant, since what a step leaves behind must not depend on the GPU."""
MAX_SEGMENTS, MAX_SEGMENT = 1024, 1 << 15
"""Of a row; logits of one, whose half masses are summed in 32 bits."""
TERMS = (246789, 2773769, 20609476, 119183688, 515881603, 1488522224, 2147483648)
"""2^-t on [0, 1), alternating signs, times 2^31 (core/draw.cuh)."""


def scale_of(temperature: float) -> np.float32:
    """What a distance between logits is multiplied by to be a key: 2^17 log2(e) / temperature; 0 for temperature 0, which draws nothing."""
    if temperature == 0:
        return np.float32(0)
    return np.float32(min((1 << OCTAVE_BITS) * np.log2(np.e) / temperature, 1e30))


def keep_of(top_p: float) -> int:
    """A share of the probability in 2^-64 of it."""
    return min(KEEP_ALL, int(top_p * 2.0**64))


def keys_of(logits: np.ndarray, best: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Keys of logits [batch, vocab], as the device computes them, in float32: uint64, NO_KEY for what has no mass."""
    logits = np.asarray(logits, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = (logits[np.arange(len(logits)), best][:, None] - logits) * np.asarray(scale, np.float32)[:, None]
        inside = distance < np.float32(1 << (2 * BIN_BITS))
    return np.where(inside, np.where(inside, distance, 0).astype(np.uint64), np.uint64(NO_KEY))


def masses_of(keys: np.ndarray) -> np.ndarray:
    """Mass of each key: uint64, 0 for NO_KEY."""
    keys = np.asarray(keys, np.uint64)
    t, value = keys & np.uint64((1 << OCTAVE_BITS) - 1), np.full(np.shape(keys), TERMS[0], np.uint64)
    for term in TERMS[1:]:
        value = np.uint64(term) - ((value * t) >> np.uint64(OCTAVE_BITS))
    return np.where(keys == NO_KEY, np.uint64(0), value >> np.minimum(keys >> np.uint64(OCTAVE_BITS), np.uint64(63)))


def crossing(masses: np.ndarray, target: int) -> tuple[int, int]:
    """(first index whose running sum of `masses` [n] is above `target`, the sum before it); without one (the last index, the whole sum)."""
    sums = np.cumsum(masses.astype(np.uint64))
    index = int(np.searchsorted(sums, np.uint64(target), side="right"))
    return (index, int(sums[index] - masses[index])) if index < len(sums) else (len(sums) - 1, int(sums[-1]))


def segment_of(batch: int, vocab: int) -> int:
    """Logits of one task: about TARGET_TASKS of them for all rows."""
    return min(MAX_SEGMENT, max(1024, round_up(ceil_div(batch * vocab, TARGET_TASKS), 1024)))


@dataclass(frozen=True, kw_only=True)
class Nucleus(Task):
    """One of the two ops that find the least probable key of a row's nucleus. logits [batch, vocab] float32, best [batch] int32 (an index of
    each row's largest), scale [batch] float32 (see `scale_of`), keep [batch] uint64 (see `keep_of`).

    high: adds to high [batch, 2048] uint64 the mass of the keys by their upper 11 bits, and clears low [batch, 2048] uint32. low: writes
    found [batch, 2] uint64, the bin in which keep's share is passed and how far into it, and counts its keys in low. A row of scale 0 or that
    keeps all is passed over: found is (2047, 0)."""

    batch: int
    vocab: int
    low: bool

    header = "tasks/nucleus.cuh"
    fields = tuple(
        Field(name, kind)
        for name, kind in [("logits", "ptr"), ("best", "ptr"), ("scale", "ptr"), ("keep", "ptr"), ("high", "ptr"), ("low", "ptr"), ("found", "ptr"),
                           ("vocab", "i32"), ("segments", "i32"), ("segment", "i32")]
    )  # fmt: skip

    def __post_init__(self):
        check_range("batch", self.batch, 1, 2**10, "tasks are counted in 32 bits")
        check_range("vocab", self.vocab, 1, MAX_SEGMENTS * MAX_SEGMENT, "one task takes the sums of a row's segments")

    @property
    def struct(self) -> str:
        return f"cuk::Nucleus<{str(self.low).lower()}>"

    @property
    def scratch_bytes(self) -> int:
        return round_up(BINS * 8 + 6 * 8, 128)

    @property
    def segment(self) -> int:
        return segment_of(self.batch, self.vocab)

    @property
    def segments(self) -> int:
        return ceil_div(self.vocab, self.segment)

    @property
    def operands(self) -> dict[str, Operand]:
        inputs = {
            "logits": Operand((self.batch, self.vocab), "float32"),
            "best": Operand((self.batch,), "int32"),
            "scale": Operand((self.batch,), "float32", role="state"),
            "keep": Operand((self.batch,), "uint64", role="state"),
        }
        high, low = Operand((self.batch, BINS), "uint64", "inout", role="state"), Operand((self.batch, BINS), "uint32", "out")
        if not self.low:
            return {**inputs, "high": high, "low": low}
        high, low = Operand(high.shape, high.dtype, role="state"), Operand(low.shape, low.dtype, "inout")
        return {**inputs, "high": high, "low": low, "found": Operand((self.batch, 2), "uint64", "out")}

    @property
    def scalars(self) -> dict[str, int | float]:
        return {"vocab": self.vocab, "segments": self.segments, "segment": self.segment}

    @property
    def num_tasks(self) -> int:
        return self.batch * self.segments

    def reads(self, task: int) -> list[Region]:
        row, segment = divmod(task, self.segments)
        each = ((row, row + 1),)
        logits = Region("logits", (*each, (segment * self.segment, min(self.vocab, (segment + 1) * self.segment))))
        return [
            logits,
            *(Region(name, each) for name in ("best", "scale", "keep")),
            *([Region("high", (*each, (0, BINS)))] if self.low else []),
        ]

    def writes(self, task: int) -> list[Region]:
        """Every task of a row adds to all of its bins: these regions overlap, and integers may be added in any order."""
        row, segment = divmod(task, self.segments)
        bins = ((row, row + 1), (0, BINS))
        if not self.low:
            return [Region("high", bins), Region("low", bins)]
        return [Region("low", bins), *([Region("found", ((row, row + 1), (0, 2)))] if segment == 0 else [])]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.vocab

    def reference(self, arrays, rounded: bool = True) -> dict[str, np.ndarray]:
        scale, keep = np.asarray(arrays["scale"]), np.asarray(arrays["keep"])
        keys = keys_of(arrays["logits"], np.asarray(arrays["best"]), scale)
        drawn = (scale > 0) & (keep != np.uint64(KEEP_ALL))
        high = np.array(arrays["high"])
        counts = np.zeros((self.batch, BINS), np.uint32) if not self.low else np.array(arrays["low"])
        found = np.full((self.batch, 2), (BINS - 1, 0), np.uint64)
        for row in np.flatnonzero(drawn):
            known = keys[row][keys[row] != NO_KEY]
            bins = (known >> np.uint64(BIN_BITS)).astype(np.int64)
            if not self.low:
                np.add.at(high[row], bins, masses_of(known))
                continue
            target = int(high[row].sum()) * int(keep[row]) >> 64
            wanted, before = crossing(high[row], target)
            found[row] = wanted, target - before
            np.add.at(counts[row], (known[bins == wanted] & np.uint64(BINS - 1)).astype(np.int64), 1)
        return {"low": counts, "found": found} if self.low else {"high": high, "low": counts}
