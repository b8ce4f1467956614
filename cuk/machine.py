"""The limits and measured constants of one GPU, and the arithmetic of what fits on an SM."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Constant:
    """A measured figure with its spread: `value` from `low` to `high` in `unit`; `source` says how and when it was measured."""

    value: float
    low: float
    high: float
    unit: str
    source: str


@dataclass(frozen=True)
class Footprint:
    """What one CTA takes: threads, registers a thread, dynamic plus static shared memory in bytes."""

    threads: int
    registers: int
    smem_bytes: int = 0

    def __post_init__(self):
        for name in ("threads", "registers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.smem_bytes < 0:
            raise ValueError(f"smem_bytes={self.smem_bytes}: must not be negative")


@dataclass(frozen=True)
class Occupancy:
    """How many such CTAs fit on an SM, which resource is the first to run out, and the room that each resource has for them."""

    ctas: int
    limited_by: str
    by_resource: dict[str, int]

    def __str__(self) -> str:
        room = ", ".join(f"{name} {count}" for name, count in self.by_resource.items())
        return f"{self.ctas} CTAs an SM, limited by {self.limited_by} ({room})"


@dataclass(frozen=True)
class Machine:
    """One GPU. Sizes in bytes, `clock_hz` the highest SM clock; `constants` are measured (see cuk/machines/*.json)."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_threads_per_sm: int
    max_threads_per_cta: int
    max_ctas_per_sm: int
    registers_per_sm: int
    register_unit: int
    smem_per_sm_bytes: int
    smem_per_cta_bytes: int
    smem_reserved_per_cta_bytes: int
    smem_unit_bytes: int
    l2_bytes: int
    clock_hz: float
    constants: dict[str, Constant] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> Machine:
        """A stored machine, e.g. "h200". Raises ValueError listing the stored ones."""
        file = resources.files("cuk") / "machines" / f"{name}.json"
        if "/" in name or not file.is_file():
            raise ValueError(f"unknown machine {name!r}: stored ones are {', '.join(stored())}")
        return cls.from_json(json.loads(file.read_text()), f"machines/{name}.json")

    @classmethod
    def from_json(cls, given: dict[str, Any], where: str = "machine") -> Machine:
        """From a JSON object. Raises ValueError naming the field that is missing, unknown or of the wrong type."""
        known = {f.name: f for f in fields(cls)}
        for name in known:
            if name not in given and name != "constants":
                raise ValueError(f"{where}: field {name!r} is missing")
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{where}: unknown field {name!r}; known ones are {', '.join(known)}")
            wanted = {"name": str, "compute_capability": list, "clock_hz": (int, float), "constants": dict}.get(name, int)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{where}: field {name!r} is {value!r}, which is no {getattr(wanted, '__name__', 'number')}")
            if wanted in (int, (int, float)) and value <= 0:
                raise ValueError(f"{where}: field {name!r} is {value!r}, must be positive")
        constants = {}
        for name, value in given.get("constants", {}).items():
            try:
                constants[name] = Constant(**value)
            except TypeError as error:
                raise ValueError(f"{where}: constant {name!r}: {error}") from None
            if not constants[name].low <= constants[name].value <= constants[name].high:
                raise ValueError(f"{where}: constant {name!r}: value must lie between low and high")
        return cls(**{**given, "compute_capability": tuple(given["compute_capability"]), "constants": constants})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"compute_capability": list(self.compute_capability)}

    @classmethod
    def from_device(cls, device: int = 0) -> Machine:
        """The limits of a GPU read off the driver through CuPy; constants from the stored machine of the same name, where there is one."""
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(device)
        attributes = cupy.cuda.Device(device).attributes
        full = properties["name"].decode()
        name = full.lower().replace("nvidia", "").strip().replace(" ", "-")
        constants = cls.load(name).constants if name in stored() else {}
        return cls(
            name=name,
            compute_capability=(properties["major"], properties["minor"]),
            num_sms=attributes["MultiProcessorCount"],
            max_threads_per_sm=attributes["MaxThreadsPerMultiProcessor"],
            max_threads_per_cta=attributes["MaxThreadsPerBlock"],
            max_ctas_per_sm=properties.get("maxBlocksPerMultiProcessor", attributes.get("MaxBlocksPerMultiprocessor", 32)),
            registers_per_sm=attributes["MaxRegistersPerMultiprocessor"],
            register_unit=256,
            smem_per_sm_bytes=attributes["MaxSharedMemoryPerMultiprocessor"],
            smem_per_cta_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
            smem_reserved_per_cta_bytes=properties.get("reservedSharedMemPerBlock", 1024),
            smem_unit_bytes=128,
            l2_bytes=attributes["L2CacheSize"],
            clock_hz=properties.get("clockRate", attributes.get("ClockRate", 0)) * 1e3 or 1.98e9,
            constants=constants,
        )

    # ---- what fits ----
    def _takes(self, footprint: Footprint) -> dict[str, int]:
        """What a CTA takes of each resource. Registers are given to whole warps in units of `register_unit`; shared memory in units of
        `smem_unit_bytes`, with a reserved part for each CTA (CUDA occupancy calculator)."""
        warps = math.ceil(footprint.threads / 32)
        registers = warps * math.ceil(footprint.registers * 32 / self.register_unit) * self.register_unit
        smem = footprint.smem_bytes + self.smem_reserved_per_cta_bytes
        return {
            "threads": warps * 32,
            "registers": registers,
            "shared memory": math.ceil(smem / self.smem_unit_bytes) * self.smem_unit_bytes,
            "CTA slots": 1,
        }

    def _has(self) -> dict[str, int]:
        return {"threads": self.max_threads_per_sm, "registers": self.registers_per_sm, "shared memory": self.smem_per_sm_bytes,
                "CTA slots": self.max_ctas_per_sm}  # fmt: skip

    def admits(self, residents: Sequence[tuple[Footprint, int]], footprint: Footprint) -> Occupancy:
        """How many CTAs of `footprint` an SM admits beside `residents`, pairs of a footprint and a number of CTAs.

        Raises ValueError when the residents themselves do not fit."""
        if footprint.threads > self.max_threads_per_cta or footprint.smem_bytes > self.smem_per_cta_bytes:
            return Occupancy(0, "the limits of a CTA", {"threads": 0, "registers": 0, "shared memory": 0, "CTA slots": 0})
        left = self._has()
        for resident, count in residents:
            for name, amount in self._takes(resident).items():
                left[name] -= amount * count
        for name, amount in left.items():
            if amount < 0:
                raise ValueError(f"the resident CTAs do not fit on an SM: {name} is short by {-amount}")
        room = {name: left[name] // amount for name, amount in self._takes(footprint).items()}
        tightest = min(room, key=room.__getitem__)
        return Occupancy(room[tightest], tightest, room)

    def occupancy(self, footprint: Footprint) -> Occupancy:
        """How many CTAs of `footprint` fit on an empty SM."""
        return self.admits([], footprint)

    def resident_grid(self, footprint: Footprint) -> int:
        """The largest grid whose CTAs are all resident at once."""
        return self.num_sms * self.occupancy(footprint).ctas

    def __repr__(self) -> str:
        return f"<Machine {self.name}: {self.num_sms} SMs, {self.smem_per_sm_bytes // 1024} KiB shared memory an SM>"


def stored() -> list[str]:
    """The names of the stored machines."""
    return sorted(f.name[:-5] for f in (resources.files("cuk") / "machines").iterdir() if f.name.endswith(".json"))
