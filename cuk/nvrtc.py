"""NVRTC as cuk uses it: options, headers of the CUDA toolkit, errors that name the user's file and line. No GPU or driver needed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
DEFAULT_OPTIONS = ("--std=c++17", "--fmad=false", "--generate-line-info")
"""fmad off: otherwise the compiler contracts a multiply and an add in one kernel and not in another (see docs/design.md, Numbers)."""

_ALIASES = {"-std": "--std", "-fmad": "--fmad", "-lineinfo": "--generate-line-info", "-arch": "--gpu-architecture", "-I": "--include-path",
            "-include": "--pre-include"}  # fmt: skip
_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?P<what>(?:catastrophic )?error.*)$", re.MULTILINE)

CUBIN_OPTIONS = ["--ptxas-options=-v", "--no-cache"]
"""ptxas reports registers and spills; NVRTC's own cache would answer a second compilation without that report."""


class CompileError(RuntimeError):
    """A kernel that does not compile. The message begins with the file and line of the first error and goes on with the compiler's
    log; `file`, `line` (None where the compiler names none) and `log` have them apart."""

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None, log: str = ""):
        super().__init__(message)
        self.file, self.line, self.log = file, line, log


@cache
def compiler_version() -> tuple[str, ...]:
    """What identifies the compiler: NVRTC's version, then its package's and the size of the library that is loaded, since patch
    releases share a version. Raises ImportError saying what to install."""
    nvrtc = _bindings()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise ImportError(f"NVRTC cannot be loaded ({error}): pip install 'cuk[cuda13]' (or cuda12; compiler without a GPU)") from error
    if int(status):
        raise ImportError(f"NVRTC answers {status}: reinstall it with pip install nvidia-cuda-nvrtc")
    found = []
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    with contextlib.suppress(OSError):  # Linux only
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc.so" in line}
        found += sorted(f"{Path(path).name} {Path(path).stat().st_size} bytes" for path in loaded)
    return (f"NVRTC {major}.{minor}", *found)


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(
            "compiling needs cuda.bindings and NVRTC: pip install 'cuk[cuda13]' (or cuda12; compiler without a GPU)"
        ) from error
    return nvrtc


def merged_options(options: Sequence[str], arch: str) -> tuple[str, ...]:
    """The options of a compilation. Raises ValueError for those that would bring in headers or an architecture unseen."""
    given = []
    for option in options:
        name, equals, value = option.partition("=")
        name = "-I" if name.startswith("-I") else name
        given.append(_ALIASES.get(name, name) + equals + value)
    names = {option.partition("=")[0] for option in given}
    for name, argument in {
        "--include-path": "include_dirs",
        "--gpu-architecture": "arch",
        "--pre-include": "an #include in source",
    }.items():
        if name in names:
            raise ValueError(f"options={list(options)}: {name} is not taken here, so that the cache sees it: use {argument}")
    defaults = [option for option in DEFAULT_OPTIONS if option.partition("=")[0] not in names]
    return (f"--gpu-architecture={arch}", *defaults, *given)


def _homes() -> list[Path]:
    return [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)] + [Path("/usr/local/cuda")]


def _wheel_folders() -> list[Path]:
    """Where the nvidia-* wheels put their files."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]


@cache
def toolkit_include_dirs() -> tuple[Path, ...]:
    """The folders of the CUDA runtime's and CCCL's headers: of the wheels, then (for what no wheel here has) of $CUDA_HOME, $CUDA_PATH
    or /usr/local/cuda if it is of NVRTC's major version. Empty without any; the package's own device sources need none."""
    major = compiler_version()[0].removeprefix("NVRTC ").partition(".")[0]
    packages = ("cuda_runtime", "cuda_cccl") if major == "12" else (f"cu{major}",)
    parents = [folder / package / "include" for folder in _wheel_folders() for package in packages]
    for home in _homes():
        version = home / "include" / "cuda_runtime_api.h"
        if version.is_file() and f"#define CUDART_VERSION  {major}" in version.read_text(errors="replace"):
            parents.append(home / "include")
            break
    # CUDA 13 moved CCCL into a folder of its own.
    return tuple(folder for parent in parents for folder in (parent / "cccl", parent) if folder.is_dir())


def find_nvdisasm() -> str:
    candidates = [path for folder in _wheel_folders() for path in sorted(folder.glob("*/bin/nvdisasm"))]
    candidates += [home / "bin/nvdisasm" for home in _homes()]
    for path in (shutil.which("nvdisasm"), *candidates):
        if path and os.access(path, os.X_OK):
            return str(path)
    raise FileNotFoundError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")


def run(source: str, name: str, target: str, include_dirs: Sequence[str], options: Sequence[str]) -> tuple[bytes, str]:
    """("cubin" or "ptx" of one translation unit, log). Straight from NVRTC's bindings: cuda.core's Program asks the driver for
    its version on the way (for PTX always, for cubins before its release 1.0), and a machine that compiles need not have one."""
    nvrtc = _bindings()

    def checked(result: tuple) -> Any:
        if int(result[0]):
            raise CompileError(f"kernel {name!r}: NVRTC answers {result[0]}")
        return result[1] if len(result) > 1 else None

    # In a folder that does not exist, or quoted includes would be looked up in the working directory, unseen by the cache.
    file = f"<generated>/{name}.cu"
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    try:
        arguments = _arguments(target, include_dirs, options)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])
        # Not b" " * size, as is often seen: of length 1 that is the interpreter's one shared b" ", which NVRTC would overwrite.
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").rstrip("\0")
        if int(status):
            raise _failure(name, text.strip() or f"NVRTC answers {status}")
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if target == "cubin" else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        code = bytearray(checked(size(program)))
        checked(get(program, code))
        return bytes(code), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _arguments(target: str, include_dirs: Sequence[str], options: Sequence[str]) -> list[str]:
    arguments = [o.replace("=sm_", "=compute_") if target == "ptx" and o.startswith("--gpu-architecture") else o for o in options]
    return arguments + [f"--include-path={folder}" for folder in include_dirs] + (CUBIN_OPTIONS if target == "cubin" else [])


def _failure(name: str, log: str) -> CompileError:
    first = _ERROR.search(log)
    where = f"{first['file']}:{first['line']}: {first['what']}" if first else log.partition("\n")[0]
    hint = ""
    if re.search(r'(?:cannot|could not) open source file "(?:cuda|cub|thrust|nv|crt|cooperative_groups)\b', log):
        hint = "\nHeaders of the CUDA toolkit come with pip install 'cuk[cuda13]' (or cuda12), or from a toolkit that $CUDA_HOME names."
    return CompileError(
        f"kernel {name!r} does not compile: {where}\n{log}{hint}",
        file=first["file"] if first else None,
        line=int(first["line"]) if first else None,
        log=log,
    )
