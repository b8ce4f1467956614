"""Drawing tokens: the random bits, the masses, the nucleus and the frequencies, each against an independent statement of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from cuk.decode import Decoder
from cuk.programs import decoding, llama
from cuk.runs.check import check_bitwise, check_by_op
from cuk.runs.memory import numpy_buffers
from cuk.runs.reference import execute
from cuk.tasks.nucleus import NO_KEY, crossing, keys_of, masses_of, scale_of
from cuk.tasks.sample import random_bits
from tests.alone import draws
from tests.emulator import emulate
from tests.emulator.emulate import EmulatedRun

emulated = pytest.mark.skipif(not emulate.COMPILER, reason="no g++ to compile the device files with")
TINY = dict(
    hidden_size=64, intermediate_size=72, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=1500, head_dim=64
)


def chosen_by(program):
    arrays = numpy_buffers(program)
    execute(program, arrays, exact=False)
    return arrays["chosen"]


def test_random_bits_are_those_of_random123():
    """Known answers of Random123's kat_vectors for philox4x32-10; of the others only the first two words are used, and two of the counter."""
    assert random_bits(0, 0, 0) == 0xE169C58D << 32 | 0x6627E8D5
    numbers = [random_bits(seed, position, sequence) for seed in range(4) for position in range(8) for sequence in range(4)]
    assert len(set(numbers)) == len(numbers)


def test_masses_are_powers_of_two():
    """Interpolated to 1.2e-8, then cut off to an integer."""
    keys = np.concatenate([np.arange(1 << 17), np.arange(1 << 17, 1 << 22, 97)])
    masses, exact = masses_of(keys).astype(np.float64), np.exp2(31 - keys / 2**17)
    assert (np.abs(masses - exact) <= 1 + 1.3e-8 * exact).all()
    assert (np.diff(masses) <= 0).all() and masses_of(np.array([0, NO_KEY])).tolist() == [2**31, 0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 200))
def test_crossing(masses, target):
    index, before = crossing(np.array(masses), target)
    if target >= sum(masses):
        assert (index, before) == (len(masses) - 1, sum(masses))
    else:
        assert before == sum(masses[:index]) and before <= target < before + masses[index]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.01, 0.999))
def test_the_nucleus_is_the_fewest_likeliest_tokens_of_that_share(seed, temperature, share):
    """By sorting probabilities in float64. A token may differ only where the running sum is within rounding of the share."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((1, 1200)).astype(np.float32) * 3
    program = draws(logits, temperature, share)
    arrays = numpy_buffers(program)
    for op in program.ops[:2]:
        for key, value in op.task.reference({name: view.of(arrays) for name, view in op.views.items()}).items():
            op.views[key].of(arrays)[...] = value
    first = int(arrays["found"][0, 0]) << 11
    end = first + crossing(arrays["low"][0].astype(np.uint64) * masses_of(first + np.arange(2048)), int(arrays["found"][0, 1]))[0]
    ours = set(np.flatnonzero(keys_of(logits, arrays["best"], arrays["scale"])[0] <= end).tolist())

    p = np.exp((logits[0].astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    running = np.cumsum(p[order])
    count = int(np.searchsorted(running, share, side="right")) + 1
    differing = ours ^ set(order[:count].tolist())
    assert all(abs(running[count - 1] - share) < 1e-4 or abs(p[token] / p[order[count - 1]] - 1) < 1e-4 for token in differing), differing


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (3.0, 0.5)])
def test_frequencies_are_the_probabilities(temperature, share):
    logits = np.random.default_rng(5).standard_normal(40).astype(np.float32) * 2
    counts = np.zeros(40)
    for block in range(8):
        program = draws(np.tile(logits, (1000, 1)), temperature, share, positions=np.arange(1000) + 1000 * block, seed=11)
        counts += np.bincount(chosen_by(program), minlength=40)
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), share, side="right")) + 1]
    assert counts.sum() == counts[kept].sum() == 8000
    expected = 8000 * p[kept] / p[kept].sum()
    common = expected >= 5  # chi-square's approximation
    observed = np.append(counts[kept][common], counts[kept][~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    filled = expected > 0
    assert chisquare(observed[filled], expected[filled]).pvalue > 1e-4


def test_what_nothing_can_be_drawn_from_gives_the_best():
    for row in ([np.nan, -np.inf], [-np.inf, -np.inf], [np.inf, 1.0], [np.nan, 3.0]):
        logits = np.array([row], np.float32)
        assert chosen_by(draws(logits, 1.0, 0.9)).tolist() == [int(np.argmax(np.where(np.isnan(row), -np.inf, row)))]


def test_low_temperatures_and_small_shares_take_the_likeliest():
    logits = np.random.default_rng(0).standard_normal((16, 500)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    for temperature, share in [(0.0, 1.0), (1e-30, 1.0), (1e-6, 0.9), (1.0, 1e-12)]:
        assert chosen_by(draws(logits, temperature, share)).tolist() == best
    assert scale_of(0) == 0 and np.isfinite(scale_of(1e-300))


@emulated
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_draws_do_not_depend_on_the_run(share):
    """Nor does what the ops leave to each other; and bins and words are as they were for the next step."""
    logits = np.random.default_rng(1).standard_normal((3, 9000)).astype(np.float32)
    program = draws(logits, 1.3, share, positions=[4, 5, 6], seed=99)
    first = EmulatedRun(program)
    check_by_op(first)
    for switches in [dict(num_sms=1), dict(num_sms=40), dict(num_sms=2, teams=4, ctas_per_sm=1), dict(pdl=True)]:
        run = EmulatedRun(program, **switches)
        check_bitwise(run, first)
        run()
        assert not run.buffers["high"].any() and (run.buffers["sample.words"] == 2**64 - 1).all()


@emulated
def test_a_sampled_loop_draws_what_the_host_would():
    """The step's own logits, and the draws computed from them in NumPy by seed, position and sequence."""
    plain = EmulatedRun(llama(TINY, batch=2, context=9))
    looped = EmulatedRun(decoding(plain.program, sampled=True), buffers=plain.buffers)
    prompts, choice = [[5, 6, 7], [8]], {"temperature": 0.8, "top_p": 0.9, "seed": 1234567890123}
    decoded = Decoder(looped).decode(prompts, 5, **choice)
    known = [list(prompt) for prompt in prompts]
    for position in range(7):
        tokens = [known[b][min(position, len(known[b]) - 1)] for b in range(2)]
        plain.buffers["tokens"][...], plain.buffers["positions"][...] = tokens, position
        plain()
        drawn = chosen_by(draws(plain.buffers["logits"], 0.8, 0.9, positions=position, seed=choice["seed"]))
        for b in range(2):
            if position == len(known[b]) - 1 and len(known[b]) < len(prompts[b]) + 5:
                known[b].append(int(drawn[b]))
    assert decoded == [known[b][len(prompts[b]) :] for b in range(2)]
    decoder = Decoder(looped)
    assert decoder.decode(prompts, 5, **choice) == decoded
    assert decoder.decode(prompts, 5, **{**choice, "seed": 1}) != decoded
    assert decoder.decode(prompts, 2) == [
        tokens[:2] for tokens in Decoder(EmulatedRun(decoding(plain.program), buffers=plain.buffers)).decode(prompts, 2)
    ]
