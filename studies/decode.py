"""What does a Llama decode step cost in each execution style, beside the floor and beside others' steps? And a decode loop beside its step?

python studies/decode.py                                  # every part, on the current GPU
python studies/decode.py --part 1b-1024 --part decoded    # some of them
python studies/decode.py --part 1b-1024 --runs graph,pdl  # and of those only some runs
python studies/decode.py --list
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuk.bench import Floor, Table, interleave, measure_floor, results_dir
from cuk.compare import compare, has_gpu
from cuk.decode import Decoder, request
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import decoding, llama
from cuk.record import load_record, source_sha256
from cuk.rivals import RIVALS
from cuk.runs import RUNS, CheckFailed, Run, build, check


@dataclass(frozen=True)
class Part:
    """One program of the study: model, batch, context (one for each sequence, where they differ); further variants; rivals; the bars, run -> most
    times the floor."""

    model: str
    batch: int
    context: int | tuple[int, ...]
    runs: tuple[str, ...] = ("graph", "pdl")
    variants: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    bars: dict[str, float] = field(default_factory=dict)
    repeats: int = 10

    def only(self, names: tuple[str, ...]) -> Part:
        """The part with those of its runs and rivals that are named, and the variants of those runs."""
        kept = {name: (run, switches) for name, (run, switches) in self.variants.items() if run in names}
        runs, rivals = (tuple(name for name in of if name in names) for of in (self.runs, self.rivals))
        return replace(self, runs=runs, variants=kept, rivals=rivals)

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.runs, *self.variants, *self.rivals)

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, context {self.context}; at most, times the floor: {self.bars}"


@dataclass(frozen=True)
class Decoded:
    """Tokens decoded on the device after a prompt, and the same kernels replayed at the mean position; the bar is the mean step over that."""

    model: str
    prompt: int
    tokens: int
    bar: float
    runs: tuple[str, ...] = ("pdl",)
    repeats: int = 10

    def only(self, names: tuple[str, ...]) -> Decoded:
        return replace(self, runs=tuple(run for run in self.runs if run in names))

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.runs, *(f"{run} decoded" for run in self.runs))

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens after {self.prompt}; mean step at most {self.bar} times the replayed one"


ALWAYS = {"pdl no prefetch": ("pdl", {"prefetch": False}), "pdl tile": ("pdl", {"deps": "tile"})}
SWITCHED = {
    **ALWAYS,
    "pdl full ring": ("pdl", {"ctas_per_sm": 1}),  # so large that no successor is admitted early
    "pdl trigger loads": ("pdl", {"trigger": "loads"}),
    "pdl trigger end": ("pdl", {"trigger": "end"}),
}
UNEQUAL = (64, 144, 312, 688, 1520, 3360, 7424, 16384)
TORCH = ("torch_graph",)
PARTS: dict[str, Part | Decoded] = {
    "1b-1024": Part("llama-3.2-1b", 1, 1024, ("stream", "graph", "pdl", "persistent", "loop"), SWITCHED, ("cublas", "torch_graph", "torch_compile"),
                    {"graph": 1.42, "pdl": 1.17, "persistent": 1.12, "loop": 1.10}, repeats=20),
    "1b-16384": Part("llama-3.2-1b", 1, 16384, ("graph", "pdl", "persistent"), ALWAYS, TORCH, {"pdl": 1.20, "persistent": 1.18}),
    "8b-1024": Part("llama-3.1-8b", 1, 1024, ("graph", "pdl", "persistent", "loop"), ALWAYS, TORCH, {"pdl": 1.08, "persistent": 1.06, "loop": 1.06}),
    "1b-16x1024": Part("llama-3.2-1b", 16, 1024, variants=ALWAYS, rivals=TORCH, bars={"pdl": 1.30}),
    "1b-unequal": Part("llama-3.2-1b", 8, UNEQUAL, variants=ALWAYS, rivals=("cublas",), bars={"pdl": 1.30}),  # PyTorch's step takes one context
    "qwen3-8b-1024": Part("qwen3-8b", 1, 1024, variants=ALWAYS, rivals=TORCH, bars={"pdl": 1.08}),
    "qwen3-0.6b-1024": Part("qwen3-0.6b", 1, 1024, variants=ALWAYS, rivals=TORCH, bars={"pdl": 1.25}),
    "decoded": Decoded("llama-3.2-1b", 32, 128, 1.03),
}  # fmt: skip
FASTER_THAN_TORCH_COMPILE = 1.45


def is_done(name: str, part: Part | Decoded) -> bool:
    """Whether the record has this part's rows, measured from these very sources."""
    path = results_dir() / Machine.from_device().name / "decode.json"
    try:
        rows = load_record(path)["rows"]
    except (FileNotFoundError, ValueError):  # saving puts a broken one aside
        return False
    found = {row["run"] for row in rows if row.get("part") == name and row.get("source_sha256") == source_sha256()}
    return set(part.rows) <= found


