"""The device code itself, without a GPU: kernels compiled for the CPU run on emulated warps and are held against the references."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuk.programs import llama
from cuk.runs.check import CheckFailed, check_bitwise, check_by_op
from cuk.tasks import Argmax, AttentionDecode, Linear
from tests.alone import PROGRAMS, alone
from tests.emulator import emulate
from tests.emulator.emulate import EmulatedRun

pytestmark = pytest.mark.skipif(not emulate.COMPILER, reason="no g++ to compile the device files with")
SMALL = dict(
    hidden_size=72, intermediate_size=104, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, vocab_size=203, head_dim=64
)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_task_over_drawn_shapes(kind):
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS[kind], st.integers(0, 2**31), st.integers(1, 4))
    def holds(program, seed, num_sms):
        check_by_op(EmulatedRun(program, seed=seed, num_sms=num_sms))

    holds()


@pytest.mark.parametrize(("batch", "k"), [(16, 4104), (9, 4104), (16, 4096)])
def test_x_that_comes_through_the_ring(batch, k):
    task = Linear(batch=batch, n=19, k=k, residual=True)
    assert task.stream_x
    for prefetch in (False, 1, True):
        check_by_op(EmulatedRun(alone(task), pdl=True, prefetch=prefetch))


@pytest.mark.parametrize(("head_dim", "batch", "context", "qk_norm"), [
    (64, 1, 100, False), (128, 3, 70, True), (64, 2, 0, False), (64, 3, (5, 0, 700), False), (128, 2, (900, 33), True), (64, 2, (5000, 2), False),
])  # fmt: skip
def test_a_model(head_dim, batch, context, qk_norm):
    check_by_op(EmulatedRun(llama({**SMALL, "head_dim": head_dim, "qk_norm": qk_norm}, batch=batch, context=context)))


def test_bits_do_not_depend_on_teams_stages_or_sms():
    """The order of every sum is the op's own."""
    program = llama(SMALL, batch=2, context=90)
    first = EmulatedRun(program)
    first()
    for switches in [
        dict(num_sms=1),
        dict(num_sms=7, teams=1),
        dict(num_sms=2, teams=4, ctas_per_sm=1),
        dict(stages=1),
        dict(stages=2, pdl=True, prefetch=1),
    ]:
        check_bitwise(EmulatedRun(program, **switches), first)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("prefetch", [True, False])
def test_asking_ahead_changes_nothing(early, prefetch):
    program = llama({**SMALL, "intermediate_size": 2048, "num_hidden_layers": 1}, batch=1, context=90)
    run = EmulatedRun(program, num_sms=13, pdl=True, prefetch=prefetch, ahead_bytes=1 << 12, ahead_early=early)
    assert run.asks
    check_by_op(run)


@pytest.mark.parametrize("num_sms", [1, 3, 40])  # from the last task taking all words to each task its share
@pytest.mark.parametrize(
    "program",
    [
        alone(AttentionDecode(batch=1, kv_heads=2, group=3, head_dim=64, capacity=400, context=390, splits=5), [390]),
        alone(Argmax(batch=2, vocab=70_000)),
    ],
    ids=["attention", "argmax"],
)
def test_words_are_empty_again_after_a_step(program, num_sms):
    run = EmulatedRun(program, num_sms=num_sms)
    scratch = [name for name, buffer in program.buffers.items() if buffer.role == "scratch"]
    assert scratch
    for _ in range(2):
        check_by_op(run)
        assert all((run.buffers[name] == 2**64 - 1).all() for name in scratch)


def test_rows_past_the_end_of_a_partial_block_do_not_leak():
    """With k no multiple of 64 the last box of a row holds columns of the next one: NaN there must not reach this row."""
    task = Linear(batch=2, n=16, k=72)
    w = np.random.default_rng(0).standard_normal((16, 72)).astype(np.float32)
    w[9] = np.nan
    run = EmulatedRun(alone(task, w=w))
    run.launches[0]()
    y = run.buffers["y"].astype(np.float32)
    assert np.isnan(y[:, 9]).all() and np.isfinite(np.delete(y, 9, axis=1)).all()


