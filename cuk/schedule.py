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

from cuk.target import HEAD_WORDS
from cuk.task import round_up

NONE = -1
"""In a word: no instruction (opcode), no counter (signal, wait)."""
FORMAT = "cuk-schedule-1"


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
        for name in ("starts", "op", "task", "signal", "waits"):
            array = np.array(getattr(self, name), np.int64 if name == "starts" else np.int32)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        n = len(self.op)
        if self.waits.ndim != 3 or self.waits.shape[::2] != (n, 2) or self.task.shape != (n,) or self.signal.shape != (n,):
            raise ValueError(
                f"waits {self.waits.shape}, task {self.task.shape}, signal {self.signal.shape}: must be [{n}, W, 2], [{n}], [{n}]"
            )
        if self.starts.ndim != 1 or len(self.starts) < 2 or self.starts[0] or self.starts[-1] != n or (np.diff(self.starts) < 0).any():
            raise ValueError(f"starts {self.starts}: must rise from 0 to the number of instructions, {n}")

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
        none. Each queue ends with an opcode of -1, which also fills the rest of it."""
        lengths = np.diff(self.starts)
        opcode = {struct: i for i, struct in enumerate(self.structs)}
        codes = np.array([opcode[row.struct] for row in self.ops], np.int32)
        words = np.full((self.num_queues, int(lengths.max()) + 1, self.words), NONE, np.int32)
        queue = np.repeat(np.arange(self.num_queues), lengths)
        place = np.arange(self.num_instructions) - self.starts[queue]
        flat = [codes[self.op], self.op, self.task, self.signal, *self.waits.reshape(self.num_instructions, 2 * self.waits.shape[1]).T]
        words[queue, place, : len(flat)] = np.stack(flat, axis=1)
        return words

    @classmethod
    def decode(cls, words: np.ndarray, header: Mapping[str, Any]) -> Schedule:
        """The schedule that `encode` made the words from; `header`: its `header()`. Raises ValueError naming the word that is wrong."""
        rest = {**header, "ops": tuple(OpRow(*row) for row in header["ops"])}
        num_waits = rest.pop("num_waits")
        present = words[:, :, 0] != NONE
        lengths = present.sum(axis=1)
        if (present != (np.arange(words.shape[1]) < lengths[:, None])).any() or (lengths == words.shape[1]).any():
            raise ValueError("words: a queue has an instruction behind its end, or no end")
        flat = words[present]
        made = cls(
            **rest,
            starts=np.concatenate([[0], np.cumsum(lengths)]),
            op=flat[:, 1], task=flat[:, 2], signal=flat[:, 3],
            waits=flat[:, HEAD_WORDS : HEAD_WORDS + 2 * num_waits].reshape(len(flat), num_waits, 2),
        )  # fmt: skip
        if not np.array_equal(made.encode(), words):
            raise ValueError("words: an opcode is not its op's, or a word behind the last wait is not -1")
        return made

    def header(self) -> dict[str, Any]:
        """Everything but the instructions, as JSON has it."""
        arrays = ("starts", "op", "task", "signal", "waits")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in arrays}
        rows = [[row.name, row.kind, row.struct, row.num_tasks] for row in self.ops]
        return {**given, "spec": dict(self.spec), "limits": dict(self.limits), "fingerprint": dict(self.fingerprint), "ops": rows,
                "num_waits": self.waits.shape[1]}  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.header() == other.header() and np.array_equal(self.encode(), other.encode())

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
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # of JSON, or of UTF-8
            raise ValueError(f"{path}: not JSON ({error}); make the schedule again") from error
        return _from_json(given, str(path))

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


_TYPES = {
    "format": str, "program": str, "machine": str, "scheduler": str, "deps": str, "spec": dict, "limits": dict, "fingerprint": dict,
    "ops": list, "num_sms": int, "num_counters": int, "teams": int, "stages": int, "dynamic": bool, "num_waits": int, "queues": list,
}  # fmt: skip


def _from_json(given: Any, where: str) -> Schedule:
    """Raises ValueError beginning with `where`."""
    if not isinstance(given, dict):
        raise ValueError(f"{where}: is a {type(given).__name__}, must be an object with {', '.join(_TYPES)}")
    for name, kind in _TYPES.items():
        if name not in given:
            raise ValueError(f"{where}: field {name!r} is missing; make the schedule again")
        if not isinstance(given[name], kind) or (kind is int and (isinstance(given[name], bool) or not 0 <= given[name] < 2**31)):
            raise ValueError(f"{where}: field {name!r} is {_short(given[name])}, must be {_KINDS[kind]}")
    if unknown := sorted(set(given) - set(_TYPES)):
        raise ValueError(f"{where}: unknown field {', '.join(map(repr, unknown))}")
    if given["format"] != FORMAT:
        raise ValueError(f"{where}: field 'format' is {given['format']!r}, must be {FORMAT!r}")
    for i, row in enumerate(given["ops"]):
        if not (isinstance(row, list) and len(row) == 4 and all(isinstance(text, str) for text in row[:3]) and _is_count(row[3])):
            raise ValueError(f"{where}: field 'ops[{i}]' is {_short(row)}, must be [name, kind, struct, number of tasks]")
    if not given["queues"]:
        raise ValueError(f"{where}: field 'queues' is empty, must have a queue for each SM, or one for all")
    width = 2 * given["num_waits"]
    flat: list[list[int]] = []
    starts = [0]
    for q, queue in enumerate(given["queues"]):
        if not isinstance(queue, list):
            raise ValueError(f"{where}: field 'queues[{q}]' is {_short(queue)}, must be a list of instructions")
        for i, row in enumerate(queue):
            at = f"{where}: field 'queues[{q}][{i}]' is {_short(row)}"
            if not isinstance(row, list) or any(type(word) is not int or not NONE <= word < 2**31 for word in row):
                raise ValueError(f"{at}, must be a list of whole numbers, -1 where there is none")
            if len(row) < 3 or len(row) % 2 == 0 or len(row) > 3 + width:
                raise ValueError(f"{at}, must be [op, task, signal] and up to {width // 2} times counter, threshold")
            if not 0 <= row[0] < len(given["ops"]) or not 0 <= row[1] < given["ops"][row[0]][3]:
                raise ValueError(f"{at}: there is no such op or task")
            if max(row[2], *row[3::2], NONE) >= given["num_counters"]:
                raise ValueError(f"{at}: there are {given['num_counters']} counters")
            flat.append(row + [NONE] * (3 + width - len(row)))
        starts.append(len(flat))
    words = np.array(flat, np.int32).reshape(len(flat), 3 + width)
    header = {name: given[name] for name in _TYPES if name not in ("format", "queues", "num_waits", "ops")}
    return Schedule(
        **header, ops=tuple(OpRow(*row) for row in given["ops"]), starts=np.array(starts),
        op=words[:, 0], task=words[:, 1], signal=words[:, 2], waits=words[:, 3:].reshape(len(flat), given["num_waits"], 2),
    )  # fmt: skip


_KINDS = {str: "text", dict: "an object", list: "a list", int: "a whole number from 0", bool: "true or false"}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
