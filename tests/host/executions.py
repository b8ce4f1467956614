"""Whether some execution of a schedule goes wrong, found by trying them all: the meaning of schedules, written a second time.

It shares no code and no notion with cuk.validate. There are no conflicts, pairs or clocks here, but memory: each element of a buffer holds the
name of the task that wrote it last. Executing the tasks one after another, as the program lists them, says what every task must find
where it reads, and where it overwrites. Then every interleaving runs, and a task that finds something else is a fault, as is an
execution that stops before its end. For cases of a dozen tasks.

What executions there are:
- A team takes every `teams`-th instruction of its SM's queue and runs one after the other; of a shared queue any number of takers do.
- A task may begin when its counters have come so far. It then reads, and later writes and signals.
- What the ring brings may be read from the moment on when the counters have come so far, whatever stands before the task in its queue.
- A team goes from one task of an op to the next without a barrier. So tasks of one op, too, may begin that early.
- A task that takes scratch words from tasks of its op with lower indices ends once those have begun. The words bring nothing else with them, so
  that in another execution everything else of theirs is late: waits for words hold an execution up, but keep no read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cuk.program import Program
from cuk.schedule import Instruction, Schedule

Name = tuple[int, int]
"""(op, task)."""
Cell = tuple[str, int]
"""(buffer, element)."""


@dataclass
class Meaning:
    """What a task must find: {element: who wrote it last} where it reads, where the ring reads for it, where it overwrites; `words`: of the
    scratch that it takes from `siblings`, who may have written it last."""

    finds: dict[Cell, Name | None] = field(default_factory=dict)
    loads: dict[Cell, Name | None] = field(default_factory=dict)
    overwrites: dict[Cell, Name | None] = field(default_factory=dict)
    words: dict[Cell, set[Name | None]] = field(default_factory=dict)
    siblings: set[Name] = field(default_factory=set)
    beside: set[Name] = field(default_factory=set)  # tasks of its op, of lower index, that must have ended


def meanings(program: Program) -> dict[Name, Meaning]:
    """By executing the tasks in the order in which the program lists them."""
    numbered = {name: np.arange(int(np.prod(b.shape))).reshape(b.shape) for name, b in program.buffers.items()}
    memory: dict[Cell, Name] = {}
    found: dict[Name, Meaning] = {}
    for i, op in enumerate(program.ops):
        before: dict[Cell, Name | None] = {}  # what stood there before this op
        touched: dict[Name, tuple[set[Cell], set[Cell]]] = {}

        def cells(regions: Iterable, op=op) -> list[tuple[str, Cell]]:
            return [
                (region.operand, (op.views[region.operand].buffer.name, int(e)))
                for region in regions
                for e in op.views[region.operand].of(numbered)[tuple(slice(*ends) for ends in region.box)].ravel()
            ]

        for t in range(op.task.num_tasks):
            me, reads, writes = Meaning(), cells(op.task.reads(t)), {cell for _, cell in cells(op.task.writes(t))}
            for operand, cell in reads:
                last = memory.get(cell)
                if op.task.operands[operand].role == "scratch" and last is not None and last[0] == i:
                    me.siblings.add(last)
                    me.words[cell] = {last, before[cell]}
                    continue
                me.finds[cell] = last
                if operand in op.task.dependent_loads:
                    me.loads[cell] = last
            for other, (read, written) in touched.items():
                mine = {cell for _, cell in reads} - set(me.words)
                if written & (mine | writes) or read & writes:
                    me.beside.add(other)
            touched[i, t] = {cell for _, cell in reads}, writes
            for cell in writes:
                me.overwrites[cell] = memory.get(cell)
                before.setdefault(cell, memory.get(cell))
                memory[cell] = (i, t)
            found[i, t] = me
    return found


class Executions:
    """All of them. A state is how far each task has come (0: not begun, 1: has read, 2: has ended) and, of a shared queue, how many tasks are
    taken. While nothing has gone wrong, memory is what the ended tasks leave, whatever order they ended in."""

    def __init__(self, schedule: Schedule, program: Program):
        self.queues = [schedule.queue(q) for q in range(schedule.num_queues)]
        self.flat: list[Instruction] = [ins for queue in self.queues for ins in queue]
        self.names = [(ins.op, ins.task) for ins in self.flat]
        self.complete = Counter(self.names) == Counter((i, t) for i, op in enumerate(program.ops) for t in range(op.task.num_tasks))
        self.shared, self.teams = schedule.dynamic, schedule.teams
        if not self.complete:
            return
        means = meanings(program)
        self.means = [means[name] for name in self.names]
        self.at = {name: i for i, name in enumerate(self.names)}
        writers: dict[Cell, list[int]] = {}
        for i, name in enumerate(self.names):
            for cell in means[name].overwrites:
                writers.setdefault(cell, []).append(i)
        self.writers = {cell: sorted(mine, key=lambda i: self.names[i], reverse=True) for cell, mine in writers.items()}

    def fault(self) -> str | None:
        """What goes wrong in one of them, or None."""
        if not self.complete:
            return "not each task once"
        if self.shared:
            takers = sorted({1, 2, len(self.flat)})
            stops = next((found for count in takers if (found := self._walk(count, held=True))), None)
            return stops or self._walk(len(self.flat), held=False)
        return self._walk(0, held=True) or self._walk(0, held=False)

    def _last(self, cell: Cell, state: tuple[int, ...]) -> Name | None:
        return next((self.names[i] for i in self.writers.get(cell, ()) if state[i] == 2), None)

    def _differs(self, wanted: dict[Cell, Name | None], state: tuple[int, ...]) -> Cell | None:
        return next((cell for cell, name in wanted.items() if self._last(cell, state) != name), None)

    def _walk(self, takers: int, held: bool) -> str | None:
        """held: tasks wait for words, and it is looked for executions that stop; else it is looked for wrong reads and writes."""
        n = len(self.flat)
        ahead = [-1] * n  # the instruction that has to end before
        start = 0
        for queue in self.queues:
            for place in range(len(queue)):
                if not self.shared and place >= self.teams:
                    ahead[start + place] = start + place - self.teams
            start += len(queue)
        first = ((0,) * n, 0)
        seen, todo = {first}, [first]
        while todo:
            state, taken = todo.pop()
            values = Counter(ins.signal for ins, phase in zip(self.flat, state, strict=True) if phase == 2)
            over = [all(values[c] >= k for c, k in ins.waits) for ins in self.flat]
            after: list[tuple[tuple[int, ...], int]] = []
            if self.shared and taken < n and taken - state[:taken].count(2) < takers:
                after.append((state, taken + 1))
            for i, phase in enumerate(state):
                if phase == 2:
                    continue
                me = self.means[i]
                if not held and over[i]:
                    if cell := self._differs(me.loads, state):
                        return f"{self.names[i]} loads {cell} of {self._last(cell, state)}, not of {me.loads[cell]}"
                    if late := next((x for x in me.beside if state[self.at[x]] != 2), None):
                        return f"{self.names[i]} may begin before {late} of its op has ended"
                begins = phase == 0 and over[i] and (i < taken if self.shared else ahead[i] < 0 or state[ahead[i]] == 2)
                ends = phase == 1 and (not held or all(state[self.at[x]] for x in me.siblings))
                if not begins and not ends:
                    continue
                if not held and begins:
                    if cell := self._differs(me.finds, state):
                        return f"{self.names[i]} finds {cell} of {self._last(cell, state)}, not of {me.finds[cell]}"
                    if cell := next((c for c, allowed in me.words.items() if self._last(c, state) not in allowed), None):
                        return f"{self.names[i]} takes the word {cell} of {self._last(cell, state)}"
                if not held and ends and (cell := self._differs(me.overwrites, state)):
                    return f"{self.names[i]} overwrites {cell} of {self._last(cell, state)}, not of {me.overwrites[cell]}"
                after.append(((*state[:i], phase + 1, *state[i + 1 :]), taken))
            if not after and min(state, default=2) < 2:
                return f"nothing goes on after {[name for name, phase in zip(self.names, state, strict=True) if phase == 2]}"
            for each in after:
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        return None


def wrong_execution(schedule: Schedule, program: Program) -> str | None:
    """What goes wrong in some execution of the schedule, or None."""
    return Executions(schedule, program).fault()
