"""The reference run against an independently written Llama: plain per-token attention over a cache, no shared code."""

import numpy as np
import pytest

from cuk.programs import llama
from cuk.programs.llama import Config, rope_table
from cuk.runs.memory import numpy_buffers
from cuk.runs.reference import execute
from cuk.task import widen

SMALL = dict(hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
             head_dim=64, rope_theta=10_000.0)  # fmt: skip


def independent_logits(arrays, meta):
    """One decode step, a sequence and a head at a time, in float64."""
    heads, kv, hd, layers = meta["heads"], meta["kv_heads"], meta["head_dim"], meta["layers"]

    def norm(v, w):
        return v / np.sqrt((v * v).mean() + meta["rms_eps"]) * w

    def rope(v, position):
        half = hd // 2
        angle = position * meta["rope_theta"] ** (-np.arange(half) / half)
        turned = np.empty(hd)
        for i in range(half):
            turned[i] = v[i] * np.cos(angle[i]) - v[i + half] * np.sin(angle[i])
            turned[i + half] = v[i + half] * np.cos(angle[i]) + v[i] * np.sin(angle[i])
        return turned

    w = {name: widen(arrays[name]) for name in arrays if name.startswith(("w_", "norm_"))}
    logits = []
    for b, (token, position) in enumerate(zip(arrays["tokens"], arrays["positions"], strict=True)):
        x = w["w_embed"][token]
        for layer in range(layers):
            projected = w["w_qkv"][layer] @ norm(x, w["norm_attn"][layer])
            q, k, v = np.split(projected, [heads * hd, (heads + kv) * hd])
            if meta["qk_norm"]:
                q = np.concatenate([norm(head, w["norm_q"][layer]) for head in np.split(q, heads)])
                k = np.concatenate([norm(head, w["norm_k"][layer]) for head in np.split(k, kv)])
            out = []
            for h in range(heads):
                g = h * kv // heads
                keys = widen(arrays["k_cache"][layer, b, g, :position])
                values = widen(arrays["v_cache"][layer, b, g, :position])
                keys = np.vstack([keys, rope(k[g * hd : (g + 1) * hd], position)])
                values = np.vstack([values, v[g * hd : (g + 1) * hd]])
                score = np.exp(keys @ rope(q[h * hd : (h + 1) * hd], position) / np.sqrt(hd))
                out.append(score @ values / score.sum())
            x = x + w["w_o"][layer] @ np.concatenate(out)
            gate, up = np.split(w["w_gate_up"][layer] @ norm(x, w["norm_mlp"][layer]), 2)
            x = x + w["w_down"][layer] @ (gate / (1 + np.exp(-gate)) * up)
        head = w["w_embed"] if meta["tied"] else w["w_lm_head"]
        logits.append(head @ norm(x, w["norm_final"]))
    return np.array(logits)


@pytest.mark.parametrize("context", [0, 1, 37, (64, 3)])
@pytest.mark.parametrize(("tied", "qk_norm"), [(False, False), (True, False), (True, True)])
def test_reference_equals_an_independent_model(context, tied, qk_norm):
    program = llama({**SMALL, "tie_word_embeddings": tied, "qk_norm": qk_norm}, batch=2, context=context)
    arrays = numpy_buffers(program, seed=int(np.sum(context)))
    expected = independent_logits(arrays, program.meta)
    execute(program, arrays, exact=True)
    # Two float64 computations of the same sums: they differ by rounding alone; RoPE's table is stored in float32.
    np.testing.assert_allclose(arrays["logits"], expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(arrays["next_tokens"], expected.argmax(axis=1))


def test_rounded_reference_stays_close_to_the_exact_one():
    program = llama(SMALL, batch=1, context=20)
    exact, rounded = numpy_buffers(program, seed=3), numpy_buffers(program, seed=3)
    execute(program, exact, exact=True)
    execute(program, rounded, exact=False)
    difference = rounded["logits"].astype(np.float64) - exact["logits"]
    # A dozen roundings of relative size 2^-9 on the way: far below 5% of the logits' own size.
    assert np.sqrt(np.mean(difference**2)) < 0.05 * np.sqrt(np.mean(exact["logits"] ** 2))


def test_llama3_rope_scaling_against_its_definition():
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = Config.of({**SMALL, "rope_scaling": scaling})
    table = rope_table(config, 3)
    for i in range(32):
        frequency = 10_000.0 ** (-i / 32)
        wavelength = 2 * np.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 32.0
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 32.0 + smooth * frequency
        np.testing.assert_allclose(table[2, i], [np.cos(2 * frequency), np.sin(2 * frequency)], atol=1e-7)


def test_unequal_contexts_cost_what_each_costs_alone():
    """Weights once, each sequence's old positions and new rows; and a range of the longest is about a task's equal share."""
    contexts = (64, 144, 312, 688, 1520, 3360, 7424, 16384)
    program = llama("llama-3.2-1b", batch=8, context=contexts)
    old = 16 * 2 * 8 * 64 * 2  # bytes a position: layers, K and V, heads, columns, bf16
    assert program.min_bytes - llama("llama-3.2-1b", batch=8, context=0).min_bytes == old * sum(contexts)
    assert program.meta["context"] == "64,144,312,688,1520,3360,7424,16384" and program.meta["capacity"] == 16448
    arrays = program.buffers["positions"].init.values
    assert tuple(arrays) == contexts
    attention = next(op.task for op in program.ops if op.kind == "attention")
    assert attention.merge and attention.min_bytes == old // 16 * sum(contexts)
    share = sum(contexts) * 8 / 128
    assert share / 2 <= 16384 / attention.splits <= 2 * share
    assert llama("llama-3.2-1b", batch=2, context=[1024, 1024]).meta["context"] == 1024


def test_contexts_that_do_not_fit_are_named():
    for given, message in [
        (dict(batch=2, context=(1, 2, 3)), r"context=\[1, 2, 3\]: 3 contexts for batch=2; give one for all or one for each"),
        (dict(batch=2, context=(1, -2)), "context=-2: must be from 0"),
        (dict(batch=2, context=(1, 70), capacity=70), "capacity=70: must be from 71"),
    ]:
        with pytest.raises(ValueError, match=message):
            llama("llama-3.2-1b", **given)
