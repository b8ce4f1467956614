"""What a launch hands to the driver, read back from the C structs of the real bindings; and what it refuses before it gets there."""

import ctypes
import re
import sys
import types
import weakref

import numpy as np
import pytest

from cuk import launch
from cuk.launch import Launch, LaunchError, capture, encode_tensor_map

bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings are not installed: pip install 'cuk[compiler]'")
OK, INVALID = bindings.CUresult.CUDA_SUCCESS, bindings.CUresult.CUDA_ERROR_INVALID_VALUE
SMEM_OPTIN, SMS = 232448, 132


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint)]  # fmt: skip


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, a union of 64."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Driver:
    """The types of the real bindings, and a driver that has one kernel: parameters of `sizes` bytes, and these limits."""

    def __init__(self, sizes=(8, 8, 4), *, ctas=2, clusters=10, threads=1024, static=0):
        self.sizes, self.ctas, self.clusters, self.threads, self.static = sizes, ctas, clusters, threads, static
        self.set, self.launched, self.log, self.fail = {}, [], [], OK

    def __getattr__(self, name):
        return getattr(bindings, name)

    def cuGetErrorString(self, status):
        return OK, b"as the driver explains it"

    def cuFuncGetAttribute(self, attribute, function):
        known = {
            "MAX_THREADS_PER_BLOCK": self.threads,
            "NUM_REGS": 40,
            "SHARED_SIZE_BYTES": self.static,
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": 49152 - self.static,
        }
        return OK, self.set.get(attribute.name, known[attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")])  # fmt: skip

    def cuFuncSetAttribute(self, function, attribute, value):
        if attribute.name.endswith("DYNAMIC_SHARED_SIZE_BYTES") and value > SMEM_OPTIN - self.static:
            return (INVALID,)
        self.set[attribute.name] = value
        return (OK,)

    def cuFuncGetParamInfo(self, function, index):
        return (OK, 0, self.sizes[index]) if index < len(self.sizes) else (INVALID, 0, 0)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem):
        return OK, self.ctas

    def cuOccupancyMaxActiveClusters(self, function, config):
        return OK, self.clusters

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        c = Config.from_address(config.getPtr())
        attributes = (Attribute * c.num_attributes).from_address(c.attributes) if c.num_attributes else ()
        table = (ctypes.c_void_p * len(self.sizes)).from_address(parameters) if parameters else ()
        self.launched.append(dict(
            grid=tuple(c.grid), block=tuple(c.block), smem=c.smem, stream=c.stream, function=int(function),
            attributes={a.id: tuple(a.value[:3]) for a in attributes},
            parameters=[ctypes.string_at(p, size) for p, size in zip(table, self.sizes, strict=False)],
        ))  # fmt: skip
        self.log.append("launch")
        return (self.fail,)

    def cuStreamBeginCapture(self, stream, mode):
        self.log.append("begin")
        return (OK,)

    def cuStreamEndCapture(self, stream):
        self.log.append("end")
        return OK, bindings.CUgraph(0)

    def cuGraphGetNodes(self, graph, count):
        return OK, [], self.log.count("launch")

    def cuGraphInstantiate(self, graph, flags):
        return self.fail_instantiate, bindings.CUgraphExec(0)

    fail_instantiate = OK

    def cuGraphExecDestroy(self, graph):
        self.log.append("destroy executable")

    def cuGraphDestroy(self, graph):
        self.log.append("destroy graph")


class Stream:
    def __init__(self, ptr=0x55, non_blocking=True):
        self.ptr = ptr


KERNEL = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=0x1234), name="k")
ARRAY = types.SimpleNamespace(__cuda_array_interface__={"data": (0xABC000, False)}, data=types.SimpleNamespace(ptr=0xABC000))
ARGS = (ARRAY, ARRAY, 7)


@pytest.fixture
def use(monkeypatch):
    """use(Driver(...)) stands in for the driver, and CuPy has one GPU."""
    attributes = {"MultiProcessorCount": SMS, "MaxSharedMemoryPerBlockOptin": SMEM_OPTIN}
    cuda = types.SimpleNamespace(
        get_current_stream=Stream, Stream=Stream, Device=lambda: types.SimpleNamespace(id=0, attributes=attributes)
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "_programmatic_edges", lambda graph, num_nodes: None)

    def stand_in(driver):
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        return driver

    return stand_in


# Values of CUlaunchAttributeID (cuda.h).
COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6


