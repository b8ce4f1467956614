"""One decode step of a Llama: a new token per sequence, over a KV cache that already holds `context` of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from cuk.checkpoint import Checkpoint, CheckpointError
from cuk.program import Init, Program, View
from cuk.task import check_multiple, check_range, round_up
from cuk.tasks import Argmax, AttentionDecode, Embed, GateUp, Linear, MergeLinear, QkNorm, Qkv, RmsNorm
from cuk.tasks.matvec import MAX_BATCH, streams_x

MAX_CONTEXT = 131_072
MAX_RANGES = 32
"""Ranges of all sequences that the output projection merges: each of its CTAs reads them all, so attention merges more than these itself."""


@dataclass(frozen=True)
class Config:
    """The fields of a Hugging Face Llama `config.json` that the step depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: Mapping | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head before RoPE, as Qwen3 has it

    def __post_init__(self):
        if self.head_dim is None:
            check_multiple("hidden_size", self.hidden_size, self.num_attention_heads, "head_dim is hidden_size / num_attention_heads")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_multiple("hidden_size", self.hidden_size, 8, "weight rows are read 16 bytes at a time")
        check_multiple("intermediate_size", self.intermediate_size, 8, "weight rows are read 16 bytes at a time")
        check_multiple("num_attention_heads", self.num_attention_heads, self.num_key_value_heads, "query heads share KV heads equally")
        check_range("num_hidden_layers", self.num_hidden_layers, 1, 1024, "layers")
        check_range("vocab_size", self.vocab_size, 1, 2**30, "tokens")
        scaling = self.rope_scaling or {"rope_type": "default"}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in ("llama3", "default"):
            raise ValueError(f"rope_scaling rope_type={kind!r}: must be 'llama3' or 'default'")
        if kind == "llama3" and (missing := sorted({*_LLAMA3_SCALING} - {*scaling, "rope_type"})):
            raise ValueError(f"rope_scaling of rope_type='llama3' lacks {', '.join(missing)}")

    @classmethod
    def of(cls, given: Mapping) -> Config:
        """From a config's fields. Raises ValueError naming missing and unknown ones."""
        known = {f.name for f in fields(cls)}
        required = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"}
        missing, unknown = sorted(required - set(given)), sorted(set(given) - known)
        if missing or unknown:
            raise ValueError(
                f"llama config: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}; known fields are {', '.join(sorted(known))}"
            )
        return cls(**given)

    @classmethod
    def of_checkpoint(cls, given: Mapping, where: str = "config.json") -> Config:
        """From a Hugging Face config.json of a Llama, Mistral, Qwen3 or SmolLM2. Raises CheckpointError naming a field that is missing, or
        that asks for what the step does not do, and its value."""
        kind = given.get("model_type")
        if kind not in MODEL_TYPES:
            raise CheckpointError(f"{where}: model_type={kind!r}: must be one of {', '.join(MODEL_TYPES)}")
        windowed = given.get("use_sliding_window", True)
        for name, accepted, why in UNSUPPORTED:
            value = given.get(name)
            if value is not None and value not in accepted and not (name == "sliding_window" and not windowed):
                raise CheckpointError(f"{where}: {name}={value!r}: {why}")
        kinds = sorted(set(given.get("layer_types") or ["full_attention"]))
        if kinds != ["full_attention"]:
            raise CheckpointError(f"{where}: layer_types={kinds}: every layer must be 'full_attention'")
        rope = {**(given.get("rope_parameters") or {}), **(given.get("rope_scaling") or {})}
        theta = rope.pop("rope_theta", None) or given.get("rope_theta", 10_000.0)
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            rope = {}
        names = {f.name for f in fields(cls)} - {"rope_scaling", "rope_theta", "qk_norm"}
        kept = {name: given[name] for name in names if given.get(name) is not None}
        kept.setdefault("num_key_value_heads", given.get("num_attention_heads"))
        kept.setdefault("rms_norm_eps", 1e-6)
        try:
            return cls.of({**kept, "rope_theta": float(theta), "rope_scaling": rope or None, "qk_norm": kind == "qwen3"})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: {error}") from None


