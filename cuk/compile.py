"""CUDA C++ source -> cubin (NVRTC, no GPU needed) -> CuPy RawModule, with a disk cache and a report of what the kernel takes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
DEFAULT_OPTIONS = ("--std=c++17", "--fmad=false", "--generate-line-info")
"""fmad off: otherwise the compiler contracts a multiply and an add in one kernel and not in another (see docs/design.md, Numbers)."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel that does not compile; the message has the compiler's own lines, with the user's file and line."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread; spill, stack and static shared-memory bytes; bytes of machine code."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class Layout:
    """Size, alignment and member offsets of a device struct, in bytes, as the compiler lays it out."""

    size: int
    align: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel. `path` is its file in the cache, `log` the compiler's output."""

    name: str
    source: str
    key: str
    path: Path
    log: str
    resources: Resources
    include_dirs: tuple[str, ...] = field(repr=False, default=())
    options: tuple[str, ...] = field(repr=False, default=())

    @property
    def code(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def ptx(self) -> str:
        """The PTX of the same source and options, compiled when first asked for."""
        return _nvrtc(self.source, self.name, "ptx", self.include_dirs, self.options)[0].decode().rstrip("\0")

    @cached_property
    def sass(self) -> str:
        """The machine code as text. Raises FileNotFoundError without nvdisasm (PyPI: nvidia-cuda-nvdisasm)."""
        tool = _find_nvdisasm()
        return subprocess.run([tool, "-c", str(self.path)], check=True, capture_output=True, text=True).stdout

    def load(self) -> Any:
        """A cupy.RawModule on the current device."""
        import cupy

        return cupy.RawModule(path=str(self.path))

    def function(self, name: str | None = None) -> Any:
        """The kernel, ready for cuk.launch.Launch or for CuPy's own call."""
        return self.load().get_function(name or self.name)


def cuda_src() -> Path:
    """The folder of device sources: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_cuda_src", here.parent / "cuda_src"):
        if (folder / "core").is_dir():
            return folder
    raise FileNotFoundError(f"no device sources in {here / '_cuda_src'} or {here.parent / 'cuda_src'}: the installation is incomplete")


def compile(
    source: str,
    *,
    name: str,
    include_dirs: Sequence[str | os.PathLike] = (),
    options: Sequence[str] = DEFAULT_OPTIONS,
    arch: str = ARCH,
    cache_dir: str | os.PathLike | None = None,
) -> Cubin:
    """The cubin of one translation unit, from the cache or compiled.

    source: CUDA C++ text with an extern "C" kernel called `name`; includes are looked up in `include_dirs`, then in cuda_src().
    options: NVRTC's. The cache key covers the source, the text
    of every included header, options, architecture and compiler version. Raises CompileError, ImportError (no NVRTC)."""
    dirs = tuple(str(Path(d).resolve()) for d in (*include_dirs, cuda_src()))
    options = (f"--gpu-architecture={arch}", *options)
    key = cache_key(source, name, dirs, options)
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    known = _memo.get((str(folder), key))
    if known is None:
        known = _read_cached(folder, key, source, name, dirs, options) or _compile_into(folder, key, source, name, dirs, options)
        _memo[(str(folder), key)] = known
    return known


_memo: dict[tuple[str, str], Cubin] = {}


def default_cache_dir() -> Path:
    """$CUK_CACHE_DIR, or `cuk` in the platform's cache folder."""
    if "CUK_CACHE_DIR" in os.environ:
        return Path(os.environ["CUK_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or (
        os.path.expanduser("~/Library/Caches") if sys.platform == "darwin" else os.path.expanduser("~/.cache")
    )
    return Path(base) / "cuk"


def cache_key(source: str, name: str, include_dirs: Sequence[str], options: Sequence[str]) -> str:
    """SHA-256 over everything that goes into a compilation."""
    digest = hashlib.sha256()
    parts = [source, name, json.dumps(list(options)), *compiler_version()]
    for path, text in sorted(included_headers(source, include_dirs).items()):
        parts += [path, text]
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()


def included_headers(source: str, include_dirs: Sequence[str]) -> dict[str, str]:
    """Path -> text of every header that the source includes, directly or not, and that is found in the include folders, beside the
    header that asks for it, or by its absolute path. Compiler headers that are not found are covered by the compiler's version."""
    found: dict[str, str] = {}
    waiting = [(source, None)]
    while waiting:
        text, beside = waiting.pop()
        for quoted, angled in _INCLUDE.findall(text):
            target = quoted or angled
            for folder in ([beside] if beside and quoted else []) + list(include_dirs):
                path = os.path.normpath(os.path.join(folder, target))
                if path in found:
                    break
                if os.path.isfile(path):
                    found[path] = Path(path).read_text()
                    waiting.append((found[path], os.path.dirname(path)))
                    break
    return found


@cache
def compiler_version() -> tuple[str, ...]:
    """What identifies the compiler: NVRTC's version, and its package's where it came as one. Raises ImportError saying what to install."""
    nvrtc = _bindings()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise ImportError(f"NVRTC cannot be loaded ({error}): pip install 'cuk[cuda13]' (or cuda12)") from error
    if int(status):
        raise ImportError(f"NVRTC answers {status}: reinstall it with pip install nvidia-cuda-nvrtc")
    found = []
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return (f"NVRTC {major}.{minor}", *found)


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError("compiling needs cuda.bindings and NVRTC: pip install 'cuk[cuda13]' (or cuda12)") from error
    return nvrtc


def _nvrtc(source: str, name: str, target: str, include_dirs: Sequence[str], options: Sequence[str]) -> tuple[bytes, str]:
    """("cubin" or "ptx" of one translation unit, log). Straight from NVRTC's bindings: cuda.core's Program asks the driver for
    its version on the way (for PTX always, for cubins before its release 1.0), and a machine that compiles need not have one."""
    nvrtc = _bindings()

    def checked(result: tuple) -> Any:
        if int(result[0]):
            raise CompileError(f"kernel {name!r}: NVRTC answers {result[0]}")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        arguments = _arguments(target, include_dirs, options)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").rstrip("\0")
        if int(status):
            raise CompileError(f"kernel {name!r} does not compile ({status}):\n{text.strip() or 'the compiler gave no reason'}")
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if target == "cubin" else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        code = b" " * checked(size(program))
        checked(get(program, code))
        return code, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _arguments(target: str, include_dirs: Sequence[str], options: Sequence[str]) -> list[str]:
    arguments = [o.replace("=sm_", "=compute_") if target == "ptx" and o.startswith("--gpu-architecture") else o for o in options]
    return arguments + [f"--include-path={folder}" for folder in include_dirs] + (["--ptxas-options=-v"] if target == "cubin" else [])


def parse_resources(log: str, name: str, code: bytes) -> Resources:
    """The resources of kernel `name` from ptxas's -v report; the size of its machine code from the cubin's section table."""
    start = log.find(f"Compiling entry function '{name}'")
    part = log[start:] if start >= 0 else log
    following = part.find("Compiling entry function", 10)
    part = part if following < 0 else part[:following]

    def number(pattern: str) -> int:
        match = re.search(pattern, part)
        return int(match.group(1)) if match else 0

    if not re.search(r"Used \d+ registers", part):
        raise CompileError(f"kernel {name!r}: the compiler reported no registers; is there an extern \"C\" kernel of that name?\n{log}")
    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
        code_bytes=len(_section(code, f".text.{name}")),
    )


def _section(elf: bytes, section: str) -> bytes:
    """A named section of a 64-bit little-endian ELF file, empty where there is none. Layout: the ELF-64 object file format."""
    if elf[:4] != b"\x7fELF":
        return b""

    def at(offset: int, size: int) -> int:
        return int.from_bytes(elf[offset : offset + size], "little")

    table, entry, count, names = at(0x28, 8), at(0x3A, 2), at(0x3C, 2), at(0x3E, 2)
    strings = at(table + names * entry + 0x18, 8)
    for i in range(count):
        header = table + i * entry
        start = strings + at(header, 4)
        if elf[start : elf.index(b"\0", start)] == section.encode():
            return elf[at(header + 0x18, 8) : at(header + 0x18, 8) + at(header + 0x20, 8)]
    return b""


def _compile_into(folder: Path, key: str, source: str, name: str, dirs: tuple[str, ...], options: Sequence[str]) -> Cubin:
    code, log = _nvrtc(source, name, "cubin", dirs, options)
    resources = parse_resources(log, name, code)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.cubin"
    digest = hashlib.sha256(code).hexdigest()
    # The report is written last: an entry without one is not an entry.
    _write_whole(path, code)
    report = {"name": name, "log": log, "resources": asdict(resources), "code_sha256": digest, "compiler": compiler_version()}
    _write_whole(folder / f"{key}.json", json.dumps(report, indent=1).encode())
    return Cubin(name, source, key, path, log, resources, dirs, options)


def _read_cached(folder: Path, key: str, source: str, name: str, dirs: tuple[str, ...], options: Sequence[str]) -> Cubin | None:
    path = folder / f"{key}.cubin"
    try:
        report = json.loads((folder / f"{key}.json").read_text())
        if hashlib.sha256(path.read_bytes()).hexdigest() != report["code_sha256"]:
            return None
        return Cubin(name, source, key, path, report["log"], Resources(**report["resources"]), dirs, options)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, half-written by another version, or corrupt: compiled again


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def layout(source: str, struct: str, fields: Sequence[str], *, include_dirs: Sequence[str | os.PathLike] = ()) -> Layout:
    """How the compiler itself lays out `struct` (a C++ type that `source` makes known) with these members: the constants that it
    stores in the PTX of a kernel that writes down size, alignment and addresses within an object at 0."""
    values = ["sizeof(cuk_struct)", "alignof(cuk_struct)"] + [f"&reinterpret_cast<cuk_struct*>(0)->{name}" for name in fields]
    stores = "".join(f"  *out = (unsigned long long)({value});\n" for value in values)
    unit = f'{source}\nusing cuk_struct = {struct};\nextern "C" __global__ void cuk_layout(volatile unsigned long long* out) {{\n{stores}}}\n'
    dirs = tuple(str(Path(d).resolve()) for d in (*include_dirs, cuda_src()))
    ptx = _nvrtc(unit, "cuk_layout", "ptx", dirs, (f"--gpu-architecture={ARCH}", *DEFAULT_OPTIONS))[0].decode()
    known = dict(re.findall(r"mov\.[bu]64\s+(%rd\d+), (\d+);", ptx))
    stored = re.findall(r"st\.volatile\.\S+\s+\[[^\]]+\], (%rd\d+|\d+);", ptx)
    numbers = [int(known.get(value, value)) for value in stored if value in known or value.isdigit()]
    if len(numbers) != len(values):
        raise CompileError(f"{struct}: the compiler left {len(numbers)} of {len(values)} constants of its layout in the PTX")
    return Layout(numbers[0], numbers[1], dict(zip(fields, numbers[2:], strict=True)))


def _find_nvdisasm() -> str:
    import shutil

    found = shutil.which("nvdisasm")
    if found:
        return found
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/nvdisasm") if folder and Path(folder).is_dir() else ():
            return str(path)
    raise FileNotFoundError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
