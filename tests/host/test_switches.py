"""Switches reach the runs that have them, whatever runs there are, and are refused by name where none has; relaxed ordering is marked."""

import contextlib
import importlib
import json
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cuk import bench, cli, switches
from cuk.programs import chain, llama
from cuk.runs import RUNS, CheckFailed, build

compare = importlib.import_module("cuk.compare")
FLOOR = bench.Floor(4.2e12, 4.1e12, 4.3e12, "plain", ())
GPU_RUNS = [name for name in RUNS if name != "reference"]


class Whirl:
    """A run that is registered and nothing more."""

    switches = {"deps": "op", "signal": "words", "ordering": "release", "spin": 1}


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(cli, "has_gpu", lambda: False)
    for module in (switches, *(sys.modules[RUNS[run].__module__] for run in GPU_RUNS)):
        monkeypatch.setattr(module, "gpu_missing", lambda: "there is none", raising=False)


@pytest.mark.parametrize("name", switches.OPTIONS)
def test_each_option_is_a_switch_of_some_run_and_goes_to_those_that_have_it(name):
    have = [run for run in RUNS if name in RUNS[run].switches]
    assert have
    found = switches.switches_of(GPU_RUNS, {name: RUNS[have[0]].switches[name]})
    assert [run for run in GPU_RUNS if found[run]] == have and set(found) == set(GPU_RUNS)


def test_a_run_that_is_registered_is_known_by_its_switches(monkeypatch):
    monkeypatch.setitem(RUNS, "whirl", Whirl)
    given = {"deps": "tile", "spin": 3, "teams": 1}
    assert switches.switches_of(["whirl", "graph"], given) == {"whirl": {"deps": "tile", "spin": 3}, "graph": {"teams": 1}}
    with pytest.raises(ValueError, match="switch 'spin': run graph has not it; whirl has"):
        switches.switches_of(["graph"], {"spin": 3})
    assert "whirl" in cli.parser().parse_args(["compare", "chain", "--runs", "whirl", "--signal", "words"]).runs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare chain --scheduler balanced", "switch 'scheduler': none of the runs stream, graph, pdl has it; persistent has"),
        ("compare chain --runs graph --ordering relaxed", "switch 'ordering': run graph has not it; "),
        ("compare chain --runs graph,pdl --signal words", "switch 'signal': none of the runs graph, pdl has it; "),
        ("compare chain --runs persistent --scheduler best", "unknown scheduler 'best': known ones are round_robin, balanced"),
        ("compare chain --runs persistent --prefetch much", "--prefetch 'much': must be on, off, or a number of ring stages"),
        ("compare chain --prefetch -1", "--prefetch '-1': must be on, off, or a number of ring stages"),
        ("compare chain --runs persistent --ordering loose", "ordering='loose': must be one of release, relaxed"),
        ("compare chain --runs persistent --signal smoke", "signal='smoke': must be one of words"),
        ("compare chain --runs pdl --deps all", "deps='all': must be one of"),
        ("compare chain --teams 0", "teams=0: must be from 1"),
        ("compare chain --stages 65", "stages=65: must be from 1 to 64"),
        ("decode --model llama-3.2-1b --ids 1 --scheduler balanced", "switch 'scheduler': run pdl has not it; persistent has"),
        ("decode --model llama-3.2-1b --ids 1 --run reference --teams 2", "switch 'teams': run reference has not it; stream, graph, pdl"),
        ("decode --model llama-3.2-1b --ids 1 --run persistent --scheduler best", "unknown scheduler 'best'"),
    ],
)
def test_what_is_refused_by_name(capsys, monkeypatch, without_gpu, line, message):
    monkeypatch.setattr(cli, "has_gpu", lambda: False)
    monkeypatch.setattr(cli, "build", lambda *given, **more: pytest.fail("something would be built"))
    monkeypatch.setattr(switches, "gpu_missing", lambda: "there is none")
    for module in ("cuk.runs.separate", "cuk.runs.persistent"):
        monkeypatch.setattr(importlib.import_module(module), "gpu_missing", lambda: "there is none")
    assert cli.main(shlex.split(line)) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_runs_by_name_and_switches_are_accepted(capsys, without_gpu):
    rest = "--scheduler waves --deps tile --ordering relaxed --signal counter --teams 3 --stages 2"
    for line in (f"--runs {','.join(GPU_RUNS)}", f"--runs graph,persistent {rest}"):
        assert cli.main(shlex.split(f"compare chain --json {line}")) == 0
        assert json.loads(capsys.readouterr().out)["measured"] is False


class Fake:
    def __init__(self, run, settings):
        self.name, self.settings, self.checked, self.resources, self.launches = run, settings, None, {}, []
        self.correct_by_claim = settings.get("ordering") != "relaxed"
        self.buffers = {"logits": np.zeros((1, 8), np.float32)}

    def __call__(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """What was built, in order."""
    built = []

    def build(program, run, *, buffers=None, seed=0, **given):
        built.append((run, given))
        return Fake(run, {**RUNS[run].switches, **given})

    def check(runs, progress=None):
        assert all(run.correct_by_claim for run in runs.values())
        for run in runs.values():
            run.checked = "reference"

    monkeypatch.setattr(compare, "has_gpu", lambda: True)
    monkeypatch.setattr(cli, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda device: contextlib.nullcontext())))
    timed = lambda runs, **given: bench.interleave(runs, **given, timer=lambda call, inner: 800.0)  # noqa: E731
    for name, value in {
        "build": build,
        "check": check,
        "interleave": timed,
        "measure_floor": lambda: FLOOR,
        "states": lambda run: {},
    }.items():
        monkeypatch.setattr(compare, name, value)
    return built


