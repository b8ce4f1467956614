"""Records of measurements: JSON files that say what was measured, on what, from which sources; written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuk.compile import cuda_src

FIELDS = ("study", "machine", "driver", "cuda", "cupy", "commit", "source_sha256", "date", "settings", "rows")
TEXTS = ("study", "machine", "driver", "cuda", "cupy", "source_sha256", "date")
ROW_FIELDS = ("program", "run", "settings", "median_us", "iqr_us", "floor_us", "ratio_to_floor", "checked")
TIMES = ("median_us", "iqr_us", "ratio_to_floor")
POSITIVE = ("median_us", "floor_us", "ratio_to_floor")


def source_sha256() -> str:
    """SHA-256 over the sorted files of cuda_src/ and cuk/ (relative path and content): what a record was measured from."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for name, folder in (("cuda_src", cuda_src()), ("cuk", package)):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in (".py", ".cuh", ".cu", ".json") and "_cuda_src" not in path.relative_to(folder).parts:
                content = path.read_bytes()
                digest.update(f"{name}/{path.relative_to(folder).as_posix()}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def commit() -> str | None:
    """The commit that the package is checked out at, with "+" when files differ from it; None outside git."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(folder), str(folder.parent / "cuda_src")) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, Any]:
    """The machine's key ("h200"), driver, CUDA and CuPy versions and the commit. Needs CuPy and a GPU."""
    import cupy

    from cuk.machine import Machine

    driver = "unknown"
    with contextlib.suppress(OSError, IndexError):
        driver = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    if driver == "unknown" or not driver[:1].isdigit():
        with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    version = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "machine": Machine.from_device(cupy.cuda.Device().id).name,
        "driver": driver,
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "cupy": cupy.__version__,
        "commit": commit(),
    }


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def validate(record: Mapping[str, Any], where: str = "record") -> None:
    """Raises ValueError naming the field of a record, or of one of its rows, that is missing or of the wrong kind."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: is a {type(record).__name__}, must be an object with {', '.join(FIELDS)}")
    _require(record, FIELDS, where)
    for name in TEXTS:
        if not isinstance(record[name], str):
            raise ValueError(f"{where}: field {name!r} is {record[name]!r}, must be text")
    if not isinstance(record["commit"], (str, type(None))):
        raise ValueError(f"{where}: field 'commit' is {record['commit']!r}, must be text, or null outside git")
    if not isinstance(record["rows"], list):
        raise ValueError(f"{where}: field 'rows' must be a list")
    for i, row in enumerate(record["rows"]):
        _require(row, ROW_FIELDS, f"{where}: rows[{i}]")
        failed = bool(row.get("invalid")) and all(row[name] is None for name in TIMES)  # could not be set up; `invalid` says why
        for name in ("floor_us",) if failed else (*POSITIVE, "iqr_us"):
            value = row[name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name in POSITIVE and value == 0):
                raise ValueError(
                    f"{where}: rows[{i}]: field {name!r} is {value!r}, must be a finite number {'above' if name in POSITIVE else 'from'} 0"
                )
        if not isinstance(row["settings"], Mapping):
            raise ValueError(f"{where}: rows[{i}]: field 'settings' is {row['settings']!r}, must be an object")
        if not isinstance(row["checked"], (str, type(None))):
            raise ValueError(f"{where}: rows[{i}]: field 'checked' is {row['checked']!r}, must say how, or be null")


def _require(given: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in given:
            raise ValueError(f"{where}: field {name!r} is missing")


def write_record(path: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Writes a record to `path`: to a file beside it first, which then takes its name. A killed run leaves the old record whole.

    Raises ValueError for a record that `validate` refuses, and for a NaN or infinity anywhere in it, which JSON does not have."""
    validate(record, str(path))
    try:
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{path}: a value of the record cannot be written as JSON ({error})") from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_record(path: str | os.PathLike) -> dict[str, Any]:
    """A record from its file. Raises ValueError naming what is wrong with it."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: not JSON ({error}); remove it and run the study again") from error
    validate(record, str(path))
    return record
