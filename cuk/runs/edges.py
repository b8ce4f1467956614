"""Edges of a program whose reader need not wait for the whole of the op before it: it takes that op's output word by word.

What orders the words stands in cuda_src/core/sync.cuh: each proves itself, and the op behind the reader empties it for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cuk.program import Op, Program
from cuk.task import round_up

_ALIGN_WORDS = 16  # 128 bytes: two edges never share a line


@dataclass(frozen=True)
class Words:
    """Where an op's words lie in the run's array of them: (first word, words) to the next op, from the one before, and of the edge that
    it empties; None where there are none."""

    posted: tuple[int, int] | None = None
    polled: tuple[int, int] | None = None
    emptied: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The enumerator of kernels/separate.cuh."""
        return {(False, False): "kNone", (True, False): "kPosts", (False, True): "kPolls", (True, True): "kBoth"}[
            self.posted is not None, self.polled is not None
        ]


NO_WORDS = Words()


def has_words(writer: Op, reader: Op) -> bool:
    """Whether `reader`, the op right behind `writer`, can take its input as the words that `writer` posts."""
    posted = [writer.views[name] for name in writer.task.posts]
    polled = [reader.views[name] for name in reader.task.polls]
    if not posted or len(posted) != len(polled):
        return False
    return all((out.buffer.name, out.index) == (into.buffer.name, into.index) for out, into in zip(posted, polled, strict=True))


def words_of(program: Program) -> tuple[list[Words], int]:
    """The words of each op, and how many there are in all. No edge shares words with another: one that is used again within a
    step would have to be empty before its writer may start, which a programmatic edge does not promise. The last op's edge has
    none, since nobody would empty them within the step."""
    ops = program.ops
    edges: list[tuple[int, int] | None] = []
    total = 0
    for i in range(len(ops) - 2):
        edge = None
        if has_words(ops[i], ops[i + 1]):
            edge = (total, ops[i].task.words)
            total += round_up(edge[1], _ALIGN_WORDS)
        edges.append(edge)

    def edge_from(index: int) -> tuple[int, int] | None:
        return edges[index] if 0 <= index < len(edges) else None

    return [Words(edge_from(i), edge_from(i - 1), edge_from(i - 2)) for i in range(len(ops))], total


def unit_names(ops: Sequence[Op], words: Sequence[Words]) -> list[str]:
    """What each op's kernel is called in tables: its kind, and how it is ordered where not all ops of the kind are alike."""
    kinds: dict[str, dict[str, int]] = {}
    for op, of in zip(ops, words, strict=True):
        counts = kinds.setdefault(op.kind, {})
        counts[of.kind] = counts.get(of.kind, 0) + 1
    described = {"kNone": "waits", "kPosts": "waits, posts", "kPolls": "polls", "kBoth": "polls, posts"}
    names = []
    for op, of in zip(ops, words, strict=True):
        counts = kinds[op.kind]
        usual = max(counts, key=counts.__getitem__)
        names.append(op.kind if of.kind == usual else f"{op.kind} ({described[of.kind]})")
    return names
