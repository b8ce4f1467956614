"""Whether runs compute what they should: op by op against the NumPy reference, and bit by bit against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuk.program import Op
from cuk.runs.base import Run
from cuk.runs.memory import poison, to_numpy
from cuk.task import widen

COMPARED_ROLES = ("activation", "output", "cache", "state")


class CheckFailed(AssertionError):
    """A run's output differs from the reference or from another run: names the op or buffer, the worst index and both values."""


def check(runs: Mapping[str, Run], *, progress: Callable[[Op], None] | None = None) -> None:
    """Checks GPU runs of one program and sets their `checked`.

    The run named "stream" (or else the first that launches its ops singly) is stepped op by op: each op's outputs are poisoned, the op
    runs on what the ops before it really left, and the result is held against the float64 reference on those same inputs, at full
    size. The other runs must then leave the same bits in every activation, output, cache and state. States are as before when it is done.
    Raises CheckFailed."""
    stepped = next((run for run in runs.values() if run.name == "stream"), None)
    if stepped is None:
        raise ValueError(f"nothing to check against: runs are {', '.join(runs)}; give a 'stream' run too, which is stepped op by op")
    check_by_op(stepped, progress)
    stepped.checked = "reference"
    for run in runs.values():
        if run is not stepped and hasattr(run, "launches"):
            check_bitwise(run, stepped)
            run.checked = f"bitwise:{stepped.name}"


def poison_outputs(run: Run, op: Op | None = None) -> None:
    """Fills with NaN what a step (or one op) is to write: activations and outputs whole, caches at the new position only; not states, which the
    step reads first."""
    views = [v for o in ([op] if op else run.program.ops) for v in o.accesses("out") if v.buffer.role != "state"]
    for view in {str(v): v for v in views}.values():
        array = view.of(run.buffers)
        if view.buffer.role == "cache":
            positions = to_numpy(run.buffers["positions"])
            for b, position in enumerate(positions):
                array.view(np.uint16)[b, :, int(position)] = 0xFFFF
        else:
            poison(array)


def check_by_op(run: Any, progress: Callable[[Op], None] | None = None) -> None:
    """Steps a stream run and holds each op's stored outputs within its task's `error_bound` of the reference. States are restored."""
    before = states(run)
    for op, launch in zip(run.program.ops, run.launches, strict=True):
        poison_outputs(run, op)
        arrays = {}
        for key, view in op.views.items():
            access, role = op.task.operands[key].access, view.buffer.role
            if access == "in":
                arrays[key] = to_numpy(view.of(run.buffers))
            elif access == "inout" and role != "scratch":
                arrays[key] = np.array(to_numpy(view.of(run.buffers)))
        appended = _Appended(op, run.buffers, arrays)
        launch()
        run.synchronize()
        expected = appended.expected(op.task.reference(arrays))
        bounds = op.task.error_bound(arrays, expected)
        for key, value in expected.items():
            actual = appended.rows(key) if key in appended.caches else to_numpy(op.views[key].of(run.buffers))
            compare(f"{op.name}.{key}", actual, value, bounds[key])
        appended.require_rest_unchanged()
        if progress:
            progress(op)
    restore(run, before)


