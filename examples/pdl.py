"""Programmatic dependent launch for kernels of one's own: a chain of CuPy RawModule kernels on a stream, in a CUDA graph, and in a graph
with programmatic edges, from one and the same machine code.

What comes out of each must equal NumPy to the bit, in every kernel of the chain; then they are timed, interleaved. See docs/launch.md.
"""

import argparse
import json
import sys

import numpy as np

import cuk

# y[i] = w[i] * x[n - 1 - i] + 1, float32, rounded after each step as NumPy does. w is the chain's own, x what the kernel before has written.
SOURCE = r"""
extern "C" __global__ void step(const float* w, const float* x, float* y, int n) {
  asm volatile("griddepcontrol.launch_dependents;");       // the next kernel's CTAs may take their places: it says nothing of y
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float weight = i < n ? w[i] : 0.0f;                      // no kernel of the chain writes w: it may be read before the wait
  asm volatile("griddepcontrol.wait;" ::: "memory");       // all kernels before have ended; x is here, and no one reads y any more
  if (i < n) y[i] = __fadd_rn(__fmul_rn(weight, x[n - 1 - i]), 1.0f);
}
"""
THREADS = 256
USAGE = """examples:
  python examples/pdl.py
  python examples/pdl.py --kernels 200 --elements 1000000
  python examples/pdl.py --json > pdl.json
exit code: 0 all equal to the bit; 1 a run differs; 2 wrong usage, or no GPU that can do this"""


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("--kernels", type=int, default=64, help="kernels of the chain, from 2 to 1000 (default 64)")
    described.add_argument("--elements", type=int, default=32768, help="float32 elements of a vector, 1 to 2^20 (default 32768: 128 CTAs)")
    described.add_argument("--repeats", type=int, default=30, help="timings of each run, in random order (default 30)")
    described.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return described


def expected(w: np.ndarray, x: np.ndarray, kernels: int) -> np.ndarray:
    """[kernels + 1, n] float32: x, then what each kernel of the chain writes."""
    rows = [x]
    for _ in range(kernels):
        rows.append(w * rows[-1][::-1] + np.float32(1))
    return np.stack(rows)


def measure(kernels: int, elements: int, repeats: int) -> dict:
    """{"equal": run -> bool, "us": run -> median µs of the whole chain, "ratio": run -> [ratio to graph, low, high]}, and the sizes; of
    runs that are not all equal nothing is timed."""
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        raise RuntimeError("programmatic dependent launch needs compute capability 9.0 (Hopper) or newer")
    rng = np.random.default_rng(0)
    w, x = rng.uniform(-0.9, 0.9, elements).astype(np.float32), rng.standard_normal(elements, np.float32)
    truth, weights, y = expected(w, x, kernels), cupy.asarray(w), cupy.empty((kernels + 1, elements), np.float32)
    step = cupy.RawModule(code=SOURCE).get_function("step")
    grid = -(-elements // THREADS)

    def chain(programmatic: bool) -> list[cuk.Launch]:
        # The first has a full edge: whatever the stream did before, a replay of this very chain too, has ended when it starts.
        return [cuk.Launch(step, grid, THREADS, (weights, y[k], y[k + 1], elements), programmatic=programmatic and k > 0)
                for k in range(kernels)]  # fmt: skip

    launches = chain(False)
    runs = {
        "stream": lambda: [launch() for launch in launches],
        "graph": cuk.capture(launches).launch,
        "pdl": cuk.capture(chain(True)).launch,
    }
    equal = {}
    for name, run in runs.items():
        y[0], y[1:] = cupy.asarray(x), np.nan
        run()
        equal[name] = cupy.asnumpy(y).tobytes() == truth.tobytes()
    found = {"kernels": kernels, "elements": elements, "equal": equal}
    if all(equal.values()):
        timed = cuk.bench.interleave(runs, baseline="graph", repeats=repeats)
        found |= {"us": {name: timed.median(name) for name in runs}, "ratio": {name: timed.ratio(name) for name in runs}}
    return found


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    for name, low, high in (("kernels", 2, 1000), ("elements", 1, 2**20), ("repeats", 1, 10_000)):
        if not low <= getattr(given, name) <= high:
            parser().error(f"--{name} {getattr(given, name)}: must be from {low} to {high}")
    try:
        if missing := cuk.launch.gpu_missing():
            raise RuntimeError(f"this example launches kernels: {missing}")
        found = measure(given.kernels, given.elements, given.repeats)
    except (RuntimeError, ImportError, MemoryError) as error:
        print(f"pdl.py: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found))
    for name, same in ({} if given.json else found["equal"]).items():
        times = f"{found['us'][name]:9.1f} us  {found['ratio'][name][0]:.3f} x graph" if "us" in found else "not timed"
        print(f"{name:8}{'equal to the bit' if same else 'DIFFERS':18}{times}")
    return 0 if all(found["equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
