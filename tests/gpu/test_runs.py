"""stream, graph and pdl leave the same bits whatever their switches; a replay changes nothing; transformers agrees; the sanitizer is silent."""

import shutil
import subprocess
import sys
from pathlib import Path

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import cuk
from cuk.fidelity import transformers_models
from cuk.programs import chain, llama
from cuk.runs import build, check
from cuk.runs.check import check_bitwise
from cuk.runs.memory import to_numpy
from tests.alone import example as scale_example

SMALL = dict(
    hidden_size=264, intermediate_size=520, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=1003, head_dim=64
)


@pytest.fixture(scope="module")
def stepped():
    program = llama(SMALL, batch=3, context=150)
    run = build(program, "stream")
    check({"stream": run})
    return run


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["stream", "graph", "pdl"]), st.integers(1, 4), st.sampled_from([None, 1, 2, 3, 5]), st.integers(1, 3),
    st.sampled_from([True, False, 1, 2]), st.sampled_from(["start", "loads", "end"]), st.sampled_from([1, 40_000, 1 << 20]),
    st.sampled_from(["op", "tile"]),
)  # fmt: skip
@example("pdl", 2, 1, 1, 1, "start", 1, "op")
@example("pdl", 2, None, 2, True, "start", 48 << 10, "tile")
def test_bits_do_not_depend_on_switches(stepped, name, teams, stages, ctas_per_sm, prefetch, trigger, early_bytes, deps):
    switches = {"teams": teams, "stages": stages, "ctas_per_sm": ctas_per_sm}
    if name == "pdl":
        switches |= {
            "prefetch": prefetch,
            "trigger": trigger,
            "early_bytes": early_bytes,
            "ahead_bytes": early_bytes // 16 * 16,
            "ahead_early": ctas_per_sm == 2,
            "deps": deps,
        }
    check_bitwise(build(stepped.program, name, buffers=stepped.buffers, **switches), stepped)


@pytest.mark.parametrize(
    "config",
    [SMALL, {**SMALL, "head_dim": 128, "num_attention_heads": 10, "num_key_value_heads": 1}, {**SMALL, "head_dim": 128, "qk_norm": True}],
)
@pytest.mark.parametrize(("batch", "context"), [(1, 0), (1, 1500), (16, 33)])
def test_models_of_odd_shapes(config, batch, context):
    program = llama(config, batch=batch, context=context)
    stream = build(program, "stream")
    check(
        {
            "stream": stream,
            **{name: build(program, name, buffers=stream.buffers) for name in ("graph", "pdl")},
            "tile": build(program, "pdl", buffers=stream.buffers, deps="tile"),
        }
    )


def test_a_hidden_size_whose_x_comes_through_the_ring():
    program = llama({**SMALL, "hidden_size": 2600, "num_hidden_layers": 1}, batch=16, context=5)
    assert any(op.kind == "norm" for op in program.ops)
    stream = build(program, "stream")
    check({"stream": stream, "pdl": build(program, "pdl", buffers=stream.buffers)})


def test_chain():
    program = chain([(384, 256), (256, 256), (5000, 256), (256, 5000)], layers=3)
    stream = build(program, "stream")
    check({"stream": stream, **{deps: build(program, "pdl", buffers=stream.buffers, deps=deps) for deps in ("op", "tile")}})


@pytest.mark.parametrize(("name", "switches"), [("graph", {}), ("pdl", {}), ("pdl", {"deps": "tile"})])
def test_a_thousand_replays_are_bit_identical(stepped, name, switches):
    run = build(stepped.program, name, buffers=stepped.buffers, **switches)
    run()
    first = {k: v.copy() for k, v in run.buffers.items() if stepped.program.buffers[k].role in ("output", "activation", "cache")}
    different = cupy.zeros((), np.int64)
    for _ in range(1000):
        run()
        different += (run.buffers["logits"].view(np.uint32) != first["logits"].view(np.uint32)).sum()
    assert int(different) == 0
    for key, value in first.items():
        assert bool((run.buffers[key].reshape(-1).view(np.uint8) == value.reshape(-1).view(np.uint8)).all()), key