@pytest.mark.parametrize(
    ("switches", "attributes"),
    [
        ({}, {}),
        ({"programmatic": True}, {PROGRAMMATIC: (1, 0, 0)}),
        ({"cooperative": True}, {COOPERATIVE: (1, 0, 0)}),
        ({"cluster": 4}, {CLUSTER: (4, 1, 1)}),
        ({"programmatic": True, "cluster": (2, 1, 1)}, {PROGRAMMATIC: (1, 0, 0), CLUSTER: (2, 1, 1)}),
    ],
)
def test_what_reaches_the_driver(use, switches, attributes):
    driver = use(Driver())
    prepared = Launch(KERNEL, 8, (32, 2), ARGS, smem_bytes=100_000, **switches)
    junk = [Launch(KERNEL, 1, 32, (ARRAY, ARRAY, i)) for i in range(20)]  # what it built must not depend on what others build
    prepared()
    prepared(Stream(0x66))
    assert len(junk) == 20 and [seen["stream"] for seen in driver.launched] == [0x55, 0x66]
    for seen in driver.launched:
        assert (seen["grid"], seen["block"], seen["smem"], seen["function"]) == ((8, 1, 1), (32, 2, 1), 100_000, 0x1234)
        assert seen["attributes"] == attributes
        assert [int.from_bytes(p, "little") for p in seen["parameters"]] == [0xABC000, 0xABC000, 7]
    assert driver.set["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"] == 100_000
    assert driver.set["CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"] == 100


def test_a_struct_by_value_and_scalars_of_every_kind(use):
    values = [(bytes(range(200)), bytes(range(200))), (np.float32(1.5), np.float32(1.5).tobytes()), (-3, (-3).to_bytes(4, "little", signed=True)),
              (1 << 40, (1 << 40).to_bytes(8, "little")), (0.25, np.float64(0.25).tobytes()), (True, b"\1"), (ctypes.c_short(9), b"\x09\0")]  # fmt: skip
    driver = use(Driver([len(raw) for _, raw in values]))
    Launch(KERNEL, 1, 32, [value for value, _ in values])()
    assert driver.launched[0]["parameters"] == [raw for _, raw in values]


def test_a_kernel_without_parameters(use):
    driver = use(Driver(()))
    Launch(KERNEL, 1, 32)()
    assert driver.launched[0]["parameters"] == []


@pytest.mark.parametrize("missing", [AttributeError("no cuFuncGetParamInfo"), RuntimeError('Function "cuFuncGetParamInfo" not found')])
def test_a_driver_that_does_not_tell_the_parameters_is_believed(use, missing):
    """cuFuncGetParamInfo came with CUDA 12.4: older bindings lack the name, newer ones over an older driver raise RuntimeError."""
    driver = use(Driver())

    def absent(function, index):
        raise missing

    driver.cuFuncGetParamInfo = absent
    Launch(KERNEL, 1, 32, ARGS)()
    assert len(driver.launched) == 1


def test_the_limit_of_shared_memory_is_only_raised(use):
    driver = use(Driver())
    for smem in (150_000, 60_000):
        Launch(KERNEL, 1, 32, ARGS, smem_bytes=smem)
    assert driver.set["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"] == 150_000


