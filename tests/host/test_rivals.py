"""The rivals' side without a GPU: PyTorch's step computes what the reference does (where torch is), the cuBLAS plan is the step's products."""

import numpy as np
import pytest

from cuk import rivals
from cuk.programs import chain, llama
from cuk.runs.memory import numpy_buffers
from cuk.runs.reference import execute
from cuk.task import widen

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 512, "head_dim": 64}  # fmt: skip


def torch_tensors(arrays):
    torch = pytest.importorskip("torch")
    return {
        name: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype.itemsize == 2 else torch.from_numpy(a)
        for name, a in arrays.items()
    }


@pytest.mark.parametrize("attend", [rivals.attend_grouped, rivals.attend_gqa])
@pytest.mark.parametrize(
    "batch, context, tied, qk_norm", [(1, 37, True, False), (3, 0, False, False), (16, 70, False, False), (2, 9, True, True)]
)
def test_pytorchs_step_is_the_programs(attend, batch, context, tied, qk_norm):
    torch = pytest.importorskip("torch")
    program = llama({**SMALL, "tie_word_embeddings": tied, "qk_norm": qk_norm}, batch=batch, context=context)
    arrays = numpy_buffers(program, seed=1)
    t = torch_tensors({name: array.copy() for name, array in arrays.items()})
    with torch.no_grad():
        logits, tokens = rivals.decode_step(program.meta, t, t["k_cache"], t["v_cache"], attend=attend)()
    execute(program, arrays, exact=True)
    expected = arrays["logits"]
    error = np.sqrt(np.mean((logits.float().numpy() - expected) ** 2) / np.mean(expected**2))
    # bf16 rounds to 2^-9 in RMS 2^-9 / sqrt(3); some thirty roundings in a row stand between the embedding and the logits.
    assert error < 2**-9 * np.sqrt(30 / 3) * 2
    assert np.array_equal(logits.float().argmax(dim=-1).numpy(), tokens.numpy())
    for name in ("k_cache", "v_cache"):
        new = t[name].float().numpy()[:, :, :, context]
        assert np.abs(new - widen(arrays[name])[:, :, :, context]).max() < 0.1
        assert np.array_equal(t[name].float().numpy()[:, :, :, :context], widen(numpy_buffers(program, seed=1)[name])[:, :, :, :context])


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_the_products_of_a_step_form_one_chain(name):
    program = llama(name)
    plan = rivals.plan_products(program)
    assert len(plan) == 4 * program.meta["layers"] + 1
    assert [fed for *_, fed, _ in plan] == [False] + [True] * (len(plan) - 1)
    assert [as_float for *_, as_float in plan] == [False] * (len(plan) - 1) + [True]
    weights = sum(2 * n * k for _, n, k, *_ in plan)
    assert 0.9 * program.min_bytes < weights < program.min_bytes


def test_products_keep_unit_size():
    rng = np.random.default_rng(0)
    program = chain([(256, 128), (128, 256)], layers=8)
    arrays, x = numpy_buffers(program), rng.standard_normal((1, 128))
    for view, _, _, alpha, _, _ in rivals.plan_products(program):
        x = alpha * x @ widen(view.of(arrays)).T
    assert 0.3 < np.sqrt(np.mean(x**2)) < 3


def test_every_attention_names_a_backend_that_torch_has():
    attention = pytest.importorskip("torch.nn.attention")
    for backend, _ in rivals.ATTENTIONS.values():
        assert hasattr(attention.SDPBackend, backend)
