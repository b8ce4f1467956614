"""The command line on a machine without a GPU: what it says, and its exit codes."""

import importlib
import json
import shlex

import pytest

from cuk import cli, compare, doctor
from cuk.launch import gpu_missing
from cuk.programs import llama


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(cli, "has_gpu", lambda: False)


def test_compare_without_a_gpu_says_on_every_line_that_nothing_was_measured(capsys):
    assert cli.main(["compare", "llama-3.2-1b"]) == 0
    out = capsys.readouterr().out
    assert "NOTHING WAS MEASURED" in out and "gate_up" in out and "stored machine h200" in out
    notes = out.split("whole step")[1]
    assert notes.count("not measured") >= 3
    assert "cuk[cuda13]" in out.replace("\n", "") or gpu_missing() is None


def test_compare_as_json(capsys):
    assert cli.main(["compare", "llama-3.1-8b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    program = llama("llama-3.1-8b")
    assert found["measured"] is False
    assert sum(row["bytes"] for row in found["ops"]) == program.min_bytes
    assert sum(row["count"] for row in found["ops"]) == len(program.ops)
    assert 0 < found["reference_difference"] < 0.05


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "compare nope",
            "unknown program 'nope': known ones are llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, qwen3-0.6b, qwen3-1.7b, qwen3-8b, chain",
        ),
        ("compare llama-3.2-1b --runs graf", "unknown run graf: known ones are stream, graph, pdl"),
        ("compare llama-3.2-1b --rivals jax", "unknown rival jax: known ones are torch_graph"),
        ("compare llama-3.2-1b --batch 17", "batch=17: must be from 1 to 16"),
        ("compare llama-3.2-1b --context -1", "context=-1: must be from 0 to 131071"),
        ("compare llama-3.2-1b --context 1,x", "--context '1,x': must be a number, or one for each sequence"),
        ("compare llama-3.2-1b --batch 3 --context 1,2", "context=[1, 2]: 2 contexts for batch=3"),
        ("compare llama-3.2-1b --machine b300", "unknown machine 'b300'"),
        ("compare llama-3.2-1b --repeats 0", "--repeats 0: must be at least 1"),
        ("compare llama-3.2-1b --runs ,", "names no run"),
    ],
)
def test_bad_input_is_named_and_exits_2(capsys, line, message):
    assert cli.main(shlex.split(line)) == 2
    assert message in capsys.readouterr().err


def test_a_chain_is_sized_up_too(capsys):
    assert cli.main(["compare", "chain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is False and 0 < found["reference_difference"] < 0.05


def test_unequal_contexts_on_the_command_line(capsys):
    assert cli.main(["compare", "llama-3.2-1b", "--context", "64,512,4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(row["bytes"] for row in found["ops"]) == llama("llama-3.2-1b", batch=3, context=(64, 512, 4096)).min_bytes


@pytest.mark.parametrize("name", ["compare", "decode", "doctor"])
def test_the_examples_of_the_help_parse(name, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0 and "examples:" in capsys.readouterr().out
    for line in cli.EXAMPLES[name].splitlines()[1:]:
        cli.parser().parse_args(shlex.split(line)[1:])


def test_doctor_exits_1_when_a_run_is_impossible(monkeypatch, capsys):
    findings = [doctor.Finding("GPU", False, "none", "get one"), doctor.Finding("torch", False, "none", "pip install", needed=False)]
    monkeypatch.setattr(cli, "examine", lambda: findings)
    assert cli.main(["doctor"]) == 1
    assert "get one" in capsys.readouterr().out
    monkeypatch.setattr(cli, "examine", lambda: findings[1:])
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["possible"] is True


def test_doctor_finds_what_is_here():
    found = {f.what: f for f in doctor.examine()}
    assert found["device sources"].ok and found["NVRTC and headers"].ok, found
    assert all(f.remedy for f in found.values() if not f.ok)


def test_compare_in_python_sizes_up_without_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.import_module("cuk.compare"), "has_gpu", lambda: False)
    program = llama("llama-3.2-1b", batch=4)
    sizes = compare(program)
    assert sum(row["bytes"] for row in sizes.ops) == program.min_bytes
    assert all("not measured" in line or "nothing was measured" in line for line in repr(sizes).splitlines())
    with pytest.raises(ValueError, match="unknown run graf: known ones are stream, graph, pdl"):
        compare(program, ["graf"])
    with pytest.raises(ValueError, match="unknown rival jax: known ones are torch_graph"):
        compare(program, rivals=["jax"])


def test_unknown_runs_and_switches_list_the_known():
    from cuk.runs import build

    program = llama("llama-3.2-1b")
    with pytest.raises(ValueError, match="unknown run 'megakernel': known ones are reference, stream, graph, pdl"):
        build(program, "megakernel")
    with pytest.raises(ValueError, match="run 'graph' has no switch prefetch: its switches and their defaults are teams=2"):
        build(program, "graph", prefetch=True)
    with pytest.raises(ValueError, match="trigger='middle': must be one of start, loads, end"):
        build(program, "pdl", trigger="middle")


def test_a_gpu_run_without_a_gpu_says_what_to_install(monkeypatch):
    import sys

    from cuk.runs import build

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"run 'pdl' needs a GPU: CuPy cannot be imported .*pip install 'cuk\[cuda13\]'"):
        build(llama("llama-3.2-1b"), "pdl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("llama-9", "unknown model 'llama-9': known ones are"),
        ({"hidden_size": 64}, "missing .*intermediate_size"),
        ({"hidden_size": 60, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 9}, "hidden_size=60"),
        ({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 2, "vocab_size": 9, "head_dim": 64},
         "num_attention_heads=3"),
        ({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 9, "head_dim": 96},
         "head_dim=96: must be one of"),
    ],
)  # fmt: skip
def test_bad_models_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        llama(given)