# ---- a step ----
def run(name: str, part: Part | Decoded, floor: Floor, quick: bool) -> Any:
    """Checks and times one part; returns its table. Its runs' rows are recorded before any rival is set up."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        repeats = 5 if quick else part.repeats
        if isinstance(part, Decoded):
            return marked(name, part, decoded(part, floor, repeats, status.update))
        table = compare(llama(part.model, batch=part.batch, context=part.context), part.runs, variants=part.variants, rivals=part.rivals, study="decode",
                        floor=floor, repeats=repeats, progress=status.update,
                        on_runs=None if quick else lambda table: marked(name, part, table).save())  # fmt: skip
    return marked(name, part, table)


def marked(name: str, part: Part | Decoded, table: Any) -> Any:
    """The table, whose rows say the part that they are of, and their bar."""
    for row in table.rows:
        row["part"] = name
        if isinstance(part, Part):
            row["at_most"] = part.bars.get(row["run"])
        elif row["run"] != table.baseline:
            row["at_most_to_baseline"] = part.bar
    return table


# ---- a decode loop ----
class Steps:
    """`count` steps of a run as one call, which is what is timed."""

    def __init__(self, run: Run, count: int, call: Callable[[], Any] | None = None):
        self.run, self.count, self.call = run, count, call

    def __call__(self) -> None:
        if self.call:
            self.call()
            return
        for _ in range(self.count):
            self.run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


def decoded(part: Decoded, floor: Floor, repeats: int, progress: Callable[[str], None]) -> Table:
    """A row for each run's step, replayed at the mean position of the loop, and one for the mean step of its loop, from the request to the last
    token on the host. Raises CheckFailed where the loop's tokens are not those that the host chooses step by step."""
    capacity = part.prompt + part.tokens
    step = llama(part.model, context=capacity - 1, capacity=capacity)
    prompts = [np.random.default_rng(0).integers(0, step.meta["vocab"], part.prompt).tolist()]
    asked = request(decoding(step), prompts, part.tokens)
    (mean,) = asked.mean_contexts(asked.steps, 1)
    progress("building and checking")
    replayed = checked_runs(step, part.runs, mean)
    looped = checked_runs(decoding(step), part.runs, mean, buffers=replayed["stream"].buffers)
    timed: dict[str, Steps] = {}
    for name in part.runs:
        progress(f"decoding with {name}")
        decoder = Decoder(looped[name])
        require_tokens(name, decoder.decode(prompts, part.tokens)[0], by_host(replayed[name], prompts[0], part.tokens))
        replayed[name].buffers["positions"][...] = mean
        timed[name] = Steps(replayed[name], asked.steps)
        timed[f"{name} decoded"] = Steps(looped[name], asked.steps, functools.partial(decoder.decode, prompts, part.tokens))
    total = repeats * len(timed)
    done = iter(range(1, total + 1))
    measurement = interleave(
        timed, baseline=part.runs[0], repeats=repeats, inner=1, warmup=1, progress=lambda _: progress(f"timing, {next(done)} of {total}")
    )
    measurement = replace(measurement, samples={name: samples / asked.steps for name, samples in measurement.samples.items()})
    table = Table("decode", part.runs[0])
    table.add(
        measurement, floor=floor, program=llama(part.model, context=mean), batch=1, context=mean, prompt=part.prompt, tokens=part.tokens
    )
    return table


def checked_runs(program: Program, names: tuple[str, ...], position: int, buffers: Mapping[str, Any] | None = None) -> dict[str, Run]:
    """Runs that share their weights, checked at `position`; `stream` is among them."""
    runs = {"stream": build(program, "stream", buffers=buffers)}
    runs["stream"].buffers["positions"][...] = position
    runs |= {name: build(program, name, buffers=runs["stream"].buffers) for name in names if name != "stream"}
    check(runs)
    return runs


