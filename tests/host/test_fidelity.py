"""How far logits stand from float32: the statistics against their definitions, and the whole path with an independent model as the rival."""

import contextlib
import json
import shlex
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from cuk import cli
from cuk import fidelity as fidelity_function
from cuk.fidelity import Pair, divergence, fidelity, judge, logits_of, margins, nll_difference, passages, prompts_for, random_prompts
from cuk.programs import llama
from cuk.task import bfloat16, widen
from tests.host.test_checkpoint import CONFIG, random_tensors, write

POSITIONS = 12
SEEDS = st.integers(0, 2**32 - 1)


# ---- the statistics ----
def drawn(seed, vocab=17, n=5, spread=3.0):
    rng = np.random.default_rng(seed)
    return rng, (spread * rng.standard_normal((n, vocab))).astype(np.float32)


@given(SEEDS, st.sampled_from([0.01, 3.0, 80.0]), st.integers(1, 40))
def test_divergence_is_its_definition(seed, spread, vocab):
    rng, exact = drawn(seed, vocab, spread=spread)
    other = exact + rng.standard_normal(exact.shape).astype(np.float32)
    p, q = softmax(exact.astype(np.float64), axis=-1), softmax(other.astype(np.float64), axis=-1)
    found = divergence(exact, other)
    # Both sum vocab terms of at most about 1 in float64; log p differs from log(exp(log p)) by rounding of logits of up to some hundreds.
    np.testing.assert_allclose(found, rel_entr(p, q).sum(axis=-1), rtol=1e-9, atol=1e-11)
    assert (found >= 0).all() and (divergence(exact, exact) == 0).all()
    shift = rng.integers(-8, 8, (len(exact), 1)).astype(np.float64)  # probabilities do not see what all logits share
    np.testing.assert_allclose(divergence(exact + shift, other - shift), found, rtol=1e-9, atol=1e-11)


@given(SEEDS, st.integers(1, 40))
def test_nll_difference_is_its_definition(seed, vocab):
    rng, exact = drawn(seed, vocab)
    other, following = exact + rng.standard_normal(exact.shape), rng.integers(0, vocab, len(exact))
    p, q = softmax(exact.astype(np.float64), axis=-1), softmax(other, axis=-1)
    expected = [abs(np.log(p[i, t]) - np.log(q[i, t])) for i, t in enumerate(following)]
    np.testing.assert_allclose(nll_difference(exact, other, following), expected, atol=1e-12)


def test_ratios_are_of_pairs():
    """Prompts differ tenfold, the two runs on each by a fifth: an interval of unpaired prompts would hold 1, one of pairs does not."""
    rng = np.random.default_rng(0)
    rival = 10.0 ** rng.uniform(-3, -2, 12)
    pair = Pair.of(rival * rng.uniform(0.75, 0.85, 12), rival)
    assert 0.75 < pair.low < pair.ratio < pair.high < 0.85
    rms = Pair.of(np.square(3 * rival), np.square(rival), root=True)
    assert rms.ratio == pytest.approx(3) and rms.rival == pytest.approx(np.sqrt(np.mean(rival**2))) and str(rms) == "3.000 [3.000, 3.000]"
    alone = Pair.of(rival[:1], rival[:1])
    assert (alone.ratio, alone.low, alone.high, str(alone)) == (1.0, None, None, "1.000")
    assert Pair.of(np.zeros(3), np.zeros(3)).ratio == 1.0 and Pair.of(np.ones(3), np.zeros(3)).ratio == np.inf


def planted(change=None):
    """Two prompts of three positions, float32 and rival alike but for 0.1 in one logit, ours as the rival's but for `change` (prompt, position,
    token, by)."""
    exact = [np.array([[5, 1, 0, 0], [5, 4.9, 0, 0], [0, 0, 3, 0]], np.float32) for _ in range(2)]
    rival = [e + np.array([[0.1, 0, 0, 0]], np.float32) for e in exact]
    ours = [r.copy() for r in rival]
    if change:
        prompt, position, token, by = change
        ours[prompt][position, token] += by
    return judge("m", "pdl", [np.array([0, 1, 2, 3])] * 2, exact, rival, ours)


