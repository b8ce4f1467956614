"""Checkpoints as Hugging Face writes them: what is read, and what is refused, before a weight is touched."""

import contextlib
import json
import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuk import checkpoint
from cuk.checkpoint import Checkpoint, CheckpointError
from cuk.programs import llama
from cuk.programs.llama import Config, tensor_shapes
from cuk.runs.memory import numpy_buffers
from cuk.task import bfloat16, widen

safetensors = pytest.importorskip("safetensors.numpy")

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 101, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "torch_dtype": "bfloat16", "max_position_embeddings": 2048, "rope_scaling": None,
}  # fmt: skip


def random_tensors(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(Config.of_checkpoint(config))
    return {name: rng.standard_normal(shape, dtype=np.float32).astype(dtype) for name, shape in shapes.items()}


def write(folder, config=CONFIG, tensors=None, shards=None):
    """A checkpoint in `folder`: of one file, or of `shards`."""
    tensors = random_tensors(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        safetensors.save_file(tensors, folder / "model.safetensors")
        return folder
    where = {}
    for i, names in enumerate(np.array_split(sorted(tensors), shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        safetensors.save_file({name: tensors[name] for name in names}, folder / file)
        where |= dict.fromkeys(names.tolist(), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("kind", "tied", "shards"), [("llama", False, None), ("qwen3", True, 3), ("mistral", False, 2)])
def test_each_weight_stands_where_the_step_reads_it(tmp_path, monkeypatch, dtype, kind, tied, shards):
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 5000)  # several pieces a tensor
    config = {**CONFIG, "model_type": kind, "tie_word_embeddings": tied}
    tensors = random_tensors(config, bfloat16() if dtype == "bfloat16" else np.dtype(dtype))
    if tied:
        del tensors["lm_head.weight"]
    told = []
    program = llama.from_pretrained(write(tmp_path, config, tensors, shards), batch=2, context=5, progress=told.append)
    assert not told and program.meta["tied"] is tied and program.meta["qk_norm"] is (kind == "qwen3")
    arrays = numpy_buffers(program)
    assert set(told) == set(tensors)

    def stored(name):
        return widen(tensors[name].astype(bfloat16()))

    for i in range(2):
        at = f"model.layers.{i}."
        qkv = np.concatenate([stored(f"{at}self_attn.{part}_proj.weight") for part in "qkv"])
        gate_up = np.concatenate([stored(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")])
        expected = {"w_qkv": qkv, "w_gate_up": gate_up, "w_o": stored(f"{at}self_attn.o_proj.weight"), "w_down": stored(f"{at}mlp.down_proj.weight"),
                    "norm_attn": stored(f"{at}input_layernorm.weight"), "norm_mlp": stored(f"{at}post_attention_layernorm.weight")}  # fmt: skip
        if kind == "qwen3":
            expected |= {f"norm_{part}": stored(f"{at}self_attn.{part}_norm.weight") for part in "qk"}
        for name, value in expected.items():
            np.testing.assert_array_equal(widen(arrays[name][i]), value, err_msg=name)
    np.testing.assert_array_equal(widen(arrays["w_embed"]), stored("model.embed_tokens.weight"))
    np.testing.assert_array_equal(widen(arrays["norm_final"]), stored("model.norm.weight"))
    assert ("w_lm_head" in arrays) is not tied
    if not tied:
        np.testing.assert_array_equal(widen(arrays["w_lm_head"]), stored("lm_head.weight"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2': must be one of llama, mistral, qwen3"),
        ({"attention_bias": True}, "attention_bias=True: projections have no bias"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4096}, "sliding_window=4096: attention goes over the whole context"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': the activation must be 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"num_local_experts": 8}, "num_local_experts=8: there is one MLP a layer"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "every layer must be 'full_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type='yarn': must be 'llama3' or 'default'"),
        ({"hidden_size": None}, "missing ['hidden_size']"),
        ({"hidden_size": 50}, "hidden_size=50"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4"),
    ],
)
def test_what_the_step_does_not_do_is_refused_by_field_and_value(tmp_path, change, message):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    (tmp_path / "model.safetensors").unlink()  # the config is refused whatever the weights are
    safetensors.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        llama.from_pretrained(tmp_path)


def test_configs_that_mean_the_same():
    base = Config.of_checkpoint(CONFIG)
    assert Config.of_checkpoint({**CONFIG, "sliding_window": 4096, "use_sliding_window": False}) == base
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    assert Config.of_checkpoint({**CONFIG, "rope_parameters": rope}) == Config.of_checkpoint({**CONFIG, "rope_theta": 5e5})
    without = {name: value for name, value in CONFIG.items() if name not in ("num_key_value_heads", "head_dim")}
    plain = Config.of_checkpoint(without)
    assert plain.num_key_value_heads == 4 and plain.head_dim == 12


def broken(folder, kind):
    """A checkpoint with one thing wrong."""
    tensors = random_tensors(CONFIG)
    name, file = "model.layers.1.mlp.up_proj.weight", folder / "model.safetensors"
    if kind == "shape":
        tensors[name] = tensors[name][:-1]
    if kind == "dtype":
        tensors[name] = tensors[name].astype(np.int8)
    if kind == "missing":
        del tensors[name]
    if kind == "unknown":
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    write(folder, tensors=tensors, shards=2 if kind in ("outside", "index", "lost") else None)
    index = folder / "model.safetensors.index.json"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if kind == "oversized":
        file.write_bytes(file.read_bytes() + bytes(100))
    if kind == "header lies":
        file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])
    if kind == "empty":
        file.write_bytes(b"")
    if kind == "no config":
        (folder / "config.json").unlink()
    if kind == "config is no JSON":
        (folder / "config.json").write_text("{")
    if kind == "outside":
        index.write_text(json.dumps({"weight_map": {name: "../model.safetensors"}}))
    if kind == "index":
        index.write_text(json.dumps({"weight_map": [1]}))
    if kind == "lost":
        (folder / "model-00002-of-00002.safetensors").unlink()
    if kind == "pickle":
        file.rename(folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' has shape (87, 48), by config.json it has (88, 48)"),
        ("dtype", "tensor 'model.layers.1.mlp.up_proj.weight' has dtype I8, must be one of BF16, F16, F32"),
        ("missing", "lacks model.layers.1.mlp.up_proj.weight"),
        ("unknown", "holds, which config.json does not account for, model.layers.0.self_attn.q_proj.bias"),
        ("truncated", "model.safetensors: not a whole safetensors file of"),
        ("oversized", "model.safetensors: not a whole safetensors file of"),
        ("header lies", "model.safetensors: not a whole safetensors file of"),
        ("empty", "model.safetensors: not a whole safetensors file of 0 bytes"),
        ("no config", "config.json: no such file"),
        ("config is no JSON", "config.json: not JSON"),
        ("outside", "file '../model.safetensors' must be the name of a safetensors file in the same directory"),
        ("index", "field 'weight_map' must give each tensor's file"),
        ("lost", "model-00002-of-00002.safetensors: no such file, though the index names it"),
        ("pickle", "checkpoints in pickle files are not read"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_file_and_tensor(tmp_path, kind, message):
    with pytest.raises((CheckpointError, FileNotFoundError), match=re.escape(message)):
        llama.from_pretrained(broken(tmp_path, kind))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_damage_to_a_file_does_worse_than_an_error(tmp_path_factory, data):
    folder = write(tmp_path_factory.mktemp("damaged"))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), header, header + 7, 5]))])
    with contextlib.suppress(CheckpointError, FileNotFoundError):  # it is found, or has left a whole file
        numpy_buffers(llama.from_pretrained(folder))


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        llama.from_pretrained(tmp_path / "nowhere")


def test_a_checkpoint_says_what_it_is(tmp_path):
    assert repr(Checkpoint(write(tmp_path, shards=2))).endswith("21 tensors in 2 files>")
