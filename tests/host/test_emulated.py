"""The device code itself, without a GPU: kernels compiled for the CPU run on emulated warps and are held against the references."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuk.programs import chain, llama
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
    write is NaN, and the op's own outputs must stay as they were. Of the words that arrive, a drawn half is missing when a CTA starts; the
    others come a few at a time, whenever nothing else can go on."""

    def __init__(self, run, seed=0):
        self.run, self.touched_early, self.words_awaited = run, [], 0
        self.random = np.random.default_rng(seed)
        self.written = set()
        for op, launch, words in zip(run.program.ops, run.launches, run.words_of, strict=True):
            self._start(op, launch, words.polled)
            self.written |= {str(view) for view in op.accesses("out", "inout")}

    def _start(self, op, launch, polled):
        def bytes_of(view):
            return view.of(self.run.buffers).reshape(-1).view(np.uint8)

        stale = [view for view in op.accesses("in") if str(view) in self.written]
        outputs = op.accesses("out")
        arriving = self.run.words[polled[0] : polled[0] + polled[1]] if polled else self.run.words[:0]
        real, words = [(view, bytes_of(view).copy()) for view in stale], arriving.copy()
        assert not (words == emulate.EMPTY_WORD).any(), f"{op.name}: a word was not posted"
        waits, before = 0, None

        def start(_):
            nonlocal before
            before = waits, [(view, bytes_of(view).copy()) for view in outputs]
            for view in stale:
                if view.buffer.role == "cache":  # old positions are old; the new one is this step's
                    for b, position in enumerate(self.run.buffers["positions"]):
                        view.of(self.run.buffers).view(np.uint16)[b, :, position] = 0xFFFF
                else:
                    bytes_of(view)[...] = 0xFF
            arriving[self.random.random(len(arriving)) < 0.5] = emulate.EMPTY_WORD

        def wait(_):
            nonlocal waits
            if before[0] == waits:  # nobody has written since
                self.touched_early += [str(view) for view, content in before[1] if not np.array_equal(bytes_of(view), content)]
            waits += 1
            arriving[...] = words
            for view, content in real:
                bytes_of(view)[...] = content

        def stuck():
            missing = np.flatnonzero(arriving != words)
            come = self.random.permutation(missing)[: 1 + len(missing) // 4]
            arriving[come] = words[come]
            self.words_awaited += len(come)
            return len(come) > 0

        hooks = emulate.Hook(start), emulate.Hook(wait), emulate.StuckHook(stuck)
        launch.library.hooks(*hooks)
        try:
            launch()
        finally:
            launch.library.hooks(emulate.Hook(), emulate.Hook(), emulate.StuckHook())


MANY_CHUNKS = {**SMALL, "intermediate_size": 2056}
WIDE = {**SMALL, "hidden_size": 2600, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("model", "batch", "context", "prefetch", "deps"),
    [
        (SMALL, 1, 100, True, "op"),
        (SMALL, 1, 100, 1, "op"),
        (WIDE, 16, 5, True, "op"),
        (WIDE, 16, 5, 1, "op"),
        (MANY_CHUNKS, 1, 100, True, "tile"),
        (MANY_CHUNKS, 3, 5, 1, "tile"),
        (SMALL, 9, 5, True, "tile"),
    ],
)
def test_before_its_wait_a_kernel_touches_nothing_of_this_step(model, batch, context, prefetch, deps):
    program = llama(model, batch=batch, context=context)
    expected = EmulatedRun(program)
    for launch in expected.launches:
        launch()
    run = EmulatedRun(program, pdl=True, prefetch=prefetch, deps=deps)
    early = Early(run)
    assert not early.touched_early
    assert (early.words_awaited > 0) == (deps == "tile" and prefetch is True)  # a producer that waits brings all of them at once
    assert (run.words == emulate.EMPTY_WORD).all(), "words must be empty again after a step"
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


@pytest.mark.parametrize("shapes", [[(40, 2064), (2064, 40)], [(24, 1032), (1040, 24)]])
@pytest.mark.parametrize("num_sms", [1, 5])
def test_bits_do_not_depend_on_taking_words(shapes, num_sms):
    program = chain(shapes, layers=2)
    expected, run = EmulatedRun(program), EmulatedRun(program, pdl=True, deps="tile", num_sms=num_sms)
    assert any(words.polled for words in run.words_of)
    for launch in [*expected.launches, *run.launches]:
        launch()
    check_bitwise_arrays(run, expected)
    assert (run.words == emulate.EMPTY_WORD).all()


def test_a_word_that_is_never_posted_is_waited_for_in_vain(monkeypatch):
    """So that a word left from the step before would be the only way to a wrong result: nobody goes on without one."""
    run = EmulatedRun(chain([(16, 16), (16, 16), (16, 16)]), pdl=True, deps="tile", num_sms=1)
    with pytest.raises(AssertionError, match="deadlock"):
        run.launches[1]()


def test_a_deadlock_is_found_and_explained(monkeypatch):
    """Copies that never land would keep a GPU waiting for ever."""
    monkeypatch.setattr(EmulatedRun, "drop_copies", True)
    with pytest.raises(AssertionError, match=r"deadlock: CTA 0, \d+ threads wait for ever"):
        EmulatedRun(alone(Linear(batch=1, n=8, k=64)), num_sms=1).launches[0]()


def test_a_cache_row_that_no_position_asks_for_must_not_change(monkeypatch):
    """The check looks at the appended rows alone, and at whether anything else has moved."""
    run = EmulatedRun(llama(SMALL, batch=2, context=(3, 9)))
    launch = next(i for i, op in enumerate(run.program.ops) if op.kind == "qkv")
    honest = run.launches[launch]

    def astray():
        honest()
        run.buffers["v_cache"].view(np.uint16)[0, 1, 0, 5, 7] ^= 1

    run.launches[launch] = astray
    with pytest.raises(CheckFailed, match=r"layer0.qkv.v_cache\[1, 0, 5, 7\]: changed, though only positions \[3, 9\] are appended"):
        check_by_op(run)
