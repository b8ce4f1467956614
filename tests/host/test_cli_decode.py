"""`cuk decode` on a small checkpoint: what it prints, what it asks a GPU for, and what it refuses before it reads a weight."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from cuk import bench, cli, text
from cuk.checkpoint import CheckpointError
from cuk.decode import Decoder
from cuk.programs import decoding, llama
from cuk.runs import build
from tests.host.test_checkpoint import CONFIG, write


@pytest.fixture
def model(tmp_path):
    return write(tmp_path, {**CONFIG, "eos_token_id": [3, 7]})


def run(capsys, line, *more):
    code = cli.main([*shlex.split(line), *map(str, more)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_tokens_are_those_of_the_loop(capsys, model):
    code, out, err = run(capsys, "decode --ids 1,2,3 --ids 5 --tokens 6 --run reference --json --stop none --model", model)
    found = json.loads(out)
    assert code == 0 and found["prompts"] == [[1, 2, 3], [5]]
    step = llama.from_pretrained(model, batch=2, context=8, capacity=9)
    assert found["tokens"] == Decoder(build(decoding(step), "reference", precision="storage")).decode([[1, 2, 3], [5]], 6)
    assert found["steps"] == 8 and found["tokens_per_s"] > 0 and found["floor_us"] is None and found["text"] is None
    code, out, err = run(capsys, "decode --ids 1,2,3 --tokens 6 --run reference --stop none --model", model)
    assert code == 0 and out.split() == [str(token) for token in found["tokens"][0]]
    assert "tokens/s: 6 tokens, 8 steps of" in err and "no floor without a GPU" in err
    code, out, _ = run(capsys, "decode --ids 1,2,3 --ids 5 --tokens 6 --run reference --stop none --model", model)
    assert out.splitlines() == [f"[{i}] {' '.join(map(str, tokens))}" for i, tokens in enumerate(found["tokens"])]
    stop = found["tokens"][0][2]
    code, out, _ = run(capsys, f"decode --ids 1,2,3 --tokens 6 --run reference --stop {stop} --model", model)
    assert out.split()[-1] == str(stop) and len(out.split()) <= 3


def test_draws_are_seeded(capsys, model):
    def drawn(seed):
        line = f"decode --ids 4 --tokens 12 --run reference --json --stop none --temperature 1.5 --top-p 0.9 --seed {seed} --model"
        return json.loads(run(capsys, line, model)[1])["tokens"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_on_a_gpu_the_floor_of_the_mean_step_stands_beside(capsys, model, monkeypatch):
    def as_pdl(program, run, *, seed, device):
        made = build(program, "reference", precision="storage", seed=seed)
        made.name = run
        return made

    monkeypatch.setattr(cli, "build", as_pdl)
    monkeypatch.setattr(cli, "gpu_missing", lambda: None)
    monkeypatch.setattr(cli, "measure_floor", lambda: bench.Floor(1e12, 1e12, 1e12, "plain", ()))
    found = json.loads(run(capsys, "decode --ids 1,2,3 --tokens 9 --json --stop none --model", model)[1])
    assert found["steps"] == 11 and found["floor_us"] == pytest.approx(llama.from_pretrained(model, context=5).min_bytes / 1e6)
    assert found["ratio_to_floor"] == found["step_us"] / found["floor_us"]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("decode --model DIR", 2, "nothing to go on with: give --prompt TEXT, or --ids"),
        ("decode --model DIR --ids 1,x", 2, "--ids '1,x': must be tokens with commas between them"),
        ("decode --model DIR --ids 1 --stop x", 2, "--stop 'x'"),
        ("decode --model DIR --ids 1 --run megakernel", 2, "unknown run 'megakernel': known ones are reference, stream, graph, pdl"),
        ("decode --model DIR --ids 1,101 --run reference", 2, "prompt 0: token 101 must be from 0 to 100"),
        ("decode --model DIR --ids 1 --tokens 0 --run reference", 2, "tokens=0"),
        ("decode --model DIR --ids 1 --top-p 0 --run reference", 2, "top_p=0.0"),
        ("decode --model DIR --ids 1 --tokens 30 --capacity 20 --run reference", 2, "capacity=20: must be from 31"),
        ("decode --model /nowhere --ids 1", 1, "--model /nowhere: no such directory, nor one of llama-3.2-1b"),
        ("decode --model llama-3.2-1b --prompt hello", 2, "llama-3.2-1b has random weights and no tokenizer; give --ids"),
    ],
)
def test_what_is_refused(capsys, model, monkeypatch, line, code, message):
    monkeypatch.setattr(cli, "build", lambda *given, **switches: pytest.fail("weights would be read"))
    assert (code, True) == ((got := run(capsys, line.replace("DIR", str(model))))[0], message in got[2]), got


def test_without_a_gpu_it_says_what_to_do(capsys, model, monkeypatch):
    monkeypatch.setattr(cli, "gpu_missing", lambda: "there is none")
    code, _, err = run(capsys, "decode --ids 1 --model", model)
    assert code == 1 and "run 'pdl' needs a GPU: there is none. On the CPU, for a small model: --run reference" in err


def test_text_without_a_tokenizer(capsys, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = run(capsys, "decode --prompt hello --model", model)
    assert code == 1 and "pip install 'cuk[text]', or give tokens by --ids" in err
    fake = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=lambda path: 1 / 0))
    monkeypatch.setitem(sys.modules, "tokenizers", fake)
    code, _, err = run(capsys, "decode --prompt hello --model", model)
    assert code == 1 and "tokenizer.json: no such file; give tokens by --ids" in err
    (model / "tokenizer.json").write_text("{")
    code, _, err = run(capsys, "decode --prompt hello --model", model)
    assert code == 2 and "tokenizer.json: not a tokenizer" in err


def test_stop_tokens_of_a_checkpoint(model):
    assert text.stop_tokens(model) == (3, 7)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert text.stop_tokens(model) == (9,)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(CheckpointError, match="eos_token_id='end': must be a token or a list"):
        text.stop_tokens(model)


def test_a_character_is_held_back_until_its_bytes_have_come():
    class Bytes:
        def text(self, tokens):
            return bytes(tokens).decode("utf-8", errors="replace")

    spelled = text.Spelled(Bytes())
    assert [spelled([byte]) for byte in "aé😀b".encode()] == ["a", "", "é", "", "", "", "😀", "b"]
    assert spelled([0xC3]) == "" and spelled.rest == "\ufffd"


def test_a_real_tokenizer(capsys, model):
    """Text in, text out, with byte-level pieces."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(c): c for c in range(32, 127 - 26)} | {"\u0120": 0, "he": 1, "llo": 2}
    vocab = {piece: i for i, piece in enumerate(sorted(vocab))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="!"))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(model / "tokenizer.json"))
    speller = text.Speller(model)
    assert speller.tokens("AB") == [vocab["A"], vocab["B"]] and speller.text([vocab["A"], vocab["B"]]) == "AB"
    code, out, _ = run(capsys, "decode --prompt AB --tokens 5 --run reference --stop none --model", model)
    ids = json.loads(run(capsys, f"decode --ids {vocab['A']},{vocab['B']} --tokens 5 --run reference --json --stop none --model", model)[1])
    assert code == 0 and out == ids["text"][0] + "\n" and ids["text"][0] == speller.text(ids["tokens"][0])
