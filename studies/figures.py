"""Draws the README's figure, and prints its table, from the records: nothing in them is typed.

python studies/figures.py          # writes docs/decode.svg and the table between the marks in README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cuk.record import load_record  # noqa: E402

MARKS = ("<!-- table: decode -->", "<!-- /table -->")


def rows_of(machine: str = "h200") -> list[dict]:
    """The rows of the decode record, programs in order of first appearance, slowest first."""
    rows = load_record(ROOT / "studies" / "results" / machine / "decode.json")["rows"]
    order: dict[tuple, int] = {}
    for row in rows:
        order.setdefault(key(row), len(order))
    return sorted(rows, key=lambda row: (order[key(row)], -(row["median_us"] or float("inf"))))


def key(row: dict) -> tuple:
    return row["program"], row["settings"].get("batch"), row["settings"].get("context")


def table(rows: list[dict]) -> str:
    """A Markdown table of the rows."""
    lines = ["| program, batch, context | run | µs a step | × floor | at most | checked |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        program, batch, context = key(row)
        if row["run"] == "cublas":
            continue  # products only: no decode step
        if row["median_us"] is None:
            lines.append(f"| {program}, {batch}, {context} | {row['run']} | | | | {row['invalid']} |")
            continue
        bar = f"{row['at_most']:.2f}" if row.get("at_most") else ""
        if row.get("at_most_to_baseline"):
            bar = f"{row['at_most_to_baseline']:.2f} × {row['baseline']} (is {row['ratio_to_baseline'][0]:.3f})"
        note = f" (invalid: {row['invalid']})" if row["invalid"] else ""
        lines.append(
            f"| {program}, {batch}, {context} | {row['run']} | {row['median_us']:.0f} | {row['ratio_to_floor']:.2f} | {bar} | {row['checked'] or 'no'}{note} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Bars of times over the floor, one group a program."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row["run"] != "cublas" and not row["invalid"]]
    groups = list(dict.fromkeys(key(row) for row in shown))
    sizes = [sum(key(row) == group for row in shown) for group in groups]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(7.5, 0.34 * sum(sizes) + 0.9 * len(groups)), gridspec_kw={"height_ratios": sizes}, sharex=True
    )
    for axis, group in zip([axes] if len(groups) == 1 else axes, groups, strict=True):
        mine = [row for row in shown if key(row) == group]
        names = [row["run"] for row in mine]
        colors = ["#9a9a9a" if row["run"].startswith("torch") else "#1f6fb4" if row["run"] == "pdl" else "#8fbbe0" for row in mine]
        bars = axis.barh(names, [row["ratio_to_floor"] for row in mine], color=colors)
        axis.bar_label(bars, [f" {row['median_us']:.0f} µs, {row['ratio_to_floor']:.2f}×" for row in mine], fontsize=8)
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_title(f"{group[0]}, batch {group[1]}, context {group[2]}: floor {mine[0]['floor_us']:.0f} µs", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, max(row["ratio_to_floor"] for row in shown) * 1.25)
    figure.supxlabel("time of a decode step over the floor (bytes that must move / measured read bandwidth)", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    rows = rows_of()
    draw(rows, ROOT / "docs" / "decode.svg")
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(MARKS[0])
    readme.write_text(before + MARKS[0] + "\n" + table(rows) + "\n" + MARKS[1] + rest.split(MARKS[1])[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
