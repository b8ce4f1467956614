"""Launches that CuPy cannot express: programmatic edges (PDL), cooperative grids, clusters, and graphs of them.

Works for any function of a `cupy.RawModule` or `cupy.RawKernel`, on CuPy arrays and streams:

    module = cupy.RawModule(code=source)
    first = Launch(module.get_function("produce"), grid=132, block=256, args=(x, n))
    second = Launch(module.get_function("consume"), grid=132, block=256, args=(x, y, n), programmatic=True)
    first(); second()                      # on the current CuPy stream
    graph = capture([first, second])       # the same as a CUDA graph, with a programmatic edge
    graph.launch()

A kernel launched with `programmatic=True` may start before the one before it in the stream has ended: it must execute
griddepcontrol.wait before it reads what that kernel, or any kernel before it, writes, and before it overwrites what they read.
docs/launch.md says what those instructions promise, and what each error means.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
"""CTAs of a cluster: on every GPU that has clusters; on an H200, for a kernel that asks for it (CUDA C++ programming guide)."""

_LEGACY_STREAMS = (0, 1)
"""The default stream by its two names, NULL and CU_STREAM_LEGACY (cuda.h)."""


class LaunchError(RuntimeError):
    """A launch that the driver refused, or that was refused before it: names the kernel, its grid, block and shared memory."""


def gpu_missing() -> str | None:
    """Why no kernel can be launched here and what to install, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install 'cuk[cuda13]' (or cuda12, for a driver of CUDA 12)"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no GPU can be used ({error}): install NVIDIA's driver; `cuk doctor` tells what else is missing"
    return None if count else "no GPU is visible: see CUDA_VISIBLE_DEVICES; `cuk doctor` tells what else is missing"


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError("launching needs cuda.bindings: pip install 'cuk[cuda13]' (or cuda12)") from error
    return driver


def _shape(name: str, given: int | Sequence[int], limits: tuple[int, int, int]) -> tuple[int, int, int]:
    try:
        sizes = tuple(operator.index(size) for size in (given if np.iterable(given) else (given,)))
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or any(not 1 <= s <= limit for s, limit in zip(sizes, limits, strict=False)):
        raise ValueError(f"{name}={given!r}: must be one to three whole sizes from 1 to {limits}")
    return (*sizes, 1, 1)[:3]


def _function_pointer(function: Any) -> int:
    """Address of the CUfunction in a function of a cupy.RawModule, a cupy.RawKernel or a cupy.cuda.Function."""
    pointer = getattr(getattr(function, "kernel", function), "ptr", None)  # a cupy.RawKernel holds its cupy.cuda.Function
    if not isinstance(pointer, (int, np.integer)):
        raise ValueError(
            f"function={function!r:.80}: a {type(function).__name__} is no kernel; give module.get_function('name') of a cupy.RawModule, "
            f"or a cupy.RawKernel"
        )
    return int(pointer)


def _stream_pointer(stream: Any) -> int:
    if stream is None:
        import cupy

        stream = cupy.cuda.get_current_stream()
    try:
        return stream.ptr
    except AttributeError:
        raise ValueError(
            f"stream={stream!r:.80}: a {type(stream).__name__} is no CuPy stream; wrap another library's as cupy.cuda.ExternalStream(address)"
        ) from None


