"""The operators: one file each, with the stem of its device file in cuda_src/tasks."""

from cuk.tasks.advance import Advance
from cuk.tasks.argmax import Argmax
from cuk.tasks.attention_decode import AttentionDecode
from cuk.tasks.embed import Embed
from cuk.tasks.gate_up import GateUp
from cuk.tasks.linear import Linear
from cuk.tasks.merge_linear import MergeLinear
from cuk.tasks.nucleus import Nucleus
from cuk.tasks.qk_norm import QkNorm
from cuk.tasks.qkv import Qkv
from cuk.tasks.rms_norm import RmsNorm
from cuk.tasks.sample import Sample

__all__ = [
    "Advance",
    "Argmax",
    "AttentionDecode",
    "Embed",
    "GateUp",
    "Linear",
    "MergeLinear",
    "Nucleus",
    "QkNorm",
    "Qkv",
    "RmsNorm",
    "Sample",
]
