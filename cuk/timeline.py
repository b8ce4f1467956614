"""What ran when on which SM: the times that CTAs note (cuda_src/core/trace.cuh), op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

EVENTS = ("start", "waited", "prepared", "first_task", "end", "sm")
"""In the order of the device's enum: nanoseconds of the global timer, and the SM's number. A CTA without a task has no first_task."""


@dataclass(frozen=True)
class Timeline:
    """events: uint64 [ops, CTAs, len(EVENTS)]; 0 where an event did not happen."""

    ops: Sequence[str]
    events: np.ndarray = field(repr=False)

    def of(self, event: str) -> np.ndarray:
        """Microseconds [ops, CTAs] since the first CTA of the step started; NaN where the event did not happen. "sm": the SM numbers."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}: known ones are {', '.join(EVENTS)}")
        raw = self.events[:, :, EVENTS.index(event)]
        if event == "sm":
            return raw.astype(int)
        starts = self.events[:, :, 0]
        origin = starts[starts > 0].min() if (starts > 0).any() else np.uint64(0)
        return np.where(raw > 0, (raw.astype(np.int64) - np.int64(origin)) / 1e3, np.nan)

    def rows(self) -> list[dict[str, float | str]]:
        """For each op, in microseconds from the last end of the op before (of the step's first start for the first): the earliest and
        latest CTA of each event, and `shared_sms`, the SMs that a fair spread of CTAs would have used and this one left out."""
        times = {event: self.of(event) for event in EVENTS}
        rows, before = [], 0.0
        for i, name in enumerate(self.ops):
            row: dict[str, float | str] = {"op": name}
            for event in EVENTS[:-1]:
                mine = times[event][i][~np.isnan(times[event][i])]
                row[f"{event}_min"], row[f"{event}_max"] = (
                    (float(mine.min()) - before, float(mine.max()) - before) if mine.size else (np.nan, np.nan)
                )
            used = times["sm"][i][self.events[i, :, 0] > 0]
            row["shared_sms"] = len(used) - len(set(used.tolist()))
            rows.append(row)
            before += row["end_max"]
        return rows

    def __repr__(self) -> str:
        head = (
            f"{'op':18s}"
            + "".join(f"{event:>17s}" for event in EVENTS[:-1])
            + "  shared SMs   (us from the end of the op before: first..last CTA)"
        )
        lines = [head]
        for row in self.rows():
            spans = "".join(f"{row[f'{e}_min']:8.2f}..{row[f'{e}_max']:7.2f}" for e in EVENTS[:-1])
            lines.append(f"{row['op']:18s}{spans}  {row['shared_sms']:d}")
        return "\n".join(lines)
