"""Compiling without a GPU: what the report says is true, the cache serves nothing stale or broken, errors lead with the user's line."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuk import nvrtc
from cuk.compile import CompileError, Resources, compile, cuda_src, default_cache_dir, layout

SCALE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.f; }\n'

# 64 values stay alive across a loop that the compiler cannot shorten: they fit in 255 registers and not in 32.
HUNGRY = """
extern "C" __global__ void hungry(float* x, int n) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * 128 + threadIdx.x];
#pragma unroll 1
  for (int r = 0; r < n; ++r)
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = fmaf(v[i], v[(i * 7 + 3) & 63], v[(i + 1) & 63]);
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 128 + threadIdx.x] = v[i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUK_CACHE_DIR", str(tmp_path / "cache"))


# ---- what comes out ----
def test_a_cubin_for_the_architecture_comes_out():
    cubin = compile(SCALE, name="scale")
    # ELF-64 header: magic; e_machine 190 is CUDA (binutils' elf.h, EM_CUDA).
    assert cubin.code[:4] == b"\x7fELF" and int.from_bytes(cubin.code[18:20], "little") == 190
    assert ".target sm_90a" in cubin.ptx and ".entry scale" in cubin.ptx
    assert cubin.path.read_bytes() == cubin.code
    assert cubin.resources.code_bytes % 16 == 0 and cubin.resources.code_bytes > 0  # an instruction has 16 bytes
    assert b" "[0] == 32  # what NVRTC writes a log of length 1 into must not be the interpreter's shared b" "


def test_spills_are_reported_where_they_are_forced_and_only_there():
    free = compile(HUNGRY, name="hungry").resources
    tight = compile(HUNGRY, name="hungry", options=["--maxrregcount=32"]).resources
    assert free.spill_bytes == 0 and free.stack_bytes == 0 and free.registers > 64
    assert tight.registers <= 32 and tight.spill_bytes > 0 and tight.stack_bytes > 0
    # At least the 32 values that cannot be in registers are stored and loaded once, 4 bytes each way.
    assert tight.spill_bytes >= 2 * 32 * 4


def test_spills_are_the_local_loads_and_stores_of_the_machine_code():
    pytest.importorskip("cuda.bindings")
    try:
        nvrtc.find_nvdisasm()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    tight = compile(HUNGRY, name="hungry", options=["--maxrregcount=32"])
    widths = {"": 4, ".64": 8, ".128": 16}
    moved = sum(widths[width or ""] for width in re.findall(r"\b(?:STL|LDL)(?:\.LU)?(\.64|\.128)?\b", tight.sass))
    assert moved == tight.resources.spill_bytes
    assert not re.search(r"\b(?:STL|LDL)\b", compile(HUNGRY, name="hungry").sass)


def test_each_kernel_of_a_source_has_its_own_report():
    source = SCALE + HUNGRY + 'extern "C" __global__ void shared(int* x) { __shared__ int s[256]; s[threadIdx.x] = *x; *x = s[*x]; }'
    of = {name: compile(source, name=name).resources for name in ("scale", "hungry", "shared")}
    assert of["hungry"].registers > 64 > of["scale"].registers
    assert (of["scale"].static_smem_bytes, of["shared"].static_smem_bytes) == (0, 1024)
    assert of["hungry"].code_bytes > of["scale"].code_bytes


def test_contraction_is_off_unless_asked_for():
    source = 'extern "C" __global__ void axpy(float* x, float a, float b) { x[threadIdx.x] = x[threadIdx.x] * a + b; }'
    assert "fma.rn.f32" not in compile(source, name="axpy").ptx
    fused = compile(source, name="axpy", options=["-fmad=true"])
    assert "fma.rn.f32" in fused.ptx and "warning" not in fused.log


def test_toolkit_headers_are_found():
    source = '#include <cuda_bf16.h>\n#include <cuda/std/cstdint>\nextern "C" __global__ void k(__nv_bfloat16* x, cuda::std::uint32_t i) { x[i] = x[0]; }'
    assert compile(source, name="k").resources.spill_bytes == 0


def test_layout_is_the_compilers():
    struct = "struct S { char a; double b; short c[3]; void* p; struct { alignas(128) char map[128]; } t; };"
    found = layout(struct, "S", ["a", "b", "c", "p", "t"])
    assert (found.size, found.align) == (256, 128)
    assert found.offsets == {"a": 0, "b": 8, "c": 16, "p": 24, "t": 128}
    with pytest.raises(CompileError, match='has no member "z"'):
        layout(struct, "S", ["z"])


# ---- errors ----
def test_an_error_leads_with_the_users_file_and_line(tmp_path):
    mine = tmp_path / "softcap.cuh"
    mine.write_text("struct Softcap {\n  static __device__ float of(float x) {\n    return x * cap;\n  }\n};\n")
    source = '#include "softcap.cuh"\nextern "C" __global__ void softcap(float* x) { *x = Softcap::of(*x); }'
    with pytest.raises(CompileError) as caught:
        compile(source, name="softcap", include_dirs=[tmp_path])
    assert str(caught.value).startswith(f"kernel 'softcap' does not compile: {mine}:3: error: ")
    assert 'identifier "cap" is undefined' in str(caught.value)
    assert (caught.value.file, caught.value.line) == (str(mine), 3)


def test_an_error_names_what_to_do():
    with pytest.raises(CompileError, match='no extern "C" __global__ function of that name'):
        compile(SCALE, name="scales")
    with pytest.raises(CompileError, match=r"source:2: #include WHERE: .* name the header"):
        compile('#define WHERE "a.h"\n#include WHERE\n', name="k")
    for option in ("-I/tmp", "--include-path=/tmp", "-arch=sm_80", "--pre-include=a.h"):
        with pytest.raises(ValueError, match=r"use (include_dirs|arch|an #include)"):
            compile(SCALE, name="scale", options=[option])
    with pytest.raises(CompileError, match="--no-such-option"):
        compile(SCALE, name="scale", options=["--no-such-option"])
    with pytest.raises(CompileError, match=r"<generated>/k.cu:1: catastrophic error.*nowhere.h"):
        compile("#include <nowhere.h>\n", name="k")


def test_a_header_in_the_working_directory_is_not_picked_up(tmp_path, monkeypatch):
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compile('#include "stray.cuh"\n' + SCALE, name="scale")


def test_an_unwritable_cache_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="set CUK_CACHE_DIR"):
        compile(SCALE, name="scale", cache_dir=tmp_path / "file" / "cache")