MODEL_TYPES = ("llama", "mistral", "qwen3")
UNSUPPORTED = (
    ("hidden_act", ("silu", "swish"), "the activation must be 'silu'"),
    ("attention_bias", (False,), "projections have no bias"),
    ("mlp_bias", (False,), "projections have no bias"),
    ("sliding_window", (), "attention goes over the whole context"),
    ("quantization_config", (), "weights are bf16"),
    ("num_local_experts", (0, 1), "there is one MLP a layer"),
    ("num_experts", (0, 1), "there is one MLP a layer"),
    ("partial_rotary_factor", (1.0,), "RoPE turns whole heads"),
    ("pretraining_tp", (1,), "projections are not split"),
)
"""(field of a config.json, values that change nothing, what holds instead)."""

_LLAMA3_SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}  # fmt: skip

MODELS: dict[str, Config] = {
    "llama-3.2-1b": Config(2048, 8192, 16, 32, 8, 128256, 64, rope_scaling=_LLAMA3_SCALING, tie_word_embeddings=True),
    "llama-3.2-3b": Config(3072, 8192, 28, 24, 8, 128256, 128, rope_scaling=_LLAMA3_SCALING, tie_word_embeddings=True),
    "llama-3.1-8b": Config(4096, 14336, 32, 32, 8, 128256, 128, rope_scaling={**_LLAMA3_SCALING, "factor": 8.0}),
    "qwen3-0.6b": Config(1024, 3072, 28, 16, 8, 151936, 128, 1e-6, 1_000_000.0, tie_word_embeddings=True, qk_norm=True),
    "qwen3-1.7b": Config(2048, 6144, 28, 16, 8, 151936, 128, 1e-6, 1_000_000.0, tie_word_embeddings=True, qk_norm=True),
    "qwen3-8b": Config(4096, 12288, 36, 32, 8, 151936, 128, 1e-6, 1_000_000.0, qk_norm=True),
}


def rope_table(config: Config, capacity: int) -> np.ndarray:
    """(cos, sin) of each position and pair, float32 [capacity, head_dim / 2, 2].

    Llama-3 scaling as in Hugging Face transformers, modeling_rope_utils `_compute_llama3_parameters`: wavelengths above
    original / low_freq_factor are stretched by `factor`, those between are blended, those below original / high_freq_factor kept."""
    half = config.head_dim // 2
    inverse = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "llama3":
            low, high, original = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
            smooth = np.clip((original * inverse / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
            inverse = (1 - smooth) * inverse / scaling["factor"] + smooth * inverse
    angle = np.arange(capacity, dtype=np.float64)[:, None] * inverse
    return np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by Hugging Face's names, and their shapes."""
    c, hd = config, config.head_dim
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,),
              "lm_head.weight": (c.vocab_size, c.hidden_size)}  # fmt: skip
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (c.hidden_size,), f"{at}post_attention_layernorm.weight": (c.hidden_size,),
            f"{at}self_attn.q_proj.weight": (q, c.hidden_size), f"{at}self_attn.k_proj.weight": (kv, c.hidden_size),
            f"{at}self_attn.v_proj.weight": (kv, c.hidden_size), f"{at}self_attn.o_proj.weight": (c.hidden_size, q),
            f"{at}mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size), f"{at}mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{at}mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }  # fmt: skip
        if c.qk_norm:
            shapes |= {f"{at}self_attn.q_norm.weight": (hd,), f"{at}self_attn.k_norm.weight": (hd,)}
    return shapes


SLABS = {
    "norm_attn": ("input_layernorm",), "norm_mlp": ("post_attention_layernorm",),
    "w_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "w_o": ("self_attn.o_proj",),
    "w_gate_up": ("mlp.gate_proj", "mlp.up_proj"), "w_down": ("mlp.down_proj",),
    "norm_q": ("self_attn.q_norm",), "norm_k": ("self_attn.k_norm",),
}  # fmt: skip
"""The buffers that hold a layer's weights, and the tensors whose rows stand in each, one after another."""


