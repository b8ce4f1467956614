"""A program: a DAG of ops over named buffers, e.g. one Llama decode step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuk.task import ITEM_BYTES, Task

SHARED_ROLES = ("weight", "table", "index")
"""Roles that no op writes: several runs of a program may share them."""


@dataclass(frozen=True)
class Init:
    """How a buffer starts: `kind` is "normal" (mean, std), "integers" (low, high), "values" (array), "zero", "empty" (every bit set), or "parts"
    (`values`: a callable that yields (index, array), which together are all of it)."""

    kind: str
    mean: float = 0.0
    std: float = 1.0
    low: int = 0
    high: int = 1
    values: Any = None


@dataclass(frozen=True)
class Buffer:
    """A named array: `shape`, `dtype` and what it is for (`role`: weight, table, index, cache, state, activation, output, scratch). A "state" is
    what a step, or the host between steps, leaves for the next step: each run has its own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "activation"
    init: Init | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __getitem__(self, index: int) -> View:
        """The slice of the first dimension, e.g. one layer of a slab of weights."""
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"{self.name}[{index}]: must be from 0 to {self.shape[0] - 1}")
        return View(self, index)


@dataclass(frozen=True)
class View:
    """A buffer, or one slice of its first dimension (`index`), or the first `columns` of a buffer that is one row."""

    buffer: Buffer
    index: int | None = None
    columns: int | None = None

    def __post_init__(self):
        if self.columns is not None and math.prod(self.buffer.shape[:-1]) != 1:
            raise ValueError(f"{self.buffer.name} {self.buffer.shape}: only a buffer of one row has its first columns in one piece")

    @property
    def shape(self) -> tuple[int, ...]:
        if self.columns is not None:
            return (*self.buffer.shape[:-1], self.columns)
        return self.buffer.shape if self.index is None else self.buffer.shape[1:]

    @property
    def offset_bytes(self) -> int:
        return 0 if self.index is None else self.index * math.prod(self.shape) * ITEM_BYTES[self.buffer.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.buffer.dtype]

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """This view of an array found in `arrays` under the buffer's name."""
        array = arrays[self.buffer.name]
        if self.columns is not None:
            return array[..., : self.columns]
        return array if self.index is None else array[self.index]

    def overlaps(self, other: View) -> bool:
        return self.buffer.name == other.buffer.name and (self.index is None or other.index is None or self.index == other.index)

    def __str__(self) -> str:
        return self.buffer.name if self.index is None else f"{self.buffer.name}[{self.index}]"


@dataclass(frozen=True)
class Op:
    """One operator of a program: a task type, and the view that each operand names. Ops of one `kind` differ in their views only."""

    name: str
    kind: str
    task: Task
    views: Mapping[str, View]

    @property
    def min_bytes(self) -> int:
        """The task's own, and its final outputs written."""
        outputs = sum(v.nbytes for k, v in self.views.items() if self.task.operands[k].access != "in" and v.buffer.role == "output")
        return self.task.min_bytes + outputs

    def accesses(self, *kinds: str) -> list[View]:
        """The views of the operands whose access is among `kinds` ("in", "out", "inout")."""
        return [view for name, view in self.views.items() if self.task.operands[name].access in kinds]


class Program:
    """Ops in a valid serial order over named buffers. `meta` describes the workload (model, batch, context, …)."""

    def __init__(self, name: str, meta: Mapping[str, Any] | None = None):
        self.name = name
        self.meta = dict(meta or {})
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str, role: str = "activation", init: Init | None = None) -> Buffer:
        """Declares a buffer and returns it. Raises ValueError for a name that is taken or an unknown dtype."""
        if name in self.buffers:
            raise ValueError(f"buffer {name!r} is declared twice in program {self.name!r}")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"buffer {name!r}: dtype {dtype!r} must be one of {', '.join(ITEM_BYTES)}")
        self.buffers[name] = Buffer(name, tuple(shape), dtype, role, init)
        return self.buffers[name]

    def op(self, kind: str, task: Task, name: str | None = None, **views: Buffer | View) -> Op:
        """Appends an op. Scratch operands that are not given get buffers of their own.
        Raises ValueError naming the operand whose view is missing, unknown, or of the wrong shape or dtype."""
        name = name or kind
        given = {key: View(v) if isinstance(v, Buffer) else v for key, v in views.items()}
        for key, operand in task.operands.items():
            if key not in given and operand.role == "scratch":
                given[key] = View(self.buffer(f"{name}.{key}", operand.shape, operand.dtype, "scratch", Init("empty")))
            if key not in given:
                raise ValueError(f"op {name!r}: operand {key!r} is missing; {type(task).__name__} takes {', '.join(task.operands)}")
            view = given[key]
            if view.shape != operand.shape or view.buffer.dtype != operand.dtype:
                raise ValueError(
                    f"op {name!r}: operand {key!r} must be {operand.dtype} {operand.shape}, but {view} is {view.buffer.dtype} {view.shape}"
                )
        unknown = sorted(set(given) - set(task.operands))
        if unknown:
            raise ValueError(f"op {name!r}: unknown operands {unknown}; {type(task).__name__} takes {', '.join(task.operands)}")
        if any(op.name == name for op in self.ops):
            raise ValueError(f"op {name!r} is declared twice in program {self.name!r}")
        self.ops.append(Op(name, kind, task, given))
        return self.ops[-1]

    @property
    def min_bytes(self) -> int:
        """Bytes that a run must move: weights and old KV read once, new KV and final outputs written; activations count as nothing."""
        return sum(op.min_bytes for op in self.ops)

    floor_bytes = min_bytes

    @property
    def flops(self) -> int:
        return sum(op.task.flops for op in self.ops)

    @property
    def num_tasks(self) -> int:
        return sum(op.task.num_tasks for op in self.ops)

    @property
    def nbytes(self) -> int:
        """Memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def dependencies(self) -> list[set[int]]:
        """For each op the earlier ops that it must follow: those whose outputs it reads or overwrites, or whose inputs it overwrites."""
        result: list[set[int]] = []
        for i, op in enumerate(self.ops):
            touched, written = op.accesses("in", "out", "inout"), op.accesses("out", "inout")
            before = set()
            for j in range(i):
                theirs_written, theirs_touched = self.ops[j].accesses("out", "inout"), self.ops[j].accesses("in", "out", "inout")
                if any(a.overlaps(b) for a in touched for b in theirs_written) or any(
                    a.overlaps(b) for a in written for b in theirs_touched
                ):
                    before.add(j)
            result.append(before)
        return result

    def __repr__(self) -> str:
        meta = ", ".join(f"{key}={value}" for key, value in self.meta.items() if key in ("batch", "context", "layers"))
        return f"<Program {self.name} ({meta}): {len(self.ops)} ops, {self.num_tasks} tasks, {self.min_bytes / 1e9:.3f} GB a step>"
