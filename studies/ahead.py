"""What should a small kernel ask L2 for, and when? Small ops of a decode step leave memory idle; a later op's weights could come then.

python studies/ahead.py                       # Llama-3.2-1B, batch 1, context 1024, on the current GPU
python studies/ahead.py --model llama-3.1-8b
python studies/ahead.py --list

Late: the first small op asks after its wait (and ends later by what has not landed). Early: every op that waits for a small one asks before its
wait (and delays what that one still needs). Prediction for the 1B: qkv, attention and o_proj take 9.4 us a layer, in which 25 MB come and
43 could; early asks for the other 18 MB would save up to 3.9 us a layer, 60 us a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuk.compare import compare, has_gpu
from cuk.programs import llama
from cuk.programs.llama import MODELS

MB = 1 << 20


def early(pace_ns: int = 0, **megabytes: int) -> dict[str, Any]:
    return {"ahead_early": True, "ahead_pace_ns": pace_ns, "ahead_bytes": {kind: size * MB for kind, size in megabytes.items()}}


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"ahead_bytes": 0},
    **{f"late, {size} MB": {"ahead_bytes": size * MB} for size in (3, 5, 8)},
    **{f"early, {size} MB each": {"ahead_bytes": size * MB, "ahead_early": True} for size in (2, 4, 6, 9)},
    **{f"early, 4 MB each, {pace} ns": {"ahead_bytes": 4 * MB, "ahead_early": True, "ahead_pace_ns": pace} for pace in (100, 250, 500)},
    "early, attention 5": early(attention=5),
    "early, attention 9": early(attention=9),
    "early, attention 9, 200 ns": early(200, attention=9),
    "early, o_proj 3": early(o_proj=3),
    "early, gate_up 5": early(gate_up=5),
    "early, gate_up 10": early(gate_up=10),
    "early, gate_up 10, 200 ns": early(200, gate_up=10),
    "early, attention 9, gate_up 8": early(attention=9, gate_up=8),
    "early, attention 9, o_proj 2, gate_up 11": early(attention=9, o_proj=2, gate_up=11),
    "early, attention 9, o_proj 2, gate_up 11, 200 ns": early(200, attention=9, o_proj=2, gate_up=11),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--only", action="append", metavar="TEXT", help="only variants whose name holds TEXT (may be given again)")
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15, for a look: nothing is recorded")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--list", action="store_true", help="list the variants")
    given = parser.parse_args()
    chosen = {name: switches for name, switches in VARIANTS.items() if not given.only or any(text in name for text in given.only)}
    if given.list:
        for name, switches in chosen.items():
            print(f"{name:50s} {switches}")
        return 0
    if not has_gpu():
        print("studies/ahead.py: no GPU (or no CuPy) here, and a study only measures; `cuk doctor` says what is missing", file=sys.stderr)
        return 1
    if not chosen:
        print(f"studies/ahead.py: no variant holds {' or '.join(given.only)}; --list names them", file=sys.stderr)
        return 2
    table = compare(llama(given.model, context=given.context), ("pdl",), variants={name: ("pdl", switches) for name, switches in chosen.items()}, rivals=(),
                    study="ahead", repeats=5 if given.quick else 15)  # fmt: skip
    if given.json:
        print(json.dumps(table.rows, indent=1))
    else:
        table.print()
    if not given.quick:
        print(f"record: {table.save()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
