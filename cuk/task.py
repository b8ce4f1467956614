"""What an operator is to the host: its device struct, arguments, tiling, cost and NumPy reference.

A task's Python class and its `.cuh` share a stem. The class is a frozen dataclass of the operator's sizes: everything else
(argument layout, what each tile reads and writes, bytes, flops, shared memory) is computed from them, without a GPU.
"""

from __future__ import annotations

import abc
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

TEAM_THREADS = 128
FORMATS = {"ptr": "P", "i32": "i", "f32": "f"}
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "uint32": 4, "uint64": 8}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Field:
    """One member of a device `Args` struct: `kind` is "ptr", "i32" or "f32"."""

    name: str
    kind: str

    @property
    def size(self) -> int:
        return struct.calcsize(FORMATS[self.kind])


@dataclass(frozen=True)
class Operand:
    """What a pointer argument must point to: `shape` and `dtype`; `access` is "in", "out" or "inout"."""

    shape: tuple[int, ...]
    dtype: str
    access: str = "in"
    role: str = "activation"  # weight | cache | state | activation | output | index | scratch, which starts with every bit set: empty words


@dataclass(frozen=True)
class TensorMap:
    """A pointer argument that is passed as a tensor map of an operand (bf16, 128-byte swizzle): sizes of up to five dimensions in
    elements, innermost first; strides in bytes of all but the innermost; sizes of the box that one copy brings."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A box of one operand: `box[d]` is the half-open range along dimension d."""

    operand: str
    box: tuple[tuple[int, int], ...]


def args_offsets(fields: Sequence[Field]) -> tuple[dict[str, int], int]:
    """The byte offset of each field and the struct's size, by C's rules of natural alignment."""
    offsets, at, widest = {}, 0, 1
    for field in fields:
        at = round_up(at, field.size)
        offsets[field.name] = at
        at += field.size
        widest = max(widest, field.size)
    return offsets, round_up(at, widest)


def pack_args(fields: Sequence[Field], values: Mapping[str, int | float]) -> bytes:
    """The bytes of a device `Args` struct. Raises KeyError naming a missing or unknown argument."""
    names = [field.name for field in fields]
    if set(names) != set(values):
        missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise KeyError(f"arguments do not match the struct: missing {missing}, unknown {unknown}")
    offsets, size = args_offsets(fields)
    packed = bytearray(size)
    for field in fields:
        struct.pack_into("=" + ("Q" if field.kind == "ptr" else FORMATS[field.kind]), packed, offsets[field.name], values[field.name])
    return bytes(packed)