def test_programmatic_edges_are_captured(stepped):
    edges = len(stepped.program.ops) - 1
    assert build(stepped.program, "pdl", buffers=stepped.buffers).graph.num_programmatic_edges == edges
    assert build(stepped.program, "graph", buffers=stepped.buffers).graph.num_programmatic_edges == 0


def test_a_traced_run_leaves_the_same_bits_and_says_when(stepped):
    run = build(stepped.program, "pdl", buffers=stepped.buffers, trace=True)
    check_bitwise(run, stepped)
    run()
    rows = run.timeline.rows()
    assert [row["op"] for row in rows] == [op.name for op in stepped.program.ops]
    for row in rows[1:]:  # no CTA returns from its wait before the op before has ended, give or take the timer's step
        assert row["waited_min"] > -1.1 and row["end_max"] > row["waited_min"]
    with pytest.raises(ValueError, match="trace=True"):
        _ = build(stepped.program, "pdl", buffers=stepped.buffers).timeline


def test_a_users_task_runs_in_every_run():
    program = scale_example().program()
    stream = cuk.build(program, "stream")
    cuk.check({"stream": stream, **{name: cuk.build(program, name, buffers=stream.buffers) for name in ("graph", "pdl")}})


@pytest.mark.parametrize(("kind", "tied"), [("Llama", False), ("Llama", True), ("Qwen3", True), ("Mistral", False)])
def test_logits_are_as_close_to_float32_as_those_of_transformers(tmp_path, kind, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {**SMALL, "hidden_size": 384, "tie_word_embeddings": tied, "rope_theta": 10_000.0, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
              "sliding_window": None}  # fmt: skip
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config)).cuda().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            std = 0.1 if "norm" in name else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.copy_((torch.randn_like(parameter) * std + ("norm" in name)).bfloat16().float())
        theirs.save_pretrained(tmp_path, max_shard_size="4MB")
        tokens = torch.randint(0, config["vocab_size"], (2, 48), device="cuda")
        exact = theirs(tokens).logits.double().cpu().numpy()
    with transformers_models(tmp_path, "bfloat16") as model:  # converting `theirs` would round RoPE's frequencies too
        rounded = np.stack([model(row) for row in tokens.cpu().numpy()]).astype(np.float64)
    run = build(llama.from_pretrained(tmp_path, batch=2, context=63), "pdl")
    ours = np.empty_like(exact)
    for position in range(tokens.shape[1]):
        run.buffers["tokens"][...] = cupy.asarray(tokens[:, position].cpu().numpy().astype(np.int32))
        run.buffers["positions"][...] = position
        run()
        ours[:, position] = to_numpy(run.buffers["logits"])

    def rms(x):
        return np.sqrt(np.mean(np.square(x)))

    mine, reference = rms(ours - exact), rms(rounded - exact)
    print(f"RMS error of the logits: ours {mine:.4g}, transformers bf16 {reference:.4g}, of logits {rms(exact):.4g}")
    assert mine <= 1.1 * reference


def test_too_little_memory_is_refused_before_allocating(monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (1000, 2000))
    cupy.get_default_memory_pool().free_all_blocks()
    with pytest.raises(MemoryError, match=r"need 2\.\d+ GB of GPU memory and .* free"):
        build(llama("llama-3.2-1b"), "stream")


def test_memcheck_is_clean():
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("compute-sanitizer is not installed")
    code = (
        "import cuk\n"
        f"p = cuk.programs.llama({SMALL!r}, batch=2, context=70)\n"
        "runs = {n: cuk.build(p, n) for n in ('stream', 'pdl')}\n"
        "[run() for run in runs.values()]\n"
        "import cupy; cupy.cuda.Device().synchronize()\n"
    )
    done = subprocess.run([tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], timeout=300)  # fmt: skip
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
