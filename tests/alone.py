"""A program of one op on random operands, for testing a task by itself; and the strategies that draw tasks of every kind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from hypothesis import strategies as st

from cuk.program import Init, Program
from cuk.task import Task
from cuk.tasks import Advance, Argmax, AttentionDecode, Embed, GateUp, Linear, MergeLinear, Nucleus, QkNorm, Qkv, RmsNorm, Sample
from cuk.tasks.matvec import streams_x
from cuk.tasks.nucleus import keep_of, scale_of


def alone(task: Task, positions=None, **values) -> Program:
    """The program: `values` give operands their arrays, `positions` those of the new tokens; the rest is random."""
    program = Program("alone", {})
    views = {}
    for name, operand in task.operands.items():
        if operand.role == "scratch":
            continue
        init = Init("normal") if operand.dtype in ("bfloat16", "float32") else Init("integers", low=0, high=1)
        if name == "w":
            init = Init("normal", std=operand.shape[-1] ** -0.5)
        if name == "positions":
            init = Init("values", values=np.array(positions, np.int32))
        if name in values:
            init = Init("values", values=values[name])
        written = operand.access == "out" and operand.role != "cache"
        views[name] = program.buffer(name, operand.shape, operand.dtype, operand.role, None if written else init)
    program.op(type(task).__name__.lower(), task, **views)
    return program


def example() -> ModuleType:
    """examples/scale.py: a task from outside the package."""
    path = Path(__file__).parents[1] / "examples" / "scale.py"
    spec = importlib.util.spec_from_file_location("scale_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


batches = st.integers(1, 16)
columns = st.one_of(st.integers(1, 48).map(lambda i: 8 * i), st.sampled_from([512, 1024, 1032, 2048, 4104]))


@st.composite
def linears(draw):
    batch, k = draw(batches), draw(columns)
    norm = draw(st.booleans()) and not streams_x(batch, k)
    out = draw(st.sampled_from(["bfloat16", "float32"]))
    chunk = draw(st.sampled_from([0, 256, 512, 1024]))
    return alone(Linear(batch=batch, n=draw(st.integers(1, 70)), k=k, norm=norm, residual=draw(st.booleans()), out=out, chunk_k=chunk))


@st.composite
def gate_ups(draw):
    batch, k = draw(batches), draw(columns)
    norm = draw(st.booleans()) and not streams_x(batch, k)
    return alone(GateUp(batch=batch, n=draw(st.integers(1, 40)), k=k, norm=norm))


@st.composite
def qkvs(draw):
    batch, k, capacity = draw(batches), draw(columns), draw(st.integers(1, 90))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    task = Qkv(batch=batch, k=k, norm=not streams_x(batch, k), heads=kv_heads * group, kv_heads=kv_heads,
               head_dim=draw(st.sampled_from([64, 128])), capacity=capacity)  # fmt: skip
    return alone(task, draw(st.lists(st.integers(0, capacity - 1), min_size=batch, max_size=batch)))


@st.composite
def qk_norms(draw):
    batch, capacity, kv_heads = draw(batches), draw(st.integers(1, 90)), draw(st.integers(1, 3))
    task = QkNorm(batch=batch, heads=kv_heads * draw(st.integers(1, 5)), kv_heads=kv_heads, head_dim=draw(st.sampled_from([64, 128])),
                  capacity=capacity)  # fmt: skip
    return alone(task, draw(st.lists(st.integers(0, capacity - 1), min_size=batch, max_size=batch)))


@st.composite
def attentions(draw):
    batch, capacity = draw(st.integers(1, 4)), draw(st.integers(1, 500))
    positions = draw(st.lists(st.integers(0, capacity - 1), min_size=batch, max_size=batch))
    task = AttentionDecode(batch=batch, kv_heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 19)), head_dim=draw(st.sampled_from([64, 128])),
                           capacity=capacity, context=max(positions), splits=draw(st.sampled_from([0, 1, 2, 5, 17])), merge=draw(st.booleans()))  # fmt: skip
    # What lies beyond a sequence's position may be anything: nothing of it may reach the output.
    cache = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(task.operands["k_cache"].shape).astype(np.float32)
    for b, position in enumerate(positions):
        cache[b, :, position + 1 :] = np.nan
    return alone(task, positions, k_cache=cache, v_cache=cache[..., ::-1])


@st.composite
def merge_linears(draw):
    head_dim = draw(st.sampled_from([64, 128]))
    k, batch = draw(st.integers(1, 9)) * head_dim, draw(batches)
    task = MergeLinear(batch=batch, n=draw(st.integers(1, 40)), k=k, head_dim=head_dim, splits=draw(st.sampled_from([1, 2, 7, 8, 9, 17])),
                       residual=draw(st.booleans()))  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lse = rng.standard_normal(task.operands["lse"].shape).astype(np.float32) * draw(st.sampled_from([1, 30]))
    lse[..., 1:][rng.random(lse[..., 1:].shape) < 0.2] = -np.inf  # empty ranges, though never all of them
    return alone(task, lse=lse[..., ::-1])


@st.composite
def embeds(draw):
    batch, vocab = draw(batches), draw(st.integers(1, 500))
    tokens = np.array(draw(st.lists(st.integers(0, vocab - 1), min_size=batch, max_size=batch)), np.int32)
    return alone(Embed(batch=batch, vocab=vocab, hidden=draw(st.integers(1, 64)) * 8), tokens=tokens)


@st.composite
def rms_norms(draw):
    return alone(RmsNorm(batch=draw(batches), k=draw(st.integers(1, 600)) * 8))


@st.composite
def argmaxes(draw):
    batch, vocab = draw(batches), draw(st.integers(1, 5000))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    logits = rng.integers(-3, 4, (batch, vocab)).astype(np.float32)  # few values: many ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = np.nan
    return alone(Argmax(batch=batch, vocab=vocab), logits=logits)


@st.composite
def advances(draw):
    batch, columns = draw(batches), draw(st.integers(1, 9))

    def drawn(low, high):
        return np.array(draw(st.lists(st.integers(low, high), min_size=batch, max_size=batch)), np.int32)

    task = Advance(batch=batch, columns=columns)
    history = np.arange(batch * columns).reshape(columns, batch)
    return alone(task, drawn(0, columns - 1), history=history, chosen=drawn(0, 99), lengths=drawn(1, columns), ends=drawn(1, columns))


def draws(logits: np.ndarray, temperatures, shares, *, positions=0, seed: int = 0) -> Program:
    """A program of the ops that draw a token from each row of logits [batch, vocab], of whose likeliest tokens `shares` are drawn from."""
    batch, vocab = logits.shape
    best = Argmax(batch=batch, vocab=vocab).reference({"logits": logits})["next"].astype(np.int32)
    given = {
        "logits": logits.astype(np.float32), "best": best, "scale": np.array([scale_of(t) for t in np.broadcast_to(temperatures, batch)], np.float32),
        "keep": np.array([keep_of(share) for share in np.broadcast_to(shares, batch)], np.uint64), "seed": np.array([seed], np.uint64),
        "positions": np.broadcast_to(positions, batch).astype(np.int32), "high": np.zeros((batch, 2048), np.uint64),
    }  # fmt: skip
    program = Program("draws", {})
    ops = [
        ("high", Nucleus(batch=batch, vocab=vocab, low=False)),
        ("low", Nucleus(batch=batch, vocab=vocab, low=True)),
        ("sample", Sample(batch=batch, vocab=vocab)),
    ]
    views = {}
    for kind, task in ops:
        for name, operand in task.operands.items():
            if operand.role != "scratch" and name not in views:
                init = Init("values", values=given[name]) if name in given else None
                views[name] = program.buffer(name, operand.shape, operand.dtype, operand.role, init)
        program.op(kind, task, **{name: views[name] for name, operand in task.operands.items() if operand.role != "scratch"})
    return program


@st.composite
def drawn(draw):
    batch, vocab = draw(batches), draw(st.one_of(st.integers(1, 3000), st.integers(3000, 40_000)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    logits = rng.standard_normal((batch, vocab)).astype(np.float32) * draw(st.sampled_from([0, 1e-5, 3, 1000]))
    logits[rng.random(logits.shape) < draw(st.sampled_from([0, 0.1, 1]))] = draw(st.sampled_from([-np.inf, np.nan, 2.0]))
    temperatures = draw(st.lists(st.sampled_from([0, 1e-9, 0.7, 1, 50]), min_size=batch, max_size=batch))
    shares = draw(st.lists(st.sampled_from([1e-9, 0.3, 0.9, 1 - 1e-9, 1]), min_size=batch, max_size=batch))
    return draws(logits, temperatures, shares, positions=draw(st.integers(0, 10_000)), seed=draw(st.integers(0, 2**64 - 1)))


PROGRAMS = {
    "linear": linears(), "gate_up": gate_ups(), "qkv": qkvs(), "qk_norm": qk_norms(), "attention": attentions(), "merge_linear": merge_linears(), "embed": embeds(), "rms_norm": rms_norms(),
    "argmax": argmaxes(), "advance": advances(), "draws": drawn(),
}  # fmt: skip
