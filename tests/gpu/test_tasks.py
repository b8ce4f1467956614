"""Every task on the GPU against its float64 reference, over drawn shapes, on what a poisoned output must replace."""

import dataclasses

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuk.launch import Launch
from cuk.runs import build
from cuk.runs.check import CheckFailed, check_by_op, compare
from cuk.tasks import GateUp, Linear
from tests.alone import PROGRAMS, alone


def stepped(program, seed=0):
    run = build(program, "stream", seed=seed)
    check_by_op(run)
    return run


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_task_over_drawn_shapes(kind):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS[kind], st.integers(0, 99))
    def holds(program, seed):
        stepped(program, seed)

    holds()


@pytest.mark.parametrize("task", [
    Linear(batch=1, n=1, k=8, norm=True, residual=True), Linear(batch=16, n=17, k=4104, residual=True), Linear(batch=9, n=9, k=72, norm=True, out="float32"),
    Linear(batch=1, n=3000, k=2048), GateUp(batch=1, n=3, k=8, norm=True), GateUp(batch=16, n=5, k=4104),
], ids=str)  # fmt: skip
def test_shapes_at_the_edges(task):
    stepped(alone(task))


def test_the_check_catches_one_wrong_element():
    run = stepped(alone(Linear(batch=2, n=64, k=256)))
    right = cupy.asnumpy(run.buffers["y"].view(np.uint16)).copy()
    wrong = right.copy()
    wrong[1, 33] ^= 0x0100  # one bit of one element's exponent
    dtype = run.buffers["y"].dtype
    expected = right.view(dtype).astype(np.float64)
    bound = 2.0**-7 * np.abs(expected)
    compare("y", right.view(dtype), expected, bound)
    with pytest.raises(CheckFailed, match=r"y\[1, 33\]"):
        compare("y", wrong.view(dtype), expected, bound)


def test_an_unwritten_output_is_caught():
    """An op whose task count is one short leaves poison behind."""
    run = stepped(alone(Linear(batch=1, n=64, k=64)))
    op, fit = run.program.ops[0], run.footprints["linear"]
    words = dataclasses.replace(fit, num_tasks=op.task.num_tasks - 1).pack()
    args = (run._pack(0, op), words)
    run.launches[0] = Launch(run.cubins["linear"].function(), run.machine.num_sms, fit.threads, args, smem_bytes=fit.smem_bytes)
    with pytest.raises(CheckFailed, match="nan"):
        check_by_op(run)
