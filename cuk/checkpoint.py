"""Hugging Face checkpoints: config.json and safetensors files, checked whole before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuk.task import bfloat16

DTYPES = ("BF16", "F16", "F32")
_CHUNK_BYTES = 1 << 26  # of a tensor at a time


class CheckpointError(ValueError):
    """A file of a checkpoint that is not what it should be: names the file, the tensor or field, what was expected and what was found."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies, its dtype as safetensors names it, and its shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a directory: `model.safetensors`, or the files that `model.safetensors.index.json` names, and its config.json.

    Only headers are read, by the safetensors library, which holds them against the file's size. Raises CheckpointError, and
    FileNotFoundError for a directory without a checkpoint."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileNotFoundError(f"{directory}: no such directory; give one that holds config.json and model.safetensors")
        self.config = read_json(self.directory / "config.json")
        self.tensors: dict[str, Tensor] = {}
        whole, index = self.directory / "model.safetensors", self.directory / "model.safetensors.index.json"
        if whole.exists():
            self._add(whole)
        elif index.exists():
            self._add_sharded(index)
        else:
            raise FileNotFoundError(f"{directory}: neither {whole.name} nor {index.name}; checkpoints in pickle files are not read")

    def _add(self, path: Path) -> None:
        for tensor in _tensors_of(path):
            if tensor.name in self.tensors:
                raise CheckpointError(f"{path}: tensor {tensor.name!r} is in {self.tensors[tensor.name].file.name} too")
            self.tensors[tensor.name] = tensor

    def _add_sharded(self, index: Path) -> None:
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise CheckpointError(f"{index}: field 'weight_map' must give each tensor's file")
        for name in sorted(set(where.values())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index}: file {name!r} must be the name of a safetensors file in the same directory")
            self._add(self.directory / name)
        for name, file in where.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file}, which does not hold it")

    def require(self, shapes: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Raises CheckpointError unless the tensors are those of `shapes` (name -> shape), of a dtype that is read; those that are
        `optional` may be missing. Rotary frequencies, which old checkpoints hold, are computed and may stand there."""
        missing = [name for name in shapes if name not in self.tensors and name not in optional]
        unknown = [name for name in self.tensors if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
        for what, names in (("lacks", missing), ("holds, which config.json does not account for,", unknown)):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise CheckpointError(f"{self.directory}: {what} {', '.join(names[:4])}{more}")
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                continue
            if tensor.shape != tuple(shape):
                raise CheckpointError(f"{tensor.file}: tensor {name!r} has shape {tensor.shape}, by config.json it has {tuple(shape)}")
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, must be one of {', '.join(DTYPES)}")

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor as bf16 (nearest, ties to even), some of its first dimension at a time: (first row, rows)."""
        tensor = self.tensors[name]
        each = max(1, _CHUNK_BYTES // max(1, 4 * int(np.prod(tensor.shape[1:]))))
        with _opened(tensor.file) as file:
            rows = file.get_slice(name)
            for start in range(0, tensor.shape[0], each):
                piece = rows[start : min(start + each, tensor.shape[0])]  # the library takes no end beyond the last
                yield start, np.ascontiguousarray(piece).astype(bfloat16(), copy=False)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.directory}: {len(self.tensors)} tensors in {len({t.file for t in self.tensors.values()})} files>"


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; a checkpoint has one") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, must be an object")
    return found


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file, though the index names it") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file of {path.stat().st_size} bytes ({error})") from None


def _tensors_of(path: Path) -> list[Tensor]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return [Tensor(name, path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()]