def test_a_greedy_token_counts_where_its_margin_exceeds_twice_the_rivals_error():
    exact, rival = np.array([[5, 1], [5, 4.9]], np.float32), np.array([[5.1, 1], [5, 4.75]], np.float32)
    margin, error = margins(exact, rival)
    np.testing.assert_allclose([margin, error], [[4, 0.1], [0.1, 0.15]], atol=1e-6)
    found = planted()
    assert (found.decided, found.differing, found.problems, found.rms.ratio) == (4, (), [], 1.0)
    assert planted((1, 1, 1, 0.3)).differing == ()  # as near as that, either token will do
    wrong = planted((1, 2, 0, 4.0))
    assert [(d.prompt, d.position, d.ours, d.exact) for d in wrong.differing] == [(1, 2, 0, 2)]
    assert "prompt 1, position 2: greedy token 0, in float32 2 by a margin of 3, over twice the 0.1" in " ".join(wrong.problems)
    assert any(problem.startswith("the RMS error of the logits is") for problem in wrong.problems)
    broken = planted((0, 0, 3, np.nan))
    assert broken.problems and json.loads(json.dumps(broken.to_json(), allow_nan=False))["rms"]["ours"] is None


def test_too_few_decided_positions_are_a_problem():
    exact = [np.array([[1.0, 1.05]] * 4, np.float32)]
    found = judge("m", "pdl", [np.zeros(5, int)], exact, [exact[0] + np.float32([0.1, 0])], [exact[0]])
    assert found.problems == ["only 0 of 4 positions have a margin that decides the greedy token: equal tokens show little"]


