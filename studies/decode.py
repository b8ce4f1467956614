"""What does a Llama decode step cost as separate kernels, in three launch styles, beside the floor and beside others' steps?

python studies/decode.py                     # every part, on the current GPU
python studies/decode.py --part 1b-1024      # one of them
python studies/decode.py --list
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuk.bench import Floor, measure_floor, results_dir
from cuk.compare import compare, has_gpu
from cuk.machine import Machine
from cuk.programs import llama
from cuk.record import load_record, source_sha256


@dataclass(frozen=True)
class Part:
    """One program of the study: model, batch, context; further variants; rivals; the bars, run -> most times the floor."""

    model: str
    batch: int
    context: int
    runs: tuple[str, ...] = ("stream", "graph", "pdl")
    variants: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    bars: dict[str, float] = field(default_factory=dict)
    repeats: int = 20


ALWAYS = {"pdl no prefetch": ("pdl", {"prefetch": False}), "pdl tile": ("pdl", {"deps": "tile"})}
SWITCHED = {
    **ALWAYS,
    "pdl full ring": ("pdl", {"ctas_per_sm": 1}),  # so large that no successor is admitted early
    "pdl trigger loads": ("pdl", {"trigger": "loads"}),
    "pdl trigger end": ("pdl", {"trigger": "end"}),
}
PARTS = {
    "1b-1024": Part(
        "llama-3.2-1b", 1, 1024, variants=SWITCHED, rivals=("cublas", "torch_graph", "torch_compile"), bars={"graph": 1.42, "pdl": 1.17}
    ),
    "1b-16384": Part(
        "llama-3.2-1b", 1, 16384, runs=("graph", "pdl"), variants=ALWAYS, rivals=("torch_graph",), bars={"pdl": 1.20}, repeats=10
    ),
    "8b-1024": Part(
        "llama-3.1-8b", 1, 1024, runs=("graph", "pdl"), variants=ALWAYS, rivals=("torch_graph",), bars={"pdl": 1.08}, repeats=10
    ),
}
FASTER_THAN_TORCH_COMPILE = 1.45


def is_done(part: Part) -> bool:
    """Whether the record has this part's rows, measured from these very sources."""
    path = results_dir() / Machine.from_device().name / "decode.json"
    if not path.exists():
        return False
    wanted = {*part.runs, *part.variants, *part.rivals}
    found = {
        row["run"] for row in load_record(path)["rows"]
        if row["program"] == part.model and row.get("source_sha256") == source_sha256()
        and (row["settings"].get("batch"), row["settings"].get("context")) == (part.batch, part.context)
    }  # fmt: skip
    return wanted <= found


def run(part: Part, floor: Floor, quick: bool) -> Any:
    """Checks and times one part; returns its table. Its runs' rows are recorded before any rival is set up."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        table = compare(llama(part.model, batch=part.batch, context=part.context), part.runs, variants=part.variants, rivals=part.rivals, study="decode",
                        floor=floor, repeats=5 if quick else part.repeats, progress=status.update,
                        on_runs=None if quick else lambda table: with_bars(part, table).save())  # fmt: skip
    return with_bars(part, table)


def with_bars(part: Part, table: Any) -> Any:
    for row in table.rows:
        row["at_most"] = part.bars.get(row["run"])
    return table


def verdicts(part: Part, rows: list[dict[str, Any]]) -> list[str]:
    """A line for each bar: met or missed, with the number."""
    by_run = {row["run"]: row for row in rows if row["median_us"] is not None}
    lines = [
        f"{'met' if by_run[name]['ratio_to_floor'] <= bar else 'MISSED'}: {name} {by_run[name]['ratio_to_floor']:.3f} x floor, at most {bar}"
        for name, bar in part.bars.items()
    ]
    if "torch_compile" in by_run:
        ratio = by_run["torch_compile"]["median_us"] / by_run["pdl"]["median_us"]
        lines.append(
            f"{'met' if ratio >= FASTER_THAN_TORCH_COMPILE else 'MISSED'}: pdl {ratio:.2f} times as fast as torch.compile, at least {FASTER_THAN_TORCH_COMPILE}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given again)")
    parser.add_argument("--again", action="store_true", help="measure parts again that the record has from these sources")
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 10 or 20, for a look: nothing is recorded")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--list", action="store_true", help="list the parts and their bars")
    given = parser.parse_args()
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:10s} {part.model}, batch {part.batch}, context {part.context}; bars {part.bars}")
        return 0
    if not has_gpu():
        print("studies/decode.py: no GPU (or no CuPy) here, and a study only measures; `cuk doctor` says what is missing", file=sys.stderr)
        return 1
    floor, rows = None, []
    # With --json standard output is one JSON document.
    say = functools.partial(print, file=sys.stderr if given.json else sys.stdout, flush=True)
    for name in given.part or PARTS:
        part = PARTS[name]
        if not given.again and not given.quick and is_done(part):
            say(f"{name}: the record has it from these sources (--again measures anew)")
            continue
        floor = floor or measure_floor()
        table = run(part, floor, given.quick)
        rows += table.rows
        if not given.json:
            table.print()
        for line in verdicts(part, table.rows):
            say(f"{name}: {line}")
        say("quick: not recorded" if given.quick else f"record: {table.save()}")
        release_memory()
    if given.json:
        print(json.dumps(rows, indent=1))
    return 0


def release_memory() -> None:
    """Gives what the part before took back to the driver: the next checks how much is free."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
