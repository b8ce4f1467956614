"""The workloads: one file each."""

from collections.abc import Mapping
from typing import Any

from cuk.program import Program
from cuk.programs.chain import chain
from cuk.programs.decoding import decoding
from cuk.programs.llama import MODELS, from_pretrained, llama, of_meta


def rebuild(name: str, meta: Mapping[str, Any]) -> Program:
    """The program of that name and `meta` (`Program.meta`, as a schedule's file carries it), with random weights. Raises ValueError for a
    workload that is not among these files, or a `meta` that makes no program."""
    try:
        if "shapes" in meta:
            return chain([tuple(shape) for shape in meta["shapes"]], batch=meta["batch"], layers=meta["layers"])
        if "hidden" in meta:
            return of_meta(name, meta)
    except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"program {name!r} cannot be rebuilt from its specification: {type(error).__name__}: {error}") from error
    raise ValueError(f"program {name!r} cannot be rebuilt from its specification, which is that of no known workload (chain, llama)")


__all__ = ["MODELS", "chain", "decoding", "from_pretrained", "llama", "rebuild"]
