"""What all runs have in common."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from cuk.program import Program


class Run(abc.ABC):
    """A program made ready in one execution style. Calling it enqueues one step."""

    name: ClassVar[str]
    switches: ClassVar[dict[str, Any]] = {}
    correct_by_claim = True
    """False for orderings that are known to be incomplete, which are timed and recorded with the result of their check."""

    def __init__(self, program: Program, settings: dict[str, Any]):
        self.program = program
        self.settings = settings
        self.checked: str | None = None
        self.buffers: dict[str, Any] = {}
        self.resources: dict[str, Any] = {}

    @abc.abstractmethod
    def __call__(self) -> None:
        """Enqueues one step on the current stream."""

    def synchronize(self) -> None:
        """Waits until the current stream has done what was enqueued."""
        import cupy

        cupy.cuda.get_current_stream().synchronize()

    @property
    def outputs(self) -> dict[str, Any]:
        """The buffers of role "output", by name."""
        return {name: self.buffers[name] for name, buffer in self.program.buffers.items() if buffer.role == "output"}

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"<{self.name} of {self.program.name}({settings}), checked: {self.checked or 'no'}>"
