"""A decode loop's step: a decode step, the choice of its next tokens, and what the step after it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cuk.program import Init, Op, Program, View
from cuk.tasks import Advance, AttentionDecode, Nucleus, Sample
from cuk.tasks.nucleus import BINS, keep_of, scale_of

LOOPED = ("tokens", "positions", "next_tokens")


def decoding(step: Program, *, sampled: bool = False) -> Program:
    """`step` (a llama program) and behind it, on the same buffers, the op that feeds it the next token: replayed, it decodes.

    sampled: three ops draw the token; without it, it is the likeliest. A sequence of scale 0 takes the likeliest there too.

    A program of its own and not a second one beside it: every run takes it as it is, in a CUDA graph the choice is one more node with the same
    kind of edge, and a run that will keep the whole step in one kernel keeps the loop in it too. What passes from step to step has
    role "state": `tokens`, `positions`, and
      history [capacity, batch] int32   the token of each position: the prompt's, which the host writes, then the decoded ones
      lengths, ends [batch] int32       tokens of each prompt; tokens in all, at which the sequence stands still
      scale, keep, seed                 how tokens are drawn (tasks/nucleus.py, tasks/sample.py), where they are
    As initialised each sequence has its one token at the step's context and decodes to the end of the cache, at temperature 1 and top_p 0.9.

    Raises ValueError for a step without tokens and positions that come from outside and next_tokens that it computes."""
    lacking = [name for name in LOOPED if name not in step.buffers]
    if lacking or "capacity" not in step.meta or "history" in step.buffers:
        raise ValueError(
            f"{step.name} cannot be looped: give a llama program, with buffers {', '.join(LOOPED)} (it lacks {lacking or 'none'})"
        )
    batch, columns = step.meta["batch"], step.meta["capacity"]
    program = Program(step.name, {**step.meta, "decoding": True, "sampled": sampled})
    for buffer in step.buffers.values():
        program.buffers[buffer.name] = replace(buffer, role="state") if buffer.role == "index" else buffer
    for op in step.ops:
        views = {key: replace(view, buffer=program.buffers[view.buffer.name]) for key, view in op.views.items()}
        program.ops.append(Op(op.name, op.kind, op.task, views))

    def state(name: str, shape: tuple[int, ...], dtype: str, value: int | float) -> View:
        return View(program.buffer(name, shape, dtype, "state", Init("values", values=lambda: np.full(shape, value))))

    chosen = View(program.buffers["next_tokens"])
    if sampled:
        row = {"logits": View(program.buffers["logits"]), "best": chosen, "scale": state("scale", (batch,), "float32", scale_of(1.0)),
               "keep": state("keep", (batch,), "uint64", keep_of(0.9)), "high": state("high", (batch, BINS), "uint64", 0),
               "low": View(program.buffer("low", (batch, BINS), "uint32"))}  # fmt: skip
        found, chosen = View(program.buffer("found", (batch, 2), "uint64")), View(program.buffer("chosen", (batch,), "int32"))
        sizes = {"batch": batch, "vocab": step.meta["vocab"]}
        program.op("nucleus_high", Nucleus(**sizes, low=False), **row)
        program.op("nucleus_low", Nucleus(**sizes, low=True), **row, found=found)
        positions = program.buffers["positions"]
        program.op("sample", Sample(**sizes), **row, found=found, seed=state("seed", (1,), "uint64", 0), positions=positions, chosen=chosen)
    program.op(
        "advance", Advance(batch=batch, columns=columns), chosen=chosen, history=state("history", (columns, batch), "int32", 0),
        lengths=state("lengths", (batch,), "int32", 1), ends=state("ends", (batch,), "int32", columns),
        positions=program.buffers["positions"], tokens=program.buffers["tokens"],
    )  # fmt: skip
    return program


def bytes_at(program: Program, contexts: Sequence[int]) -> int:
    """Bytes that a step of a llama program must move (`Program.min_bytes`) when its sequences have so many old positions."""
    changed = {"context": max(contexts), "contexts": tuple(contexts)}
    return sum(
        op.min_bytes + (replace(op.task, **changed).min_bytes - op.task.min_bytes if isinstance(op.task, AttentionDecode) else 0)
        for op in program.ops
    )