class Task(abc.ABC):
    """An operator of given sizes. Subclasses are frozen dataclasses; see `cuk/tasks/linear.py` for a short one."""

    header: ClassVar[str]
    """The `.cuh`: relative to cuda_src/, or the absolute path of a file outside the package."""
    fields: ClassVar[tuple[Field, ...]]
    """The members of the struct's `Args`, in order."""

    # ---- the device half ----
    @property
    @abc.abstractmethod
    def struct(self) -> str:
        """The C++ type, template arguments included, e.g. `cuk::Linear<1, false, 512, true, false, float>`."""

    @property
    def stage_bytes(self) -> int:
        """Bytes of one ring stage; 0 for a task that loads nothing through the ring."""
        return 0

    def stages_of_team(self, tasks: int) -> int:
        """Ring stages that `tasks` tasks of one team fill: more than these are of no use to a kernel. Unbounded unless overridden."""
        return 1 << 30

    @property
    def dependent_loads(self) -> frozenset[str]:
        """Operands of which the ring may bring what an op of the same step wrote: read as soon as the task's own waits are over, whatever
        stands before it in its queue. Unless overridden, of a task that has a ring, all that it reads."""
        return frozenset(name for name, o in self.operands.items() if o.access != "out") if self.stage_bytes else frozenset()

    def weights_from(self, task: int) -> tuple[str, int, int] | None:
        """(operand, first byte, byte behind the last) of what this task and those after it read in order; None where there is no such thing."""
        return None

    @property
    def max_registers(self) -> int:
        """Registers a thread may have. 65,536 of an SM hold two kernels of two teams (640 threads) at 96 and less."""
        return 96

    @property
    def shared_bytes(self) -> int:
        """Shared memory that all teams of a CTA have in common."""
        return 0

    @property
    def scratch_bytes(self) -> int:
        """Shared memory of each team."""
        return 0

    # ---- word by word: how an op hands its output on before it has ended ----
    @property
    def posts(self) -> tuple[str, ...]:
        """The outputs that the device can post as words of four columns, one after another; none unless overridden."""
        return ()

    @property
    def words(self) -> int:
        """How many 64-bit words it posts."""
        return sum(ceil_div(math.prod(self.operands[name].shape) * ITEM_BYTES[self.operands[name].dtype], 8) for name in self.posts)

    @property
    def polls(self) -> tuple[str, ...]:
        """The operands that the device can take as such words; none unless overridden."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """An operand of which each task can take its own elements as such words; none unless overridden."""
        return ()

    @property
    def staged_chunks(self) -> int:
        """Chunks of the operand which are used one by one as they come, staged by four warps of their own; 0: it is staged whole."""
        return 0

    # ---- the operator ----
    @property
    @abc.abstractmethod
    def operands(self) -> dict[str, Operand]:
        """The pointer arguments that are used; a pointer field that is not listed is passed as null."""

    @property
    @abc.abstractmethod
    def scalars(self) -> dict[str, int | float]:
        """The arguments passed by value."""

    @property
    def tensor_maps(self) -> dict[str, TensorMap]:
        """The operands that the device reads through a tensor map, whose address stands in the argument instead of theirs."""
        return {}

    @property
    @abc.abstractmethod
    def num_tasks(self) -> int:
        """Into how many tasks (tiles) the operator splits."""

    @abc.abstractmethod
    def reads(self, task: int) -> list[Region]:
        """The regions that one task reads."""

    @abc.abstractmethod
    def writes(self, task: int) -> list[Region]:
        """The regions that one task writes. What it reads of scratch, tasks of lower index write: it waits for them."""

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counting two."""

    @abc.abstractmethod
    def reference(self, arrays: Mapping[str, np.ndarray], rounded: bool = True) -> dict[str, np.ndarray]:
        """The outputs in float64, from operands as stored. `rounded` rounds inner operands as the device does, so that what is
        left between it and the device is the rounding of the stored result and the order of float32 sums."""

    @property
    def min_bytes(self) -> int:
        """Bytes that must come from or go to memory however fast the caches are: weights and old KV read once, new KV written."""
        return sum(math.prod(o.shape) * ITEM_BYTES[o.dtype] for o in self.operands.values() if o.role == "weight")

    def error_bound(self, arrays: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """How far the device's stored result may lie from `reference`, elementwise: half an ulp of the stored dtype plus 2^-13 (bf16)
        or 2^-16 (float32) of the output's root mean square for the order of float32 sums."""
        bounds = {}
        for name, value in outputs.items():
            dtype = self.operands[name].dtype
            if dtype in ("int32", "uint32", "uint64"):
                bounds[name] = np.zeros(value.shape)
                continue
            ulp, order = (2.0**-8, 2.0**-13) if dtype == "bfloat16" else (2.0**-23, 2.0**-16)
            rms = math.sqrt(float(np.mean(np.square(value)))) if value.size else 0.0
            bounds[name] = ulp * np.abs(value) + order * rms
        return bounds


# ---- NumPy at bf16: shared by the references ----


@cache
def bfloat16() -> np.dtype:
    """The NumPy dtype that stands for bf16 (from ml_dtypes)."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(name: str) -> np.dtype:
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def widen(array: np.ndarray) -> np.ndarray:
    """The array in float64, exactly."""
    if array.dtype == bfloat16():
        return (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.asarray(array, dtype=np.float64)


def round_bf16(array: np.ndarray) -> np.ndarray:
    """The nearest bf16 (ties to even) of each float64, as float64. Goes through float32, as the device's results do."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(array), np.nan, rounded.view(np.float32).astype(np.float64))


_POOL = ThreadPoolExecutor(thread_name_prefix="cuk-reference")
_CHUNK_ELEMENTS = 1 << 22


def matvec(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w.T in float64, `w` [n, k] widened a few million elements at a time, on every core."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, w.shape[1]))
    parts = _POOL.map(lambda i: x @ widen(w[i : i + rows]).T, range(0, w.shape[0], rows))
    return np.concatenate(list(parts), axis=1)


def check_multiple(name: str, value: int, of: int, why: str) -> None:
    """Raises ValueError unless `value` is a positive multiple of `of`."""
    if value < 1 or value % of:
        raise ValueError(f"{name}={value}: must be a positive multiple of {of} ({why})")


def check_whole(name: str, value: Any, low: int, high: int, why: str) -> int:
    """The whole number, as Python has it. Raises ValueError for anything else (true and 2.0 too), and outside low … high."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(
            f"{name}={value!r}: must be {'' if number is not None else 'a whole number '}from {low} to {high}{why and f' ({why})'}"
        )
    return number


def check_range(name: str, value: int, low: int, high: int, why: str) -> None:
    """Raises ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high} ({why})")
