"""The decode loop on the GPU: the same tokens in every run as when the host drives the step, and no host in the loop."""

import threading

import cupy
import numpy as np
import pytest

from cuk.decode import Decoder
from cuk.programs import decoding, llama
from cuk.runs import build, check
from cuk.runs.check import check_by_op
from cuk.runs.memory import to_numpy
from tests.alone import draws

SMALL = dict(
    hidden_size=264, intermediate_size=520, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=1003, head_dim=64
)
RUNS = ("stream", "graph", "pdl")
PROMPTS = [[5], [7, 11, 96, 0, 3, 2], list(range(100, 130))]


@pytest.fixture(scope="module")
def plain():
    return build(llama(SMALL, batch=3, context=95, capacity=96), "stream")


@pytest.fixture(scope="module")
def decoders(plain):
    program = decoding(plain.program, sampled=True)
    stream = build(program, "stream", buffers=plain.buffers)
    runs = {"stream": stream, **{name: build(program, name, buffers=stream.buffers) for name in RUNS[1:]}}
    check(runs)
    return {name: Decoder(run) for name, run in runs.items()}


def driven(run, prompts, tokens):
    """Greedy, the host reading every token back; unequal prompts in one batch."""
    known = [list(prompt) for prompt in prompts]
    for position in range(max(map(len, prompts)) + tokens - 1):
        at = [min(position, len(prompt) + tokens - 1) for prompt in prompts]
        run.buffers["positions"].set(np.array(at, np.int32))
        run.buffers["tokens"].set(np.array([known[b][p] for b, p in enumerate(at)], np.int32))
        run()
        chosen = to_numpy(run.buffers["next_tokens"])
        for b, prompt in enumerate(prompts):
            if at[b] == len(known[b]) - 1 and len(known[b]) < len(prompt) + tokens:
                known[b].append(int(chosen[b]))
    return [known[b][len(prompt) :] for b, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", RUNS)
def test_greedy_tokens_are_those_of_a_host_in_the_loop(plain, decoders, name):
    assert decoders[name].decode(PROMPTS, 60) == driven(plain, PROMPTS, 60)


def test_a_loop_without_sampling_takes_the_same_tokens(plain, decoders):
    greedy = Decoder(build(decoding(plain.program), "pdl", buffers=plain.buffers))
    assert greedy.run.graph.num_nodes == len(plain.program.ops) + 1
    assert greedy.run.graph.num_programmatic_edges == len(plain.program.ops)
    assert greedy.decode(PROMPTS, 60) == decoders["pdl"].decode(PROMPTS, 60)


def test_draws_are_the_same_in_every_run_and_by_every_way_of_asking(decoders):
    choice = dict(temperature=0.9, top_p=0.8, seed=17)
    first = decoders["stream"].decode(PROMPTS, 60, **choice)
    for decoder in decoders.values():
        assert decoder.decode(PROMPTS, 60, **choice) == first
        pieces = list(decoder.stream(PROMPTS, 60, every=5, **choice))
        assert [[token for piece in pieces for token in piece[b]] for b in range(3)] == first
        stop = first[0][20]
        cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in first]
        assert decoder.decode(PROMPTS, 60, **choice, stop=[stop]) == cut
    assert decoders["pdl"].decode(PROMPTS, 60, **{**choice, "seed": 18}) != first
    assert decoders["pdl"].decode(PROMPTS, 60, **{**choice, "top_p": 1.0}) != first


@pytest.mark.parametrize(("batch", "vocab"), [(1, 128_256), (16, 151_936)])
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_draws_at_the_size_of_a_real_vocabulary(batch, vocab, share):
    """Against NumPy to the bit, also where most tokens have a mass."""
    logits = np.random.default_rng(0).standard_normal((batch, vocab), dtype=np.float32) * 2
    run = build(draws(logits, 1.0, share, positions=np.arange(batch), seed=3), "stream")
    for _ in range(2):
        check_by_op(run)
        run()
        assert not run.buffers["high"].any()


def test_nothing_is_read_back_until_the_end(decoders):
    """All steps are enqueued while the GPU still waits for something else: had the host to read a token first, it would never get there."""
    decoder, gate = decoders["pdl"], threading.Event()
    asked = decoder.request(PROMPTS, 60)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        decoder.start(asked)
        stream.synchronize()
        stream.launch_host_func(lambda _: gate.wait(20), None)
        for _ in range(asked.steps):
            decoder.run()
        waiting = not stream.done
        gate.set()
        stream.synchronize()
    assert waiting
    history = to_numpy(decoder.run.buffers["history"])
    assert [history[len(prompt) : len(prompt) + 60, b].tolist() for b, prompt in enumerate(PROMPTS)] == decoder.decode(PROMPTS, 60)


def test_unequal_contexts(decoders):
    program = llama(SMALL, batch=4, context=(0, 3, 700, 3000))
    stream = build(program, "stream")
    check({"stream": stream, **{name: build(program, name, buffers=stream.buffers) for name in ("graph", "pdl")}})
