"""The command line: `cuk compare PROGRAM`, `cuk doctor`. Exit code 0: done; 1: a run is impossible or failed its check; 2: bad usage."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cuk.compare import RUNS, compare, has_gpu, size_up
from cuk.doctor import examine
from cuk.program import Program
from cuk.programs import MODELS, chain, llama
from cuk.programs.chain import LLAMA_1B
from cuk.rivals import RIVALS
from cuk.runs import RUNS as KNOWN_RUNS
from cuk.runs import CheckFailed

PROGRAMS = (*MODELS, "chain")

EXAMPLES = {
    "compare": """examples:
  cuk compare llama-3.2-1b
  cuk compare llama-3.2-1b --context 16384 --runs graph,pdl
  cuk compare llama-3.2-1b --context 64,512,4096,16384
  cuk compare llama-3.1-8b --batch 4 --rivals torch_graph,torch_compile
  cuk compare chain --json""",
    "doctor": """examples:
  cuk doctor
  cuk doctor --json""",
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(prog="cuk", description="One chain of GPU operators in every execution style, compared.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=EXAMPLES[name], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.add_argument("--json", action="store_true", help="print JSON instead of tables")
        return made

    c = command("compare", "Time a program in several runs beside the measured floor; without a GPU, size it up on a stored machine.")
    c.add_argument("program", metavar="PROGRAM", help=f"one of {', '.join(PROGRAMS)}")
    c.add_argument("--batch", type=int, help="sequences, 1 to 16 (default: as many as contexts are given)")
    c.add_argument(
        "--context", default="1024", metavar="N[,N…]", help="tokens already in the KV cache, for all sequences or for each (default 1024)"
    )
    c.add_argument(
        "--runs",
        default=",".join(RUNS),
        help=f"comma-separated, of {', '.join(r for r in KNOWN_RUNS if r != 'reference')} (default %(default)s)",
    )
    c.add_argument(
        "--rivals",
        default="auto",
        help=f"comma-separated, of {', '.join(RIVALS)}; or none (default: cublas, and torch_graph where torch is installed)",
    )
    c.add_argument("--repeats", type=int, default=20, help="rounds of interleaved timing (default 20)")
    c.add_argument("--seed", type=int, default=0, help="of the random weights and of the order (default 0)")
    c.add_argument("--device", type=int, help="CUDA device (default: the current one)")
    c.add_argument("--machine", default="h200", help="stored machine to size the program up on without a GPU (default h200)")
    command("doctor", "Say what this machine has and lacks for the runs, and how to get it.")
    return top


def program_of(name: str, batch: int | None, context: str) -> Program:
    """The program of that name. Raises ValueError listing the known ones, or for a context that is no number."""
    try:
        contexts = [int(part) for part in context.split(",")]
    except ValueError:
        raise ValueError(f"--context {context!r}: must be a number, or one for each sequence with commas between them") from None
    if name == "chain":
        return chain(LLAMA_1B, batch=batch or 1, layers=16)
    if name in MODELS:
        return llama(name, batch=batch or len(contexts), context=contexts if len(contexts) > 1 else contexts[0])
    raise ValueError(f"unknown program {name!r}: known ones are {', '.join(PROGRAMS)}")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = parser().parse_args(arguments)
    try:
        return {"compare": run_compare, "doctor": run_doctor}[given.command](given)
    except (ValueError, RuntimeError, MemoryError, CheckFailed, ImportError) as error:
        print(f"cuk {given.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print(f"cuk {given.command}: interrupted; nothing was written", file=sys.stderr)
        return 130


def _names(text: str, known: Any, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}: known ones are {', '.join(known)}")
    return names


def run_compare(given: argparse.Namespace) -> int:
    program = program_of(given.program, given.batch, given.context)
    runs = _names(given.runs, [r for r in KNOWN_RUNS if r != "reference"], "run")
    rivals = None if given.rivals == "auto" else _names("" if given.rivals == "none" else given.rivals, RIVALS, "rival")
    if not runs:
        raise ValueError(f"--runs {given.runs!r} names no run: give some of {', '.join(RUNS)}")
    if given.repeats < 1:
        raise ValueError(f"--repeats {given.repeats}: must be at least 1")
    if not has_gpu():
        sizes = size_up(program, given.machine)
        if given.json:
            print(json.dumps(sizes.to_json(), indent=1))
        else:
            sizes.print()
        return 0
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        table = compare(program, runs, rivals=rivals, repeats=given.repeats, seed=given.seed, device=given.device, progress=status.update)
    if given.json:
        print(json.dumps(table.record(), indent=1))
    else:
        table.print()
    return 0


def run_doctor(given: argparse.Namespace) -> int:
    findings = examine()
    possible = all(f.ok for f in findings if f.needed)
    if given.json:
        print(json.dumps({"possible": possible, "findings": [vars(f) for f in findings]}, indent=1))
        return 0 if possible else 1
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="cuk doctor", title_justify="left", header_style="bold")
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for f in findings:
        mark = "[green]yes[/green]" if f.ok else "[red]no[/red]" if f.needed else "[yellow]no[/yellow]"
        table.add_row(mark, f.what, escape(f.found), escape(f.remedy))
    console = Console()
    console.print(table)
    console.print("every run is possible" if possible else "GPU runs are impossible until what is marked [red]no[/red] is there")
    return 0 if possible else 1