@pytest.mark.parametrize(
    ("driver", "given", "error", "message"),
    [
        ({}, dict(grid=0), ValueError, "grid=0: must be one to three whole sizes from 1"),
        ({}, dict(grid=()), ValueError, r"grid=\(\): must be one to three whole sizes"),
        ({}, dict(grid=(1, 1, 1, 1)), ValueError, r"grid=\(1, 1, 1, 1\): must be one to three whole sizes"),
        ({}, dict(grid=131.5), ValueError, "grid=131.5: must be one to three whole sizes"),
        ({}, dict(grid=(2.0, 1)), ValueError, r"grid=\(2.0, 1\): must be one to three whole sizes"),
        ({}, dict(grid="132"), ValueError, "grid='132': must be one to three whole sizes"),
        ({}, dict(grid=(1, 70_000)), ValueError, "grid=.*70000.*65535"),
        ({}, dict(block=2048), ValueError, "block=2048"),
        ({}, dict(smem_bytes=-1), ValueError, "smem_bytes=-1: must be a whole number of bytes, 0 or more"),
        ({}, dict(smem_bytes=1e5), ValueError, "smem_bytes=100000.0: must be a whole number"),
        ({}, dict(function="k"), ValueError, r"function='k': a str is no kernel; give module.get_function\('name'\) of a cupy.RawModule"),
        ({}, dict(function=types.SimpleNamespace(module=1)), ValueError, "function=.* a SimpleNamespace is no kernel"),
        ({}, dict(block=(32, 64)), ValueError, "2048 threads, a CTA can have 1024"),
        ({}, dict(cluster=(4, 4, 2)), ValueError, "32 CTAs, a cluster can have 16"),
        ({}, dict(grid=3, cluster=2), ValueError, "no multiple of cluster"),
        ({}, dict(args=ARGS[:2]), ValueError, "k: 2 arguments given, the kernel takes 3"),
        ({}, dict(args=(*ARGS, 1)), ValueError, "4 arguments given, the kernel takes 3"),
        ({}, dict(args=(*ARGS[:2], 1.0)), ValueError, r"argument 2 \(float\) has 8 bytes, the kernel takes 4; give a NumPy scalar"),
        ({}, dict(args=(ARRAY, 1, 7)), ValueError, r"k: argument 1 \(int\) has 4 bytes, the kernel takes 8; give a NumPy scalar"),
        ({}, dict(args=(ARRAY, b"1234", 7)), ValueError, r"argument 1 \(bytes\) has 4 bytes, the kernel takes 8$"),
        ({}, dict(args=(*ARGS[:2], "n")), ValueError, "k: argument 2 of type str is neither an array on the GPU"),
        ({}, dict(args=(ARRAY, None, 7)), ValueError, "k: argument 1 of type NoneType"),
        ({}, dict(args=(np.zeros(4), ARRAY, 7)), ValueError, "k: argument 0 is a NumPy array, in the host's memory: give a CuPy array"),
        ({}, dict(args=(*ARGS[:2], 1 << 64)), ValueError, "k: argument 2 is 18446744073709551616, which does not fit 64 bits"),
        ({"threads": 640}, dict(block=1024), LaunchError, "1024 threads, the kernel can have 640 with its 40 registers"),
        ({"static": 1024}, dict(smem_bytes=232_000), LaunchError, "smem_bytes=232000 beside 1024 bytes of static .* a CTA can have 232448"),
        ({}, dict(grid=265, cooperative=True), LaunchError, r"all 265 CTAs .* 2 CTAs of 32 threads, 40 .* 2 \* 132 SMs = 264; take"),
        ({}, dict(grid=265, resident=True), LaunchError, r"2 \* 132 SMs = 264"),
        ({}, dict(grid=44, cluster=4, resident=True), LaunchError, r"all 44 CTAs .* 10 clusters of 4 CTAs .* 10 \* 4 = 40; take"),
        ({"clusters": 0}, dict(grid=8, cluster=8), LaunchError, "no cluster of 8 CTAs .* fits the GPU"),
    ],
)
def test_what_is_refused_before_any_launch(use, driver, given, error, message):
    stand_in = use(Driver(**driver))
    with pytest.raises(error, match=message):
        Launch(**{"function": KERNEL, "grid": 1, "block": 32, "args": ARGS, **given})
    assert not stand_in.launched


@pytest.mark.parametrize(
    "given", [dict(grid=264, cooperative=True), dict(grid=40, cluster=4, cooperative=True), dict(grid=10_000, cluster=4)]
)
def test_what_just_fits_is_not_refused(use, given):
    driver = use(Driver())
    Launch(KERNEL, block=32, args=ARGS, **given)()
    assert len(driver.launched) == 1


def test_a_refused_launch_names_kernel_grid_and_shared_memory(use):
    driver = use(Driver())
    driver.fail = INVALID
    with pytest.raises(LaunchError, match=r"k grid=\(5, 1, 1\) block=\(32, 1, 1\) smem=64.*INVALID_VALUE \(as the driver explains it\)"):
        Launch(KERNEL, 5, 32, ARGS, smem_bytes=64)()


def test_a_stream_that_is_not_cupys_is_named(use):
    driver = use(Driver())
    prepared = Launch(KERNEL, 1, 32, ARGS)
    graph = capture([prepared])
    for call in (prepared, graph.launch, lambda stream: capture([prepared], stream)):
        with pytest.raises(ValueError, match=r"stream=7: a int is no CuPy stream; wrap another library's as cupy.cuda.ExternalStream"):
            call(7)
    assert driver.log == ["begin", "launch", "end"]


