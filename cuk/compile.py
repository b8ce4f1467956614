"""CUDA C++ source -> cubin (NVRTC, no GPU needed) -> CuPy RawModule, with a disk cache and a report of what the kernel takes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cuk import nvrtc
from cuk.nvrtc import ARCH, DEFAULT_OPTIONS, CompileError

__all__ = ["ARCH", "DEFAULT_OPTIONS", "CompileError", "Cubin", "Layout", "Resources", "compile", "cuda_src", "default_cache_dir", "layout"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread; bytes of a thread that spills store and load (their sum) and of its stack; static
    shared memory and machine code in bytes. The compiler's own report (ptxas -v); the last from the cubin's section table."""

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
    """A compiled kernel: `code` is the cubin, `path` its file in the cache, `log` the compiler's output, `key` what it is cached under."""

    name: str
    source: str
    code: bytes = field(repr=False)
    path: Path
    key: str
    log: str = field(repr=False)
    resources: Resources
    include_dirs: tuple[str, ...] = field(repr=False, default=())
    options: tuple[str, ...] = field(repr=False, default=())

    @cached_property
    def ptx(self) -> str:
        """The PTX of the same source and options, compiled when first asked for."""
        return nvrtc.run(self.source, self.name, "ptx", self.include_dirs, self.options)[0].decode().rstrip("\0")

    @cached_property
    def sass(self) -> str:
        """The machine code as text. Raises FileNotFoundError, saying how to get it, without nvdisasm."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code)
            file.flush()
            return subprocess.run([nvrtc.find_nvdisasm(), "-c", file.name], check=True, capture_output=True, text=True).stdout

    def load(self) -> Any:
        """A cupy.RawModule on the current device."""
        import cupy

        if not self.path.is_file():  # the cache was emptied since
            _write_whole(self.path, self.code)
        return cupy.RawModule(path=str(self.path))

    def function(self, name: str | None = None) -> Any:
        """The kernel (or another one of the same source), ready for cuk.launch.Launch or for CuPy's own call."""
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
    options: Sequence[str] = (),
    arch: str = ARCH,
    cache_dir: str | os.PathLike | None = None,
) -> Cubin:
    """The cubin of one translation unit, from the cache or compiled. Several processes and threads may do so at once.

    source: CUDA C++ text with an extern "C" kernel called `name`. Headers are looked up in `include_dirs`, in cuda_src(), then among
    those of the CUDA toolkit where they are installed; never in the working directory. options: NVRTC's, on top of DEFAULT_OPTIONS
    (one of the same name replaces the default). The cache key covers the source, path and text of every included header, options,
    architecture and compiler. Raises CompileError; ImportError without NVRTC; ValueError for an option that must be an argument."""
    dirs = _search_path(include_dirs)
    merged = nvrtc.merged_options(options, arch)
    key = cache_key(source, name, dirs, merged)
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    known = _memo.get((str(folder), key))
    if known is None:
        found = _read_cached(folder, key) or _compile_into(folder, key, source, name, dirs, merged)
        known = _memo[(str(folder), key)] = Cubin(name, source, found[0], folder / f"{key}.cubin", key, *found[1:], dirs, merged)
    return known


_memo: dict[tuple[str, str], Cubin] = {}


