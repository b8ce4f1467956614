"""Every task on the GPU against its float64 reference, over drawn shapes, on what a poisoned output must replace."""

import dataclasses

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cuk.program import Init, Program
from cuk.runs import build
from cuk.runs.check import CheckFailed, check_by_op, compare
from cuk.tasks import Argmax, AttentionDecode, Embed, GateUp, Linear, Qkv, RmsNorm

drawn = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
batches = st.integers(1, 16)
columns = st.one_of(st.integers(1, 48).map(lambda i: 8 * i), st.sampled_from([512, 1024, 1032, 2048, 4104]))


def run_alone(task, seed, positions=None, **values):
    """One op on random operands, stepped and checked; returns the run."""
    p = Program("alone", {})
    views = {}
    for name, operand in task.operands.items():
        if operand.role == "scratch":
            continue
        init = Init("normal") if operand.dtype in ("bfloat16", "float32") else Init("integers", low=0, high=1)
        if name in values:
            init = Init("values", values=values[name])
        if name == "positions":
            init = Init("values", values=np.array(positions, np.int32))
        if name == "w":
            init = Init("normal", std=operand.shape[1] ** -0.5)
        views[name] = p.buffer(
            name, operand.shape, operand.dtype, operand.role, None if operand.access == "out" and operand.role != "cache" else init
        )
    p.op(type(task).__name__.lower(), task, **views)
    run = build(p, "stream", seed=seed)
    check_by_op(run)
    return run


@drawn
@given(batches, st.integers(1, 300), columns, st.booleans(), st.booleans(), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 99))
@example(1, 1, 8, True, True, "bfloat16", 0)
@example(16, 17, 4104, False, True, "bfloat16", 0)
@example(9, 9, 72, True, False, "float32", 0)
def test_linear(batch, n, k, norm, residual, out, seed):
    streamed = batch * (k * 2 + 64) > 60 * 1024
    run_alone(Linear(batch=batch, n=n, k=k, norm=norm and not streamed, residual=residual, out=out), seed)


@drawn
@given(batches, st.integers(1, 200), columns, st.booleans(), st.integers(0, 99))
@example(1, 3, 8, True, 0)
@example(16, 5, 4104, False, 0)
def test_gate_up(batch, n, k, norm, seed):
    streamed = batch * (k * 2 + 64) > 60 * 1024
    run_alone(GateUp(batch=batch, n=n, k=k, norm=norm and not streamed), seed)


@drawn
@given(
    st.data(), batches, columns, st.sampled_from([64, 128]), st.integers(1, 3), st.integers(1, 5), st.integers(1, 90), st.integers(0, 99)
)
def test_qkv(data, batch, k, head_dim, kv_heads, group, capacity, seed):
    streamed = batch * (k * 2 + 64) > 60 * 1024
    positions = data.draw(st.lists(st.integers(0, capacity - 1), min_size=batch, max_size=batch))
    task = Qkv(batch=batch, k=k, norm=not streamed, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity)
    run_alone(task, seed, positions)


@drawn
@given(
    st.data(),
    st.integers(1, 16),
    st.sampled_from([64, 128]),
    st.integers(1, 3),
    st.integers(1, 19),
    st.integers(1, 700),
    st.integers(0, 99),
)
def test_attention(data, batch, head_dim, kv_heads, group, capacity, seed):
    positions = data.draw(st.lists(st.integers(0, capacity - 1), min_size=batch, max_size=batch))
    task = AttentionDecode(batch=batch, kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity, context=max(positions),
                           splits=data.draw(st.sampled_from([0, 1, 2, 5, 17])))  # fmt: skip
    run_alone(task, seed, positions)


def test_attention_ignores_what_lies_beyond_the_position():
    """Rows of the cache past the new position may hold NaN: nothing of them may reach the output."""
    task = AttentionDecode(batch=1, kv_heads=1, group=4, head_dim=64, capacity=256, context=70)
    cache = np.random.default_rng(0).standard_normal(task.operands["k_cache"].shape).astype(np.float32)
    cache[:, :, 71:] = np.nan
    run_alone(task, 0, [70], k_cache=cache, v_cache=cache)


@drawn
@given(batches, st.integers(1, 500), st.integers(1, 64).map(lambda i: 8 * i), st.integers(0, 99))
def test_embed(batch, vocab, hidden, seed):
    tokens = np.random.default_rng(seed).integers(0, vocab, batch).astype(np.int32)
    run_alone(Embed(batch=batch, vocab=vocab, hidden=hidden), seed, tokens=tokens)


@drawn
@given(batches, st.integers(1, 600).map(lambda i: 8 * i), st.integers(0, 99))
def test_rms_norm(batch, k, seed):
    run_alone(RmsNorm(batch=batch, k=k), seed)


@drawn
@given(st.integers(1, 16), st.integers(1, 5000), st.integers(0, 99))
def test_argmax_and_its_ties(batch, vocab, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (batch, vocab)).astype(np.float32)  # few values: many ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = np.nan
    run_alone(Argmax(batch=batch, vocab=vocab), seed, logits=logits)


def test_the_check_catches_one_wrong_element():
    run = run_alone(Linear(batch=2, n=64, k=256), 0)
    right = cupy.asnumpy(run.buffers["y"].view(np.uint16)).copy()
    wrong = right.copy()
    wrong[1, 33] ^= 0x0100  # one bit of one element's exponent
    dtype = run.buffers["y"].dtype
    expected = right.view(dtype).astype(np.float64)
    bound = 2.0**-7 * np.abs(expected)
    compare("y", right.view(dtype), expected, bound)
    with pytest.raises(CheckFailed, match=r"y\[1, 33\]"):
        compare("y", wrong.view(dtype), expected, bound)


def test_an_unwritten_output_is_caught():
    """An op whose task count is one short leaves poison behind."""
    from cuk.launch import Launch

    task = Linear(batch=1, n=64, k=64)
    run = run_alone(task, 0)
    fit = dataclasses.replace(run.footprints["linear"], num_tasks=task.num_tasks - 1)
    run.launches[0] = Launch(
        run.cubins["linear"].function(),
        run.machine.num_sms,
        fit.threads,
        (run._pack(0, run.program.ops[0]), fit.pack()),
        smem_bytes=fit.smem_bytes,
    )
    with pytest.raises(CheckFailed, match="nan"):
        check_by_op(run)
