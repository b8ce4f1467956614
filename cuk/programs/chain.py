"""Dependent matrix-vector products: the decode step's bare skeleton."""

from __future__ import annotations

from collections.abc import Sequence

from cuk.program import Init, Program, View
from cuk.tasks import Linear

LLAMA_1B = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]


def chain(shapes: Sequence[tuple[int, int]], *, batch: int = 1, layers: int = 1) -> Program:
    """A program of `layers` rounds of y = x @ w.T, one for each (n, k) of `shapes`, w [n, k]: each product feeds the next.

    A k smaller than the n before it takes the first k columns, which needs batch 1 (LLAMA_1B does so after its QKV shape).
    Raises ValueError when `shapes` is empty or a k cannot be fed."""
    if not shapes:
        raise ValueError("shapes is empty: give at least one (n, k)")
    program = Program("chain", {"shapes": [list(s) for s in shapes], "batch": batch, "layers": layers, "context": 0})
    slabs = [program.buffer(f"w{i}", (layers, n, k), "bfloat16", "weight", Init("normal", std=k**-0.5)) for i, (n, k) in enumerate(shapes)]
    k0 = shapes[0][1]
    source = program.buffer("x", (batch, k0), "bfloat16", "index", Init("normal"))
    for layer in range(layers):
        for i, (n, k) in enumerate(shapes):
            if k > source.shape[1] or (k < source.shape[1] and batch > 1):
                raise ValueError(f"shapes[{i}]: k={k} cannot be fed by the {source.shape[1]} columns before it at batch {batch}")
            last = layer == layers - 1 and i == len(shapes) - 1
            out = program.buffer(f"y{layer}.{i}", (batch, n), "bfloat16", "output" if last else "activation")
            window = View(source, columns=k) if k < source.shape[1] else source
            program.op(f"linear{i}", Linear(batch=batch, n=n, k=k), f"layer{layer}.linear{i}", x=window, w=slabs[i][layer], y=out)
            source = out
    return program
