"""What README shows works: its Python runs (what needs a GPU is compiled, and its names, runs and switches exist), its commands parse, its links
and the files that it names are there."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

import cuk
from cuk import cli
from cuk.runs import RUNS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
NEEDS_GPU = "# needs a GPU\n"


def test_there_is_python_of_either_kind():
    assert any(code.startswith(NEEDS_GPU) for code in PYTHON) and any(not code.startswith(NEEDS_GPU) for code in PYTHON)
    assert "```" not in re.sub(r"^```(\w*)\n(.*?)^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", [code for code in PYTHON if not code.startswith(NEEDS_GPU)])
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def exists(node: ast.AST) -> None:
    """Of cuk.a.b, that there is one."""
    path = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == "cuk":
        found = cuk
        for name in reversed(path):
            assert hasattr(found, name), f"cuk.{'.'.join(reversed(path))}: there is no {name}"
            found = getattr(found, name)


@pytest.mark.parametrize("code", [code for code in PYTHON if code.startswith(NEEDS_GPU)])
def test_python_for_a_gpu_compiles_and_means_something(code):
    compile(code, "README.md", "exec")
    for node in ast.walk(ast.parse(code)):
        exists(node)
        if isinstance(node, ast.ImportFrom):
            assert all(hasattr(importlib.import_module(node.module), alias.name) for alias in node.names)
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) == "cuk.build":
            run = ast.literal_eval(node.args[1])
            assert {word.arg for word in node.keywords} <= {*RUNS[run].switches, "buffers", "seed", "device"}
        if ast.unparse(node.func) == "cuk.compare" and len(node.args) > 1:
            runs = ast.literal_eval(node.args[1])
            switches = next((ast.literal_eval(word.value) for word in node.keywords if word.arg == "switches"), {})
            assert all(any(name in RUNS[run].switches for run in runs) for name in switches)


def test_commands_parse():
    lines = [line for language, code in BLOCKS if not language for line in code.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("cuk ")]
    assert {"compare", "decode", "schedule", "check"} <= {command[0] for command in commands}
    for command in commands:
        given = cli.parser().parse_args(command)
        for run in getattr(given, "runs", getattr(given, "run", "pdl")).split(","):
            assert run in RUNS
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(line.split()[1] in targets for line in lines if line.startswith("make "))


def test_what_it_links_to_and_maps_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert "://" in target or (ROOT / target).exists(), target
    table = TEXT.partition("## The map")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        package = None
        for name in re.findall(r"`([^`]+)`", row):
            path = name if "/" in name or (ROOT / name).exists() else f"{package}/{name}"
            package = path.split("/")[0] if "/" in path else package
            assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"{row}: there is no {path}"