# ---- the cache ----
@pytest.fixture
def counted(monkeypatch):
    """Compilations so far; the memory of this process is forgotten first."""
    calls = []
    run = nvrtc.run
    module = sys.modules["cuk.compile"]
    monkeypatch.setattr(module, "_memo", {})
    monkeypatch.setattr(nvrtc, "run", lambda *a: (calls.append(a), run(*a))[1])
    return calls


def test_what_was_compiled_once_is_not_compiled_again(counted, monkeypatch):
    first = compile(SCALE, name="scale")
    assert compile(SCALE, name="scale") is first  # from memory
    monkeypatch.setattr(sys.modules["cuk.compile"], "_memo", {})
    again = compile(SCALE, name="scale")  # from the disk
    assert again == first and again is not first and len(counted) == 1
    report = json.loads(first.path.with_suffix(".json").read_text())
    assert Resources(**report["resources"]) == first.resources
    assert report["code_sha256"] == hashlib.sha256(first.code).hexdigest()


def test_the_key_covers_everything_that_goes_in(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "outer.cuh").write_text('#pragma once\n#  include "deep/inner.cuh"\n')
    (tmp_path / "deep" / "inner.cuh").write_text('#include "leaf.cuh"\n')
    leaf = tmp_path / "deep" / "leaf.cuh"
    leaf.write_text("#define FACTOR 2.f\n")
    source = '#include <outer.cuh>\nextern "C" __global__ void k(float* x) { x[threadIdx.x] *= FACTOR; }\n'

    def go(**changed):
        return compile(**{"source": source, "name": "k", "include_dirs": [tmp_path], **changed})

    def edited():
        before = leaf.stat()
        leaf.write_text("#define FACTOR 3.f\n")
        os.utime(leaf, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, and the same time, as a coarse clock has it
        return go()

    first = go()
    assert go().key == first.key
    (tmp_path / "unrelated.cuh").write_text("")
    assert go().key == first.key
    others = [
        go(source=source + "// a comment moves no code, but lines\n"),
        go(options=["-DUNUSED"]),
        go(options=["--maxrregcount=64"]),
        go(arch="sm_100a"),
        go(source=source + SCALE, name="scale"),
        go(source=source + SCALE),
        edited(),
    ]
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: ("NVRTC 99.0",))
    monkeypatch.setattr(nvrtc, "toolkit_include_dirs", lambda: ())
    others.append(go())
    keys = [first.key, *(cubin.key for cubin in others)]
    assert len(set(keys)) == len(keys)
    assert others[-2].code != first.code  # and the edited header is what was compiled


