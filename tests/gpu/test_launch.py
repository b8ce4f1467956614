"""Launches of a RawModule that is not ours: programmatic edges, cooperative grids, clusters, refusals."""

import importlib.util
import json
import re
from pathlib import Path

import cupy
import numpy as np
import pytest

from cuk.launch import Launch, LaunchError, capture

ROOT = Path(__file__).resolve().parents[2]

SOURCE = r"""
extern "C" __global__ void produce(const float* x, float* y, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.0f * x[i];
}
extern "C" __global__ void consume(const float* y, float* z, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) z[i] = y[n - 1 - i] + 1.0f;
}
extern "C" __global__ void cluster_rank(int* out) {
  unsigned rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) out[blockIdx.x] = rank + 100 * size;
}
// y[i] = w[i] * x[n - 1 - i] + 1, each operation rounded: NumPy's float32 bits. x comes from other CTAs than the one that reads it.
extern "C" __global__ void step(const float* w, const float* x, float* y, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float weight = i < n ? w[i] : 0.0f;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) y[i] = __fadd_rn(__fmul_rn(weight, x[n - 1 - i]), 1.0f);
}
extern "C" __global__ void mixed(int a, long long b, double c, float d, double* out) { *out = a + b + c + d; }
"""


@pytest.fixture(scope="module")
def module():
    return cupy.RawModule(code=SOURCE, options=("-arch=sm_90",))


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_chain_in_stream_and_graph(module, programmatic):
    n = 1 << 20
    x, y, z = cupy.random.rand(n, dtype=np.float32), cupy.full(n, np.nan, np.float32), cupy.full(n, np.nan, np.float32)
    launches = [Launch(module.get_function("produce"), 132, 256, (x, y, n)),
                Launch(module.get_function("consume"), 132, 256, (y, z, n), programmatic=programmatic)]  # fmt: skip
    expected = 2 * cupy.asnumpy(x)[::-1] + 1
    for launch in launches:
        launch()
    np.testing.assert_array_equal(cupy.asnumpy(z), expected)
    graph = capture(launches)
    assert graph.num_nodes == 2
    assert graph.num_programmatic_edges == int(programmatic)
    for _ in range(20):
        y[...], z[...] = np.nan, np.nan
        graph.launch()
        np.testing.assert_array_equal(cupy.asnumpy(z), expected)


def test_arguments_of_every_kind(module):
    out = cupy.zeros(1)
    Launch(module.get_function("mixed"), 1, 1, (np.int32(1), np.int64(20), 300.0, np.float32(4000.0), out))()
    assert float(out[0]) == 4321.0


def test_clusters(module):
    out = cupy.full(8, -1, np.int32)
    Launch(module.get_function("cluster_rank"), 8, 32, (out,), cluster=4)()
    assert cupy.asnumpy(out).tolist() == [400, 401, 402, 403] * 2


def test_a_programmatic_launch_after_one_with_a_cluster(module):
    """In a stream and in a graph, clusters and programmatic edges go together."""
    out, y, z = cupy.full(8, -1, np.int32), cupy.ones(64, np.float32), cupy.zeros(64, np.float32)
    launches = [Launch(module.get_function("cluster_rank"), 8, 32, (out,), cluster=4),
                Launch(module.get_function("consume"), 4, 32, (y, z, 64), programmatic=True, cluster=2)]  # fmt: skip
    graph = capture(launches)
    assert (graph.num_nodes, graph.num_programmatic_edges) == (2, 1)
    graph.launch()
    assert cupy.asnumpy(out).tolist() == [400, 401, 402, 403] * 2 and float(z.sum()) == 128.0


def test_a_chain_of_programmatic_edges_is_counted(module):
    x, y = cupy.ones(64, np.float32), cupy.zeros(64, np.float32)
    chain = [Launch(module.get_function("consume"), 1, 64, (x, y, 64), programmatic=i > 0) for i in range(20)]
    graph = capture(chain)
    assert (graph.num_nodes, graph.num_programmatic_edges) == (20, 19)


def test_a_failure_in_capture_leaves_the_stream_usable(module):
    class Failing(Launch):
        def __call__(self, stream=None):
            raise RuntimeError("in the midst of a capture")

    x, stream = cupy.zeros(64, np.float32), cupy.cuda.Stream(non_blocking=True)
    good, failing = (kind(module.get_function("produce"), 1, 64, (x, x, 64)) for kind in (Launch, Failing))
    with pytest.raises(RuntimeError, match="in the midst of a capture"):
        capture([good, failing], stream)
    assert not stream.is_capturing()
    assert capture([good], stream).num_nodes == 1


def test_clusters_that_cannot_be_resident_are_refused_with_the_arithmetic(module):
    out = cupy.zeros(100_000, np.int32)
    with pytest.raises(LaunchError, match=r"all 100000 CTAs .* \d+ clusters of 4 CTAs .* \d+ \* 4 = \d+; take"):
        Launch(module.get_function("cluster_rank"), 100_000, 1024, (out,), cluster=4, resident=True)


