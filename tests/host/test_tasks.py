"""Properties of every task: tiles cover their outputs exactly once, bad sizes are named, arguments pack as the compiler lays them out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuk.task import pack_args, round_bf16, widen
from cuk.tasks import Advance, Argmax, AttentionDecode, Embed, GateUp, Linear, MergeLinear, Nucleus, QkNorm, Qkv, RmsNorm, Sample

batches = st.integers(1, 16)
eights = st.integers(1, 40).map(lambda i: 8 * i)


@st.composite
def tasks(draw):
    batch, k = draw(batches), draw(eights)
    head_dim = draw(st.sampled_from([64, 128]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 19))
    capacity = draw(st.integers(1, 300))
    return draw(
        st.sampled_from(
            [
                Linear(batch=batch, n=draw(st.integers(1, 100)), k=k, residual=draw(st.booleans())),
                GateUp(batch=batch, n=draw(st.integers(1, 60)), k=k),
                Qkv(batch=batch, k=k, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity),
                QkNorm(batch=batch, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity),
                AttentionDecode(batch=batch, kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity,
                                context=draw(st.integers(0, capacity - 1)), merge=draw(st.booleans())),
                MergeLinear(batch=batch, n=draw(st.integers(1, 100)), k=head_dim * kv_heads, head_dim=head_dim, splits=draw(st.integers(1, 9)),
                            residual=draw(st.booleans())),
                Embed(batch=batch, vocab=draw(st.integers(1, 50)), hidden=k),
                RmsNorm(batch=batch, k=k),
                Argmax(batch=batch, vocab=draw(st.integers(1, 5000))),
                Advance(batch=batch, columns=capacity),
                Sample(batch=batch, vocab=draw(st.integers(1, 5000))),
            ]
        )
    )  # fmt: skip


nuclei = st.builds(Nucleus, batch=batches, vocab=st.integers(1, 5000), low=st.booleans())  # whose tasks add to the same bins


@settings(deadline=None, max_examples=150)
@given(tasks())
def test_tiles_cover_each_output_once(task):
    """Each element of an output, and of what tasks hand each other, is written by one task and by no other."""
    owners = {name: np.zeros(o.shape, np.int32) for name, o in task.operands.items() if o.access != "in"}
    for index in range(task.num_tasks):
        for region in task.writes(index):
            owners[region.operand][tuple(slice(low, high) for low, high in region.box)] += 1
    for name, count in owners.items():
        assert (count == 1).all(), f"{task}: {name} written {np.unique(count)} times"


@settings(deadline=None, max_examples=100)
@given(st.one_of(tasks(), nuclei))
def test_regions_lie_within_their_operands(task):
    for index in {0, task.num_tasks // 2, task.num_tasks - 1}:
        for region in task.reads(index) + task.writes(index):
            shape = task.operands[region.operand].shape
            assert len(region.box) == len(shape)
            assert all(0 <= low < high <= size for (low, high), size in zip(region.box, shape, strict=True)), (task, region)


@settings(deadline=None, max_examples=100)
@given(st.one_of(tasks(), nuclei))
def test_arguments_name_every_field(task):
    assert {f.name for f in task.fields} >= set(task.operands) | set(task.scalars)
    values = {f.name: 0 for f in task.fields if f.kind == "ptr"} | task.scalars
    assert len(pack_args(task.fields, values)) % 4 == 0


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_round_bf16_is_what_ml_dtypes_does(values):
    import ml_dtypes

    array = np.array(values, dtype=np.float32)
    with np.errstate(over="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(round_bf16(array.astype(np.float64)), widen(expected))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(batch=1, n=8, k=900), "k=900: must be a positive multiple of 8"),
        (lambda: Linear(batch=17, n=8, k=64), "batch=17: must be from 1 to 16"),
        (lambda: Linear(batch=0, n=8, k=64), "batch=0"),
        (lambda: Linear(batch=1, n=0, k=64), "n=0"),
        (lambda: Linear(batch=1, n=8, k=64, out="float16"), "float16"),
        (lambda: Linear(batch=16, n=8, k=8192, norm=True), "RmsNorm op of its own"),
        (lambda: GateUp(batch=1, n=8, k=12), "k=12"),
        (lambda: Qkv(batch=1, k=64, heads=4, kv_heads=2, head_dim=80, capacity=64), "head_dim=80: must be one of"),
        (lambda: AttentionDecode(batch=1, kv_heads=1, group=1, head_dim=64, capacity=64, context=64), "context=64"),
        (
            lambda: AttentionDecode(batch=2, kv_heads=1, group=1, head_dim=64, capacity=64, context=9, contexts=(9,)),
            "must be one for each of 2 sequences, from 0 to context=9",
        ),
        (lambda: MergeLinear(batch=1, n=8, k=96, head_dim=64, splits=2), "k=96: must be a positive multiple of 64"),
        (lambda: MergeLinear(batch=16, n=8, k=8192, head_dim=64, splits=2), "let attention merge"),
        (lambda: MergeLinear(batch=1, n=8, k=64, head_dim=64, splits=0), "splits=0"),
        (lambda: MergeLinear(batch=1, n=8, k=64, head_dim=64, splits=2, norm=True), "norm=True"),
        (lambda: Embed(batch=1, vocab=10, hidden=4), "hidden=4"),
    ],
)
def test_bad_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()
