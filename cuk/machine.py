"""The limits and measured constants of one GPU, and the arithmetic of what fits on an SM."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    """What one CTA takes: threads, registers a thread, dynamic plus static shared memory in bytes; CTAs of a cluster.

    Raises ValueError for a size that no GPU has."""

    threads: int
    registers: int
    smem_bytes: int = 0
    cluster: int = 1

    def __post_init__(self):
        for name, low, high in (("threads", 1, 1024), ("registers", 1, 255), ("smem_bytes", 0, None), ("cluster", 1, 16)):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                raise ValueError(f"{name}={value}: must be {f'from {low} to {high}' if high else f'at least {low}'}")


@dataclass(frozen=True)
class Occupancy:
    """How many such CTAs fit on an SM, which resource is the first to run out, the room that each resource has for them, and the
    arithmetic as text."""

    ctas: int
    limited_by: str
    by_resource: dict[str, int]
    arithmetic: str

    def __str__(self) -> str:
        return f"{self.ctas} CTAs an SM, limited by {self.limited_by} ({self.arithmetic})"


@dataclass(frozen=True)
class Machine:
    """One GPU. An SM has `num_partitions` parts with a share of the registers each, which are given to a warp in multiples of
    `register_unit`; shared memory is given to a CTA in multiples of `smem_unit_bytes`. `clock_hz` is the highest SM clock. `constants`
    are measured: name -> Constant (see cuk/machines/*.json)."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_threads_per_sm: int
    max_threads_per_cta: int
    max_ctas_per_sm: int
    num_partitions: int
    registers_per_sm: int
    register_unit: int
    smem_per_sm_bytes: int
    smem_per_cta_bytes: int
    smem_reserved_per_cta_bytes: int
    smem_unit_bytes: int
    l2_bytes: int
    clock_hz: float
    constants: dict[str, Constant] = field(default_factory=dict)

    @property
    def max_warps_per_sm(self) -> int:
        return self.max_threads_per_sm // 32

    @classmethod
    def load(cls, name: str) -> Machine:
        """A stored machine, e.g. "h200". Raises ValueError listing the stored ones."""
        if name not in stored():
            raise ValueError(f"unknown machine {name!r}: stored ones are {', '.join(stored())}")
        file = resources.files("cuk") / "machines" / f"{name}.json"
        return cls.from_json(json.loads(file.read_text()), f"machines/{name}.json")

    @classmethod
    def from_json(cls, given: dict[str, Any], where: str = "machine") -> Machine:
        """From a JSON object. Raises ValueError naming the field that is missing, unknown or of the wrong type."""
        known = {f.name: f for f in fields(cls)}
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: is a {type(given).__name__}, must be an object with {', '.join(known)}")
        for name in known:
            if name not in given and name != "constants":
                raise ValueError(f"{where}: field {name!r} is missing")
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{where}: unknown field {name!r}; known ones are {', '.join(known)}")
            wanted = {"name": str, "compute_capability": list, "clock_hz": (int, float), "constants": dict}.get(name, int)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{where}: field {name!r} is {value!r}, which is no {getattr(wanted, '__name__', 'number')}")
            if wanted in (int, (int, float)):
                most = _MOST.get(name, 2**40 if name.endswith("_bytes") else 2**20)
                if not 0 < value <= most:
                    raise ValueError(f"{where}: field {name!r} is {value!r}, must be positive and at most {most}")
        if not given["name"] or not given["name"].isprintable():
            raise ValueError(f"{where}: field 'name' is {given['name']!r}, must be printable text")
        for part, whole in (("smem_per_cta_bytes", "smem_per_sm_bytes"), ("max_threads_per_cta", "max_threads_per_sm")):
            if given[part] > given[whole]:
                raise ValueError(f"{where}: field {part!r} is {given[part]}, must be at most {whole!r}, {given[whole]}")
        capability = given["compute_capability"]
        if len(capability) != 2 or not all(type(number) is int and 0 <= number < 1000 for number in capability):
            raise ValueError(f"{where}: field 'compute_capability' is {capability!r}, must be two integers such as [9, 0]")
        constants = {name: _constant(value, f"{where}: constant {name!r}") for name, value in given.get("constants", {}).items()}
        return cls(**{**given, "compute_capability": tuple(capability), "constants": constants})

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
        known = cls.load(name) if name in stored() else None
        # CUDA 13 has no clock rate among a device's properties.
        clock_khz = properties.get("clockRate") or attributes.get("ClockRate")
        if not clock_khz and known is None:
            raise ValueError(
                f"{full}: the driver tells no clock rate, and no stored machine {name!r} does; stored are {', '.join(stored())}"
            )
        return cls(
            name=name,
            compute_capability=(properties["major"], properties["minor"]),
            num_sms=attributes["MultiProcessorCount"],
            max_threads_per_sm=attributes["MaxThreadsPerMultiProcessor"],
            max_threads_per_cta=attributes["MaxThreadsPerBlock"],
            max_ctas_per_sm=properties.get("maxBlocksPerMultiProcessor", attributes.get("MaxBlocksPerMultiprocessor", 32)),
            num_partitions=4,  # of every architecture since Maxwell but GP100 (cuda_occupancy.h)
            registers_per_sm=attributes["MaxRegistersPerMultiprocessor"],
            register_unit=256,
            smem_per_sm_bytes=attributes["MaxSharedMemoryPerMultiprocessor"],
            smem_per_cta_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
            smem_reserved_per_cta_bytes=properties.get("reservedSharedMemPerBlock", 1024),
            smem_unit_bytes=128,
            l2_bytes=attributes["L2CacheSize"],
            clock_hz=clock_khz * 1e3 if clock_khz else known.clock_hz,
            constants=known.constants if known else {},
        )

    def _registers_per_warp(self, footprint: Footprint) -> int:
        return math.ceil(footprint.registers * 32 / self.register_unit) * self.register_unit

    def _smem_per_cta(self, footprint: Footprint) -> int:
        """With the part that the driver keeps for itself in every CTA."""
        return math.ceil((footprint.smem_bytes + self.smem_reserved_per_cta_bytes) / self.smem_unit_bytes) * self.smem_unit_bytes

    def _free_registers(self, residents: Sequence[tuple[Footprint, int]]) -> list[int]:
        """Registers left in each partition of an SM, each warp having gone where most were left. Less than zero: they do not fit."""
        free = [self.registers_per_sm // self.num_partitions] * self.num_partitions
        for resident, count in residents:
            for _ in range(count * math.ceil(resident.threads / 32)):
                free[free.index(max(free))] -= self._registers_per_warp(resident)
        return free

    def admits(self, residents: Sequence[tuple[Footprint, int]], footprint: Footprint) -> Occupancy:
        """How many CTAs of `footprint` an SM admits beside `residents`, pairs of a footprint and a number of CTAs.

        The arithmetic is that of NVIDIA's occupancy calculator (cuda_occupancy.h), here with some of the SM already taken, every
        kernel having the largest shared-memory carve-out. Raises ValueError when the residents themselves do not fit."""
        if footprint.threads > self.max_threads_per_cta or footprint.smem_bytes > self.smem_per_cta_bytes:
            text = f"threads {footprint.threads} of {self.max_threads_per_cta}, shared memory {footprint.smem_bytes} of {self.smem_per_cta_bytes} B"
            return Occupancy(0, "the limits of a CTA", dict.fromkeys(("warps", "registers", "shared memory", "CTA slots"), 0), text)
        free = self._free_registers(residents)
        left = {
            "warps": self.max_warps_per_sm - sum(count * math.ceil(fp.threads / 32) for fp, count in residents),
            "registers": min(0, *free),
            "shared memory": self.smem_per_sm_bytes - sum(count * self._smem_per_cta(fp) for fp, count in residents),
            "CTA slots": self.max_ctas_per_sm - sum(count for _, count in residents),
        }
        for name, amount in left.items():
            if amount < 0:
                raise ValueError(f"the resident CTAs do not fit on an SM: {name} short by {-amount}")
        warps, per_warp, smem = math.ceil(footprint.threads / 32), self._registers_per_warp(footprint), self._smem_per_cta(footprint)
        warps_by_registers = sum(amount // per_warp for amount in free)
        room = {
            "warps": left["warps"] // warps,
            "registers": warps_by_registers // warps,
            "shared memory": left["shared memory"] // smem,
            "CTA slots": left["CTA slots"],
        }
        tightest = min(room, key=room.__getitem__)
        arithmetic = (
            f"warps {left['warps']} / {warps} = {room['warps']}, "
            f"registers for {warps_by_registers} warps of {per_warp} / {warps} = {room['registers']}, "
            f"shared memory {left['shared memory']} / {smem} B = {room['shared memory']}, CTA slots {room['CTA slots']}"
        )
        return Occupancy(room[tightest], tightest, room, arithmetic)

    def occupancy(self, footprint: Footprint) -> Occupancy:
        """How many CTAs of `footprint` fit on an empty SM."""
        return self.admits([], footprint)

    def resident_grid(self, footprint: Footprint) -> int:
        """The largest grid whose CTAs are all resident at once, a multiple of the cluster's size. With clusters an upper bound: a
        cluster needs one GPC, and how many SMs each has differs from chip to chip (cuOccupancyMaxActiveClusters knows)."""
        return self.num_sms * self.occupancy(footprint).ctas // footprint.cluster * footprint.cluster

    def __repr__(self) -> str:
        return f"<Machine {self.name}: {self.num_sms} SMs, {self.smem_per_sm_bytes // 1024} KiB shared memory an SM>"


_MOST = {"num_sms": 4096, "num_partitions": 64, "registers_per_sm": 2**24, "max_ctas_per_sm": 4096, "clock_hz": 1e11}
"""Of fields that are no bytes, and not at most 2^20: more than any GPU has, and little enough to make a list of."""


def _constant(given: Any, where: str) -> Constant:
    """Raises ValueError beginning with `where`."""
    known = [f.name for f in fields(Constant)]
    if not isinstance(given, dict) or sorted(given) != sorted(known):
        raise ValueError(f"{where} is {given!r}, must be an object with {', '.join(known)}")
    for name in ("value", "low", "high"):
        if not isinstance(given[name], (int, float)) or isinstance(given[name], bool) or not -1e300 < given[name] < 1e300:
            raise ValueError(f"{where}: {name} is {given[name]!r}, which is no number")
    for name in ("unit", "source"):
        if not isinstance(given[name], str):
            raise ValueError(f"{where}: {name} is {given[name]!r}, which is no text")
    if not given["low"] <= given["value"] <= given["high"]:
        raise ValueError(f"{where}: value {given['value']} is not between low {given['low']} and high {given['high']}")
    return Constant(**given)


def stored() -> list[str]:
    """The names of the stored machines."""
    return sorted(f.name[:-5] for f in (resources.files("cuk") / "machines").iterdir() if f.name.endswith(".json"))
