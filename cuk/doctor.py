"""What a machine has and lacks for cuk's runs, and how to get what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from cuk.compile import compile, cuda_src
from cuk.nvrtc import toolkit_include_dirs


@dataclass(frozen=True)
class Finding:
    """One thing looked for: whether it is there, what was found, and what to do when it is not. `needed`: runs are impossible without it."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def _look(what: str, look: Callable[[], str], remedy: str, needed: bool = True) -> Finding:
    try:
        return Finding(what, True, look(), needed=needed)
    except Exception as error:
        return Finding(what, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", remedy, needed)


def examine() -> list[Finding]:
    """Looks for driver, GPU, NVRTC, headers and CuPy, and for what only some uses need."""

    def version(module: str) -> str:
        return str(getattr(importlib.import_module(module), "__version__", "installed"))

    def driver() -> str:
        from cuda.bindings import driver as d

        status, number = d.cuDriverGetVersion()
        if int(status):
            raise RuntimeError(str(status))
        return f"for CUDA {number // 1000}.{number % 1000 // 10}"

    def gpu() -> str:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        name = properties["name"].decode()
        if (properties["major"], properties["minor"]) != (9, 0):
            raise RuntimeError(f"{name} has compute capability {properties['major']}.{properties['minor']}; the kernels are built for 9.0")
        return name

    def cupy_version() -> str:
        import cupy

        built, driver_runs = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
        if driver_runs and driver_runs // 1000 < built // 1000:
            raise RuntimeError(
                f"{cupy.__version__} is for CUDA {built // 1000}, the driver runs up to {driver_runs // 1000}: cuk[cuda{driver_runs // 1000}]"
            )
        return cupy.__version__

    def random() -> str:
        import cupy

        return f"cuRAND {cupy.cuda.curand.getVersion()}"

    def headers() -> str:
        folders = toolkit_include_dirs()
        if not folders:
            raise FileNotFoundError("no folder has them")
        return str(folders[0])

    def compiler() -> str:
        source = '#include "core/ptx.cuh"\nextern "C" __global__ void cuk_doctor(cuk::u32* x) { *x = 1; }\n'
        return f"compiles for sm_90a ({compile(source, name='cuk_doctor').resources.registers} registers)"

    wheels = "pip install 'cuk[cuda13]' (or cuda12, for a driver of CUDA 12)"
    return [
        _look("device sources", lambda: str(cuda_src()), "reinstall cuk: its wheel carries cuda_src"),
        _look("NVRTC and headers", compiler, wheels),
        _look("CUDA bindings", lambda: version("cuda.bindings"), wheels),
        _look("driver", driver, "install NVIDIA's driver (580 or newer for CUDA 13)"),
        _look("CuPy", cupy_version, wheels),
        _look("random numbers", random, "pip install nvidia-curand, or a CUDA toolkit: CuPy makes the random weights with it"),
        _look("GPU", gpu, "use a machine with a Hopper GPU (H100, H200); without one, `cuk compare` still sizes programs up"),
        _look("toolkit headers", headers, f"{wheels}: a task of your own may include cuda_bf16.h or cuda/std", needed=False),
        _look("torch", lambda: version("torch"), "pip install 'cuk[models]' for the rivals of `cuk compare --rivals`", needed=False),
        _look("matplotlib", lambda: version("matplotlib"), "pip install 'cuk[figures]' to draw figures from records", needed=False),
    ]
