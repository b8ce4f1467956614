"""The command line: `cuk compare PROGRAM`, `cuk decode`, `cuk fidelity`, `cuk schedule PROGRAM`, `cuk check FILE`, `cuk doctor`. Exit code 0: done; 1: a
run is impossible, failed its check, a schedule is refused, or a file is missing; 2: bad usage, or a file that is not what it should be."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuk.bench import UNSAFE, is_unsafe, measure_floor, setting_text
from cuk.compare import RUNS, compare, has_gpu, size_up
from cuk.counters import DEPS, SIGNALS
from cuk.decode import Decoder, Request, request
from cuk.doctor import examine
from cuk.fidelity import POSITIONS, fidelity, prompts_for, require_transformers
from cuk.launch import gpu_missing
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import MODELS, chain, decoding, llama, rebuild
from cuk.programs.chain import LLAMA_1B
from cuk.programs.decoding import bytes_at
from cuk.rivals import RIVALS
from cuk.runs import RUNS as KNOWN_RUNS
from cuk.runs import CheckFailed, build
from cuk.schedule import Schedule
from cuk.schedule_file import short
from cuk.schedulers import SCHEDULERS
from cuk.switches import add_options, given_switches, refuse_values, switches_of
from cuk.text import Spelled, Speller, stop_tokens
from cuk.validate import Refused, validate

PROGRAMS = (*MODELS, "chain")

EXAMPLES = {
    "compare": """examples:
  cuk compare llama-3.2-1b
  cuk compare llama-3.2-1b --context 16384 --runs graph,pdl
  cuk compare llama-3.2-1b --context 64,512,4096,16384
  cuk compare llama-3.1-8b --batch 4 --rivals torch_graph,torch_compile
  cuk compare llama-3.2-1b --runs graph,pdl,persistent --scheduler balanced --deps tile --teams 2
  cuk compare chain --json""",
    "decode": """examples:
  cuk decode --model ~/models/Llama-3.2-1B --prompt "The capital of France is" --tokens 32
  cuk decode --model ~/models/Qwen3-0.6B --prompt "Once upon" --prompt "In the year" --temperature 0.8 --top-p 0.95 --seed 7
  cuk decode --model llama-3.2-1b --ids 1,2,3 --tokens 128 --run graph --json
  cuk decode --model llama-3.2-1b --ids 1,2,3 --run persistent --scheduler critical_path
  cuk decode --model ./tiny --ids 1 --tokens 8 --run reference""",
    "fidelity": """examples:
  cuk fidelity --model ~/models/Llama-3.2-1B
  cuk fidelity --model ~/models/Qwen3-0.6B --run graph --positions 32 --prompt "$(cat page.txt)" --prompt "$(cat other.txt)"
  cuk fidelity --model ./tiny --run reference --json""",
    "schedule": """examples:
  cuk schedule llama-3.2-1b -o 1b.json
  cuk schedule llama-3.1-8b --scheduler balanced --deps tile --context 4096 -o 8b.json
  cuk schedule chain --scheduler waves --num-sms 66 --teams 3 -o chain.json --json""",
    "check": """examples:
  cuk check 1b.json
  cuk check 1b.json --machine h200 --json""",
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
    _add_program(c)
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
    add_options(c)
    c.add_argument("--repeats", type=int, default=20, help="rounds of interleaved timing (default 20)")
    c.add_argument("--seed", type=int, default=0, help="of the random weights and of the order (default 0)")
    c.add_argument("--device", type=int, help="CUDA device (default: the current one)")
    c.add_argument("--machine", default="h200", help="stored machine to size the program up on without a GPU (default h200)")
    d = command("decode", "Decode text or tokens with a model's decode step: the loop stays on the GPU.")
    d.add_argument("--model", required=True, help=f"directory of a Hugging Face checkpoint, or random weights: {', '.join(MODELS)}")
    d.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to go on with; several are decoded together")
    d.add_argument("--ids", action="append", default=[], metavar="N,N…", help="the same as tokens, for which no tokenizer is needed")
    d.add_argument("--tokens", type=int, default=128, help="tokens to decode after each prompt (default 128)")
    d.add_argument("--run", default="pdl", help=f"one of {', '.join(KNOWN_RUNS)} (default pdl); reference needs no GPU")
    add_options(d)
    d.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    d.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that have this share (default 1: all)")
    d.add_argument("--seed", type=int, default=0, help="of the draws, and of random weights (default 0)")
    d.add_argument("--stop", metavar="N,N…|none", help="tokens that end a text (default: the checkpoint's eos_token_id)")
    d.add_argument("--capacity", type=int, help="rows of the KV cache (default: as many as the longest prompt and --tokens need)")
    d.add_argument("--device", type=int, help="CUDA device (default: the current one)")
    c = command(
        "fidelity", "Hold a run's logits against a float32 run of the checkpoint, beside transformers' own in bf16; exit 1 if it errs more."
    )
    c.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    c.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text longer than --positions (default: eight passages)")
    c.add_argument(
        "--ids", action="append", default=[], metavar="N,N…", help="the same as tokens (without a tokenizer the default is random ones)"
    )
    c.add_argument("--positions", type=int, default=POSITIONS, help="of each prompt that are looked at (default %(default)s)")
    c.add_argument("--batch", type=int, default=1, help="prompts that go through a step together, 1 to 16 (default 1)")
    c.add_argument("--run", default="pdl", help=f"one of {', '.join(KNOWN_RUNS)} (default pdl); reference needs no GPU")
    c.add_argument("--seed", type=int, default=0, help="of random prompts and of the bootstrap (default 0)")
    c.add_argument("--device", type=int, help="CUDA device (default: the current one)")
    c = command("schedule", "Make a schedule of a program, prove it, and write it to a file.")
    _add_program(c)
    c.add_argument("--scheduler", default="round_robin", help=f"one of {', '.join(SCHEDULERS)} (default %(default)s)")
    c.add_argument("--deps", default="op", help=f"what a task waits for, {' or '.join(DEPS)} (default %(default)s)")
    c.add_argument(
        "--signals", default="task", help=f"who signals, every {SIGNALS[0]} or the {SIGNALS[1]} of a queue (default %(default)s)"
    )
    c.add_argument("--num-sms", type=int, help="SMs to use (default: all)")
    c.add_argument("--teams", type=int, default=2, help="teams of warps in a CTA (default 2)")
    c.add_argument("--stages", type=int, help="stages of each team's ring (default: as many as fit)")
    c.add_argument("--machine", default="h200", help="stored machine to schedule for (default h200)")
    c.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write it, as JSON")
    c = command(
        "check", "Prove that a schedule computes its program: each task once, no deadlock, no race, within the machine's resources."
    )
    c.add_argument("file", metavar="FILE", help="a schedule as `cuk schedule` writes it")
    c.add_argument("--machine", help="stored machine that it must be for (default: the one in the file)")
    command("doctor", "Say what this machine has and lacks for the runs, and how to get it.")
    return top


def _add_program(c: argparse.ArgumentParser) -> None:
    c.add_argument("program", metavar="PROGRAM", help=f"one of {', '.join(PROGRAMS)}")
    c.add_argument("--batch", type=int, help="sequences, 1 to 16 (default: as many as contexts are given)")
    c.add_argument(
        "--context", default="1024", metavar="N[,N…]", help="tokens already in the KV cache, for all sequences or for each (default 1024)"
    )


def program_of(name: str, batch: int | None, context: str) -> Program:
    """The program of that name. Raises ValueError listing the known ones, or for a context that is no number."""
    try:
        contexts = [int(part) for part in context.split(",")]
    except ValueError:
        raise ValueError(f"--context {context!r}: must be a number, or one for each sequence with commas between them") from None
    if name == "chain":
        return chain(LLAMA_1B, batch=1 if batch is None else batch, layers=16)
    if name in MODELS:
        return llama(name, batch=len(contexts) if batch is None else batch, context=contexts if len(contexts) > 1 else contexts[0])
    raise ValueError(f"unknown program {name!r}: known ones are {', '.join(PROGRAMS)}")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names from files may not fit the terminal's encoding
    try:
        commands = {"compare": run_compare, "decode": run_decode, "fidelity": run_fidelity, "schedule": run_schedule, "check": run_check,
                    "doctor": run_doctor}  # fmt: skip
        return commands[given.command](given)
    except (ValueError, RuntimeError, MemoryError, CheckFailed, ImportError, OSError) as error:
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
    switches = given_switches(given)
    chosen = switches_of(runs, switches)
    if given.repeats < 1:
        raise ValueError(f"--repeats {given.repeats}: must be at least 1")
    if not has_gpu():
        refuse_values(program, chosen)
        sizes = size_up(program, given.machine)
        if given.json:
            print(json.dumps(sizes.to_json(), indent=1))
        else:
            sizes.print()
        return 0
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        table = compare(program, runs, switches=switches, rivals=rivals, repeats=given.repeats, seed=given.seed, device=given.device,
                        progress=status.update)  # fmt: skip
    if given.json:
        print(json.dumps(table.record(), indent=1))
    else:
        table.print()
    return 0


def _tokens(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r}: must be tokens with commas between them, such as 1,2,3") from None


def run_decode(given: argparse.Namespace) -> int:
    if given.run not in KNOWN_RUNS:
        raise ValueError(f"unknown run {given.run!r}: known ones are {', '.join(KNOWN_RUNS)}")
    if not given.prompt and not given.ids:
        raise ValueError("nothing to go on with: give --prompt TEXT, or --ids N,N,…")
    switches = switches_of([given.run], given_switches(given))[given.run]
    named = given.model in MODELS
    if not named and not Path(given.model).is_dir():
        raise FileNotFoundError(f"--model {given.model}: no such directory, nor one of {', '.join(MODELS)}")
    if named and given.prompt:
        raise ValueError(f"--prompt: {given.model} has random weights and no tokenizer; give --ids")
    speller = Speller(given.model) if given.prompt else None
    prompts = [speller.tokens(text) for text in given.prompt] if speller else []
    prompts += [_tokens(text, "--ids") for text in given.ids]
    stop: tuple[int, ...] = () if named or given.stop == "none" else stop_tokens(given.model)
    if given.stop not in (None, "none"):
        stop = tuple(_tokens(given.stop, "--stop"))
    if speller is None and not named:
        with contextlib.suppress(ImportError, FileNotFoundError):  # tokens are printed then
            speller = Speller(given.model)
    needed = max(map(len, prompts)) + max(given.tokens, 1)
    sizes = {"batch": len(prompts), "context": needed - 1, "capacity": given.capacity or needed}
    if given.run != "reference" and (missing := gpu_missing()):
        raise RuntimeError(f"run {given.run!r} needs a GPU: {missing}. On the CPU, for a small model: --run reference")

    from rich.console import Console

    with Console(stderr=True).status("reading the checkpoint") as status, _on_device(given):
        tell = lambda name: status.update(f"reading {name}")  # noqa: E731
        step = llama(given.model, **sizes) if named else llama.from_pretrained(given.model, **sizes, progress=tell)
        program = decoding(step, sampled=given.temperature > 0)
        asked = request(program, prompts, given.tokens, temperature=given.temperature, top_p=given.top_p, seed=given.seed, stop=stop)
        how = {"precision": "storage"} if given.run == "reference" else {"device": given.device, **switches}
        decoder = Decoder(build(program, given.run, seed=given.seed, **how))
        status.update("warming up")
        decoder.start(asked)
        decoder.run()
        decoder.run.synchronize()
    with _on_device(given):
        decoded, seconds = _stream(decoder, asked, given, speller)
        found = {"model": given.model, "run": given.run, "switches": switches, **({"unsafe": UNSAFE} if is_unsafe(switches) else {}),
                 "prompts": prompts, "tokens": decoded,
                 "text": [speller.text(tokens) for tokens in decoded] if speller else None, **_speed(decoder, asked, decoded, seconds)}  # fmt: skip
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    how_run = " ".join([given.run, *(setting_text(name, value) for name, value in switches.items())])
    line = f"{how_run}: {found['tokens_per_s']:.1f} tokens/s: {sum(map(len, decoded))} tokens, {found['steps']} steps of {found['step_us']:.0f} us"
    floor = (
        f", {found['ratio_to_floor']:.3f} x the floor of {found['floor_us']:.0f} us" if found["floor_us"] else "; no floor without a GPU"
    )
    print(line + floor, file=sys.stderr)
    return 0


def _on_device(given: argparse.Namespace) -> Any:
    if given.device is None or given.run == "reference":
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Device(given.device)


def _stream(decoder: Decoder, asked: Request, given: argparse.Namespace, speller: Speller | None) -> tuple[list[list[int]], float]:
    """(tokens of each prompt, seconds from the first step to the last). One text is printed as it comes; of several, each at the end."""
    alone, spelled = len(asked.prompts) == 1 and not given.json, Spelled(speller) if speller else None
    decoded: list[list[int]] = [[] for _ in asked.prompts]

    def show(text: str, end: str = "") -> None:
        print(text, end=end, flush=True)

    start = time.perf_counter()
    for pieces in decoder.run_request(asked):
        for tokens, piece in zip(decoded, pieces, strict=True):
            tokens += piece
        if alone and pieces[0]:
            show(spelled(pieces[0]) if spelled else " ".join(map(str, pieces[0])) + " ")
    decoder.run.synchronize()
    seconds = time.perf_counter() - start
    if alone:
        show(spelled.rest if spelled else "", "\n")
    elif not given.json:
        for i, tokens in enumerate(decoded):
            show(f"[{i}] {speller.text(tokens) if speller else ' '.join(map(str, tokens))}", "\n")
    return decoded, seconds


def _speed(decoder: Decoder, asked: Request, decoded: list[list[int]], seconds: float) -> dict[str, Any]:
    """Tokens a second; microseconds of a step, beside the floor of the mean step where there is a GPU to measure it on."""
    step_us, floor_us = seconds / decoder.steps * 1e6, None
    if decoder.run.name != "reference":
        needed = bytes_at(decoder.run.program, asked.mean_contexts(decoder.steps, decoder.batch))
        with contextlib.suppress(MemoryError):  # the probe wants 4 GiB beside the model
            floor_us = measure_floor().us(needed)
    return {"steps": decoder.steps, "seconds": seconds, "tokens_per_s": sum(map(len, decoded)) / seconds, "step_us": step_us,
            "floor_us": floor_us, "ratio_to_floor": floor_us and step_us / floor_us}  # fmt: skip


def run_fidelity(given: argparse.Namespace) -> int:
    if given.run not in KNOWN_RUNS:
        raise ValueError(f"unknown run {given.run!r}: known ones are {', '.join(KNOWN_RUNS)}")
    if given.positions < 1:
        raise ValueError(f"--positions {given.positions}: must be at least 1")
    program = llama.from_pretrained(given.model)  # headers alone
    ids = [_tokens(text, "--ids") for text in given.ids]
    prompts, kind = prompts_for(given.model, program.meta["vocab"], given.prompt, ids, given.positions, given.seed)
    require_transformers()
    if given.run != "reference" and (missing := gpu_missing()):
        raise RuntimeError(f"run {given.run!r} needs a GPU: {missing}. On the CPU, for a small model: --run reference")
    from rich.console import Console

    with Console(stderr=True).status("starting") as status, _on_device(given):
        found = fidelity(given.model, prompts, run=given.run, positions=given.positions, batch=given.batch, seed=given.seed, device=given.device,
                         progress=status.update)  # fmt: skip
    if given.json:
        print(json.dumps({**found.to_json(), "tokens": kind}, indent=1, allow_nan=False))
    else:
        found.print()
        print(f"prompts: {kind}", file=sys.stderr)
    return 1 if found.problems else 0


def run_schedule(given: argparse.Namespace) -> int:
    if given.scheduler not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {given.scheduler!r}: known ones are {', '.join(SCHEDULERS)}")
    program, machine = program_of(given.program, given.batch, given.context), Machine.load(given.machine)
    options = {name: getattr(given, name) for name in ("deps", "signals", "num_sms", "teams", "stages")}
    schedule = SCHEDULERS[given.scheduler](program, machine, **options)
    found = _proof(schedule, program, machine)
    if found["proved"]:
        try:
            schedule.save(given.output)
        except OSError as error:
            raise ValueError(f"{given.output} cannot be written: {error.strerror or error}") from error
        found["file"] = given.output
    return _tell(found, schedule, given.json)


def run_check(given: argparse.Namespace) -> int:
    try:
        schedule = Schedule.load(given.file)
    except OSError as error:
        raise ValueError(f"{given.file} cannot be read: {error.strerror or error}") from error
    program = _rebuilt(schedule, given.file)
    machine = Machine.load(given.machine) if given.machine else Machine.from_json(dict(schedule.limits), f"{given.file}: field 'limits'")
    return _tell(_proof(schedule, program, machine), schedule, given.json)


def _rebuilt(schedule: Schedule, where: str) -> Program:
    """The program of a schedule's file. Raises ValueError for a specification that makes none, or one of more layers than the file has ops."""
    spec = dict(schedule.spec)
    spec["context"] = spec.get("contexts", spec.get("context"))  # a context for each sequence
    own = "a program of your own is checked by cuk.validate(schedule, program, machine)"
    layers = spec.get("layers")
    if "layers" in spec and (type(layers) is not int or not 1 <= layers <= len(schedule.ops)):
        raise ValueError(
            f"{where}: field 'spec': layers={short(layers)}: must be a whole number from 1 to {len(schedule.ops)}, the ops of the schedule; {own}"
        )
    try:
        return rebuild(schedule.program, spec)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: field 'spec': {error}; {own}") from error


def _proof(schedule: Schedule, program: Program, machine: Machine) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found = {"proved": True, **asdict(validate(schedule, program, machine))}
    except Refused as refused:
        found = {"proved": False, "reason": refused.reason, "message": str(refused)}
    return {"program": program.name, "machine": machine.name, "scheduler": schedule.scheduler, "deps": schedule.deps, **found,
            "seconds": round(time.perf_counter() - start, 3)}  # fmt: skip


def _tell(found: dict[str, Any], schedule: Schedule, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found, indent=1))
    elif found["proved"]:
        print(schedule)
        print(
            f"proved in {found['seconds']} s: each of {found['num_instructions']} tasks once, no deadlock, {found['op_pairs']} pairs of ops in "
            f"order ({found['tile_pairs']} of them tile by tile), {found['smem_bytes']} bytes of shared memory a CTA"
        )
        if "file" in found:
            print(f"written to {found['file']}")
    else:
        print(schedule)
        print(f"REFUSED ({found['reason']}): {found['message']}")
    return 0 if found["proved"] else 1


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
