"""The workloads: one file each."""

from cuk.programs.chain import chain
from cuk.programs.decoding import decoding
from cuk.programs.llama import MODELS, from_pretrained, llama

__all__ = ["MODELS", "chain", "decoding", "from_pretrained", "llama"]