def test_each_run_is_built_with_the_switches_that_it_has(gpu):
    given = {"scheduler": "balanced", "deps": "tile", "teams": 3}
    table = compare.compare(llama("llama-3.2-1b"), ["stream", "pdl", "persistent"], switches=given, rivals=(), repeats=1)
    assert gpu == [("stream", {"teams": 3}), ("pdl", {"deps": "tile", "teams": 3}), ("persistent", given)]
    text = repr(table).splitlines()
    assert all("teams=3" in line for line in text[1:]) and "scheduler=balanced" in text[3] and "stages" not in repr(table)
    assert all("unsafe" not in row for row in table.rows)


@pytest.mark.parametrize("fails", [True, False])
def test_a_relaxed_run_is_timed_marked_and_told_of_whatever_its_check_says(gpu, monkeypatch, capsys, fails):
    def bitwise(run, other):
        if fails:
            raise CheckFailed("persistent and stream differ in 3 of 8 elements of logits")

    monkeypatch.setattr(compare, "check_bitwise", bitwise)
    monkeypatch.setenv("COLUMNS", "400")
    table = compare.compare(llama("llama-3.2-1b"), ["graph", "persistent"], switches={"ordering": "relaxed"}, rivals=(), repeats=1)
    graph, relaxed = table.rows
    assert graph["checked"] == "reference" and "unsafe" not in graph
    assert relaxed["median_us"] == 800 and relaxed["unsafe"].startswith("UNSAFE: ordering=relaxed")
    assert relaxed["checked"] == (
        "FAILED: persistent and stream differ in 3 of 8 elements of logits" if fails else "bitwise:stream, this once"
    )
    table.print()
    for shown in (capsys.readouterr().out, repr(table), table._repr_html_()):
        assert "ordering=relaxed (UNSAFE)" in " ".join(shown.split())
    assert "UNSAFE: ordering=relaxed does not order memory" in table._repr_html_()


def test_switches_of_the_command_line_are_those_of_python(gpu, capsys):
    line = "compare chain --runs pdl,persistent --deps tile --prefetch off --scheduler waves --signal counter --stages 4 --rivals none --repeats 1"
    assert cli.main(shlex.split(line)) == 0
    assert [run for run, _ in gpu] == ["stream", "pdl", "persistent"]
    assert gpu[1][1] == {"deps": "tile", "prefetch": False, "stages": 4}
    assert gpu[2][1].items() >= {"deps": "tile", "scheduler": "waves", "signal": "counter", "stages": 4}.items()
    capsys.readouterr()
    for text, value in (("on", True), ("3", 3)):
        gpu.clear()
        assert cli.main(shlex.split(f"compare chain --runs pdl --prefetch {text} --rivals none --repeats 1")) == 0
        assert gpu[1] == ("pdl", {"prefetch": value})


def test_decode_marks_a_relaxed_run(capsys, monkeypatch):
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
              "vocab_size": 101, "head_dim": 64}  # fmt: skip
    made = []

    def as_reference(program, run, *, seed, device, **given):
        made.append((run, given))
        found = build(program, "reference", precision="storage", seed=seed)
        found.name = run
        return found

    monkeypatch.setattr(cli, "llama", lambda name, **sizes: llama(config, **sizes))
    monkeypatch.setattr(cli, "build", as_reference)
    monkeypatch.setattr(cli, "gpu_missing", lambda: None)
    monkeypatch.setattr(cli, "measure_floor", lambda: FLOOR)
    line = "decode --model llama-3.2-1b --ids 1,2 --tokens 3 --run persistent --ordering relaxed --scheduler waves"
    assert cli.main(shlex.split(line)) == 0
    captured = capsys.readouterr()
    assert made == [("persistent", {"ordering": "relaxed", "scheduler": "waves"})]
    assert "persistent scheduler=waves ordering=relaxed (UNSAFE): " in captured.err
    assert cli.main(shlex.split(line + " --json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unsafe"] == bench.UNSAFE and found["switches"] == {"ordering": "relaxed", "scheduler": "waves"}


def test_python_refuses_what_the_command_line_does(monkeypatch):
    monkeypatch.setattr(compare, "has_gpu", lambda: False)
    with pytest.raises(ValueError, match="switch 'scheduler': none of the runs stream, graph, pdl has it"):
        compare.compare(chain([(64, 64)]), switches={"scheduler": "waves"})
    with pytest.raises(ValueError, match="switch 'colour': run pdl has not it; no run has"):
        compare.compare(chain([(64, 64)]), ["pdl"], switches={"colour": 1})