def from_pretrained(
    directory: str | Path,
    *,
    batch: int = 1,
    context: int | Sequence[int] = 0,
    capacity: int | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Program:
    """The decode step of a Hugging Face checkpoint: a directory with config.json and safetensors files (bf16, fp16 or fp32; whole or sharded).

    Only headers are read here; `build` reads the weights, a piece at a time, and calls `progress` with each tensor's name. Other arguments as
    for `llama`. Raises CheckpointError naming file, tensor or field, what was expected and what was found."""
    checkpoint = Checkpoint(directory)
    config = Config.of_checkpoint(checkpoint.config, str(checkpoint.directory / "config.json"))
    checkpoint.require(tensor_shapes(config), frozenset({"lm_head.weight"} if config.tie_word_embeddings else ()))

    def parts(at: tuple[int, ...], names: Sequence[str]) -> Iterator[tuple[tuple, np.ndarray]]:
        first = 0
        for name in names:
            progress(name)
            for start, rows in checkpoint.rows(name):
                yield (*at, slice(first + start, first + start + len(rows))), rows
            first += checkpoint.tensors[name].shape[0]

    def of_layers(tensors: Sequence[str]) -> Iterator[tuple[tuple, np.ndarray]]:
        for i in range(config.num_hidden_layers):
            yield from parts((i,), [f"model.layers.{i}.{name}.weight" for name in tensors])

    weights = {name: Init("parts", values=partial(of_layers, tensors)) for name, tensors in SLABS.items()}
    for name, tensor in (("w_embed", "model.embed_tokens.weight"), ("norm_final", "model.norm.weight"), ("w_lm_head", "lm_head.weight")):
        weights[name] = Init("parts", values=partial(parts, (), [tensor]))
    return llama(config, batch=batch, context=context, capacity=capacity, weights=weights, name=checkpoint.directory.resolve().name)


def llama(
    model: str | Mapping | Config = "llama-3.2-1b", *, batch: int = 1, context: int | Sequence[int] = 1024, capacity: int | None = None,
    weights: Mapping[str, Init] | None = None, name: str | None = None,
) -> Program:  # fmt: skip
    """The decode step of `model` (a name of MODELS, or a dict of a config's fields) with random weights, or with those that `weights` gives
    by buffer. name: the program's, by default the model's.

    batch: 1 to 16 sequences. context: tokens already in the cache, 0 to 131071; one for all sequences or one for each. capacity: rows of the
    cache of each sequence, by default the largest context + 1 rounded up to 64. Raises ValueError naming what is out of range, or listing the
    known models."""
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"unknown model {model!r}: known ones are {', '.join(MODELS)} (or give a dict of a config's fields)")
        name, config = name or model, MODELS[model]
    else:
        name, config = name or "llama", model if isinstance(model, Config) else Config.of(model)
    given = weights or {}
    check_range("batch", batch, 1, MAX_BATCH, "a tensor-core tile has 16 rows")
    contexts = (context,) * batch if isinstance(context, (int, np.integer)) else tuple(context)
    if len(contexts) != batch:
        raise ValueError(f"context={list(contexts)}: {len(contexts)} contexts for batch={batch}; give one for all or one for each sequence")
    for each in contexts:
        check_range("context", each, 0, MAX_CONTEXT - 1, "tokens already in the KV cache")
    context, unequal = max(contexts), len(set(contexts)) > 1
    capacity = round_up(context + 1, 64) if capacity is None else capacity
    check_range("capacity", capacity, context + 1, MAX_CONTEXT, "the new token needs a row of the cache too")
    c, hd = config, config.head_dim
    layers, hidden, heads, kv = c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    p = Program(name, {
        "model": name, "batch": batch, "context": ",".join(map(str, contexts)) if unequal else context, "contexts": contexts, "capacity": capacity, "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": kv, "head_dim": hd, "intermediate": c.intermediate_size, "vocab": c.vocab_size, "rms_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta, "rope_scaling": dict(c.rope_scaling) if c.rope_scaling else None, "tied": c.tie_word_embeddings,
        "qk_norm": c.qk_norm,
    })  # fmt: skip

    def weight(name, *shape, gain=1.0):
        return p.buffer(name, shape, "bfloat16", "weight", given.get(name, Init("normal", std=gain / math.sqrt(shape[-1]))))

    def norm(name, *shape):
        return p.buffer(name, shape, "bfloat16", "weight", given.get(name, Init("normal", mean=1.0, std=0.1)))

    residual_gain = 1.0 / math.sqrt(2 * layers)  # keeps the residual stream near unit size through the layers
    tokens = p.buffer("tokens", (batch,), "int32", "index", Init("integers", low=0, high=c.vocab_size))
    positions = p.buffer("positions", (batch,), "int32", "index", Init("values", values=np.array(contexts)))
    w_embed = p.buffer("w_embed", (c.vocab_size, hidden), "bfloat16", "weight", given.get("w_embed", Init("normal")))
    w_lm_head = w_embed if c.tie_word_embeddings else weight("w_lm_head", c.vocab_size, hidden)
    norm_attn, norm_mlp, norm_final = norm("norm_attn", layers, hidden), norm("norm_mlp", layers, hidden), norm("norm_final", hidden)
    w_qkv = weight("w_qkv", layers, (heads + 2 * kv) * hd, hidden)
    w_o = weight("w_o", layers, hidden, heads * hd, gain=residual_gain)
    w_gate_up = weight("w_gate_up", layers, 2 * c.intermediate_size, hidden)
    w_down = weight("w_down", layers, hidden, c.intermediate_size, gain=residual_gain)
    rope = p.buffer("rope", (capacity, hd // 2, 2), "float32", "table", Init("values", values=lambda: rope_table(config, capacity)))
    cache_shape = (layers, batch, kv, capacity, hd)
    k_cache = p.buffer("k_cache", cache_shape, "bfloat16", "cache", Init("normal"))
    v_cache = p.buffer("v_cache", cache_shape, "bfloat16", "cache", Init("normal"))
    # Each layer has activations of its own: what is written once a step is never overwritten while it is read, and a run that overlaps layers
    # has only the data's own way to respect.
    x, x_mid = p.buffer("x", (layers + 1, batch, hidden), "bfloat16"), p.buffer("x_mid", (layers, batch, hidden), "bfloat16")
    q = p.buffer("q", (layers, batch, heads * hd), "bfloat16")
    if c.qk_norm:
        norm_q, norm_k = norm("norm_q", layers, hd), norm("norm_k", layers, hd)
        qkv = p.buffer("qkv", (layers, batch, (heads + 2 * kv) * hd), "bfloat16")
        qk_norm = QkNorm(batch=batch, heads=heads, kv_heads=kv, head_dim=hd, capacity=capacity, eps=c.rms_norm_eps)
    act = p.buffer("act", (layers, batch, c.intermediate_size), "bfloat16")
    logits = p.buffer("logits", (batch, c.vocab_size), "float32", "output")
    next_tokens = p.buffer("next_tokens", (batch,), "int32", "output")

    # The ranges of a split attention are merged by the output projection as it stages them, where they are few and fit in shared memory.
    attention = AttentionDecode(batch=batch, kv_heads=kv, group=heads // kv, head_dim=hd, capacity=capacity, context=context,
                                contexts=contexts if unequal else ())  # fmt: skip
    o_sizes = {"batch": batch, "k": heads * hd, "n": hidden, "residual": True}
    if attention.splits > 1 and batch * attention.splits <= MAX_RANGES and not streams_x(batch, heads * hd):
        attention = replace(attention, merge=False)
        o_proj = MergeLinear(**o_sizes, head_dim=hd, splits=attention.splits)
        operands = attention.operands
        handed = {name: p.buffer(name, (layers, *operands[name].shape), operands[name].dtype) for name in ("partials", "lse")}
        taken = handed
    else:
        o_proj = Linear(**o_sizes)
        attn = p.buffer("attn", (layers, batch, heads * hd), "bfloat16")
        handed, taken = {"out": attn}, {"x": attn}

    # Where x fits in shared memory the norm is part of the projection; where it does not, it is an op before it.
    apart = streams_x(batch, hidden)
    normed = p.buffer("normed", (2 * layers + 1, batch, hidden), "bfloat16") if apart else None

    def projection(kind, name, task, source, norm_weight: View, index: int, **views):
        if apart:
            p.op("norm", RmsNorm(batch=batch, k=hidden, eps=c.rms_norm_eps), f"{name}.norm", x=source, w=norm_weight, y=normed[index])
            p.op(kind, task, name, x=normed[index], **views)
        else:
            p.op(kind, task, name, x=source, norm=norm_weight, **views)

    sizes = {"batch": batch, "k": hidden, "norm": not apart, "eps": c.rms_norm_eps}
    p.op("embed", Embed(batch=batch, vocab=c.vocab_size, hidden=hidden), tokens=tokens, table=w_embed, x=x[0])
    for i in range(layers):
        at = f"layer{i}"
        appended = {"rope": rope, "positions": positions, "q": q[i], "k_cache": k_cache[i], "v_cache": v_cache[i]}
        if c.qk_norm:
            projection("qkv", f"{at}.qkv", Linear(**sizes, n=(heads + 2 * kv) * hd), x[i], norm_attn[i], 2 * i, w=w_qkv[i], y=qkv[i])
            p.op("qk_norm", qk_norm, f"{at}.qk_norm", qkv=qkv[i], norm_q=norm_q[i], norm_k=norm_k[i], **appended)
        else:
            projection("qkv", f"{at}.qkv", Qkv(**sizes, heads=heads, kv_heads=kv, head_dim=hd, capacity=capacity), x[i], norm_attn[i], 2 * i,
                       w=w_qkv[i], **appended)  # fmt: skip
        p.op("attention", attention, f"{at}.attention", q=q[i], k_cache=k_cache[i], v_cache=v_cache[i], positions=positions,
             **{name: buffer[i] for name, buffer in handed.items()})  # fmt: skip
        p.op("o_proj", o_proj, f"{at}.o_proj", **{name: buffer[i] for name, buffer in taken.items()}, w=w_o[i], residual=x[i], y=x_mid[i])
        projection("gate_up", f"{at}.gate_up", GateUp(**sizes, n=c.intermediate_size), x_mid[i], norm_mlp[i], 2 * i + 1, w=w_gate_up[i],
                   y=act[i])  # fmt: skip
        p.op(
            "down",
            Linear(batch=batch, k=c.intermediate_size, n=hidden, residual=True),
            f"{at}.down",
            x=act[i],
            w=w_down[i],
            residual=x_mid[i],
            y=x[i + 1],
        )
    projection(
        "lm_head", "lm_head", Linear(**sizes, n=c.vocab_size, out="float32"), x[layers], View(norm_final), 2 * layers, w=w_lm_head, y=logits
    )
    p.op("argmax", Argmax(batch=batch, vocab=c.vocab_size), logits=logits, next=next_tokens)
    return p


def of_meta(name: str, meta: Mapping) -> Program:
    """The program that has this `meta`, with random weights. Raises ValueError naming what `meta` lacks or has wrong."""
    lacking = sorted(set(_META) - set(meta))
    if lacking:
        raise ValueError(f"program {name!r}: its specification lacks {', '.join(lacking)}")
    config = Config(**{field: meta[key] for key, field in _META.items() if field})
    return llama(config, batch=meta["batch"], context=meta["context"], capacity=meta["capacity"], name=name)


_META = {
    "batch": None, "context": None, "capacity": None, "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate": "intermediate_size", "vocab": "vocab_size",
    "rms_eps": "rms_norm_eps", "rope_theta": "rope_theta", "rope_scaling": "rope_scaling", "tied": "tie_word_embeddings", "qk_norm": "qk_norm",
}  # fmt: skip
"""A program's `meta`, and the field of Config that says it."""

llama.from_pretrained = from_pretrained
