"""The workloads: one file each."""

from cuk.programs.chain import chain
from cuk.programs.llama import MODELS, llama

__all__ = ["MODELS", "chain", "llama"]