def default_cache_dir() -> Path:
    """$CUK_CACHE_DIR, or `cuk` in the platform's cache folder."""
    if os.environ.get("CUK_CACHE_DIR"):
        return Path(os.environ["CUK_CACHE_DIR"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "cuk"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "cuk"


def _search_path(include_dirs: Sequence[str | os.PathLike]) -> tuple[str, ...]:
    return tuple(str(Path(folder).resolve()) for folder in (*include_dirs, cuda_src(), *nvrtc.toolkit_include_dirs()))


def cache_key(source: str, name: str, include_dirs: Sequence[str], options: Sequence[str]) -> str:
    """SHA-256 over everything that goes into a compilation. A header's path is part of it, since line information holds it."""
    digest = hashlib.sha256()
    parts = [source, name, json.dumps(list(options)), *nvrtc.compiler_version()]
    for path, text in sorted(included_headers(source, include_dirs).items()):
        parts += [path, text]
    for part in parts:
        content = part.encode()
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def included_headers(source: str, include_dirs: Sequence[str]) -> dict[str, str]:
    """Path -> text of every header that the source includes, directly or not, wherever the compiler would find it: beside the header
    that asks for it (in quotes), in the include folders, or by its absolute path. Headers built into the compiler are covered by
    its version. Conditions are not evaluated, so a header too many may count.

    Raises CompileError for `#include MACRO` outside the CUDA toolkit's headers: what it includes is not known here."""
    toolkit = tuple(str(folder) + os.sep for folder in nvrtc.toolkit_include_dirs())
    found: dict[str, str] = {}
    waiting: list[tuple[str | None, tuple[tuple[str, str, str, int], ...]]] = [(None, _includes(source))]
    while waiting:
        asker, includes = waiting.pop()
        for quoted, angled, computed, line in includes:
            if computed:
                if asker is None or not asker.startswith(toolkit):
                    raise CompileError(
                        f"{asker or 'source'}:{line}: #include {computed}: the compile cache cannot follow a macro; name the header",
                        file=asker,
                        line=line,
                    )
                continue
            for folder in ([os.path.dirname(asker)] if asker and quoted else []) + list(include_dirs):
                path = os.path.normpath(os.path.join(folder, quoted or angled))
                if path in found:
                    break
                header = _header(path)
                if header is not None:
                    found[path] = header[0]
                    waiting.append((path, header[1]))
                    break
    return found


def _includes(text: str) -> tuple[tuple[str, str, str, int], ...]:
    """(quoted, angled, computed, line) of every #include; one of the first three is not empty."""
    return tuple((*match.groups(default=""), text.count("\n", 0, match.start()) + 1) for match in _INCLUDE.finditer(text))


_headers: dict[str, tuple[tuple[int, int, int], str, tuple]] = {}


def _header(path: str) -> tuple[str, tuple] | None:
    """Text and includes of a header, read again only when its stamp has changed; None where there is no such file."""
    try:
        status = os.stat(path)
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = _headers.get(path)
        if known is None or known[0] != stamp:
            text = Path(path).read_text(errors="replace")
            known = (stamp, text, _includes(text))
            # A file just written may be written again within its clock's tick, and look unchanged.
            if time.time_ns() - status.st_mtime_ns > 1_000_000_000:
                _headers[path] = known
        return known[1:]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


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
        raise CompileError(f'kernel {name!r}: the source has no extern "C" __global__ function of that name\n{log}', log=log)
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


def _compile_into(
    folder: Path, key: str, source: str, name: str, dirs: tuple[str, ...], options: Sequence[str]
) -> tuple[bytes, str, Resources]:
    """(cubin, log, resources), compiled and written to the cache."""
    code, log = nvrtc.run(source, name, "cubin", dirs, options)
    resources = parse_resources(log, name, code)
    report = {
        "name": name,
        "log": log,
        "resources": asdict(resources),
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "compiler": nvrtc.compiler_version(),
        "options": list(options),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The report comes last: an entry without one is not an entry.
        _write_whole(folder / f"{key}.cubin", code)
        _write_whole(folder / f"{key}.json", json.dumps(report, indent=1).encode())
    except OSError as error:
        raise OSError(f"the compile cache {folder} cannot be written ({error}): set CUK_CACHE_DIR to a folder that can") from error
    return code, log, resources


def _read_cached(folder: Path, key: str) -> tuple[bytes, str, Resources] | None:
    """(cubin, log, resources), or None where the entry is absent, corrupt or from another version: it is compiled again."""
    try:
        report = json.loads((folder / f"{key}.json").read_text())
        code = (folder / f"{key}.cubin").read_bytes()
        if hashlib.sha256(code).hexdigest() != report["code_sha256"]:
            return None
        return code, str(report["log"]), Resources(**report["resources"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def layout(source: str, struct: str, fields: Sequence[str], *, include_dirs: Sequence[str | os.PathLike] = ()) -> Layout:
    """Size, alignment and offsets of `fields` in `struct`, a C++ type that `source` makes known, as the compiler itself lays it out.

    They are the constants that a kernel stores, read from its PTX; an offset is a member's address in an object at 0, since NVRTC
    has no offsetof before 13.5. Raises CompileError, e.g. for a member that does not exist."""
    values = ["sizeof(cuk_struct)", "alignof(cuk_struct)", *(f"&reinterpret_cast<cuk_struct*>(0)->{name}" for name in fields)]
    stores = "".join(f"  *out = (unsigned long long)({value});\n" for value in values)
    kernel = f'extern "C" __global__ void cuk_layout(volatile unsigned long long* out) {{\n{stores}}}\n'
    unit = f"{source}\nusing cuk_struct = {struct};\n{kernel}"
    ptx = nvrtc.run(unit, "cuk_layout", "ptx", _search_path(include_dirs), nvrtc.merged_options((), ARCH))[0].decode()
    known = dict(re.findall(r"mov\.[bu]64\s+(%rd\d+), (\d+);", ptx))
    stored = re.findall(r"st\.volatile\.\S+\s+\[[^\]]+\], (%rd\d+|\d+);", ptx)
    numbers = [int(known.get(value, value)) for value in stored if value in known or value.isdigit()]
    if len(numbers) != len(values):
        raise CompileError(f"{struct}: the compiler left {len(numbers)} of the {len(values)} numbers of its layout in the PTX", log=ptx)
    return Layout(numbers[0], numbers[1], dict(zip(fields, numbers[2:], strict=True)))
