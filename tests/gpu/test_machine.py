"""The machine read off the device is the stored one, and its occupancy is the driver's."""

import random
from dataclasses import replace

import cupy
import pytest
from cuda.bindings import driver

from cuk.compile import compile
from cuk.machine import Footprint, Machine, stored


def test_the_device_has_the_stored_limits():
    machine = Machine.from_device()
    if machine.name not in stored():
        pytest.skip(f"{machine.name} is not among the stored machines: {', '.join(stored())}")
    known = Machine.load(machine.name)
    assert machine == replace(known, clock_hz=machine.clock_hz)


def test_occupancy_is_the_drivers():
    machine = Machine.from_device()
    draw = random.Random(0)
    kernel = 'extern "C" __global__ void k(float* x) { extern __shared__ float s[]; s[threadIdx.x] = *x; *x = s[0]; }'
    cubin = compile(kernel, name="k", arch=f"sm_{cupy.cuda.Device().compute_capability}")
    function = cubin.function()
    handle = driver.CUfunction(int(getattr(function, "kernel", function).ptr))
    attributes = driver.CUfunction_attribute
    for name, value in (("MAX_DYNAMIC_SHARED_SIZE_BYTES", machine.smem_per_cta_bytes), ("PREFERRED_SHARED_MEMORY_CARVEOUT", 100)):
        (status,) = driver.cuFuncSetAttribute(handle, getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}"), value)
        assert int(status) == 0, status
    for _ in range(300):
        threads, smem = draw.randint(1, 1024), draw.choice([0, draw.randint(0, 40_000), draw.randint(0, machine.smem_per_cta_bytes)])
        status, ctas = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(handle, threads, smem)
        assert int(status) == 0, status
        ours = machine.occupancy(Footprint(threads, cubin.resources.registers, smem))
        assert ours.ctas == ctas, f"{threads} threads, {smem} B: ours is {ours}, the driver's {ctas}"