class Launch:
    """One prepared kernel launch: parameters, attributes and configuration are built here, once; a call only enqueues.

    function: a function of a cupy.RawModule or a cupy.RawKernel. grid, block: a size or up to three. args: CuPy arrays (their
    pointer), NumPy scalars, ctypes values, Python ints (int32 where they fit, else int64) and floats (float64), or `bytes` for a
    struct passed by value; arrays are kept alive. smem_bytes: dynamic shared memory. programmatic: a programmatic edge from the
    launch before. cooperative: grid-wide synchronization is used, so all CTAs must be resident. resident: likewise, for grids that
    synchronize by their own means. cluster: CTAs of a cluster, along x or a triple.

    Raises ValueError for what is no kernel, sizes out of range and arguments that the kernel does not take, LaunchError for a footprint
    that no SM has room for and for a grid that must be resident and cannot be, with the arithmetic."""

    def __init__(
        self,
        function: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        *,
        smem_bytes: int = 0,
        programmatic: bool = False,
        cooperative: bool = False,
        resident: bool = False,
        cluster: int | Sequence[int] | None = None,
        name: str = "",
    ):
        driver = _driver()
        self.grid = _shape("grid", grid, (2**31 - 1, 65535, 65535))
        self.block = _shape("block", block, (1024, 1024, 64))
        if np.prod(self.block) > 1024:
            raise ValueError(f"block={block}: {np.prod(self.block)} threads, a CTA can have 1024")
        self.cluster = None if cluster is None else _shape("cluster", cluster, (MAX_CLUSTER,) * 3)
        if self.cluster and np.prod(self.cluster) > MAX_CLUSTER:
            raise ValueError(f"cluster={cluster}: {np.prod(self.cluster)} CTAs, a cluster can have {MAX_CLUSTER}")
        if not isinstance(smem_bytes, (int, np.integer)) or not 0 <= smem_bytes < 2**31:
            raise ValueError(f"smem_bytes={smem_bytes!r}: must be a whole number of bytes, 0 or more")
        self.smem_bytes = int(smem_bytes)
        self.programmatic = programmatic
        self._keep = (function, tuple(args))
        self.handle = driver.CUfunction(_function_pointer(function))
        self.name = name or getattr(function, "name", "kernel")
        self._prepare_function(driver)
        self._pack(driver, args)
        attributes = []
        if programmatic:
            attributes.append(
                self._attribute("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed")
            )
        if cooperative:
            attributes.append(self._attribute("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", "cooperative"))
        if self.cluster:
            if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
                raise ValueError(f"{self.name}: grid={self.grid} is no multiple of cluster={self.cluster}")
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = self.cluster
            attributes.append(attribute)
            if np.prod(self.cluster) > PORTABLE_CLUSTER:
                self._set(driver, "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.smem_bytes
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config, self._launch, self._stream_type = config, driver.cuLaunchKernelEx, driver.CUstream
        if self.cluster:
            self._require_resident_clusters(driver, whole_grid=cooperative or resident)
        elif cooperative or resident:
            self._require_resident(driver)

    def __call__(self, stream: Any = None) -> None:
        """Enqueues the kernel on a CuPy stream, by default the current one."""
        self._config.hStream = self._stream_type(_stream_pointer(stream))
        (status,) = self._launch(self._config, self.handle, self._pointers, 0)
        if int(status):
            raise LaunchError(f"{self}: {_explain(status)}")

    def __repr__(self) -> str:
        return (
            f"<Launch {self.name} grid={self.grid} block={self.block} smem={self.smem_bytes}{' programmatic' if self.programmatic else ''}>"
        )

    # ---- built once ----
    def _attribute(self, identity: str, member: str) -> Any:
        driver = _driver()
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, identity)
        setattr(attribute.value, member, 1)
        return attribute

    def _set(self, driver: Any, attribute: str, value: int) -> None:
        (status,) = driver.cuFuncSetAttribute(self.handle, getattr(driver.CUfunction_attribute, attribute), value)
        if int(status):
            raise LaunchError(f"{self.name}: {attribute}={value}: {_explain(status)}")

    def _get(self, driver: Any, attribute: str) -> int | None:
        status, value = driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}"), self.handle)
        return None if int(status) else value

    def _prepare_function(self, driver: Any) -> None:
        threads, most = int(np.prod(self.block)), self._get(driver, "MAX_THREADS_PER_BLOCK")
        if most and threads > most:
            raise LaunchError(
                f"{self.name}: block={self.block} is {threads} threads, the kernel can have {most} with its {self._get(driver, 'NUM_REGS')} "
                f"registers a thread and its launch bounds; take fewer threads or compile it for more"
            )
        known = self._get(driver, "MAX_DYNAMIC_SHARED_SIZE_BYTES")
        if known is None or self.smem_bytes > known:  # only ever raised: one function may be launched with several sizes
            try:
                self._set(driver, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", self.smem_bytes)
            except LaunchError as error:
                import cupy

                limit, static = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"], self._get(driver, "SHARED_SIZE_BYTES")
                raise LaunchError(
                    f"{self.name}: smem_bytes={self.smem_bytes} beside {static} bytes of static shared memory, a CTA can have {limit} in all ({error})"
                ) from None
        # The largest carve-out, always: it decides which kernels can share an SM.
        self._set(driver, "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", 100)

    def _pack(self, driver: Any, args: Sequence[Any]) -> None:
        buffers = []
        for index, value in enumerate(args):
            try:
                buffers.append(_parameter(value))
            except ValueError as error:
                raise ValueError(f"{self.name}: argument {index} {error}") from None
        sizes = self._parameter_sizes(driver)
        if sizes is not None and len(sizes) != len(buffers):
            raise ValueError(f"{self.name}: {len(buffers)} arguments given, the kernel takes {len(sizes)}")
        for index, (value, buffer, size) in enumerate(zip(args, buffers, sizes or (), strict=False)):
            if ctypes.sizeof(buffer) != size:
                hint = "; give a NumPy scalar of the kernel's type" if isinstance(value, (int, float, np.generic)) else ""
                raise ValueError(
                    f"{self.name}: argument {index} ({type(value).__name__}) has {ctypes.sizeof(buffer)} bytes, the kernel takes {size}{hint}"
                )
        self._buffers = buffers
        self._table = (ctypes.c_void_p * max(1, len(buffers)))(*(ctypes.addressof(b) for b in buffers))
        self._pointers = ctypes.addressof(self._table) if buffers else 0

    def _parameter_sizes(self, driver: Any) -> list[int] | None:
        """Bytes of each parameter of the kernel; None where the driver does not tell (before CUDA 12.4)."""
        sizes: list[int] = []
        try:
            while not int((info := driver.cuFuncGetParamInfo(self.handle, len(sizes)))[0]):
                sizes.append(info[2])
        except (AttributeError, RuntimeError):  # the bindings have no such function, or libcuda has none
            return None
        return sizes

    def _require_resident(self, driver: Any) -> None:
        import cupy

        threads = int(np.prod(self.block))
        status, each = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.handle, threads, self.smem_bytes)
        if int(status):
            raise LaunchError(f"{self}: {_explain(status)}")
        sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
        ctas = int(np.prod(self.grid, dtype=np.int64))
        if ctas > each * sms:
            raise LaunchError(
                f"{self.name}: all {ctas} CTAs of grid={self.grid} must be resident, but {each} CTAs of {self._footprint(driver)} fit an SM, "
                f"{each} * {sms} SMs = {each * sms}; take a smaller grid or footprint"
            )

    def _require_resident_clusters(self, driver: Any, whole_grid: bool) -> None:
        """A cluster needs one GPC, and how many SMs each has differs from chip to chip: only the driver knows what fits."""
        status, most = driver.cuOccupancyMaxActiveClusters(self.handle, self._config)
        if int(status):
            raise LaunchError(f"{self}: cluster={self.cluster}: {_explain(status)}")
        size, ctas = int(np.prod(self.cluster)), int(np.prod(self.grid, dtype=np.int64))
        if most < 1:
            raise LaunchError(
                f"{self.name}: no cluster of {size} CTAs of {self._footprint(driver)} fits the GPU; take a smaller cluster or footprint"
            )
        if whole_grid and ctas > most * size:
            raise LaunchError(
                f"{self.name}: all {ctas} CTAs of grid={self.grid} must be resident, but {most} clusters of {size} CTAs of "
                f"{self._footprint(driver)} fit the GPU, {most} * {size} = {most * size}; take a smaller grid, cluster or footprint"
            )

    def _footprint(self, driver: Any) -> str:
        registers, static = self._get(driver, "NUM_REGS"), self._get(driver, "SHARED_SIZE_BYTES") or 0
        return f"{np.prod(self.block)} threads, {registers} registers a thread and {self.smem_bytes + static} bytes of shared memory"