def test_a_header_that_shadows_another_is_noticed(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir(), far.mkdir()
    (far / "factor.cuh").write_text("#define FACTOR 2.f\n")
    source = '#include "factor.cuh"\nextern "C" __global__ void k(float* x) { x[threadIdx.x] *= FACTOR; }\n'
    before = compile(source, name="k", include_dirs=[near, far])
    (near / "factor.cuh").write_text("#define FACTOR 5.f\n")
    after = compile(source, name="k", include_dirs=[near, far])
    assert before.key != after.key and before.code != after.code


@pytest.mark.parametrize("harm", ["cut cubin", "empty cubin", "no cubin", "cut report", "empty report", "foreign report", "not an object"])
def test_a_corrupt_entry_is_compiled_again(harm, counted, monkeypatch):
    first = compile(SCALE, name="scale")
    report = first.path.with_suffix(".json")
    {
        "cut cubin": lambda: first.path.write_bytes(first.code[:-1]),
        "empty cubin": lambda: first.path.write_bytes(b""),
        "no cubin": first.path.unlink,
        "cut report": lambda: report.write_text(report.read_text()[:-20]),
        "empty report": lambda: report.write_text(""),
        "foreign report": lambda: report.write_text('{"resources": {"registers": 1}, "code_sha256": "", "log": ""}'),
        "not an object": lambda: report.write_text("[]"),
    }[harm]()
    monkeypatch.setattr(sys.modules["cuk.compile"], "_memo", {})
    again = compile(SCALE, name="scale")
    assert len(counted) == 2
    assert again.path.read_bytes() == again.code and again.resources == first.resources
    assert json.loads(report.read_text())["code_sha256"] == hashlib.sha256(again.code).hexdigest()


def _compile_in_process(cache: str, barrier, results) -> None:
    barrier.wait()  # all of them start at once
    cubin = compile(HUNGRY, name="hungry", cache_dir=cache)
    results.put((hashlib.sha256(cubin.code).hexdigest(), cubin.path.read_bytes() == cubin.code, dataclasses.astuple(cubin.resources)))


def test_several_processes_compile_the_same_source_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_compile_in_process, args=(str(tmp_path / "c"), barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert len(set(got)) == 1 and got[0][1], got  # the same whole cubin for each
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".cubin", ".json"]  # and nothing left behind


def test_several_threads_compile_at_once(tmp_path):
    sources = [SCALE.replace("2.f", f"{i % 3}.f") for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda source: compile(source, name="scale", cache_dir=tmp_path), sources))
    assert len({cubin.key for cubin in cubins}) == 3
    assert all(cubin.path.read_bytes() == cubin.code for cubin in cubins)


def test_the_cache_folder_can_be_chosen(tmp_path, monkeypatch):
    assert default_cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("CUK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "cuk"
    assert compile(SCALE, name="scale", cache_dir=tmp_path / "given").path.parent == tmp_path / "given"


def test_device_sources_are_where_the_package_says():
    assert (cuda_src() / "core").is_dir() and isinstance(cuda_src(), Path)