def by_host(run: Run, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens with the host in the loop."""
    known = list(prompt)
    for position in range(len(prompt) + tokens - 1):
        run.buffers["tokens"][...], run.buffers["positions"][...] = known[position], position
        run()
        run.synchronize()
        if position == len(known) - 1:
            known.append(int(run.buffers["next_tokens"][0]))
    return known[len(prompt) :]


def require_tokens(name: str, found: list[int], expected: list[int]) -> None:
    if found != expected:
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
        raise CheckFailed(
            f"{name}: token {at} of the loop is {found[at : at + 1]}, the host chooses {expected[at : at + 1]} ({len(found)} and {len(expected)} tokens)"
        )


# ---- what came of it ----
def verdicts(part: Part | Decoded, rows: list[dict[str, Any]]) -> list[str]:
    """A line for each bar: met, missed, not measured or not valid, with the number."""
    by_run = {row["run"]: row for row in rows if row["median_us"] is not None}
    if isinstance(part, Decoded):
        bars = [(f"{run} decoded", part.bar, run) for run in part.runs]
    else:
        bars = [(run, most, "floor") for run, most in part.bars.items()]
    lines = []
    for name, most, of in bars:
        if name not in by_run:
            lines.append(f"not measured: {name}, at most {most} x {of}")
            continue
        row = by_run[name]
        ratio = row["ratio_to_floor"] if of == "floor" else row["median_us"] / by_run[of]["median_us"]
        verdict = f"NOT VALID ({row['invalid']})" if row["invalid"] else "met" if ratio <= most else "MISSED"
        lines.append(f"{verdict}: {name} {ratio:.3f} x {of}, at most {most}")
    if "torch_compile" in by_run and "pdl" in by_run:
        ratio, least = by_run["torch_compile"]["median_us"] / by_run["pdl"]["median_us"], FASTER_THAN_TORCH_COMPILE
        lines.append(f"{'met' if ratio >= least else 'MISSED'}: pdl {ratio:.2f} times as fast as torch.compile, at least {least}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given again)")
    parser.add_argument("--runs", metavar="RUN,RUN…", help="only these runs of each part, with their variants, and rivals")
    parser.add_argument("--again", action="store_true", help="measure parts again that the record has from these sources")
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 10 or 20, for a look: nothing is recorded")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--list", action="store_true", help="list the parts and their bars")
    given = parser.parse_args()
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:16s} {part}")
        return 0
    runs = tuple(dict.fromkeys(run for part in PARTS.values() for run in part.runs))
    every = (*runs, *RIVALS)
    wanted = tuple(given.runs.split(",")) if given.runs else every
    if unknown := [name for name in wanted if name not in every]:
        print(f"studies/decode.py: unknown run {', '.join(unknown)}: the parts have {', '.join(every)}", file=sys.stderr)
        return 2
    if not has_gpu():
        print("studies/decode.py: no GPU (or no CuPy) here, and a study only measures; `cuk doctor` says what is missing", file=sys.stderr)
        return 1
    # With --json standard output is one JSON document.
    say = functools.partial(print, file=sys.stderr if given.json else sys.stdout, flush=True)
    missing = [run for run in runs if run in wanted and run not in RUNS]
    for run_name in missing:
        say(f"{run_name}: left out, since cuk has no run of this name (it has {', '.join(RUNS)})")
    floor, rows, failed = None, [], []
    for name in given.part or PARTS:
        part = PARTS[name].only(tuple(row for row in wanted if row not in missing))
        if not part.runs:
            say(f"{name}: has none of {', '.join(wanted)}")
            continue
        if not given.again and not given.quick and is_done(name, part):
            say(f"{name}: the record has it from these sources (--again measures anew)")
            continue
        try:
            floor = floor or measure_floor()
            table = run(name, part, floor, given.quick)
            where = "quick: not recorded" if given.quick else f"record: {table.save()}"
        except Exception as error:  # the other parts have their own programs; what was recorded stays
            failed.append(name)
            say(f"{name}: FAILED: {type(error).__name__}: {error}")
        else:
            rows += table.rows
            if not given.json:
                table.print()
            for line in (*verdicts(part, table.rows), where):
                say(f"{name}: {line}")
        release_memory()
    if given.json:
        print(json.dumps(rows, indent=1))
    if failed:
        say(f"failed: {', '.join(failed)}; --part takes one alone, --runs leaves runs out")
    return 1 if failed else 0


def release_memory() -> None:
    """Gives what the part before took back to the driver: the next checks how much is free."""
    import cupy

    gc.collect()
    with suppress(Exception):  # after a fault of the GPU nothing can be given back
        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
