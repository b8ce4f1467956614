"""Launches of a RawModule that is not ours: programmatic edges, cooperative grids, clusters, refusals."""

import cupy
import numpy as np
import pytest

from cuk.launch import Launch, LaunchError, capture

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
    x, stream = cupy.zeros(64, np.float32), cupy.cuda.Stream(non_blocking=True)
    good = Launch(module.get_function("produce"), 1, 64, (x, x, 64))
    with pytest.raises(TypeError):
        capture([good, None], stream)
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
        (lambda x: (x, x, np.int64(1)), "argument 2 has 8 bytes, the kernel takes 4"),
        (lambda x: (x, x, "n"), "argument of type str"),
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
