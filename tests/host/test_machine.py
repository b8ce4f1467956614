"""The occupancy arithmetic is NVIDIA's, admission is consistent with it, and a bad machine file is refused by the field's name."""

import json
import random
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuk import nvrtc
from cuk.machine import Footprint, Machine, stored

H200 = Machine.load("h200")
FOOTPRINTS = st.builds(
    Footprint,
    threads=st.integers(1, 1024),
    registers=st.integers(1, 255),
    smem_bytes=st.integers(0, H200.smem_per_cta_bytes),
)

ORACLE = r"""
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  cudaOccDeviceProp device{};
  device.computeMajor = %d; device.computeMinor = %d;
  device.maxThreadsPerBlock = %d; device.maxThreadsPerMultiprocessor = %d;
  device.regsPerBlock = device.regsPerMultiprocessor = %d;
  device.warpSize = 32;
  device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = %d; device.sharedMemPerBlockOptin = %d;
  device.reservedSharedMemPerBlock = %d;
  device.numSms = %d;
  cudaOccDeviceState state{};
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  int threads, registers; unsigned long smem;
  while (scanf("%%d %%d %%lu", &threads, &registers, &smem) == 3) {
    cudaOccFuncAttributes function{};
    function.maxThreadsPerBlock = 1024; function.numRegs = registers;
    function.maxDynamicSharedSizeBytes = smem; function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.partitionedGCConfig = PARTITIONED_GC_OFF;
    cudaOccResult result{};
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, smem)) return 1;
    printf("%%d\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_occupancy_is_what_nvidias_calculator_says(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    folders = [f for f in nvrtc.toolkit_include_dirs() if (f / "cuda_occupancy.h").is_file()]
    if not compiler or not folders:
        pytest.skip("needs a host C++ compiler and cuda_occupancy.h (pip install nvidia-cuda-runtime)")
    m = H200
    limits = (*m.compute_capability, m.max_threads_per_cta, m.max_threads_per_sm, m.registers_per_sm, m.smem_per_sm_bytes)
    (tmp_path / "oracle.cc").write_text(ORACLE % (*limits, m.smem_per_cta_bytes, m.smem_reserved_per_cta_bytes, m.num_sms))
    subprocess.run([compiler, "-w", f"-I{folders[0]}", "oracle.cc", "-o", "oracle"], cwd=tmp_path, check=True)
    draw = random.Random(0)
    # Steps of 8 threads and 128 B around each allocation unit, and both ends of every range.
    footprints = [Footprint(t, r, s) for t in (1, 32, 33, 1024) for r in (1, 32, 33, 255) for s in (0, 1024, m.smem_per_cta_bytes)]
    footprints += [
        Footprint(8 * draw.randint(1, 128), draw.randint(1, 255), draw.choice([0, 128 * draw.randint(0, 1816), draw.randint(0, 40_000)]))
        for _ in range(4000)
    ]
    asked = "\n".join(f"{f.threads} {f.registers} {f.smem_bytes}" for f in footprints)
    told = subprocess.run([tmp_path / "oracle"], input=asked, capture_output=True, text=True, check=True).stdout.split()
    assert len(told) == len(footprints)
    for footprint, theirs in zip(footprints, told, strict=True):
        ours = m.occupancy(footprint)
        assert ours.ctas == int(theirs), f"{footprint}: ours is {ours}, the calculator's {theirs}"


@given(FOOTPRINTS, st.data())
def test_residents_of_the_same_kind_leave_exactly_the_rest(footprint, data):
    ctas = H200.occupancy(footprint).ctas
    resident = data.draw(st.integers(0, ctas))
    assert H200.admits([(footprint, resident)], footprint).ctas == ctas - resident


@given(FOOTPRINTS, FOOTPRINTS, st.data())
def test_what_is_admitted_beside_others_fits(resident, footprint, data):
    count = data.draw(st.integers(0, H200.occupancy(resident).ctas))
    admitted = H200.admits([(resident, count)], footprint)
    assert admitted.ctas <= H200.occupancy(footprint).ctas
    # The SM with all of them is no refusal, and one CTA more is, unless the footprint could never run.
    H200.admits([(resident, count), (footprint, admitted.ctas)], footprint)
    if H200.occupancy(footprint).ctas:
        with pytest.raises(ValueError, match=f"{admitted.limited_by} short by"):
            H200.admits([(resident, count), (footprint, admitted.ctas + 1)], footprint)


def test_the_arithmetic_is_shown():
    occupancy = H200.occupancy(Footprint(320, 64, 100_000))
    assert (occupancy.ctas, occupancy.limited_by) == (2, "shared memory")
    # 100,000 B and the driver's 1,024, in units of 128: 101,120.
    assert "shared memory 233472 / 101120 B = 2" in str(occupancy)
    assert H200.resident_grid(Footprint(320, 64, 100_000)) == 264


def test_a_cluster_is_resident_as_a_whole():
    odd = replace(H200, num_sms=7)
    assert odd.resident_grid(Footprint(1024, 64, 200_000, cluster=4)) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"threads": 2048}, "from 1 to 1024"),
        ({"registers": 256}, "registers=256"),
        ({"smem_bytes": -1}, "smem"),
    ],
)
def test_an_impossible_footprint_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        Footprint(**{"threads": 128, "registers": 32, **given})


@pytest.mark.parametrize("name", stored())
def test_stored_machines_round_trip(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    assert machine.smem_per_cta_bytes + machine.smem_reserved_per_cta_bytes <= machine.smem_per_sm_bytes
    for constant in ("read_bytes_per_s", "bf16_flops", "graph_node_us", "pdl_node_us"):
        assert machine.constants[constant].source


def test_an_unknown_machine_lists_the_known():
    for name in ("h2000", "../h200", ""):
        with pytest.raises(ValueError, match="h200"):
            Machine.load(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_sms": None}, "'num_sms' is missing"),
        ({"num_sms": "132"}, "'num_sms' is '132'"),
        ({"num_sms": True}, "'num_sms' is True"),
        ({"l2_bytes": 0}, "'l2_bytes' is 0, must be positive"),
        ({"compute_capability": [9]}, "'compute_capability' is \\[9\\]"),
        ({"warps": 64}, "unknown field 'warps'; known ones are name, "),
        ({"constants": {"c": {"value": 1}}}, "constant 'c' is .*value, low, high, unit, source"),
        ({"constants": {"c": {"value": 3, "low": 1, "high": 2, "unit": "s", "source": "x"}}}, "constant 'c': value 3 is not between"),
        ({"constants": {"c": {"value": "3", "low": 1, "high": 2, "unit": "s", "source": "x"}}}, "constant 'c': value is '3'"),
    ],
)
def test_a_bad_field_is_named(change, message):
    described = {**H200.to_json(), **change}
    described = {name: value for name, value in described.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Machine.from_json(described, "mine.json")


def test_the_greedy_placement_fills_every_partition():
    # 3 warps of 170 registers: 5632 a warp, two a partition, eight an SM: two CTAs of three, not floor(65536 / 16896) = 3.
    assert H200.occupancy(Footprint(96, 170)).by_resource["registers"] == 2
