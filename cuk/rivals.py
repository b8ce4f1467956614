"""The same decode step by others, set up as their users would: PyTorch in a CUDA graph, torch.compile in one, cuBLAS products alone.

Each takes a program and the buffers of one of its runs (weights are shared, not copied; the KV cache is the rival's own) and returns a
Rival: a callable that replays a captured graph on the current CuPy stream."""

from __future__ import annotations

import contextlib
import ctypes
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuk.program import Program

EXPECTED_US = {"llama-3.2-1b, 1, 1024": {"torch_graph": 1104.0, "torch_compile": 1026.0}}
"""Microseconds of a step on one H200, measured 2026-12-01 (driver 580.159, torch 2.11), by "model, batch, context"."""

MAX_LOGIT_ERROR = 5e-2
"""RMS difference of a rival's logits from ours, over the RMS of ours, above which it computes something else."""


class Rival:
    """A captured step. `logits()`: its logits [batch, vocab] as NumPy float32, or None where it computes none."""

    def __init__(
        self, name: str, replay: Callable[[], None], logits: Callable[[], np.ndarray | None], settings: Mapping[str, Any], keep: Any
    ):
        self.name, self._replay, self._logits, self._keep = name, replay, logits, keep
        self.settings = dict(settings)
        self.checked: str | None = None

    def __call__(self) -> None:
        self._replay()

    def logits(self) -> np.ndarray | None:
        return self._logits()

    def check(self, ours: np.ndarray) -> float | None:
        """RMS difference of the logits from ours over the RMS of ours; sets `checked`. None where it computes no logits."""
        import cupy

        cupy.cuda.Device().synchronize()
        self()
        cupy.cuda.Device().synchronize()
        theirs = self.logits()
        if theirs is None:
            return None
        ours = np.asarray(ours, np.float64)
        error = float(np.sqrt(np.mean((theirs - ours) ** 2) / np.mean(ours**2)))
        self.checked = f"logits differ by {error:.1e} of their RMS"
        return error


