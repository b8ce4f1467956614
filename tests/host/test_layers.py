"""The order of the layers: who may import whom, in Python and in the device sources, and what an import may cost."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuk
from cuk.compile import cuda_src

PACKAGE = Path(cuk.__file__).parent
# A module imports only what stands before it; a package's files also one another.
ORDER = [
    *(
        "machine",
        "timeline",
        "task",
        "tasks",
        "checkpoint",
        "text",
        "program",
        "programs",
        "conflicts",
        "target",
        "schedule_file",
        "schedule",
        "counters",
        "clocks",
    ),
    *("validate", "simulate", "schedulers"),
    *("nvrtc", "compile", "launch", "runs", "switches", "decode", "record", "bench", "fidelity", "rivals", "compare", "doctor", "cli"),
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
OPTIONAL = ("cupy", "cuda", "nvidia", "torch", "transformers", "matplotlib", "IPython", "tokenizers")


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_layers(path: Path) -> list[tuple[int, str]]:
    """(line, layer) of every import from cuk in the file, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here, so that their layer can be read"
            names = [f"cuk.{alias.name}" for alias in node.names] if node.module == "cuk" else [node.module]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "cuk":
                assert "." in name, f"{path}:{node.lineno}: import the module that is meant; `import cuk` hides its layer"
                found.append((node.lineno, name.split(".")[1]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up(path):
    own = layer(path)
    assert own in ORDER, f"cuk/{path.relative_to(PACKAGE)} has no place in the order of layers: {', '.join(ORDER)}"
    for line, other in imported_layers(path):
        assert other in ORDER, f"{path}:{line}: cuk.{other} has no place in the order of layers"
        if other == own:
            assert (PACKAGE / own).is_dir(), f"{path}:{line}: imports itself"
        else:
            assert ORDER.index(other) < ORDER.index(own), f"{path}:{line}: {own} may not import {other}, which stands after it"


def test_importing_cuk_loads_nothing():
    code = "import sys; before = set(sys.modules); import cuk; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout.split()
    heavy = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"cuk"}
    assert not heavy, f"import cuk loads {sorted(heavy)}"


def test_every_module_imports_without_a_gpu_or_any_optional_package():
    modules = ["cuk." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
    # None in sys.modules makes an import of that name fail as if it were not installed.
    code = f"import sys, importlib\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\nfor name in {modules!r}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", cuk.__all__)
def test_every_public_name_loads(name):
    assert getattr(cuk, name) is not None


def test_a_function_keeps_its_name_though_a_module_has_the_same():
    importlib.import_module("cuk.compile")
    assert callable(cuk.compile) and cuk.compile.__name__ == "compile"
    with pytest.raises(AttributeError, match=r"cuk has no 'compiler': it has .*compile"):
        _ = cuk.compiler


# ---- device sources ----
def code_of(path: Path) -> str:
    """The file with comments blanked, lines kept."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def lines_with(pattern: str, path: Path) -> list[str]:
    return [
        f"{path.relative_to(cuda_src())}:{i}: {line.strip()}"
        for i, line in enumerate(code_of(path).splitlines(), 1)
        if re.search(pattern, line)
    ]


DEVICE = sorted(cuda_src().rglob("*.cuh"))
ALLOWED = {"core": ("core/",), "tasks": ("core/",), "kernels": ("core/", "kernels/")}


@pytest.mark.parametrize("path", DEVICE, ids=lambda path: str(path.relative_to(cuda_src())))
def test_device_files_include_only_what_they_may(path):
    folder = path.relative_to(cuda_src()).parts[0]
    for included in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', code_of(path), re.MULTILINE):
        assert included.startswith(ALLOWED[folder]), f"{path}: a file of {folder}/ may include {ALLOWED[folder]}, not {included}"


def test_inline_assembly_lives_in_core():
    outside = [line for path in DEVICE if path.parent.name != "core" for line in lines_with(r"\basm\b", path)]
    assert not outside, "\n".join(outside)


def test_sync_alone_speaks_of_memory_order():
    # fence.mbarrier_init has but one form, and orders nothing but the barriers' own initialisation.
    pattern = r"(?<!mbarrier_init)\.(acquire|release|acq_rel|relaxed)\.|__threadfence|memory_order|\bfence\.(?!proxy|mbarrier_init)"
    outside = [line for path in DEVICE if path.name != "sync.cuh" for line in lines_with(pattern, path)]
    assert not outside, "\n".join(outside)


def test_each_device_task_has_its_python_half():
    halves = {path.stem for path in (PACKAGE / "tasks").glob("*.py")}
    assert {path.stem for path in DEVICE if path.parent.name == "tasks"} <= halves
