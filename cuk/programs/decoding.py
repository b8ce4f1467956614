"""A decode loop's step: a decode step, the choice of its next tokens, and what the step after it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuk.program import Init, Op, Program, View
from cuk.tasks import Advance

LOOPED = ("tokens", "positions", "next_tokens")


def decoding(step: Program) -> Program:
    """`step` (a llama program) and behind it, on the same buffers, the op that feeds it the next token: replayed, it decodes.

    A program of its own and not a second one beside it: every run takes it as it is, in a CUDA graph the choice is one more node with the same
    kind of edge, and a run that will keep the whole step in one kernel keeps the loop in it too. What passes from step to step has
    role "state": `tokens`, `positions`, and
      history [capacity, batch] int32   the token of each position: the prompt's, which the host writes, then the decoded ones
      lengths, ends [batch] int32       tokens of each prompt; tokens in all, at which the sequence stands still
    As initialised each sequence has its one token at the step's context and decodes to the end of the cache.

    Raises ValueError for a step without tokens and positions that come from outside and next_tokens that it computes."""
    lacking = [name for name in LOOPED if name not in step.buffers]
    if lacking or "capacity" not in step.meta or "history" in step.buffers:
        raise ValueError(
            f"{step.name} cannot be looped: give a llama program, with buffers {', '.join(LOOPED)} (it lacks {lacking or 'none'})"
        )
    batch, columns = step.meta["batch"], step.meta["capacity"]
    program = Program(step.name, {**step.meta, "decoding": True})
    for buffer in step.buffers.values():
        program.buffers[buffer.name] = replace(buffer, role="state") if buffer.role == "index" else buffer
    for op in step.ops:
        views = {key: replace(view, buffer=program.buffers[view.buffer.name]) for key, view in op.views.items()}
        program.ops.append(Op(op.name, op.kind, op.task, views))

    def state(name: str, shape: tuple[int, ...], dtype: str, value: int | float) -> View:
        return View(program.buffer(name, shape, dtype, "state", Init("values", values=lambda: np.full(shape, value))))

    chosen = View(program.buffers["next_tokens"])
    program.op(
        "advance", Advance(batch=batch, columns=columns), chosen=chosen, history=state("history", (columns, batch), "int32", 0),
        lengths=state("lengths", (batch,), "int32", 1), ends=state("ends", (batch,), "int32", columns),
        positions=program.buffers["positions"], tokens=program.buffers["tokens"],
    )  # fmt: skip
    return program