def test_another_stream(module):
    x, y = cupy.ones(64, np.float32), cupy.zeros(64, np.float32)
    launch = Launch(module.get_function("produce"), 1, 64, (x, y, 64))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        launch()
        stream.synchronize()
    assert float(y.sum()) == 128.0


def test_a_grid_that_cannot_be_resident_is_refused_with_the_arithmetic(module):
    x = cupy.zeros(1, np.float32)
    with pytest.raises(LaunchError, match=r"must be resident, but 2 CTAs of 1024 threads.* 2 \* \d+ SMs = \d+"):
        Launch(module.get_function("produce"), 100_000, 1024, (x, x, 1), cooperative=True)
    Launch(module.get_function("produce"), 4, 1024, (x, x, 1), cooperative=True)()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x: (x, x), "2 arguments given, the kernel takes"),
        (lambda x: (x, x, 1, 1), "4 arguments given, the kernel takes 3"),
        (lambda x: (x, x, np.int64(1)), r"produce: argument 2 \(int64\) has 8 bytes, the kernel takes 4; give a NumPy scalar"),
        (lambda x: (x, x, 1.0), r"argument 2 \(float\) has 8 bytes, the kernel takes 4; give a NumPy scalar"),
        (lambda x: (x, 0, 1), r"argument 1 \(int\) has 4 bytes, the kernel takes 8; give a NumPy scalar"),
        (lambda x: (x, x, "n"), "argument 2 of type str is neither an array on the GPU"),
        (lambda x: (x.get(), x, 1), "argument 0 is a NumPy array, in the host's memory: give a CuPy array"),
    ],
)
def test_arguments_that_the_kernel_does_not_take_are_named(module, arguments, message):
    with pytest.raises(ValueError, match=message):
        Launch(module.get_function("produce"), 1, 32, arguments(cupy.zeros(1, np.float32)))


def test_bad_sizes_are_named(module):
    x = cupy.zeros(1, np.float32)
    for sizes, message in [((0, 32), "grid=0"), ((1, 2048), "block=2048"), ((1, (32, 64)), "2048 threads")]:
        with pytest.raises(ValueError, match=message):
            Launch(module.get_function("produce"), *sizes, (x, x, 1))
    with pytest.raises(ValueError, match="no multiple of cluster"):
        Launch(module.get_function("produce"), 3, 32, (x, x, 1), cluster=2)
    with pytest.raises(ValueError, match="nothing to capture"):
        capture([])
    with pytest.raises(ValueError, match="32 CTAs, a cluster can have 16"):
        Launch(module.get_function("produce"), 32, 32, (x, x, 1), cluster=(8, 4))
    with pytest.raises(LaunchError, match=r"smem_bytes=1048576 beside 0 bytes of static .* a CTA can have"):
        Launch(module.get_function("produce"), 1, 32, (x, x, 1), smem_bytes=1 << 20)


def test_what_is_no_kernel_is_named(module):
    for wrong, kind in [(module, "RawModule"), ("produce", "str"), (cupy.zeros(1), "ndarray"), (cupy.sin, "ufunc")]:
        with pytest.raises(ValueError, match=rf"a {kind} is no kernel; give module.get_function\('name'\) of a cupy.RawModule"):
            Launch(wrong, 1, 32)


def test_streams_that_cannot_be_used_are_named(module):
    x = cupy.zeros(64, np.float32)
    launch = Launch(module.get_function("produce"), 1, 64, (x, x, 64))
    with pytest.raises(ValueError, match=r"the default stream cannot be captured: give cupy.cuda.Stream"):
        capture([launch], cupy.cuda.Stream.null)
    with pytest.raises(ValueError, match="a int is no CuPy stream; wrap another library's"):
        launch(0)


def test_a_kernel_with_fewer_threads_than_the_block_is_named():
    source = 'extern "C" __global__ void __launch_bounds__(128) small(int* out) { out[threadIdx.x] = 1; }'
    small, out = cupy.RawModule(code=source).get_function("small"), cupy.zeros(256, np.int32)
    with pytest.raises(LaunchError, match=r"small: block=256 is 256 threads, the kernel can have 128 with its \d+ registers"):
        Launch(small, 1, 256, (out,))
    Launch(small, 1, 128, (out,))()
    assert int(out.sum()) == 128


# ---- chains, to the bit ----
KERNELS, N = 40, 33_000