def test_without_cuda_bindings_a_launch_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"launching needs cuda.bindings: pip install 'cuk\[cuda13\]' \(or cuda12\)"):
        Launch(KERNEL, 1, 32, ARGS)


def no_device():
    raise RuntimeError("cudaErrorNoDevice")


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (None, r"CuPy cannot be imported .*pip install 'cuk\[cuda13\]'"),
        (no_device, "no GPU can be used .cudaErrorNoDevice.: install NVIDIA's driver; `cuk doctor`"),
        (lambda: 0, "no GPU is visible: see CUDA_VISIBLE_DEVICES"),
    ],
)
def test_why_no_kernel_can_be_launched(monkeypatch, count, message):
    runtime = types.SimpleNamespace(getDeviceCount=count)
    monkeypatch.setitem(sys.modules, "cupy", count and types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    assert re.search(message, launch.gpu_missing())


# ---- graphs ----
def test_a_graph_owns_what_was_captured(use):
    driver = use(Driver())
    graph = capture([Launch(KERNEL, 1, 32, ARGS)] * 3, Stream(0x77))
    assert graph.num_nodes == 3 and {seen["stream"] for seen in driver.launched} == {0x77}
    assert "destroy graph" not in driver.log
    del graph
    assert driver.log[-2:] == ["destroy executable", "destroy graph"]


def test_a_launch_that_fails_in_capture_ends_it(use):
    driver = use(Driver())
    prepared = Launch(KERNEL, 1, 32, ARGS)
    driver.fail = INVALID
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        capture([prepared])
    assert driver.log == ["begin", "launch", "end", "destroy graph"]


def test_a_graph_that_cannot_be_instantiated_is_freed(use):
    driver = use(Driver())
    driver.fail_instantiate = INVALID
    with pytest.raises(LaunchError, match="graph of 1 launches"):
        capture([Launch(KERNEL, 1, 32, ARGS)])
    assert driver.log[-1] == "destroy graph" and "destroy executable" not in driver.log


def test_edge_data_is_as_long_as_the_drivers():
    assert ctypes.sizeof(launch._EdgeData) == 8 and launch._EdgeData.type.offset == 2  # CUgraphEdgeData of cuda.h
    assert int(bindings.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) == launch._EdgeData.PROGRAMMATIC


def test_a_graph_keeps_the_launches_of_a_generator(use):
    """They own the arrays and the packed arguments: a generator that capture has used up would leave the graph with none of them."""
    use(Driver())
    launches = [Launch(KERNEL, 1, 32, ARGS) for _ in range(3)]
    kept = [weakref.ref(each) for each in launches]
    graph = capture(each for each in launches)
    del launches
    assert all(each() is not None for each in kept)
    del graph
    assert all(each() is None for each in kept)


def test_a_launch_alone_is_captured_as_one(use):
    use(Driver())
    assert capture(Launch(KERNEL, 1, 32, ARGS)).num_nodes == 1


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([], "nothing to capture: give at least one Launch"),
        ((), "nothing to capture"),
        (iter(()), "nothing to capture"),
        ([None], r"launches\[0\] is of type NoneType: capture takes Launch objects"),
        (KERNEL, r"launches\[0\] is of type SimpleNamespace"),
    ],
)
def test_what_cannot_be_captured(use, launches, message):
    driver = use(Driver())
    with pytest.raises(ValueError, match=message):
        capture(launches)
    assert not driver.log


@pytest.mark.parametrize("pointer", [0, 1])
def test_the_default_stream_cannot_be_captured(use, pointer):
    driver = use(Driver())
    with pytest.raises(ValueError, match=r"the default stream cannot be captured: give cupy.cuda.Stream\(non_blocking=True\)"):
        capture([Launch(KERNEL, 1, 32, ARGS)], Stream(pointer))
    assert not driver.log


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(address=8), "needs a multiple of 16"),
        (dict(sizes=[64, 0]), "sizes=.* from 1"),
        (dict(box=[64, 257]), "box=.* from 1 to 256"),
        (dict(strides=[24]), "multiple of 16 bytes"),
        (dict(strides=[]), "one to five dimensions"),
    ],
)
def test_what_a_tensor_map_cannot_hold(given, message):
    with pytest.raises(ValueError, match=message):
        encode_tensor_map(**{"address": 256, "sizes": [64, 8], "strides": [128], "box": [64, 8], **given})
