"""Every kernel of every program compiles without spilling, and its arguments pack as the compiler lays them out."""

import pytest

from cuk.compile import compile, layout
from cuk.machine import Footprint, Machine
from cuk.programs import chain, decoding, llama
from cuk.runs.edges import words_of
from cuk.runs.separate import TRIGGERS, footprint, kernel_name, source_for
from cuk.task import args_offsets
from tests.alone import example

WIDE = dict(
    hidden_size=4096,
    intermediate_size=5000,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=1003,
    head_dim=64,
)
PROGRAMS = {
    "1b": llama("llama-3.2-1b"),
    "1b, batch 16": llama("llama-3.2-1b", batch=16),
    "8b": llama("llama-3.1-8b"),
    "qwen3": llama("qwen3-0.6b"),
    "x through the ring": llama(WIDE, batch=16, context=10),
    "chain": chain([(384, 256), (256, 256)]),
    "decoding": decoding(llama("llama-3.2-1b", batch=2), sampled=True),
}
MACHINE = Machine.load("h200")
CASES = [(name, kind, op) for name, p in PROGRAMS.items() for kind, op in {op.kind: op for op in p.ops}.items()]


@pytest.mark.parametrize(("name", "kind", "op"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_no_kernel_spills(name, kind, op):
    for pdl in (False, True):
        fit = footprint(op.task, MACHINE)
        cubin = compile(source_for(op, teams=fit.teams, pdl=pdl, trigger="start"), name=kernel_name(op))
        assert cubin.resources.spill_bytes == 0 and cubin.resources.stack_bytes == 0, f"{name}: {kind}: {cubin.resources}"


@pytest.mark.parametrize("name", ["1b", "1b, batch 16", "8b", "chain"])
def test_no_kernel_that_posts_or_polls_words_spills(name):
    ops = PROGRAMS[name].ops
    words, _ = words_of(PROGRAMS[name])
    for op, of in {(op.kind, of.kind): (op, of) for op, of in zip(ops, words, strict=True)}.values():
        fit = footprint(op.task, MACHINE, polls=of.polled is not None)
        cubin = compile(source_for(op, teams=fit.teams, pdl=True, trigger="start", words=of), name=kernel_name(op))
        assert cubin.resources.spill_bytes == 0 and cubin.resources.stack_bytes == 0, f"{op.kind} {of.kind}: {cubin.resources}"


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_every_trigger_compiles(trigger):
    op = next(op for op in PROGRAMS["1b"].ops if op.kind == "o_proj")
    assert "cuk_o_proj" in compile(source_for(op, teams=2, pdl=True, trigger=trigger), name=kernel_name(op)).ptx


@pytest.mark.parametrize(
    "name", ["Advance", "Argmax", "AttentionDecode", "Embed", "GateUp", "Linear", "MergeLinear", "QkNorm", "Qkv", "RmsNorm"]
)
def test_arguments_pack_as_the_compiler_lays_them_out(name):
    task = next(op.task for _, _, op in CASES if type(op.task).__name__ == name)
    names = [field.name for field in task.fields]
    found = layout(f'#include "{task.header}"', f"{task.struct}::Args", names)
    assert (found.offsets, found.size) == args_offsets(task.fields)


def test_launch_words_pack_as_the_compiler_lays_them_out():
    integers = ["num_tasks", "num_stages", "stage_bytes", "shared_bytes", "scratch_bytes", "prefetch", "in_flight", "ahead_bytes", "ahead_early",
                "ahead_pace", "num_emptied"]  # fmt: skip
    pointers = ["ahead", "postings", "arrivals", "emptied"]
    found = layout('#include "kernels/separate.cuh"', "cuk::LaunchArgs", [*integers, *pointers])
    assert list(found.offsets.values()) == [4 * i for i in range(11)] + [48 + 8 * i for i in range(4)] and found.size == 80
    op = PROGRAMS["chain"].ops[0]
    assert len(footprint(op.task, MACHINE).pack()) == found.size


@pytest.mark.parametrize("name", PROGRAMS)
def test_footprints_leave_room_for_the_successor(name):
    """Kernels that follow each other fit one SM together, and two CTAs of one kernel never crowd out the other's: see `footprint`."""
    ops = PROGRAMS[name].ops
    fits = [footprint(op.task, MACHINE, index=i) for i, op in enumerate(ops)]
    for i in range(len(ops) - 1):
        first, second = (Footprint(f.threads, min(ops[i].task.max_registers, 96), f.smem_bytes) for f in fits[i : i + 2])
        if max(first.smem_bytes, second.smem_bytes) > MACHINE.smem_per_sm_bytes * 0.51:
            continue  # an operand that leaves no room for company
        assert MACHINE.admits([(first, 1)], second).by_resource["shared memory"] == 1, (ops[i].name, ops[i + 1].name, first, second)
        even = first if i % 2 == 0 else second
        assert MACHINE.occupancy(even).ctas == 1


def test_a_task_that_does_not_fit_says_what_it_needs():
    op = next(op for op in PROGRAMS["1b"].ops if op.kind == "gate_up")
    with pytest.raises(
        ValueError, match=r"GateUp: 60 stages of 16384 bytes for 2 teams need \d+ bytes of shared memory, a CTA can have 232448"
    ):
        footprint(op.task, MACHINE, stages=60)


def test_a_users_task_compiles_and_packs():
    op = example().program().ops[0]
    assert compile(source_for(op, teams=1, pdl=True, trigger="start"), name=kernel_name(op)).resources.spill_bytes == 0
    found = layout(f'#include "{op.task.header}"', "example::Scale::Args", [f.name for f in op.task.fields])
    assert (found.offsets, found.size) == args_offsets(op.task.fields)
