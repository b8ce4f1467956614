"""Switches of runs: who has which, and how they are given as options of a command. What a run can be told is its `switches`; nothing here lists
runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from cuk.counters import DEPS
from cuk.launch import gpu_missing
from cuk.program import Program
from cuk.runs import RUNS, build
from cuk.schedulers import SCHEDULERS

OPTIONS = {
    "scheduler": f"what makes the schedule: {', '.join(SCHEDULERS)}",
    "deps": f"what a task, or a kernel, waits for: {' or '.join(DEPS)}",
    "ordering": "what counters promise: release, or relaxed, which is UNSAFE and for studies only",
    "signal": "how a task tells that it is done",
    "prefetch": "what loads ahead of a wait: on (all that fits), off, or a number of ring stages",
    "teams": "teams of warps in a CTA",
    "stages": "stages of each team's ring",
}
"""The switches that commands take, with their help."""


def switches_of(runs: Sequence[str], switches: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each of the runs those of the switches that it has. Raises ValueError naming a switch that none of them has, and the runs that do, a
    run that is unknown, or a scheduler that is."""
    if unknown := [name for name in runs if name not in RUNS]:
        raise ValueError(f"unknown run {', '.join(unknown)}: known ones are {', '.join(RUNS)}")
    for name in switches:
        if not any(name in RUNS[run].switches for run in runs):
            have = [run for run, kind in RUNS.items() if name in kind.switches]
            none = f"none of the runs {', '.join(runs)} has" if len(runs) > 1 else f"run {', '.join(runs)} has not"
            raise ValueError(f"switch {name!r}: {none} it; {', '.join(have) or 'no run'} {'has' if len(have) < 2 else 'have'}")
    scheduler = switches.get("scheduler")
    if isinstance(scheduler, str) and scheduler not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {scheduler!r}: known ones are {', '.join(SCHEDULERS)}")
    return {run: {name: value for name, value in switches.items() if name in RUNS[run].switches} for run in runs}


def refuse_values(program: Program, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for a value that a run does not take, where there is no GPU to build it on: runs look at their switches before they look
    for a GPU."""
    for run, switches in chosen.items():
        if switches and gpu_missing():
            with contextlib.suppress(RuntimeError):
                build(program, run, **switches)


# ---- options of commands ----
def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each of OPTIONS."""
    group = parser.add_argument_group("switches", "for those of the runs that have them; each has defaults of its own")
    for name, text in OPTIONS.items():
        have = ", ".join(run for run, kind in RUNS.items() if name in kind.switches)
        group.add_argument(
            f"--{name}", type=int if name in ("teams", "stages") else str, metavar="N" if name in ("teams", "stages") else name.upper(),
            help=f"{text} ({have})",
        )  # fmt: skip


def given_switches(given: argparse.Namespace) -> dict[str, Any]:
    """The switches that were given. Raises ValueError for a prefetch that is none."""
    found = {name: getattr(given, name) for name in OPTIONS if getattr(given, name) is not None}
    if "prefetch" in found:
        text = found["prefetch"]
        if text not in ("on", "off") and not text.isdecimal():
            raise ValueError(f"--prefetch {text!r}: must be on, off, or a number of ring stages")
        found["prefetch"] = {"on": True, "off": False}[text] if text in ("on", "off") else int(text)
    return found
