"""Schedules: which SM runs which tasks in which order, with the counters that order them, and the words that encode it for a device."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cuk.schedule_file import FORMAT, HEADER, NONE, check_fields, check_queues, read_json, short
from cuk.target import HEAD_WORDS
from cuk.task import round_up

MAX_WORDS_BYTES = 1 << 32
"""What queues may take as words, the shorter ones filled up to the longest."""


ARRAYS = ("starts", "op", "task", "signal", "waits")


@dataclass(frozen=True)
class OpRow:
    """What a schedule says of an op of its program."""

    name: str
    kind: str
    struct: str
    num_tasks: int


@dataclass(frozen=True)
class Instruction:
    """One task as a queue holds it: wait for each (counter, threshold), run task `task` of op `op`, add one to counter `signal`."""

    op: int
    task: int
    waits: tuple[tuple[int, int], ...] = ()
    signal: int | None = None


@dataclass(frozen=True, eq=False)
class Schedule:
    """Queues of instructions, one an SM, or a single one that all SMs take from (`dynamic`).

    Instruction i of all queues in a row, queue q's being starts[q] … starts[q + 1] - 1: `op`, `task`, `signal` int32 [n]; `waits` int32
    [n, W, 2] of (counter, threshold), unused ones -1. A counter goes up by one for each instruction that signals it and is never
    reset: in a run's step e a wait is over when value - e * totals[counter] >= threshold.

    `teams` of an SM take its instructions in turn: instruction j of a queue runs on team j % teams, after instruction j - teams. Each
    team has a ring of `stages`. Arrays are read-only. Raises ValueError naming the field that does not fit the others."""

    program: str
    machine: str
    scheduler: str
    deps: str
    spec: Mapping[str, Any] = field(repr=False)
    limits: Mapping[str, Any] = field(repr=False)
    fingerprint: Mapping[str, str] = field(repr=False)
    ops: tuple[OpRow, ...] = field(repr=False)
    num_sms: int
    num_counters: int
    teams: int
    stages: int
    dynamic: bool
    starts: np.ndarray = field(repr=False)
    op: np.ndarray = field(repr=False)
    task: np.ndarray = field(repr=False)
    signal: np.ndarray = field(repr=False)
    waits: np.ndarray = field(repr=False)

    def __post_init__(self):
        for name in ARRAYS:
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name), np.int64 if name == "starts" else np.int32))
        n = len(self.op) if self.op.ndim == 1 else -1
        if self.waits.ndim != 3 or self.waits.shape[::2] != (n, 2) or self.task.shape != (n,) or self.signal.shape != (n,):
            raise ValueError(
                f"op {self.op.shape}, waits {self.waits.shape}, task {self.task.shape}, signal {self.signal.shape}: must be [n], [n, W, 2], [n], [n]"
            )
        if self.starts.ndim != 1 or len(self.starts) < 2 or self.starts[0] or self.starts[-1] != n or (np.diff(self.starts) < 0).any():
            raise ValueError(f"starts {short(self.starts.tolist())}: must rise from 0 to the number of instructions, {n}")
        for name, kind in (("spec", Mapping), ("limits", Mapping), ("fingerprint", Mapping), ("ops", tuple)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {short(getattr(self, name))}, must be a {kind.__name__.lower()}")
        if wrong := [row for row in self.ops if not isinstance(row, OpRow)]:
            raise ValueError(f"ops has {short(wrong[0])}, must have an OpRow for each op")
        check_fields(self.header(), HEADER, "schedule")

    # ---- what it says ----
    @property
    def num_queues(self) -> int:
        return len(self.starts) - 1

    @property
    def num_instructions(self) -> int:
        return len(self.op)

    @cached_property
    def structs(self) -> tuple[str, ...]:
        """The distinct device structs, in order of first use: an opcode is an index into them."""
        return tuple(dict.fromkeys(row.struct for row in self.ops))

    @cached_property
    def first_task(self) -> np.ndarray:
        """The program-wide index of each op's task 0, and behind the last op the number of tasks: int64 [ops + 1]."""
        return np.concatenate([[0], np.cumsum([row.num_tasks for row in self.ops], dtype=np.int64)])

    @cached_property
    def totals(self) -> np.ndarray:
        """By how much a step raises each counter: int64 [counters]."""
        return np.bincount(self.signal[self.signal >= 0], minlength=self.num_counters)

    @property
    def signals(self) -> int:
        return int((self.signal >= 0).sum())

    def where(self, instruction: int) -> tuple[int, int]:
        """(queue, place in it) of an instruction."""
        queue = int(np.searchsorted(self.starts, instruction, side="right")) - 1
        return queue, instruction - int(self.starts[queue])

    def describe(self, instruction: int) -> str:
        """An instruction in words, for errors."""
        queue, place = self.where(instruction)
        at = f"instruction {place}" if self.dynamic else f"SM {queue} instruction {place}"
        return f"{at} ({self.ops[self.op[instruction]].name} task {self.task[instruction]})"

    def queue(self, index: int) -> list[Instruction]:
        """The instructions of one queue, in order."""
        if not 0 <= index < self.num_queues:
            raise IndexError(f"queue {index}: must be from 0 to {self.num_queues - 1}")
        return [
            Instruction(int(self.op[i]), int(self.task[i]),
                        tuple((int(c), int(t)) for c, t in self.waits[i] if c != NONE),
                        None if self.signal[i] == NONE else int(self.signal[i]))
            for i in range(self.starts[index], self.starts[index + 1])
        ]  # fmt: skip

    # ---- words ----
    @property
    def words(self) -> int:
        """Words of an instruction, a multiple of four: it is fetched 16 bytes at a time."""
        return round_up(HEAD_WORDS + 2 * self.waits.shape[1], 4)

    def encode(self) -> np.ndarray:
        """int32 [queues, longest queue + 1, words]: opcode, op, task, signal, then (counter, threshold) for each wait; -1 where there is
        none. Each queue ends with an opcode of -1, which also fills the rest of it. Raises ValueError for an instruction of no op."""
        lengths = np.diff(self.starts)
        if (size := 4 * self.num_queues * (int(lengths.max()) + 1) * self.words) > MAX_WORDS_BYTES:
            raise ValueError(
                f"queues of up to {lengths.max()} instructions take {size} bytes as words, must take at most {MAX_WORDS_BYTES}"
            )
        if ((self.op < 0) | (self.op >= len(self.ops))).any():
            i = int(np.argmax((self.op < 0) | (self.op >= len(self.ops))))
            raise ValueError(f"instruction {i} is of op {self.op[i]}: there are {len(self.ops)} ops")
        codes = self._opcodes()
        words = np.full((self.num_queues, int(lengths.max()) + 1, self.words), NONE, np.int32)
        queue = np.repeat(np.arange(self.num_queues), lengths)
        place = np.arange(self.num_instructions) - self.starts[queue]
        flat = [codes[self.op], self.op, self.task, self.signal, *self.waits.reshape(self.num_instructions, 2 * self.waits.shape[1]).T]
        words[queue, place, : len(flat)] = np.stack(flat, axis=1)
        return words

    def _opcodes(self) -> np.ndarray:
        opcode = {struct: i for i, struct in enumerate(self.structs)}
        return np.array([opcode[row.struct] for row in self.ops], np.int32)

    @classmethod
    def decode(cls, words: np.ndarray, header: Mapping[str, Any]) -> Schedule:
        """The schedule that `encode` made the words from; `header`: its `header()`. Raises ValueError naming the word that is wrong."""
        check_fields(header, HEADER, "header")
        words, num_waits = _whole_numbers("words", words, np.int32), header["num_waits"]
        used = HEAD_WORDS + 2 * num_waits
        if words.ndim != 3 or 0 in words.shape[:2] or words.shape[2] != round_up(used, 4):
            raise ValueError(f"words {words.shape}: must be [queues, instructions, {round_up(used, 4)}] for {num_waits} waits")
        present = words[:, :, 0] != NONE
        lengths = present.sum(axis=1)
        if (present != (np.arange(words.shape[1]) < lengths[:, None])).any() or lengths.max() + 1 != words.shape[1]:
            raise ValueError("words: a queue has an instruction behind its end, no end, or more than one word -1 behind the longest")

        def check(wrong: np.ndarray, what: str) -> None:  # wrong: bool [queues, instructions, words]
            if wrong.any():
                q, i, w = map(int, np.argwhere(wrong)[0])
                raise ValueError(f"words[{q}, {i}, {w}] is {words[q, i, w]}: {what}")

        ops = tuple(OpRow(*row) for row in header["ops"])
        at = np.arange(words.shape[2])
        check((words != NONE) & (~present[:, :, None] | (at >= used)), "words: behind the last wait, and behind a queue's end, all are -1")
        for w, high, what in ((1, len(ops), "ops"), (3, header["num_counters"], "counters")):
            low = 0 if w == 1 else NONE
            check(((words < low) | (words >= high)) & present[:, :, None] & (at == w), f"there are {high} {what}")
        counter = (at >= HEAD_WORDS) & (at < used) & (at % 2 == HEAD_WORDS % 2)
        check(
            ((words < NONE) | (words >= header["num_counters"])) & present[:, :, None] & counter,
            f"there are {header['num_counters']} counters",
        )
        flat = words[present]
        rest = {name: header[name] for name in HEADER if name not in ("ops", "num_waits")}
        made = cls(
            **rest, ops=ops, starts=np.concatenate([[0], np.cumsum(lengths)]), op=flat[:, 1], task=flat[:, 2], signal=flat[:, 3],
            waits=flat[:, HEAD_WORDS:used].reshape(len(flat), num_waits, 2),
        )  # fmt: skip
        expected = np.full(words.shape[:2], NONE, np.int64)
        if len(flat):
            expected[present] = made._opcodes()[made.op]
        check((words != expected[:, :, None]) & (at == 0), "words: an opcode is not its op's")
        return made

    def header(self) -> dict[str, Any]:
        """Everything but the instructions, as JSON has it."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ARRAYS}
        rows = [[row.name, row.kind, row.struct, row.num_tasks] for row in self.ops]
        return {**given, "spec": dict(self.spec), "limits": dict(self.limits), "fingerprint": dict(self.fingerprint), "ops": rows,
                "num_waits": self.waits.shape[1]}  # fmt: skip

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Schedule) and self.header() == other.header()
        return same and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS)

    __hash__ = None

    # ---- files ----
    def save(self, path: str | os.PathLike) -> None:
        """Writes the schedule as JSON: to a file beside `path` first, which then takes its name."""
        queues = []
        flat = np.concatenate(
            [np.stack([self.op, self.task, self.signal], axis=1), self.waits.reshape(len(self.op), 2 * self.waits.shape[1])], axis=1
        )
        for low, high in zip(self.starts, self.starts[1:], strict=False):
            rows = flat[low:high].tolist()
            for row in rows:
                while len(row) > 3 and row[-1] == row[-2] == NONE:
                    del row[-2:]
            queues.append(rows)
        text = json.dumps({"format": FORMAT, **self.header(), "queues": queues}, allow_nan=False, separators=(",", ":"))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike) -> Schedule:
        """A schedule from its file. Raises ValueError naming the field that is missing or wrong; whether the schedule is a correct one,
        `validate` says."""
        given, where = read_json(path), str(path)
        check_fields(given, ("format", *HEADER, "queues"), where)
        starts, flat = check_queues(given, where)
        words = np.array(flat, np.int32).reshape(len(flat), 3 + 2 * given["num_waits"])
        rest = {name: given[name] for name in HEADER if name not in ("ops", "num_waits")}
        return cls(
            **rest, ops=tuple(OpRow(*row) for row in given["ops"]), starts=np.array(starts),
            op=words[:, 0], task=words[:, 1], signal=words[:, 2], waits=words[:, 3:].reshape(len(flat), given["num_waits"], 2),
        )  # fmt: skip

    def plot(self, path: Any = None) -> Any:
        """A matplotlib figure: a row for each queue, a cell for each instruction, coloured by the op's kind. `path`: where to save it."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        kinds = list(dict.fromkeys(row.kind for row in self.ops))
        code = np.array([kinds.index(row.kind) for row in self.ops])
        lengths = np.diff(self.starts)
        cells = np.full((self.num_queues, max(1, int(lengths.max()))), np.nan)
        queue = np.repeat(np.arange(self.num_queues), lengths)
        cells[queue, np.arange(self.num_instructions) - self.starts[queue]] = code[self.op]
        figure = Figure(figsize=(10, min(8, 1.5 + 0.05 * self.num_queues)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="tab20", vmin=0, vmax=max(19, len(kinds) - 1))
        patches = [Patch(color=image.cmap(image.norm(i)), label=kind) for i, kind in enumerate(kinds)]
        axes.legend(handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        axes.set(
            xlabel="instruction", ylabel="queue" if self.dynamic else "SM", title=f"{self.scheduler}, deps={self.deps}: {self.program}"
        )
        if path is not None:
            figure.savefig(path)
        return figure

    def __repr__(self) -> str:
        lengths = np.diff(self.starts)
        used = (self.waits[:, :, 0] != NONE).sum(axis=1) if self.num_instructions else np.zeros(1, int)
        queues = (
            f"one queue that {self.num_sms} SMs take from"
            if self.dynamic
            else f"{self.num_queues} queues of {lengths.min()} to {lengths.max()} instructions"
        )
        return (
            f"<Schedule {self.scheduler}(deps={self.deps}) of {self.program} for {self.machine}: {self.num_instructions} tasks in {queues}, "
            f"{self.num_counters} counters, {self.signals} signals, {int(used.sum())} waits (at most {int(used.max())} each); "
            f"teams={self.teams}, stages={self.stages}>"
        )


def _whole_numbers(name: str, given: Any, dtype: type) -> np.ndarray:
    """A read-only copy. Raises ValueError for anything but whole numbers that the dtype holds."""
    try:
        array = np.array(given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is {short(given)}, must be an array of whole numbers") from error
    if array.size and (array.dtype.kind not in "iu" or array.min() < np.iinfo(dtype).min or array.max() > np.iinfo(dtype).max):
        raise ValueError(f"{name} is {short(given)} ({array.dtype}), must be an array of whole numbers that {np.dtype(dtype)} holds")
    array = array.astype(dtype)
    array.setflags(write=False)
    return array
