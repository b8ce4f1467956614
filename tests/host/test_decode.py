"""The decode loop against one that the host drives token by token; what it refuses; how tokens are handed over."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cuk import decode
from cuk.decode import Decoder
from cuk.programs import chain, decoding, llama
from cuk.runs import build
from cuk.runs.check import check_bitwise, check_by_op
from tests.emulator import emulate
from tests.emulator.emulate import EmulatedRun

emulated = pytest.mark.skipif(not emulate.COMPILER, reason="no g++ to compile the device files with")
TINY = dict(
    hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=97, head_dim=64
)


def tiny(batch=1, capacity=24):
    return llama(TINY, batch=batch, context=capacity - 1, capacity=capacity)


def make(kind, program, **given):
    return EmulatedRun(program, **given) if kind == "emulated" else build(program, "reference", precision="storage", **given)


RUNS = ["reference", pytest.param("emulated", marks=emulated)]


def driven(run, prompt, tokens, b=0):
    """The same tokens with the host in the loop, one sequence of the batch at a time."""
    known = list(prompt)
    for position in range(len(prompt) + tokens - 1):
        run.buffers["tokens"][...], run.buffers["positions"][...] = known[position], position
        run()
        if position == len(known) - 1:
            known.append(int(run.buffers["next_tokens"][b]))
    return known[len(prompt) :]


@pytest.mark.parametrize("kind", RUNS)
def test_unequal_prompts_decode_as_each_does_alone(kind):
    plain = make(kind, tiny(batch=3))
    looped = make(kind, decoding(tiny(batch=3)), buffers=plain.buffers)
    prompts = [[5], [7, 11, 96, 0, 3, 2], [1, 2, 3]]
    decoded = Decoder(looped).decode(prompts, 6)
    assert decoded == [driven(plain, prompt, 6, b) for b, prompt in enumerate(prompts)]
    assert Decoder(looped).decode(prompts[:2], 6) == decoded[:2]


@pytest.mark.parametrize("kind", RUNS)
def test_a_cache_full_to_its_last_row(kind):
    plain = make(kind, tiny(capacity=7))
    looped = make(kind, decoding(tiny(capacity=7)), buffers=plain.buffers)
    assert Decoder(looped).decode([[5, 4]], 5) == [driven(plain, [5, 4], 5)]
    looped()  # the last token takes its row of the cache, and a step too many writes what was there
    at_end = {name: looped.buffers[name].copy() for name in ("history", "positions", "tokens", "k_cache")}
    looped()
    assert at_end["positions"] == 6
    for name, before in at_end.items():
        assert np.array_equal(looped.buffers[name].view(np.uint8), before.view(np.uint8)), name


@emulated
def test_checks_leave_a_loop_where_it_was():
    program = decoding(tiny(batch=2))
    run = EmulatedRun(program)
    other = EmulatedRun(program, buffers=run.buffers, num_sms=5, pdl=True)
    before = {name: run.buffers[name].copy() for name, buffer in program.buffers.items() if buffer.role == "state"}
    assert {"tokens", "positions", "history", "lengths", "ends"} <= set(before)
    check_by_op(run)
    check_bitwise(other, run)
    for name, array in before.items():
        assert np.array_equal(run.buffers[name], array) and np.array_equal(other.buffers[name], array), name


@pytest.fixture(scope="module")
def reference():
    return make("reference", decoding(tiny(batch=2)))


def test_a_stop_token_ends_its_sequence_alone(reference):
    whole = Decoder(reference).decode([[3], [4, 5]], 12)
    stop = whole[0][4]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
    assert len(expected[0]) <= 5
    assert Decoder(reference).decode([[3], [4, 5]], 12, stop=[stop]) == expected


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_a_stream_hands_over_what_decode_returns(reference, every):
    decoder = Decoder(reference)
    whole = decoder.decode([[3, 9, 8], [4]], 9)
    pieces = list(decoder.stream([[3, 9, 8], [4]], 9, every=every))
    assert [[token for piece in pieces for token in piece[b]] for b in range(2)] == whole
    assert len(pieces) == -(-11 // every)


def test_steps_enqueued_beyond_a_stop_are_few(reference):
    """Two looks further, of as many steps as lie between looks."""
    calls, decoder = [], Decoder(reference)
    first = decoder.decode([[3]], 20)[0][0]

    class Counting:
        program, buffers = reference.program, reference.buffers

        def __call__(self):
            calls.append(1)
            reference()

    assert Decoder(Counting()).decode([[3]], 20, stop=[first]) == [[first]]
    assert len(calls) <= 3 * 8
    calls.clear()
    Decoder(Counting()).decode([[3]], 20)
    assert len(calls) == 20


@pytest.mark.parametrize(
    ("prompts", "choice", "message"),
    [
        ([], {}, "0 prompts: this run decodes 1 to 2 at a time"),
        ([[1]] * 3, {}, "3 prompts: .* build the program with batch=3"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 97]], {}, "prompt 0: token 97 must be from 0 to 96"),
        ([[1], [-1]], {}, "prompt 1: token -1"),
        ([[1], [2] * 20], {}, "prompt 1: its 20 tokens and 5 to decode need 25 rows of the KV cache, which has 24; build .* capacity=25"),
        ([[1]], {"tokens": 0}, "tokens=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0"),
        ([[1]], {"seed": -1}, "seed=-1"),
        ([[1]], {"temperature": 0.5}, r"temperature=0.5: .* decoding\(program, sampled=True\)"),
        ([[1]], {"every": 0}, "every=0"),
    ],
)
def test_what_is_refused_is_refused_before_any_write(reference, prompts, choice, message):
    before = {name: array.copy() for name, array in reference.buffers.items()}
    with pytest.raises(ValueError, match=message):
        Decoder(reference).stream(prompts, **{"tokens": 5, **choice})
    assert all(np.array_equal(array.view(np.uint8), before[name].view(np.uint8)) for name, array in reference.buffers.items())


def test_programs_that_cannot_be_looped():
    with pytest.raises(ValueError, match="is one step and no loop"):
        Decoder(make("reference", tiny()))
    with pytest.raises(ValueError, match=r"chain cannot be looped: .*lacks \['tokens', 'positions', 'next_tokens'\]"):
        decoding(chain([(64, 64)]))
    with pytest.raises(ValueError, match="cannot be looped"):
        decoding(decoding(tiny()))


def test_looks_go_by_a_stream_of_their_own(monkeypatch, reference):
    """What is enqueued where: each copy waits for the steps before it, no step for a copy, and the host for a copy only two looks later."""
    log, expected = [], Decoder(reference).decode([[3], [4, 5]], 6)

    class Event:
        def synchronize(self):
            log.append("host waits")

    class Stream:
        ptr = 7

        def __init__(self, non_blocking=False):
            self.name = "copies" if non_blocking else "steps"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def record(self):
            return Event()

        def wait_event(self, event):
            log.append(f"{self.name} waits")

        def synchronize(self):
            log.append(f"{self.name} drained")

    def copy(to, source, size, kind, stream):
        log.append(f"copy {size}")
        ctypes.memmove(to, source, size)

    class Array(np.ndarray):  # NumPy's memory under CuPy's names
        @property
        def data(self):
            return SimpleNamespace(ptr=self.ctypes.data)

        def set(self, value):
            self[...] = value

    cuda = SimpleNamespace(get_current_stream=Stream, Stream=Stream, runtime=SimpleNamespace(memcpyAsync=copy, memcpyDeviceToHost=2))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))

    class Device:
        program = reference.program
        buffers = {**reference.buffers, "history": np.zeros((24, 2), np.int32).view(Array)}

        def __call__(self):
            log.append("step")
            reference.buffers["history"][...] = self.buffers["history"]
            reference()
            self.buffers["history"][...] = reference.buffers["history"]

    monkeypatch.setattr(decode, "_looker", decode._DeviceLooker)
    pieces = list(Decoder(Device()).stream([[3], [4, 5]], 6, every=2))
    tokens = [[token for piece in pieces for token in piece[b]] for b in range(2)]
    look = ["step", "step", "copies waits", "copy 16"]
    assert log == [*look * 3, "host waits", "step", "copies waits", "copy 8", *["host waits"] * 3, "copies drained"]
    assert tokens == expected