# ---- the whole path ----
def independent_sequence(tensors, config, tokens, rounded):
    """Logits [n, vocab] of a whole sequence, a head at a time, from the tensors by their names: float64, or with every result rounded to bf16."""

    def r(x):
        return widen(x.astype(bfloat16())) if rounded else x

    w = {name: widen(t.astype(bfloat16())) for name, t in tensors.items()}
    heads, kv, hd = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    n, half = len(tokens), hd // 2
    angle = np.arange(n)[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = (r(np.concatenate([f(angle)] * 2, axis=1)) for f in (np.cos, np.sin))

    def norm(x, weight):
        return r(r(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])) * w[weight])

    def head_of(x, name, h, turn=True):
        y = r(x @ w[f"{name}_proj.weight"][h * hd : (h + 1) * hd].T)
        if config["model_type"] == "qwen3" and turn:
            y = norm(y, f"{name}_norm.weight")
        return r(r(y * cos) + r(np.concatenate([-y[:, half:], y[:, :half]], axis=1) * sin)) if turn else y

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y, out = norm(x, f"{at}.input_layernorm.weight"), []
        for h in range(heads):
            q, k, v = (
                head_of(y, f"{at}.self_attn.{name}", i, name != "v")
                for name, i in (("q", h), ("k", h * kv // heads), ("v", h * kv // heads))
            )
            score = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(hd), -np.inf)
            out.append(r(r(softmax(score, axis=-1)) @ v))
        x = r(x + r(np.concatenate(out, axis=1) @ w[f"{at}.self_attn.o_proj.weight"].T))
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (r(y @ w[f"{at}.mlp.{name}_proj.weight"].T) for name in ("gate", "up"))
        x = r(x + r(r(r(gate / (1 + np.exp(-gate))) * up) @ w[f"{at}.mlp.down_proj.weight"].T))
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return r(norm(x, "model.norm.weight") @ w[head].T)


def sane(config, seed=0):
    """Random tensors of bf16's values, scaled as those of a trained model are: logits are near unit size."""
    tensors, tied = random_tensors(config, seed=seed), config["tie_word_embeddings"]
    if tied:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        tensor *= 0.1 if "norm" in name else 1.0 if "embed" in name and not tied else tensor.shape[-1] ** -0.5
        tensor += "norm" in name
    return {name: widen(tensor.astype(bfloat16())).astype(np.float32) for name, tensor in tensors.items()}


CONFIGS = [CONFIG, {**CONFIG, "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 128}]


@pytest.fixture(scope="module", params=CONFIGS, ids=["llama", "qwen3"])
def checkpoint(request, tmp_path_factory):
    """(directory, rival): a checkpoint, and the independent model of it in the place of transformers."""
    config, tensors = request.param, sane(request.param)
    opened = []

    def models(directory, dtype):
        assert (directory / "config.json").exists()

        @contextlib.contextmanager
        def model():
            opened.append(dtype)
            yield lambda tokens: independent_sequence(tensors, config, tokens, dtype == "bfloat16").astype(np.float32)
            opened.append("closed")

        return model()

    models.opened, models.config, models.tensors = opened, config, tensors
    return write(tmp_path_factory.mktemp("model"), config, tensors), models


@pytest.mark.parametrize("batch", [1, 3])
def test_the_reference_run_is_as_faithful_as_an_independent_bf16_model(checkpoint, batch):
    directory, models = checkpoint
    told, prompts = [], random_prompts(101, POSITIONS, 4)
    found = fidelity(directory, prompts, run="reference", positions=POSITIONS, batch=batch, seed=1, models=models, progress=told.append)
    print(found)
    assert models.opened[-4:] == ["float32", "closed", "bfloat16", "closed"]
    assert found.problems == [] and found.rms.ratio < 1.1 and found.kl.low <= found.kl.ratio <= found.kl.high
    assert 0 < found.kl.ours < 1e-2 and 0 < found.nll.ours < 0.2 and found.decided >= found.prompts * found.positions / 2
    assert (found.prompts, found.positions, found.run) == (4, POSITIONS, "reference") and "reference: prompt 1 of 4" in told


def test_an_exact_run_has_no_distance(checkpoint):
    directory, models = checkpoint
    prompts = [prompt[:POSITIONS] for prompt in random_prompts(101, POSITIONS, 3)]
    program = llama.from_pretrained(directory, batch=2, context=POSITIONS - 1, capacity=POSITIONS)
    exact = logits_of(program, "reference", prompts, POSITIONS, precision="float64")
    with models(directory, "float32") as model:
        for prompt, found in zip(prompts, exact, strict=True):
            np.testing.assert_allclose(found, model(prompt), atol=2e-6 * np.abs(found).max())  # RoPE's table is stored in float32


def test_a_wrong_model_is_found_out(checkpoint, tmp_path):
    """One layer's value projection is scaled by a tenth more."""
    _, models = checkpoint
    tensors = {name: tensor * np.float32(1.1 if "layers.1.self_attn.v_proj" in name else 1) for name, tensor in models.tensors.items()}
    found = fidelity(
        write(tmp_path, models.config, tensors), random_prompts(101, POSITIONS, 4), run="reference", positions=POSITIONS, models=models
    )
    assert any(problem.startswith("the RMS error of the logits is") for problem in found.problems) and found.rms.low > 1.1


def test_transformers_is_the_independent_model(checkpoint):
    """float32 against float64, and the error of bf16 about that of rounding every result."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from cuk.fidelity import transformers_models

    directory, models = checkpoint
    tokens = np.array(random_prompts(101, 40, 1)[0])
    with models(directory, "float32") as model:
        expected = model(tokens)
    with transformers_models(directory, "float32") as model:
        exact = model(tokens)
    # Some hundred float32 roundings of 2^-24 in a row; RoPE's angles of up to 40 are rounded to 40 * 2^-24.
    np.testing.assert_allclose(exact, expected, atol=100 * 2.0**-24 * np.abs(expected).max())
    errors = []
    for rival in (transformers_models, models):
        with rival(directory, "bfloat16") as model:
            errors.append(np.sqrt(np.mean((model(tokens) - expected) ** 2)))
    assert 1 / 1.5 < errors[0] / errors[1] < 1.5


# ---- prompts ----
def test_without_a_tokenizer_prompts_are_random_but_seeded(checkpoint):
    directory, _ = checkpoint
    prompts, kind = prompts_for(directory, 101, (), (), 64, 3)
    assert kind == "random tokens" and np.shape(prompts) == (8, 65) and np.ptp(prompts) <= 100
    assert prompts_for(directory, 101, (), (), 64, 3)[0] == prompts != prompts_for(directory, 101, (), (), 64, 4)[0]
    assert prompts_for(directory, 101, (), [[1, 2]], 1, 0) == ([[1, 2]], "given")


def test_passages_are_eight_and_long_enough(checkpoint, monkeypatch):
    """A tokenizer of a real vocabulary makes somewhat more tokens of a text than it has words."""
    directory, _ = checkpoint
    assert len(passages()) == 8 and all(len(text.split()) >= 64 for text in passages())

    class Words:
        def __init__(self, directory):
            assert directory.is_dir()

        def tokens(self, text):
            return [len(word) for word in text.split()]

    monkeypatch.setattr(sys.modules["cuk.fidelity"], "Speller", Words)
    prompts, kind = prompts_for(directory, 101, (), (), 63, 0)
    assert kind == "passages" and len(prompts) == 8
    assert prompts_for(directory, 101, (), (), 500, 0)[1] == "random tokens"
    assert prompts_for(directory, 101, ["a text"], (), 1, 0) == ([[1, 4]], "given")


@pytest.mark.parametrize(
    ("prompts", "positions", "message"),
    [
        ([], 4, "no prompts: give at least one"),
        ([[1, 2, 3]], 0, "positions=0: must be at least 1"),
        ([[1] * 5, [1] * 4], 4, "prompt 1 has 4 tokens: 4 positions need 5, .* or positions=3"),
        ([[1, 101]], 1, "prompt 0: token 101 must be from 0 to 100"),
    ],
)
def test_what_does_not_do_is_refused_before_a_model_is_loaded(checkpoint, prompts, positions, message):
    with pytest.raises(ValueError, match=message):
        fidelity(checkpoint[0], prompts, positions=positions, models=lambda *given: pytest.fail("weights would be read"))


# ---- the command line ----
def run(capsys, line, model):
    code = cli.main([*shlex.split(line), "--model", str(model)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_line_tells_the_same(checkpoint, capsys, monkeypatch):
    directory, models = checkpoint
    assert fidelity_function is fidelity
    monkeypatch.setattr(cli, "require_transformers", lambda: None)
    monkeypatch.setattr(cli, "fidelity", lambda *given, **how: fidelity(*given, **how, models=models))
    code, out, _ = run(capsys, f"fidelity --run reference --positions {POSITIONS} --batch 8 --json", directory)
    found = json.loads(out)
    assert code == 0 and found["faithful"] and found["tokens"] == "random tokens" and found["prompts"] == 8 and found["kl"]["ratio"] > 0
    code, out, err = run(capsys, "fidelity --run reference --positions 3 --ids 1,2,3,4 --ids 9,8,7,6,5", directory)
    assert "mean KL, nats" in out and "greedy tokens:" in out and "prompts: given" in err and code == ("NOT FAITHFUL" in out)
    monkeypatch.setattr(cli, "fidelity", lambda *given, **how: planted((1, 2, 0, 4.0)))
    code, out, _ = run(capsys, "fidelity --run reference", directory)
    assert code == 1 and "NOT FAITHFUL: prompt 1, position 2" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("fidelity --run megakernel", 2, "unknown run 'megakernel': known ones are reference, stream, graph, pdl"),
        ("fidelity --positions 0", 2, "--positions 0: must be at least 1"),
        ("fidelity --ids 1,x", 2, "--ids '1,x': must be tokens with commas between them"),
        ("fidelity --run reference --batch 17", 2, "batch=17: must be from 1 to 16"),
        ("fidelity", 1, "run 'pdl' needs a GPU: there is none. On the CPU, for a small model: --run reference"),
    ],
)
def test_what_is_refused(checkpoint, capsys, monkeypatch, line, code, message):
    monkeypatch.setattr(cli, "require_transformers", lambda: None)
    monkeypatch.setattr(cli, "gpu_missing", lambda: "there is none")
    found, _, err = run(capsys, line, checkpoint[0])
    assert found == code and message in err


def test_without_transformers_it_says_what_to_install(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "fidelity --run reference", checkpoint[0])
    assert code == 1 and "pip install 'cuk[models]' (torch and transformers)" in err
    with pytest.raises(ImportError, match="pip install"):
        fidelity(checkpoint[0], [[1, 2]], positions=1)
    assert run(capsys, "fidelity", tmp_path / "nowhere")[0] == 1
