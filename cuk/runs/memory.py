"""Buffers of a program as arrays: made from a seed, shared between runs, poisoned before a check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuk.program import SHARED_ROLES, Buffer, Init, Program
from cuk.task import numpy_dtype

_CHUNK = 1 << 26  # random elements at a time: their float32 and bf16 forms are all the extra memory a slab needs


def numpy_buffers(program: Program, seed: int = 0, shared: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Every buffer as a NumPy array, initialised from `seed`. `shared`: arrays of another run, whose weights and tables are used as they are
    and whose inputs, caches and states are copied."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for buffer in program.buffers.values():
        if shared and buffer.name in shared and buffer.role not in ("activation", "output", "scratch"):
            found = to_numpy(shared[buffer.name])
            arrays[buffer.name] = found if buffer.role in ("weight", "table") else found.astype(numpy_dtype(buffer.dtype))
            continue
        init = buffer.init or Init("zero")
        dtype = numpy_dtype(buffer.dtype)
        if init.kind == "normal":
            arrays[buffer.name] = (init.mean + init.std * rng.standard_normal(buffer.shape, dtype=np.float32)).astype(dtype)
        elif init.kind == "integers":
            arrays[buffer.name] = rng.integers(init.low, init.high, buffer.shape).astype(dtype)
        elif init.kind == "values":
            arrays[buffer.name] = np.asarray(init.values() if callable(init.values) else init.values).astype(dtype)
        elif init.kind == "parts":
            arrays[buffer.name] = np.empty(buffer.shape, dtype)
            for index, part in init.values():
                arrays[buffer.name][index] = part
        else:
            arrays[buffer.name] = np.zeros(buffer.shape, dtype)
            if init.kind == "empty":
                poison(arrays[buffer.name])
    return arrays


def gpu_buffers(program: Program, seed: int = 0, shared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every buffer as a CuPy array on the current device. `shared`: arrays of another run, whose weights, tables and inputs are used
    as they are and whose caches and states are copied. Raises MemoryError with needed and free bytes before allocating anything."""
    import cupy

    shared = shared or {}
    wanted = [b for b in program.buffers.values() if not (b.role in SHARED_ROLES and b.name in shared)]
    needed = sum(b.nbytes for b in wanted)
    free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    if needed > free:
        raise MemoryError(
            f"{program.name}: buffers need {needed / 1e9:.2f} GB of GPU memory and {free / 1e9:.2f} GB are free; "
            "take a smaller model, batch or context, or free the buffers of other runs"
        )
    generator = cupy.random.RandomState(seed)
    arrays = {}
    for buffer in program.buffers.values():
        if buffer.name in shared and buffer.role in SHARED_ROLES:
            arrays[buffer.name] = shared[buffer.name]
        elif buffer.name in shared and buffer.role in ("cache", "state"):
            arrays[buffer.name] = shared[buffer.name].copy()
        else:
            arrays[buffer.name] = _initialised(buffer, generator)
    return arrays


def _allocate(buffer: Buffer) -> Any:
    """An uninitialised array with 128 bytes behind it that belong to it: a tensor map's last box may reach past the last row."""
    import cupy

    dtype = numpy_dtype(buffer.dtype)
    count = math.prod(buffer.shape)
    return cupy.empty(count + 128 // dtype.itemsize, dtype)[:count].reshape(buffer.shape)


def _initialised(buffer: Buffer, generator: Any) -> Any:
    import cupy

    dtype = numpy_dtype(buffer.dtype)
    init = buffer.init
    if init is None or init.kind == "empty":
        array = _allocate(buffer)
        poison(array)
        return array
    if init.kind == "normal":
        array = _allocate(buffer)
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            count = min(_CHUNK, flat.size - start)
            values = init.mean + init.std * generator.standard_normal(count, dtype=np.float32)
            if buffer.dtype == "bfloat16":
                _rounding_kernel()(values, flat[start : start + count].view(np.uint16))
            else:
                flat[start : start + count] = values
        return array
    if init.kind == "parts":
        array = _allocate(buffer)
        bits = array.view(np.uint16) if buffer.dtype == "bfloat16" else array
        for index, part in init.values():
            bits[index] = cupy.asarray(part.view(bits.dtype))
        return array
    if init.kind == "integers":
        return cupy.asarray(np.random.default_rng(int(generator.randint(2**31))).integers(init.low, init.high, buffer.shape).astype(dtype))
    if init.kind == "values":
        return cupy.asarray(np.asarray(init.values() if callable(init.values) else init.values).astype(dtype))
    return cupy.zeros(buffer.shape, dtype)


def _rounding_kernel() -> Any:
    """float32 -> the bits of the nearest bf16, for finite values."""
    import cupy

    return cupy.ElementwiseKernel(
        "float32 x", "uint16 y", "unsigned b = __float_as_uint(x); y = (b + 0x7fff + ((b >> 16) & 1)) >> 16", "cuk_round_bf16"
    )


def poison(array: Any) -> None:
    """Fills a contiguous CuPy (or NumPy) array with 0xFF bytes: NaN as bf16 or float32, -1 as int32."""
    if isinstance(array, np.ndarray):
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return
    import cupy

    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memsetAsync(array.data.ptr, 0xFF, array.nbytes, stream.ptr)


def to_numpy(array: Any) -> np.ndarray:
    """A CuPy (or NumPy) array on the host; bf16 keeps its bits."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    if array.dtype.itemsize == 2:
        return cupy.asnumpy(array.view(np.uint16)).view(array.dtype)
    return cupy.asnumpy(array)
