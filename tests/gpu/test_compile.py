"""A cubin compiled here loads and runs through CuPy, and the driver agrees with the compiler's report."""

import cupy
import numpy as np
import pytest
from cuda.bindings import driver

from cuk.compile import compile

KERNELS = r"""
template <int kValues>
__device__ void mix(float* x, int n) {
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) v[i] = x[i * 128 + threadIdx.x];
#pragma unroll 1
  for (int r = 0; r < n; ++r)
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = fmaf(v[i], v[(i * 7 + 3) % kValues], v[(i + 1) % kValues]);
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i * 128 + threadIdx.x] = v[i];
}
extern "C" __global__ void small(float* x, int n) { mix<4>(x, n); }
extern "C" __global__ void large(float* x, int n) { mix<64>(x, n); }
extern "C" __global__ void shared(float* x, int n) { __shared__ float s[300]; s[threadIdx.x] = x[n]; x[n] = s[n]; }
extern "C" __global__ void scale(float* x, float by) { x[blockIdx.x * blockDim.x + threadIdx.x] *= by; }
"""


def attribute(function, name: str) -> int:
    handle = driver.CUfunction(int(getattr(function, "kernel", function).ptr))
    status, value = driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), handle)
    assert int(status) == 0, status
    return value


def test_a_cubin_runs():
    x = cupy.arange(256, dtype=np.float32)
    compile(KERNELS, name="scale").function()((2,), (128,), (x, np.float32(3)))
    assert (x.get() == np.arange(256) * 3).all()


def test_the_file_in_the_cache_may_vanish(tmp_path):
    cubin = compile(KERNELS, name="scale", cache_dir=tmp_path)
    cubin.path.unlink()
    assert cubin.function() is not None


@pytest.mark.parametrize("options", [(), ("--maxrregcount=32",)])
@pytest.mark.parametrize("name", ["small", "large", "shared", "scale"])
def test_the_driver_agrees_with_the_report(name, options, tmp_path):
    cubin = compile(KERNELS, name=name, options=options, cache_dir=tmp_path)
    function = cubin.function()
    assert attribute(function, "NUM_REGS") == cubin.resources.registers
    assert attribute(function, "LOCAL_SIZE_BYTES") == cubin.resources.stack_bytes
    assert attribute(function, "SHARED_SIZE_BYTES") == cubin.resources.static_smem_bytes