def test_an_op_with_a_task_too_few_is_caught(monkeypatch):
    whole = Linear.num_tasks.fget
    program = alone(Linear(batch=1, n=64, k=64))
    monkeypatch.setattr(Linear, "num_tasks", property(lambda task: whole(task) - 1))
    with pytest.raises(CheckFailed, match="nan"):
        check_by_op(EmulatedRun(program))


class Early:
    """Starts every kernel of a pdl run before the one before it has ended: until a CTA's first thread has waited, what earlier ops of the step
    write is NaN, and the op's own outputs must stay as they were."""

    def __init__(self, run):
        self.run, self.touched_early = run, []
        self.written = set()
        for op, launch in zip(run.program.ops, run.launches, strict=True):
            self._start(op, launch)
            self.written |= {str(view) for view in op.accesses("out", "inout")}

    def _start(self, op, launch):
        def bytes_of(view):
            return view.of(self.run.buffers).reshape(-1).view(np.uint8)

        stale = [view for view in op.accesses("in") if str(view) in self.written]
        outputs = op.accesses("out")

        def start(_):
            self.real = [(view, bytes_of(view).copy()) for view in stale]
            self.before = [(view, bytes_of(view).copy()) for view in outputs]
            for view in stale:
                if view.buffer.role == "cache":  # old positions are old; the new one is this step's
                    for b, position in enumerate(self.run.buffers["positions"]):
                        view.of(self.run.buffers).view(np.uint16)[b, :, position] = 0xFFFF
                else:
                    bytes_of(view)[...] = 0xFF

        def wait(_):
            self.touched_early += [str(view) for view, before in self.before if not np.array_equal(bytes_of(view), before)]
            for view, content in self.real:
                bytes_of(view)[...] = content

        hooks = emulate.Hook(start), emulate.Hook(wait)
        launch.library.hooks(*hooks)
        try:
            launch()
        finally:
            launch.library.hooks(emulate.Hook(), emulate.Hook())


@pytest.mark.parametrize(("model", "batch", "context"), [(SMALL, 1, 100), ({**SMALL, "hidden_size": 2600, "num_hidden_layers": 1}, 16, 5)])
@pytest.mark.parametrize("prefetch", [True, 1])
def test_before_its_wait_a_kernel_touches_nothing_of_this_step(model, batch, context, prefetch):
    program = llama(model, batch=batch, context=context)
    expected = EmulatedRun(program)
    for launch in expected.launches:
        launch()
    run = EmulatedRun(program, pdl=True, prefetch=prefetch)
    early = Early(run)
    assert not early.touched_early
    check_bitwise_arrays(run, expected)


def check_bitwise_arrays(run, expected):
    for name, buffer in run.program.buffers.items():
        if buffer.role in ("activation", "output", "cache"):
            mine, theirs = (r.buffers[name].reshape(-1).view(np.uint8) for r in (run, expected))
            assert np.array_equal(mine, theirs), name


def test_a_kernel_that_does_not_wait_is_caught(monkeypatch):
    """The same without griddepcontrol.wait: the graph's kernels, started early."""
    program = llama(SMALL, batch=1, context=9)
    run = EmulatedRun(program, pdl=False)
    expected = EmulatedRun(program)
    for launch in expected.launches:
        launch()
    Early(run)
    with pytest.raises(AssertionError):
        check_bitwise_arrays(run, expected)


def test_a_deadlock_is_found_and_explained(monkeypatch):
    """Copies that never land would keep a GPU waiting for ever."""
    monkeypatch.setattr(EmulatedRun, "drop_copies", True)
    with pytest.raises(AssertionError, match=r"deadlock: CTA 0, \d+ threads wait for ever"):
        EmulatedRun(alone(Linear(batch=1, n=8, k=64)), num_sms=1).launches[0]()