class _Appended:
    """The rows that an op appends to caches [batch, kv_heads, capacity, head_dim], which may be far too large for the reference: it is given
    caches of one row a sequence, sequence b's at position b, and rows of the rope table to match. What else is in them must stay as it was."""

    def __init__(self, op: Op, buffers: Mapping[str, Any], arrays: dict[str, np.ndarray]):
        self.op = op
        self.caches = {key: view.of(buffers) for key, view in op.views.items()
                       if view.buffer.role == "cache" and op.task.operands[key].access == "out"}  # fmt: skip
        self.before = {key: _bits(cache).copy() for key, cache in self.caches.items()}
        if not self.caches:
            return
        self.positions = [int(position) for position in arrays["positions"]]
        batch = len(self.positions)
        arrays["rope"] = arrays["rope"][arrays["positions"]]
        arrays["positions"] = np.arange(batch, dtype=np.int32)
        for key, cache in self.caches.items():
            arrays[key] = np.zeros((batch, cache.shape[1], batch, cache.shape[3]), cache.dtype)

    def expected(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The reference's outputs, of caches the new rows [batch, kv_heads, head_dim]."""
        return {
            key: np.stack([value[b, :, b] for b in range(len(value))]) if key in self.caches else value for key, value in values.items()
        }

    def rows(self, key: str) -> np.ndarray:
        return np.stack([to_numpy(self.caches[key][b, :, position]) for b, position in enumerate(self.positions)])

    def require_rest_unchanged(self) -> None:
        for key, cache in self.caches.items():
            before, after = self.before[key], _bits(cache)
            for b, position in enumerate(self.positions):
                before[b, :, position] = after[b, :, position]
            differs = (before != after).reshape(-1)
            if bool(differs.any()):
                at = [int(i) for i in np.unravel_index(int(differs.argmax()), cache.shape)]
                raise CheckFailed(f"{self.op.name}.{key}{at}: changed, though only positions {self.positions} are appended")


def _bits(array: Any) -> Any:
    """A bf16 array as what it is stored as: CuPy compares and copies integers only."""
    return array.view(np.uint16)


def states(run: Any) -> dict[str, Any]:
    """Copies of the run's states, by name."""
    return {name: run.buffers[name].copy() for name, buffer in run.program.buffers.items() if buffer.role == "state"}


def restore(run: Any, saved: Mapping[str, Any]) -> None:
    """Puts states back as `states` found them."""
    for name, array in saved.items():
        run.buffers[name][...] = array


def compare(what: str, actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Raises CheckFailed with the worst index and both values unless |actual - expected| <= bound everywhere (NaN never passes, equal
    infinities do)."""
    found = widen(actual)
    with np.errstate(invalid="ignore"):
        excess = np.where(found == expected, -bound, np.abs(found - expected) - bound)
    bad = ~(excess <= 0)
    if bad.any():
        worst = np.unravel_index(int(np.argmax(np.where(np.isnan(excess), np.inf, excess))), excess.shape)
        at = tuple(int(i) for i in worst)
        raise CheckFailed(
            f"{what}{list(at)}: got {found[at]!r}, the reference is {expected[at]!r}, allowed difference {bound[at]:.3g}; "
            f"{int(bad.sum())} of {bad.size} elements are out of bounds"
        )


def check_bitwise(run: Any, other: Any) -> None:
    """Runs one step of each, from the other's state and with poisoned outputs, and raises CheckFailed naming the first buffer that differs,
    where, and how. States are restored."""
    before = [(one, states(one)) for one in (run, other)]
    restore(run, before[1][1])
    for one in (run, other):
        poison_outputs(one)
        one()
        one.synchronize()
    for name, buffer in run.program.buffers.items():
        if buffer.role not in COMPARED_ROLES:
            continue
        bits = [one.buffers[name].reshape(-1).view(np.uint8) for one in (run, other)]
        if not bool((bits[0] == bits[1]).all()):
            mine, theirs = (to_numpy(one.buffers[name]).reshape(-1) for one in (run, other))
            differs = mine.view(np.uint8).reshape(mine.size, -1) != theirs.view(np.uint8).reshape(mine.size, -1)
            index = int(np.argmax(differs.any(axis=1)))
            at = [int(i) for i in np.unravel_index(index, buffer.shape)]
            raise CheckFailed(
                f"{run.name} and {other.name} differ in {int(differs.any(axis=1).sum())} of {mine.size} elements of {name}, first at {at}: "
                f"{mine[index]!r} and {theirs[index]!r}"
            )
    for one, saved in before:
        restore(one, saved)