class Chain:
    """KERNELS launches of `step`; y: [KERNELS + 1, N], whose row 0 is the input and whose other rows each one kernel writes."""

    def __init__(self, step, programmatic):
        rng = np.random.default_rng(7)
        self.w, self.x = rng.uniform(-0.9, 0.9, N).astype(np.float32), rng.standard_normal(N, np.float32)
        self.y, self.input, weights = cupy.empty((KERNELS + 1, N), np.float32), cupy.asarray(self.x), cupy.asarray(self.w)
        self.launches = [Launch(step, -(-N // 256), 256, (weights, self.y[k], self.y[k + 1], N), programmatic=programmatic and k > 0)
                         for k in range(KERNELS)]  # fmt: skip

    def output(self, run):
        """All rows, as bits, after `run` has filled those that no longer hold what another run left."""
        self.y[0], self.y[1:] = self.input, np.nan
        run()
        return self.y.view(np.uint32).copy()

    def on_stream(self):
        for launch in self.launches:
            launch()


def differing(mine, theirs):
    """Where the first difference is and both values, or None."""
    wrong = cupy.argwhere(mine != theirs)
    if not len(wrong):
        return None
    row, column = (int(i) for i in wrong[0])
    values = [float(bits[row, column].view(np.float32)) for bits in (mine, theirs)]
    return f"{len(wrong)} differ, the first at kernel {row - 1}, element {column}: {values[0]} and {values[1]}"


@pytest.fixture(scope="module")
def truth(module):
    """What the launches make on a stream without programmatic edges, itself held against NumPy."""
    chain = Chain(module.get_function("step"), False)
    found, rows = chain.output(chain.on_stream), [chain.x]
    for _ in range(KERNELS):
        rows.append(chain.w * rows[-1][::-1] + np.float32(1))
    np.testing.assert_array_equal(cupy.asnumpy(found), np.stack(rows).view(np.uint32))
    return found


def test_200_replays_of_a_pdl_chain_equal_the_stream_to_the_bit(module, truth):
    chain = Chain(module.get_function("step"), True)
    graph = capture(chain.launches)
    assert (graph.num_nodes, graph.num_programmatic_edges) == (KERNELS, KERNELS - 1)
    for replay in range(200):
        wrong = differing(chain.output(graph.launch), truth)
        assert wrong is None, f"replay {replay}: {wrong}"


def test_replays_back_to_back_over_two_buffers_count_every_step(module):
    """Each kernel overwrites what the one before it reads, and a replay goes on from where the last one ended: with w = 1 an element is
    its start plus the number of kernels, an exact float32, and one that is read or overwritten too early stays wrong for good."""
    start, ones = cupy.arange(N, dtype=np.float32), cupy.ones(N, np.float32)
    y, step = cupy.stack([start, cupy.full(N, np.nan, np.float32)]), module.get_function("step")
    graph = capture(Launch(step, -(-N // 256), 256, (ones, y[k % 2], y[(k + 1) % 2], N), programmatic=k > 0) for k in range(KERNELS))
    for _ in range(200):
        graph.launch()
    assert KERNELS % 2 == 0  # an even number of reversals
    wrong = cupy.argwhere(y[0] != start + 200 * KERNELS)
    assert not len(wrong), f"{len(wrong)} differ, the first at {int(wrong[0, 0])}: {float(y[0, int(wrong[0, 0])])}"


def test_a_pdl_chain_on_a_stream_equals_it_too(module, truth):
    chain = Chain(module.get_function("step"), True)
    for round_ in range(20):
        wrong = differing(chain.output(chain.on_stream), truth)
        assert wrong is None, f"round {round_}: {wrong}"


def test_a_raw_kernel_is_a_kernel_too(truth):
    """cupy.RawKernel, compiled by CuPy with the options it chooses itself."""
    chain = Chain(cupy.RawKernel(SOURCE, "step"), True)
    wrong = differing(chain.output(capture(chain.launches).launch), truth)
    assert wrong is None, wrong


def test_cupys_own_capture_takes_launches_along(module, truth):
    """Launches between CuPy's own work, in a graph of CuPy's."""
    chain, doubled = Chain(module.get_function("step"), True), cupy.empty(N, np.float32)
    cupy.multiply(chain.input, 2, out=doubled)  # compiled and loaded before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        chain.on_stream()
        cupy.multiply(chain.y[KERNELS], 2, out=doubled)
        graph = stream.end_capture()
    wrong = differing(chain.output(graph.launch), truth)
    assert wrong is None, wrong
    assert bool((doubled == 2 * chain.y[KERNELS]).all())


def test_a_graph_of_a_generator_keeps_its_arrays(module):
    """Without them the pool would hand the memory to `others`, and the replay would write there."""

    def launches():
        x = cupy.ones(1 << 20, np.float32)
        yield Launch(module.get_function("produce"), 132, 256, (x, cupy.zeros_like(x), x.size))

    graph = capture(launches())
    others = [cupy.full(1 << 20, 5, np.float32) for _ in range(4)]
    graph.launch()
    assert all(float(other.sum()) == 5 * 2**20 for other in others)


# ---- the page and the example ----
def test_the_code_of_the_page_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "launch.md").read_text(), re.MULTILINE | re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block, "docs/launch.md", "exec"), namespace)
    assert "1000000 CTAs of grid=(1000000, 1, 1) must be resident" in capsys.readouterr().out


def test_the_example_runs(capsys):
    spec = importlib.util.spec_from_file_location("pdl_example", ROOT / "examples" / "pdl.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--json", "--repeats", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] == dict.fromkeys(("stream", "graph", "pdl"), True)
    assert set(found["us"]) == set(found["ratio"]) == set(found["equal"]) and all(us > 0 for us in found["us"].values())
