"""docs/launch.md and examples/pdl.py: their code compiles, the names that they use exist, the errors that they quote are raised."""

import ast
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import cuk
from cuk import launch
from cuk.compile import compile as compile_cuda

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "launch.md"
DOTTED = re.compile(r"cuk(\.\w+)+")
EXAMPLE = ROOT / "examples" / "pdl.py"
TEXT = PAGE.read_text()
BLOCKS = [(TEXT.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in re.finditer(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)]
PYTHON = [pytest.param(text, id=f"line {line}") for line, language, text in BLOCKS if language == "python"]


def cuda_strings(source: str) -> list[str]:
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in strings if "__global__" in text]


def resolve(dotted: str):
    """The object that `cuk.a.b` names. Raises AttributeError or ImportError where there is none."""
    found, *names = importlib.import_module("cuk"), *dotted.split(".")[1:]
    for name in names:
        found = getattr(found, name)
    return found


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("pdl_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_code_and_all_of_it_is_python():
    assert len(PYTHON) >= 2 and {language for _, language, _ in BLOCKS} == {"python"}


@pytest.mark.parametrize("text", PYTHON)
def test_python_of_the_page_compiles_and_names_what_exists(text):
    tree = ast.parse(text, str(PAGE))
    compile(tree, str(PAGE), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and DOTTED.fullmatch(ast.unparse(node)):
            resolve(ast.unparse(node))
        if isinstance(node, ast.Call) and DOTTED.fullmatch(ast.unparse(node.func)):
            parameters = inspect.signature(resolve(ast.unparse(node.func))).parameters
            assert {keyword.arg for keyword in node.keywords} <= set(parameters), ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "cuk":
            for alias in node.names:
                resolve(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("source", [*PYTHON, pytest.param(EXAMPLE.read_text(), id="examples/pdl.py")])
def test_cuda_compiles(source, tmp_path):
    strings = cuda_strings(source)
    assert strings
    for text in strings:
        for name in re.findall(r'extern "C" __global__ void (\w+)', text):
            cubin = compile_cuda(text, name=name, cache_dir=tmp_path)
            assert cubin.resources.spill_bytes == 0
            for instruction in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):
                assert text.count(instruction) == cubin.ptx.count(instruction), f"{name}: {instruction}"


def test_names_in_the_prose_exist():
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(cuk(?:\.\w+)+)", prose))
    assert {"cuk.Launch", "cuk.capture", "cuk.launch.LaunchError"} <= named
    for dotted in named:
        resolve(dotted)
    switches = {name for name, p in inspect.signature(cuk.Launch).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(re.findall(r"`(\w+)=", prose)) <= switches | {"grid", "block", "args"}


def test_links_of_the_page_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / link).exists(), link


def test_the_errors_on_the_page_are_those_of_the_source():
    """Each message of the table, piece by piece, stands in cuk/launch.py."""
    source = inspect.getsource(launch)
    messages = re.findall(r"^\| `([^`]+)` \|", TEXT[TEXT.index("| message |") :], re.MULTILINE)
    assert len(messages) >= 15
    for message in messages:
        for piece in message.split("…"):
            assert piece.strip() in source, f"{message!r}: no error says {piece!r}"


def test_the_page_is_on_the_readmes_map():
    readme = (ROOT / "README.md").read_text()
    assert "(docs/launch.md)" in readme and "(examples/pdl.py)" in readme


# ---- examples/pdl.py ----
def test_without_a_gpu_the_example_says_so(example, monkeypatch, capsys):
    monkeypatch.setattr(launch, "gpu_missing", lambda: "no GPU is visible: see CUDA_VISIBLE_DEVICES")
    assert example.main(["--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "pdl.py: this example launches kernels: no GPU is visible: see CUDA_VISIBLE_DEVICES\n"


def test_the_examples_help_has_examples_that_parse(example, capsys):
    with pytest.raises(SystemExit) as exit:
        example.main(["--help"])
    assert exit.value.code == 0 and "exit code:" in capsys.readouterr().out
    lines = [line for line in example.USAGE.splitlines() if "examples/pdl.py" in line]
    assert len(lines) == 3
    for line in lines:
        example.parser().parse_args(shlex.split(line.partition(">")[0])[2:])


@pytest.mark.parametrize("given", ["--kernels 1", "--kernels 1001", "--elements 0", "--repeats 0", "--kernels x", "--nothing"])
def test_wrong_usage_of_the_example_exits_2(example, given, capsys):
    with pytest.raises(SystemExit) as exit:
        example.main(given.split())
    assert exit.value.code == 2 and given.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("same", [True, False])
def test_what_the_example_prints_and_its_exit_code(example, monkeypatch, capsys, same):
    found = {"kernels": 64, "elements": 100, "equal": {"stream": True, "graph": True, "pdl": same}}
    if same:
        found |= {"us": {"stream": 500.0, "graph": 80.0, "pdl": 40.0}}
        found |= {"ratio": {"stream": [6.25, 6.2, 6.3], "graph": [1.0] * 3, "pdl": [0.5, 0.49, 0.51]}}
    monkeypatch.setattr(launch, "gpu_missing", lambda: None)
    monkeypatch.setattr(example, "measure", lambda kernels, elements, repeats: found)
    assert example.main([]) == (0 if same else 1)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    assert ("40.0 us  0.500 x graph" in table[2]) if same else ("DIFFERS" in table[2] and "not timed" in table[2])
    assert example.main(["--json"]) == (0 if same else 1)
    assert json.loads(capsys.readouterr().out) == found


def test_what_the_example_expects(example):
    """Row k + 1 is w * reversed(row k) + 1, each operation rounded to float32."""
    rng = np.random.default_rng(1)
    w, x = rng.uniform(-0.9, 0.9, 7).astype(np.float32), rng.standard_normal(7, np.float32)
    rows = example.expected(w, x, 3)
    assert rows.dtype == np.float32 and rows.shape == (4, 7)
    for before, after in itertools.pairwise(rows):
        for i in range(7):
            assert after[i] == np.float32(np.float32(w[i] * before[6 - i]) + np.float32(1)), (i, after[i])
