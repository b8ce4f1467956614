"""The schedulers: one pure function per file, f(program, machine, *, deps="op", **options) -> Schedule. Any function of that form will do;
`assemble` makes a schedule from queues of tasks."""

from collections.abc import Callable

from cuk.counters import assemble
from cuk.schedule import Schedule
from cuk.schedulers.balanced import balanced
from cuk.schedulers.critical_path import critical_path
from cuk.schedulers.dynamic import dynamic
from cuk.schedulers.round_robin import round_robin
from cuk.schedulers.waves import waves

SCHEDULERS: dict[str, Callable[..., Schedule]] = {f.__name__: f for f in (round_robin, balanced, critical_path, waves, dynamic)}

__all__ = ["SCHEDULERS", "assemble", "balanced", "critical_path", "dynamic", "round_robin", "waves"]
