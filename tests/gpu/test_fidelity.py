"""Random checkpoints of odd shapes: logits of GPU runs are as near to float32 as those of transformers in bf16, and greedy tokens the same."""

import json

import pytest

from cuk import cli
from cuk.fidelity import MOST_RMS_RATIO, fidelity, random_prompts
from tests.host.test_checkpoint import write
from tests.host.test_fidelity import sane

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {
    "model_type": "llama", "hidden_size": 264, "intermediate_size": 520, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 1003, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", "max_position_embeddings": 512,
}  # fmt: skip
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "scaled": {**BASE, "architectures": ["LlamaForCausalLM"], "hidden_size": 1000, "intermediate_size": 1016, "head_dim": 128, "num_attention_heads": 5,
               "num_key_value_heads": 1, "vocab_size": 777, "tie_word_embeddings": True, "rope_scaling": SCALING},
    "qwen3": {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 520, "tie_word_embeddings": True,
              "use_sliding_window": False},
    "mistral": {**BASE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4,
                "intermediate_size": 2056, "num_hidden_layers": 7, "sliding_window": None},
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    config = CONFIGS[request.param]
    return write(tmp_path_factory.mktemp(request.param), config, sane(config), shards=2)


@pytest.mark.parametrize(("run", "batch"), [("stream", 1), ("pdl", 1), ("pdl", 3), ("pdl", 8)])
def test_logits_are_as_near_to_float32_as_those_of_transformers(model, run, batch):
    config = json.loads((model / "config.json").read_text())
    found = fidelity(model, random_prompts(config["vocab_size"]), run=run, batch=batch)
    print(found)
    assert found.rms.ratio <= MOST_RMS_RATIO and found.problems == []
    assert found.decided >= found.prompts * found.positions / 2 and not found.differing
    # KL goes with the square of the logits' errors, whatever their sign: as many roundings leave as much, but for what prompts differ by.
    assert found.kl.low <= MOST_RMS_RATIO**2


def test_the_command_line_says_so(model, capsys):
    code = cli.main(["fidelity", "--model", str(model), "--json", "--positions", "16"])
    found = json.loads(capsys.readouterr().out)
    assert code == (not found["faithful"]) and found["run"] == "pdl" and found["kl"]["rival"] > 0