def encode_tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """The 128 bytes of a tensor map over bf16 elements at `address`, with the 128-byte swizzle and zeros outside the tensor.

    sizes, box: elements of each dimension, innermost first. strides: bytes of all dimensions but the innermost.
    Raises ValueError naming what a tensor map cannot hold (CUDA driver API, cuTensorMapEncodeTiled)."""
    if address % 16:
        raise ValueError(f"address {address:#x}: a tensor map needs a multiple of 16")
    if not 1 <= len(sizes) <= 5 or len(box) != len(sizes) or len(strides) != len(sizes) - 1:
        raise ValueError(f"sizes={tuple(sizes)}, strides={tuple(strides)}, box={tuple(box)}: a tensor map has one to five dimensions")
    for name, values, high in (("sizes", sizes, 2**32), ("box", box, 256)):
        if any(not 1 <= v <= high for v in values):
            raise ValueError(f"{name}={tuple(values)}: each must be from 1 to {high}")
    if any(s % 16 or not 0 < s < 2**40 for s in strides):
        raise ValueError(f"strides={tuple(strides)}: each must be a multiple of 16 bytes below 2^40")
    d = _driver()
    status, encoded = d.cuTensorMapEncodeTiled(
        d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(sizes), address, [d.cuuint64_t(s) for s in sizes],
        [d.cuuint64_t(s) for s in strides], [d.cuuint32_t(b) for b in box], [d.cuuint32_t(1)] * len(sizes),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if int(status):
        raise LaunchError(f"tensor map of sizes={tuple(sizes)}, strides={tuple(strides)}, box={tuple(box)}: {_explain(status)}")
    return ctypes.string_at(encoded.getPtr(), 128)


def _parameter(value: Any) -> Any:
    """A ctypes object that holds the bytes of one kernel parameter. Raises ValueError whose text follows "argument 3 "."""
    if isinstance(value, (bytes, bytearray)):
        return (ctypes.c_char * len(value)).from_buffer_copy(bytes(value))
    if hasattr(value, "__cuda_array_interface__"):
        return ctypes.c_void_p(value.data.ptr if hasattr(value.data, "ptr") else value.__cuda_array_interface__["data"][0])
    if isinstance(value, np.generic):
        raw = value.tobytes()
        return (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"is {value}, which does not fit 64 bits")
        return ctypes.c_int32(value) if -(2**31) <= value < 2**31 else ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return value
    if isinstance(value, np.ndarray):
        raise ValueError("is a NumPy array, in the host's memory: give a CuPy array, e.g. cupy.asarray(it)")
    raise ValueError(f"of type {type(value).__name__} is neither an array on the GPU, a scalar, a ctypes value nor bytes")


def _explain(status: Any) -> str:
    driver = _driver()
    found, text = driver.cuGetErrorString(status)
    return f"{getattr(status, 'name', status)} ({text.decode() if not int(found) and text else 'no description'})"


class Graph:
    """A captured sequence of launches. `num_nodes`, `num_programmatic_edges`: as the driver recorded them (None where it cannot say)."""

    def __init__(self, graph: Any, launches: Sequence[Launch]):
        driver = _driver()
        self._graph, self._executable, self._keep = graph, None, tuple(launches)
        status, _, num_nodes = driver.cuGraphGetNodes(graph, 0)
        self.num_nodes = None if int(status) else num_nodes
        self.num_programmatic_edges = _programmatic_edges(graph, self.num_nodes)
        status, executable = driver.cuGraphInstantiate(graph, 0)
        if int(status):
            raise LaunchError(f"graph of {len(launches)} launches: {_explain(status)}")
        self._executable = executable
        self._launch, self._stream_type = driver.cuGraphLaunch, driver.CUstream

    def launch(self, stream: Any = None) -> None:
        """Enqueues one replay on a CuPy stream, by default the current one."""
        (status,) = self._launch(self._executable, self._stream_type(_stream_pointer(stream)))
        if int(status):
            raise LaunchError(f"graph of {len(self._keep)} launches: {_explain(status)}")

    def __del__(self):
        try:
            driver = _driver()
            if self._executable is not None:
                driver.cuGraphExecDestroy(self._executable)
            driver.cuGraphDestroy(self._graph)
        except Exception:  # the interpreter or the context may be gone already
            pass

    def __repr__(self) -> str:
        return f"<Graph of {self.num_nodes} kernels, {self.num_programmatic_edges} programmatic edges>"


def capture(launches: Sequence[Launch], stream: Any = None) -> Graph:
    """A CUDA graph of launches, each following the one before; those with `programmatic` by a programmatic edge.

    stream: the CuPy stream to capture on, not the default one; without it a stream of its own. Nothing runs on it.
    Raises ValueError for an empty sequence, anything in it that is no Launch, and the default stream; LaunchError when the driver refuses."""
    launches = tuple(launches) if np.iterable(launches) else (launches,)  # the graph keeps them, so a generator must not be used up
    if not launches:
        raise ValueError("nothing to capture: give at least one Launch")
    for index, launch in enumerate(launches):
        if not isinstance(launch, Launch):
            raise ValueError(f"launches[{index}] is of type {type(launch).__name__}: capture takes Launch objects; CuPy's own work is captured "
                             f"with stream.begin_capture() and end_capture(), and a Launch called in between goes along")  # fmt: skip
    driver = _driver()
    if stream is None:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
    pointer = _stream_pointer(stream)
    if pointer in _LEGACY_STREAMS:
        raise ValueError("the default stream cannot be captured: give cupy.cuda.Stream(non_blocking=True), or no stream")
    handle = driver.CUstream(pointer)
    (status,) = driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if int(status):
        raise LaunchError(f"capture: {_explain(status)}")
    try:
        for launch in launches:
            launch(stream)
    except BaseException:  # the stream must not stay in capture, nor the half graph in memory
        status, graph = driver.cuStreamEndCapture(handle)
        if not int(status):
            driver.cuGraphDestroy(graph)
        raise
    status, graph = driver.cuStreamEndCapture(handle)
    if int(status):
        raise LaunchError(f"capture: {_explain(status)}")
    return Graph(graph, launches)


def _programmatic_edges(graph: Any, num_nodes: int | None) -> int | None:
    """How many edges of the graph are programmatic, asked of the driver; None where it does not tell (before CUDA 12.3).

    Asked of libcuda itself: bindings before the fix of NVIDIA/cuda-python issue 1804 (13.0 among them) return edge data that they have
    freed. Room is given for an edge a node, enough for a chain: asking for their number first leaves no room for their data, which the
    driver may refuse (CUDA_ERROR_LOSSY_QUERY) for the very graphs that have programmatic edges."""
    if not num_nodes:
        return None
    try:
        query = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    except (OSError, AttributeError):
        return None
    origins, targets = (ctypes.c_void_p * num_nodes)(), (ctypes.c_void_p * num_nodes)()
    edges, count = (_EdgeData * num_nodes)(), ctypes.c_size_t(num_nodes)
    if query(ctypes.c_void_p(int(graph)), origins, targets, edges, ctypes.byref(count)):
        return None
    return sum(edge.type == _EdgeData.PROGRAMMATIC for edge in edges[: count.value])


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData of cuda.h."""

    PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    _fields_ = [("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5)]
