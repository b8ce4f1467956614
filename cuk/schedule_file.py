"""The form of a schedule's file, checked: what is not one is refused by the field's name, and costs no more memory than its text."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NONE = -1
"""In a word: no instruction (opcode), no counter (signal, wait)."""
FORMAT = "cuk-schedule-1"
MAX_FILE_BYTES = 1 << 28
"""A step of Llama-3.1-8B takes 4 MB."""
MAX_OPS = 8192
MAX_WAITS = 64
"""Of an instruction as a file may announce them; where one has more, as many as that."""
MAX_TEXT = 2000
FINGERPRINT = ("machine", "program", "layout")

_TYPES = {
    "format": str, "program": str, "machine": str, "scheduler": str, "deps": str, "spec": dict, "limits": dict, "fingerprint": dict,
    "ops": list, "num_sms": int, "num_counters": int, "teams": int, "stages": int, "dynamic": bool, "num_waits": int, "queues": list,
}  # fmt: skip
_KINDS = {str: "text", dict: "an object", list: "a list", int: "a whole number from 0", bool: "true or false"}
HEADER = tuple(name for name in _TYPES if name not in ("format", "queues"))


def short(value: Any) -> str:
    """A value as errors show it: of a large one the beginning."""
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxlist, shown.maxdict, shown.maxstring, shown.maxother = 3, 8, 4, 60, 60
    try:
        text = shown.repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        text = f"a {type(value).__name__} of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(path: str | os.PathLike) -> Any:
    """What a JSON file says. Raises ValueError for one that is too large or nested too deeply, is not JSON or UTF-8, has NaN, Infinity or a
    key twice; OSError where it cannot be read."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is no number")

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise ValueError(f"{short(name)} appears twice in an object")
            made[name] = value
        return made

    content = bytearray()
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):  # a read of as much as is allowed takes that memory first
            content += piece
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"{path}: is larger than {MAX_FILE_BYTES} bytes, which no schedule is")
    try:
        return json.loads(content.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path}: not JSON of a schedule (nested too deeply); make the schedule again") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: not JSON ({error}); make the schedule again") from error


def check_fields(given: Any, names: Iterable[str], where: str) -> None:
    """Raises ValueError, beginning with `where`, naming a field of `names` that is missing or of the wrong type, or one that is not among them."""
    names = tuple(names)
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: is a {type(given).__name__}, must be an object with {', '.join(names)}")
    for name in names:
        kind = _TYPES[name]
        if name not in given:
            raise ValueError(f"{where}: field {name!r} is missing; make the schedule again")
        if not isinstance(given[name], kind) or (kind is int and not is_count(given[name])):
            raise ValueError(
                f"{where}: field {name!r} is {short(given[name])}, must be {_KINDS[kind]}{' below 2^31' if kind is int else ''}"
            )
        if kind is str and not is_text(given[name]):
            raise ValueError(f"{where}: field {name!r} is {short(given[name])}, must be printable text of at most {MAX_TEXT} characters")
    if unknown := sorted(short(name) for name in set(given) - set(names)):
        raise ValueError(f"{where}: unknown field {', '.join(unknown[:8])}; the fields are {', '.join(names)}")
    if "format" in names and given["format"] != FORMAT:
        raise ValueError(f"{where}: field 'format' is {short(given['format'])}, must be {FORMAT!r}")
    if len(given["ops"]) > MAX_OPS:
        raise ValueError(f"{where}: field 'ops' has {len(given['ops'])} ops, must have at most {MAX_OPS}")
    for i, row in enumerate(given["ops"]):
        if not (isinstance(row, list) and len(row) == 4 and all(is_text(text) for text in row[:3]) and is_count(row[3])):
            raise ValueError(f"{where}: field 'ops[{i}]' is {short(row)}, must be [name, kind, struct, number of tasks]")
    for name, digest in given["fingerprint"].items():
        if name not in FINGERPRINT or not is_text(digest):
            raise ValueError(
                f"{where}: field 'fingerprint' has {short(name)}: {short(digest)}, must have a text for each of {', '.join(FINGERPRINT)}"
            )


def check_queues(given: Mapping[str, Any], where: str) -> tuple[list[int], list[list[int]]]:
    """(where each queue starts, instructions as rows of one length), from fields that `check_fields` has passed. Raises ValueError, beginning
    with `where`, naming the queue or the instruction that is wrong."""
    queues, counters = given["queues"], given["num_counters"]
    sizes = [row[3] for row in given["ops"]]
    if not queues:
        raise ValueError(f"{where}: field 'queues' is empty, must have a queue for each SM, or one for all")
    longest = max((len(row) for queue in queues if isinstance(queue, list) for row in queue if isinstance(row, list)), default=3)
    if given["num_waits"] > max(MAX_WAITS, (longest - 2) // 2):
        raise ValueError(f"{where}: field 'num_waits' is {given['num_waits']}, but no instruction has so many waits")
    width = 3 + 2 * given["num_waits"]
    flat: list[list[int]] = []
    starts = [0]
    for q, queue in enumerate(queues):
        if not isinstance(queue, list):
            raise ValueError(f"{where}: field 'queues[{q}]' is {short(queue)}, must be a list of instructions")
        for i, row in enumerate(queue):
            if why := _wrong(row, width, sizes, counters):
                raise ValueError(f"{where}: field 'queues[{q}][{i}]' is {short(row)}{why}")
            flat.append(row + [NONE] * (width - len(row)))
        starts.append(len(flat))
    return starts, flat


def _wrong(row: Any, width: int, sizes: list[int], counters: int) -> str | None:
    if not isinstance(row, list) or any(type(word) is not int or not NONE <= word < 2**31 for word in row):
        return ", must be a list of whole numbers, -1 where there is none"
    if len(row) < 3 or len(row) % 2 == 0 or len(row) > width:
        return f", must be [op, task, signal] and up to {(width - 3) // 2} times counter, threshold"
    if not 0 <= row[0] < len(sizes) or not 0 <= row[1] < sizes[row[0]]:
        return ": there is no such op or task"
    if max(row[2], *row[3::2], NONE) >= counters:
        return f": there are {counters} counters"
    return None


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()
