"""The rivals compute the step that ours do, as often as they are replayed, and when others use the memory around them."""

import cupy
import pytest

from cuk import rivals
from cuk.programs import llama
from cuk.runs import build
from cuk.runs.memory import to_numpy

SMALL = dict(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, vocab_size=2048, head_dim=64
)


@pytest.fixture(scope="module")
def stepped():
    run = build(llama(SMALL, context=100), "stream")
    run()
    run.synchronize()
    return run


@pytest.mark.parametrize("name", ["torch_graph", "torch_compile"])
def test_pytorchs_logits_are_ours(stepped, name):
    torch = pytest.importorskip("torch")
    rival = rivals.RIVALS[name](stepped.program, stepped.buffers)
    for _ in range(3):
        assert rival.check(to_numpy(stepped.buffers["logits"])) < rivals.MAX_LOGIT_ERROR
        torch.cuda.empty_cache()
        # What is free is filled: the next replay must not have depended on it.
        junk = [torch.full((size,), -1, device="cuda", dtype=torch.int32) for size in (16, 256, 4096, 65536) for _ in range(50)]
        del junk


def test_cublas_runs_on(stepped):
    rival = rivals.RIVALS["cublas"](stepped.program, stepped.buffers)
    before = to_numpy(stepped.buffers["logits"]).copy()
    for _ in range(3):
        rival()
    cupy.cuda.Device().synchronize()
    assert (to_numpy(stepped.buffers["logits"]) == before).all() and rival.checked
