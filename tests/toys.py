"""Small random programs of made-up tasks, and changes to their schedules. tests/host/executions.py says which of them compute the program."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from cuk.machine import Machine
from cuk.program import Program, View
from cuk.schedule import Schedule
from cuk.task import Operand, Region, Task

H200 = Machine.load("h200")


def machine(num_sms: int) -> Machine:
    return replace(H200, name=f"toy{num_sms}", num_sms=num_sms)


@dataclass(frozen=True)
class Toy(Task):
    """A task that is nothing but what it touches. given: (operand, shape, access, role); tiles: for each task what it reads and writes;
    ring: operands that it loads through a ring."""

    given: tuple[tuple[str, tuple[int, ...], str, str], ...]
    tiles: tuple[tuple[tuple[Region, ...], tuple[Region, ...]], ...]
    ring: tuple[str, ...] = ()

    header = "toy.cuh"
    fields = ()
    scalars = {}
    flops = 0

    @property
    def struct(self) -> str:
        return f"toy::Toy<{len(self.tiles)}, {len(self.given)}>"

    @property
    def stage_bytes(self) -> int:
        return 1024 if self.ring else 0

    @property
    def dependent_loads(self) -> frozenset[str]:
        return frozenset(self.ring)

    @property
    def operands(self):
        return {name: Operand(shape, "float32", access, role) for name, shape, access, role in self.given}

    @property
    def num_tasks(self) -> int:
        return len(self.tiles)

    @property
    def min_bytes(self) -> int:
        return 64 * len(self.tiles)

    def reads(self, task):
        return list(self.tiles[task][0])

    def writes(self, task):
        return list(self.tiles[task][1])

    def reference(self, arrays, rounded=True):
        raise NotImplementedError


BUFFERS = {"a": (4,), "b": (4,), "c": (2, 4), "d": (2, 4), "e": (3, 4)}
SLABS = ("c", "d")


def _some_view(rng: random.Random) -> tuple[str, int | None]:
    name = rng.choice(list(BUFFERS))
    return name, (rng.choice([None, 0, 1]) if name in SLABS else None)


def _tiles(rng: random.Random, shape: tuple[int, ...], parts: int) -> list[tuple[tuple[int, int], ...]]:
    """Boxes that are apart, along one dimension; some may be empty."""
    dim = rng.randrange(len(shape))
    edges = [0, *sorted(rng.choices(range(shape[dim] + 1), k=parts - 1)), shape[dim]]
    return [tuple((edges[t], edges[t + 1]) if d == dim else (0, size) for d, size in enumerate(shape)) for t in range(parts)]


def _some_boxes(rng: random.Random, how: str, shape: tuple[int, ...], n: int) -> list[tuple[tuple[int, int], ...]]:
    if how == "tile":
        return _tiles(rng, shape, n)
    if how == "any":
        return [tuple(tuple(sorted(rng.sample(range(size + 1), 2))) for size in shape) for _ in range(n)]
    return [tuple((0, size) for size in shape)] * n


def random_program(rng: random.Random, max_ops: int = 4, max_tasks: int = 3) -> Program:
    """A program of up to `max_ops` ops in which no two tasks of one op race."""
    program = Program("toys")
    for name, shape in BUFFERS.items():
        program.buffer(name, shape, "float32")
    program.buffer("w", (4,), "float32", "weight")

    for i in range(rng.randint(1, max_ops)):
        n = rng.randint(1, max_tasks)
        out = _some_view(rng)
        views, given = {"y": out}, []
        shape = BUFFERS[out[0]] if out[1] is None else BUFFERS[out[0]][1:]
        written = _tiles(rng, shape, n)
        reads: list[list[Region]] = [[] for _ in range(n)]
        writes: list[list[Region]] = [[Region("y", box)] for box in written]
        given.append(("y", shape, "out", "activation"))
        for k in range(rng.randint(0, 2)):
            source, operand = _some_view(rng), f"x{k}"
            if source[0] == out[0]:
                if source != out:
                    continue
                how = "own"  # in place: a task may read what it writes, and nothing else of it
            else:
                how = rng.choice(["whole", "tile", "any", "weight"])
            if how == "weight":
                source = ("w", None)
            size = (BUFFERS | {"w": (4,)})[source[0]]
            size = size if source[1] is None else size[1:]
            boxes = written if how == "own" else _some_boxes(rng, how, size, n)
            views[operand] = source
            given.append((operand, size, "in", "weight" if how == "weight" else "activation"))
            for task, box in enumerate(boxes):
                reads[task].append(Region(operand, box))
        if n > 1 and rng.random() < 0.25:
            given.append(("words", (n - 1,), "inout", "scratch"))
            views["words"] = (f"words{n}", None)
            if f"words{n}" not in program.buffers:
                program.buffer(f"words{n}", (n - 1,), "float32", "scratch")
            for task in range(n - 1):
                writes[task].append(Region("words", ((task, task + 1),)))
            reads[n - 1].append(Region("words", ((0, n - 1),)))
        ring = tuple(name for name, *_, role in given if name.startswith("x") and rng.random() < 0.3)
        task = Toy(tuple(given), tuple((tuple(r), tuple(w)) for r, w in zip(reads, writes, strict=True)), ring)
        program.op(
            f"kind{n}.{len(given)}.{i}", task, f"op{i}", **{key: View(program.buffers[name], index) for key, (name, index) in views.items()}
        )
    return program


def aliased(program: Program, buffer: str, other: str) -> Program:
    """The program with `other`, of the same shape, in the place of `buffer`."""
    made = Program(program.name)
    for b in program.buffers.values():
        made.buffer(b.name, b.shape, b.dtype, b.role)
    for op in program.ops:
        views = {k: View(made.buffers[other if v.buffer.name == buffer else v.buffer.name], v.index) for k, v in op.views.items()}
        made.op(op.kind, op.task, op.name, **views)
    return made


def elements(program: Program) -> dict[tuple[int, int], tuple[set, set]]:
    """For each (op, task): what it reads and what it writes; sets of (buffer, element)."""
    numbered = {name: np.arange(int(np.prod(b.shape))).reshape(b.shape) for name, b in program.buffers.items()}
    found = {}
    for i, op in enumerate(program.ops):
        for t in range(op.task.num_tasks):
            sets = []
            for regions in (op.task.reads(t), op.task.writes(t)):
                cells = set()
                for region in regions:
                    view = op.views[region.operand]
                    part = view.of(numbered)[tuple(slice(low, high) for low, high in region.box)]
                    cells |= {(view.buffer.name, int(e)) for e in part.ravel()}
                sets.append(cells)
            found[i, t] = tuple(sets)
    return found


# ---- mutations ----
def with_queues(schedule: Schedule, queues: list[list], **changes) -> Schedule:
    """The schedule with other instructions."""
    flat = [ins for queue in queues for ins in queue]
    width = max([schedule.waits.shape[1], *(len(ins.waits) for ins in flat)])
    waits = np.full((len(flat), width, 2), -1)
    for i, ins in enumerate(flat):
        for j, wait in enumerate(ins.waits):
            waits[i, j] = wait
    return replace(
        schedule, starts=np.cumsum([0, *map(len, queues)]), op=np.array([ins.op for ins in flat]), task=np.array([ins.task for ins in flat]),
        signal=np.array([-1 if ins.signal is None else ins.signal for ins in flat]), waits=waits, **changes,
    )  # fmt: skip


MUTATIONS = (
    "drop wait",
    "lower",
    "raise",
    "swap",
    "move",
    "rotate",
    "duplicate",
    "drop task",
    "drop signal",
    "other signal",
    "other counter",
    "merge counters",
)


def mutate(schedule: Schedule, rng: random.Random, kind: str) -> Schedule | None:
    """The schedule with one thing changed; None where there is nothing of the kind to change."""
    queues = [schedule.queue(q) for q in range(schedule.num_queues)]
    places = [(q, i) for q, queue in enumerate(queues) for i in range(len(queue))]
    if not places:
        return None
    waiting = [(q, i) for q, i in places if queues[q][i].waits]
    q, i = rng.choice(places)
    if kind in ("drop wait", "lower", "raise", "other counter"):
        if not waiting:
            return None
        q, i = rng.choice(waiting)
        ins = queues[q][i]
        j = rng.randrange(len(ins.waits))
        counter, threshold = ins.waits[j]
        changed = {"drop wait": (), "lower": ((counter, max(0, threshold - rng.randint(1, 2))),), "raise": ((counter, threshold + 1),),
                   "other counter": ((rng.randrange(schedule.num_counters), threshold),)}[kind]  # fmt: skip
        queues[q][i] = replace(ins, waits=(*ins.waits[:j], *changed, *ins.waits[j + 1 :]))
    elif kind == "swap":
        r, k = rng.choice(places)
        if (q, i) == (r, k):
            return None
        queues[q][i], queues[r][k] = queues[r][k], queues[q][i]
    elif kind == "move":
        queues[rng.randrange(len(queues))].append(queues[q].pop(i))
    elif kind == "rotate":
        queues[q].insert(0, queues[q].pop(i))
    elif kind == "duplicate":
        queues[rng.randrange(len(queues))].append(queues[q][i])
    elif kind == "drop task":
        queues[q].pop(i)
    elif kind in ("drop signal", "other signal"):
        if not schedule.num_counters:
            return None
        queues[q][i] = replace(queues[q][i], signal=None if kind == "drop signal" else rng.randrange(schedule.num_counters))
    elif kind == "merge counters":  # one counter for what two stood for: a wait for the earlier one is for its signals alone
        if schedule.num_counters < 2:
            return None
        a, b = rng.sample(range(schedule.num_counters), 2)
        both = bool(rng.randrange(2))

        def merged(c: int, k: int) -> tuple[int, int]:
            return (a, k + int(schedule.totals[a]) * both) if c == b else (c, k)

        queues = [
            [replace(ins, signal=a if ins.signal == b else ins.signal, waits=tuple(merged(*w) for w in ins.waits)) for ins in queue]
            for queue in queues
        ]
    return with_queues(schedule, queues)
