"""The same decode step by others, set up as their users would: PyTorch in a CUDA graph, torch.compile in one, cuBLAS products alone.

Each takes a llama program and the buffers of one of its runs (weights are shared, not copied; the KV cache is the rival's own) and
returns a callable that replays a captured graph on the current CuPy stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuk.program import Program

EXPECTED_US = {"llama-3.2-1b, 1, 1024": {"torch_graph": 1104.0, "torch_compile": 1026.0}}
"""Microseconds of a step on one H200, measured 2026-12-01 (driver 580.159, torch 2.11), by "model, batch, context"."""


class Rival:
    """A captured step. `logits()`: its logits [batch, vocab] as NumPy float32, or None where it computes none."""

    def __init__(self, name: str, replay: Callable[[], None], logits: Callable[[], np.ndarray | None], keep: Any):
        self.name, self._replay, self._logits, self._keep = name, replay, logits, keep
        self.settings: dict[str, Any] = {}
        self.checked: str | None = None

    def __call__(self) -> None:
        self._replay()

    def logits(self) -> np.ndarray | None:
        return self._logits()

    def check(self, ours: np.ndarray) -> float | None:
        """RMS difference of the logits from ours over the RMS of ours; sets `checked`."""
        import cupy

        self()
        cupy.cuda.get_current_stream().synchronize()
        theirs = self.logits()
        if theirs is None:
            return None
        error = float(np.sqrt(np.mean((theirs.astype(np.float64) - ours) ** 2) / np.mean(np.square(ours, dtype=np.float64))))
        self.checked = f"logits differ by {error:.1e} of their RMS"
        return error


def _torch_view(array: Any) -> Any:
    """A CuPy array as a torch tensor that shares its memory; bf16 goes through int16, which both know."""
    import torch

    if array.dtype.itemsize == 2:
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16)
    return torch.as_tensor(array, device="cuda")


def torch_graph(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """PyTorch, eager operators captured in a CUDA graph."""
    return _torch(program, buffers, "torch_graph", None)


def torch_compile(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """PyTorch, one layer compiled with max-autotune, the step captured in a CUDA graph."""
    return _torch(program, buffers, "torch_compile", "max-autotune-no-cudagraphs")


def _torch(program: Program, buffers: Mapping[str, Any], name: str, mode: str | None) -> Rival:
    import cupy
    import torch
    import torch.nn.functional as F

    m = program.meta
    hidden, heads, kv, hd, eps, context = m["hidden"], m["heads"], m["kv_heads"], m["head_dim"], m["rms_eps"], m["context"]
    batch, group, layers = m["batch"], heads // kv, m["layers"]
    cupy.cuda.get_current_stream().synchronize()
    t = {key: _torch_view(value) for key, value in buffers.items() if program.buffers[key].role in ("weight", "table", "index")}
    k_cache, v_cache = (_torch_view(buffers[key]).clone() for key in ("k_cache", "v_cache"))
    tokens, position = t["tokens"].long(), t["positions"][:1].long()
    turn = t["rope"][position[0]].to(torch.bfloat16)
    cos, sin = turn[:, 0].repeat(2), turn[:, 1].repeat(2)
    head_weight = t["w_embed"] if m["tied"] else t["w_lm_head"]

    def rope(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def layer(x, norm_attn, w_qkv, w_o, norm_mlp, w_gate_up, w_down, k_layer, v_layer):
        qkv = F.linear(F.rms_norm(x, (hidden,), norm_attn, eps), w_qkv).view(batch, heads + 2 * kv, 1, hd)
        q, k, v = qkv.split([heads, kv, kv], dim=1)
        k_layer.index_copy_(2, position, rope(k))
        v_layer.index_copy_(2, position, v)
        # The query heads of one KV head stand as rows of one query block: no key is read twice, and the split kernels apply.
        q = rope(q).view(batch, kv, group, hd)
        out = F.scaled_dot_product_attention(q, k_layer[:, :, : context + 1], v_layer[:, :, : context + 1])
        x = x + F.linear(out.reshape(batch, heads * hd), w_o)
        gate, up = F.linear(F.rms_norm(x, (hidden,), norm_mlp, eps), w_gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w_down)

    def head(x, norm_final, weight):
        return F.linear(F.rms_norm(x, (hidden,), norm_final, eps), weight)

    if mode:
        layer = torch.compile(layer, mode=mode, fullgraph=True, dynamic=False)
        head = torch.compile(head, mode=mode, fullgraph=True, dynamic=False)

    def step():
        x = F.embedding(tokens, t["w_embed"])
        for i in range(layers):
            x = layer(
                x,
                t["norm_attn"][i],
                t["w_qkv"][i],
                t["w_o"][i],
                t["norm_mlp"][i],
                t["w_gate_up"][i],
                t["w_down"][i],
                k_cache[i],
                v_cache[i],
            )
        logits = head(x, t["norm_final"], head_weight)
        return logits, logits.argmax(dim=-1)

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, _ = step()

    def replay():
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            graph.replay()

    return Rival(name, replay, lambda: logits.float().cpu().numpy(), (graph, t, k_cache, v_cache))


def cublas(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """The step's matrix products alone, by cuBLAS through CuPy, in a CUDA graph: less than a decode step, so a bound on one by cuBLAS."""
    import cupy
    from cupy_backends.cuda.libs import cublas as lib

    transpose, keep_order, bf16, fp32, compute_fp32, tensor_op = (
        1,
        0,
        14,
        0,
        68,
        99,
    )  # cublasOperation_t, cudaDataType, cublasComputeType_t, …
    one, zero = (ctypes.c_float(value) for value in (1.0, 0.0))
    products = [(op.task, op.views) for op in program.ops if hasattr(op.task, "weight_map")]
    widest = max(view.shape[0] for _, views in products for key, view in views.items() if key == "w")
    batch = program.meta["batch"]
    x = cupy.zeros(batch * max(task.k for task, _ in products), np.uint16)
    out = cupy.zeros(batch * widest, np.float32)

    def issue():
        handle = cupy.cuda.get_cublas_handle()
        for task, views in products:
            w = views["w"].of(buffers)
            last = views["y"].buffer.dtype == "float32" if "y" in views else False
            lib.gemmEx(handle, transpose, keep_order, w.shape[0], batch, task.k, ctypes.addressof(one), w.data.ptr, bf16, task.k, x.data.ptr, bf16,
                       task.k, ctypes.addressof(zero), out.data.ptr, fp32 if last else bf16, w.shape[0], compute_fp32, tensor_op)  # fmt: skip

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        issue()
        stream.synchronize()
        stream.begin_capture()
        issue()
        graph = stream.end_capture()
    rival = Rival("cublas", lambda: graph.launch(cupy.cuda.get_current_stream()), lambda: None, (graph, x, out, one, zero))
    rival.checked = "products only"
    return rival


RIVALS: dict[str, Callable[[Program, Mapping[str, Any]], Rival]] = {
    "torch_graph": torch_graph,
    "torch_compile": torch_compile,
    "cublas": cublas,
}
