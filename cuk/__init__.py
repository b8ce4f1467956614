"""One chain of GPU operators in every execution style, compared: start with `programs`, `build`, `check` and `compare`.

Every name loads on first use, so `import cuk` is quick and needs neither a GPU nor CuPy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "Decoder": "cuk.decode",
    "Launch": "cuk.launch",
    "Machine": "cuk.machine",
    "Program": "cuk.program",
    "Schedule": "cuk.schedule",
    "Task": "cuk.task",
    "build": "cuk.runs",
    "capture": "cuk.launch",
    "check": "cuk.runs",
    "compare": "cuk.compare",
    "compile": "cuk.compile",
    "fidelity": "cuk.fidelity",
    "simulate": "cuk.simulate",
    "validate": "cuk.validate",
}
_MODULES = ("bench", "launch", "machine", "programs", "rivals", "runs", "schedulers", "task", "tasks")

__all__ = sorted({*_HOME, *_MODULES})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"cuk.{name}")
    else:
        raise AttributeError(f"cuk has no {name!r}: it has {', '.join(__all__)}")
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Importing cuk.compare makes Python bind that module to the package's attribute `compare`, whoever imports it: here the
    function of the same name stays what `cuk.compare` means."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