# ---- PyTorch ----
def decode_step(
    meta: Mapping[str, Any], t: Mapping[str, Any], k_cache: Any, v_cache: Any, *, attend: Callable, wrap: Callable = lambda f: f
) -> Callable:
    """The step in functional PyTorch: () -> (logits [batch, vocab] bf16, next tokens [batch]), on tensors of any one device.

    meta, t: a llama program's meta, and its weights, rope table, tokens and positions as tensors (one position for all sequences).
    k_cache, v_cache [layers, batch, kv_heads, capacity, head_dim]: appended to in place. attend(q, k, v): attention of q [batch, heads, 1,
    head_dim] over k and v [batch, kv_heads, length, head_dim]. wrap: what each compiled region goes through."""
    import torch
    import torch.nn.functional as F

    hidden, heads, kv, hd, eps, batch = meta["hidden"], meta["heads"], meta["kv_heads"], meta["head_dim"], meta["rms_eps"], meta["batch"]
    length = max(meta["contexts"]) + 1
    tokens, index = t["tokens"].long(), t["positions"][:1].long()
    cos, sin = (t["rope"][..., i].to(k_cache.dtype) for i in (0, 1))
    # x * cos + roll(x, half) * sin, the sign of the rotation being in sin: fewer kernels than cat((-high, low)).
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    w_head = t["w_embed"] if meta["tied"] else t["w_lm_head"]

    def layer(x, cos_row, sin_row, norm_attn, w_qkv, w_o, norm_mlp, w_gate_up, w_down, k_layer, v_layer, *norms):
        qkv = F.linear(F.rms_norm(x, (hidden,), norm_attn, eps), w_qkv).view(batch, heads + 2 * kv, 1, hd)
        qk, v = qkv.split([heads + kv, kv], dim=1)
        if norms:
            parts = zip(qk.split([heads, kv], dim=1), norms, strict=True)
            qk = torch.cat([F.rms_norm(part, (hd,), weight, eps) for part, weight in parts], dim=1)
        qk = torch.addcmul(qk * cos_row, qk.roll(hd // 2, dims=-1), sin_row)
        q, k = qk.split([heads, kv], dim=1)
        k_layer.index_copy_(2, index, k)
        v_layer.index_copy_(2, index, v)
        out = attend(q, k_layer[:, :, :length], v_layer[:, :, :length])
        x = x + F.linear(out.reshape(batch, heads * hd), w_o)
        gate, up = F.linear(F.rms_norm(x, (hidden,), norm_mlp, eps), w_gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w_down)

    def head(x, norm_final, weight):
        logits = F.linear(F.rms_norm(x, (hidden,), norm_final, eps), weight)
        return logits, logits.argmax(dim=-1)

    layer, head = wrap(layer), wrap(head)
    slabs = [t[name] for name in ("norm_attn", "w_qkv", "w_o", "norm_mlp", "w_gate_up", "w_down")] + [k_cache, v_cache]
    slabs += [t["norm_q"], t["norm_k"]] if meta["qk_norm"] else []

    def step():
        x = F.embedding(tokens, t["w_embed"])
        cos_row, sin_row = cos[index], sin[index]
        for i in range(meta["layers"]):
            x = layer(x, cos_row, sin_row, *(slab[i] for slab in slabs))
        return head(x, t["norm_final"], w_head)

    return step


def attend_grouped(q: Any, k: Any, v: Any) -> Any:
    """The query heads of one KV head stand as the rows of one query block: no key is read twice."""
    import torch.nn.functional as F

    batch, kv, hd = k.shape[0], k.shape[1], k.shape[3]
    return F.scaled_dot_product_attention(q.reshape(batch, kv, -1, hd), k, v)


def attend_gqa(q: Any, k: Any, v: Any) -> Any:
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


ATTENTIONS = {
    f"{backend.lower()}, {name}": (f"{backend}_ATTENTION", attend)
    for backend in ("FLASH", "CUDNN", "EFFICIENT")
    for name, attend in (("grouped", attend_grouped), ("gqa", attend_gqa))
}
"""Ways for PyTorch to attend to a static cache with one query a head: name -> (torch.nn.attention.SDPBackend, function)."""


def torch_graph(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """PyTorch, eager operators captured in a CUDA graph."""
    return _torch(program, buffers, "torch_graph", None)


def torch_compile(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """PyTorch, the layer and the head compiled with max-autotune, the step captured in a CUDA graph."""
    return _torch(program, buffers, "torch_compile", "max-autotune-no-cudagraphs")


def _torch(program: Program, buffers: Mapping[str, Any], name: str, mode: str | None) -> Rival:
    """Raises ImportError without torch, ValueError for a program that is no llama."""
    import cupy
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if "head_dim" not in program.meta:
        raise ValueError(f"{program.name} is no llama program: PyTorch's step is written for those")
    if len(set(program.meta["contexts"])) > 1:
        raise ValueError(f"context={program.meta['context']}: PyTorch's step is written for sequences of one context")
    cupy.cuda.get_current_stream().synchronize()
    wrap = (lambda f: torch.compile(f, mode=mode, fullgraph=True, dynamic=False)) if mode else (lambda f: f)
    with torch.no_grad(), torch.cuda.device(cupy.cuda.Device().id):
        t = {key: _torch_view(value) for key, value in buffers.items() if program.buffers[key].role in ("weight", "table", "index")}
        k_cache, v_cache = (_torch_view(buffers[key]).clone() for key in ("k_cache", "v_cache"))
        attention = _fastest_attention(program.meta, k_cache, v_cache)
        backend, attend = ATTENTIONS[attention]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            step = decode_step(program.meta, t, k_cache, v_cache, attend=attend, wrap=wrap)
            graph, (logits, _) = _captured(step)

    def replay():
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            graph.replay()

    settings = {"attention": attention, "torch": torch.__version__}
    return Rival(name, replay, lambda: logits.float().cpu().numpy(), settings, (graph, step, t, k_cache, v_cache))


def _torch_view(array: Any) -> Any:
    """A CuPy array as a torch tensor that shares its memory; bf16 goes through int16, which both know."""
    import torch

    if array.dtype.itemsize == 2:
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16)
    return torch.as_tensor(array, device="cuda")


def _captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """(CUDA graph, what `call` returned under capture), after three calls on a side stream as PyTorch's notes on CUDA graphs ask. The graph
    holds addresses alone: `call`, with every tensor that it reads, must outlive it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _fastest_attention(meta: Mapping[str, Any], k_cache: Any, v_cache: Any) -> str:
    """The name in ATTENTIONS of what attends fastest over all layers' caches, in a CUDA graph, of those whose replay attends as the first
    layer's float32 does. Raises RuntimeError when none works."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(meta["batch"], meta["heads"], 1, meta["head_dim"], device=k_cache.device).to(k_cache.dtype)
    length = max(meta["contexts"]) + 1
    exact = attend_gqa(*(x.float() for x in (q, k_cache[0, :, :, :length], v_cache[0, :, :, :length])))
    times = {}
    for name, (backend, attend) in ATTENTIONS.items():
        # A backend that does not take these shapes says so by warnings and a RuntimeError, in the eager calls before the capture.
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError), sdpa_kernel(getattr(SDPBackend, backend)):
            warnings.simplefilter("ignore")
            graph, outputs = _captured(
                lambda a=attend: [a(q, k[:, :, :length], v[:, :, :length]) for k, v in zip(k_cache, v_cache, strict=True)]
            )
            graph.replay()
            if not (outputs[0].reshape(exact.shape).float() - exact).square().mean() < 1e-4 * exact.square().mean():
                continue
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(10):
                graph.replay()
            stop.record()
            stop.synchronize()
            times[name] = start.elapsed_time(stop)
    if not times:
        raise RuntimeError(f"no backend of scaled_dot_product_attention takes these shapes: tried {'; '.join(ATTENTIONS)}")
    return min(times, key=times.__getitem__)


# ---- cuBLAS ----
TRANSPOSED, AS_IS = 1, 0  # cublasOperation_t
BF16, FP32 = 14, 0  # cudaDataType
COMPUTE_FP32, DEFAULT_ALGORITHM = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t
WORKSPACE_BYTES = 32 << 20  # what cuBLAS itself takes on Hopper


class _Cublas:
    """cuBLAS with a handle and a workspace of its own. CuPy 14's wrappers refuse to be captured, and set the stream at every call, which
    takes a given workspace away again. Raises RuntimeError where the library is not installed or refuses."""

    def __init__(self, stream: Any):
        import cupy
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self.library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        self.workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self.handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self.handle))
        weakref.finalize(self, self.library.cublasDestroy_v2, self.handle)
        self._call("cublasSetStream_v2", self.handle, ctypes.c_void_p(stream.ptr))
        self._call("cublasSetWorkspace_v2", self.handle, ctypes.c_void_p(self.workspace.data.ptr), ctypes.c_size_t(WORKSPACE_BYTES))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: cuBLAS answers status {status}")

    def product(self, batch: int, n: int, k: int, alpha: float, w: int, x: int, x_pitch: int, y: int, y_type: int) -> None:
        """y [batch, n] = alpha * x [batch, k] @ w [n, k].T, by addresses; x_pitch: elements from row to row of x."""
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        scale, zero = ctypes.c_float(alpha), ctypes.c_float(0.0)
        self._call("cublasGemmEx", self.handle, integer(TRANSPOSED), integer(AS_IS), integer(n), integer(batch), integer(k), ctypes.byref(scale),
                   pointer(w), integer(BF16), integer(k), pointer(x), integer(BF16), integer(x_pitch), ctypes.byref(zero), pointer(y),
                   integer(y_type), integer(n), integer(COMPUTE_FP32), integer(DEFAULT_ALGORITHM))  # fmt: skip


def plan_products(program: Program) -> list[tuple[Any, int, int, float, bool, bool]]:
    """The step's matrix products in order: (view of w, n, k, alpha, whether the product before feeds it, whether the output is float32).
    alpha keeps the values near unit size without the norms that stand between the products of a real step."""
    plan, width = [], 0
    for op in program.ops:
        if "w" in op.views and len(op.views["w"].shape) == 2:
            view = op.views["w"]
            n, k = view.shape
            std = view.buffer.init.std if view.buffer.init and view.buffer.init.kind == "normal" else k**-0.5
            plan.append((view, n, k, 1 / (math.sqrt(k) * std), k <= width, "y" in op.views and op.views["y"].buffer.dtype == "float32"))
            width = n
    return plan


def cublas(program: Program, buffers: Mapping[str, Any]) -> Rival:
    """The step's matrix products alone, each reading the one before, by cuBLAS in a CUDA graph: less than a decode step, so a lower bound
    of one by cuBLAS. Raises ValueError for a program without products."""
    import cupy

    plan, batch = plan_products(program), program.meta["batch"]
    if not plan:
        raise ValueError(f"{program.name} has no matrix products")
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    library = _Cublas(stream)
    start = cupy.random.RandomState(3).standard_normal((batch, max(k for _, _, k, *_ in plan)), dtype=np.float32)
    start = (start.view(np.uint32) >> 16).astype(np.uint16)  # bf16, cut off
    outputs = [cupy.zeros(batch * max(n for _, n, *_ in plan), np.float32) for _ in range(2)]

    def issue(count: int | None = None) -> None:
        source, pitch = start, start.shape[1]
        for i, (view, n, k, alpha, fed, as_float) in enumerate(plan[:count]):
            x, x_pitch = (source, pitch) if fed else (start, start.shape[1])
            target = outputs[i % 2]
            library.product(batch, n, k, alpha, view.of(buffers).data.ptr, x.data.ptr, x_pitch, target.data.ptr, FP32 if as_float else BF16)
            source, pitch = target, n

    cupy.cuda.get_current_stream().synchronize()
    issue(1)
    stream.synchronize()
    checked = _check_first_product(plan[0], buffers, start, outputs[0], batch)
    issue()
    stream.synchronize()
    with stream:
        stream.begin_capture()
        issue()
        graph = stream.end_capture()
    keep = (graph, library, start, outputs)
    rival = Rival("cublas", lambda: graph.launch(cupy.cuda.get_current_stream()), lambda: None, {"part": "matrix products alone"}, keep)
    rival.checked = checked
    return rival


def _check_first_product(first: tuple, buffers: Mapping[str, Any], x: Any, y: Any, batch: int) -> str:
    """Holds the first product's columns against float32 in CuPy. Raises RuntimeError when they differ."""
    view, n, k, alpha, _, as_float = first

    def wide(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    columns = min(n, 256)
    w = wide(view.of(buffers)[:columns].view(np.uint16))
    expected = alpha * (wide(x[:, :k])[:, None, :] * w[None]).sum(axis=2)
    found = (y[: batch * n] if as_float else wide(y.view(np.uint16)[: batch * n])).reshape(batch, n)[:, :columns]
    error = float(abs(found - expected).max() / abs(expected).max())
    if not error < 1e-2:  # bf16 rounds to 2^-9
        raise RuntimeError(f"cuBLAS's first product is off by {error:.2g} of its largest value")
    return "first product against float32"


RIVALS: dict[str, Callable[[Program, Mapping[str, Any]], Rival]] = {
    "torch_graph": torch_graph,
    "torch_compile": torch_compile,
    "cublas": cublas,
}
