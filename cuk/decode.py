"""The decode loop: prompts in, tokens out, and nothing on the way that the device waits for the host to say."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuk.program import Program
from cuk.runs.base import Run
from cuk.tasks.nucleus import keep_of, scale_of

LOOK_EVERY = 8
"""Steps between two looks at what was decoded: the host learns of a stop token so many steps late, and of as many for each of LOOKS_AHEAD."""
LOOKS_AHEAD = 2


@dataclass(frozen=True)
class Request:
    """What one call decodes, checked whole before anything is written: prompts, tokens in all of each, and how the next one is chosen."""

    prompts: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int
    stop: frozenset[int]

    @property
    def steps(self) -> int:
        """Steps of the whole batch: each sequence's last token is chosen by the step of the token before it."""
        return max(self.ends) - 1

    def mean_contexts(self, steps: int, batch: int) -> list[int]:
        """The old positions of each of a run's `batch` sequences, on average over the first `steps` steps, rounded."""
        ends = [*self.ends, *(1,) * (batch - len(self.ends))]
        return [round(sum(min(step, end - 1) for step in range(steps)) / steps) for end in ends]


def request(
    program: Program, prompts: Sequence[Sequence[int]], tokens: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
    stop: Collection[int] = (),
) -> Request:  # fmt: skip
    """The request, checked against a `programs.decoding` program, without touching anything.

    prompts: one to batch of them, each of at least one token. tokens: how many to decode after each. temperature: 0 takes the likeliest. top_p: of
    the likeliest tokens, as many are drawn from as have this share of the probability. stop: tokens that end a sequence, which they are the
    last of. Raises ValueError naming what is out of range, or what does not fit the KV cache."""
    batch, capacity, vocab = (program.meta[name] for name in ("batch", "capacity", "vocab"))
    given = tuple(tuple(int(token) for token in prompt) for prompt in prompts)
    if not 1 <= len(given) <= batch:
        raise ValueError(f"{len(given)} prompts: this run decodes 1 to {batch} at a time; build the program with batch={len(given)}")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: must be at least 1")
    for i, prompt in enumerate(given):
        if not prompt:
            raise ValueError(f"prompt {i} is empty: give at least one token, such as the model's beginning of text")
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise ValueError(f"prompt {i}: token {bad} must be from 0 to {vocab - 1}")
        if (needed := len(prompt) + tokens) > capacity:
            raise ValueError(
                f"prompt {i}: its {len(prompt)} tokens and {tokens} to decode need {needed} rows of the KV cache, which has {capacity}; build the "
                f"program with capacity={needed} or more, or decode fewer"
            )
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature}: must be 0 (the likeliest token) or above")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0, up to 1 (all tokens)")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed}: must be from 0 to 2^64 - 1")
    if temperature > 0 and not program.meta.get("sampled"):
        raise ValueError(f"temperature={temperature}: this run takes the likeliest token; build it from decoding(program, sampled=True)")
    ends = tuple(len(prompt) + tokens for prompt in given)
    return Request(given, ends, float(temperature), float(top_p), int(seed), frozenset(int(token) for token in stop))


class Decoder:
    """Decodes with a run of a `programs.decoding` program. Prompts go through the decode step, a token a step, and embedding, position and
    token choice are on the device, so the host only enqueues replays. It reads back once, at the end; or, where there are stop tokens
    to look for or somebody takes tokens as they come, a few integers every LOOK_EVERY steps, copied on a stream of their own while the
    steps go on, at most LOOKS_AHEAD looks behind. What was enqueued beyond a stop token runs and is dropped.

    The draws of a sampled token depend on seed, position and sequence (its place among the prompts), and on the logits' bits, which every
    run shares. `steps`: how many the last call has enqueued. Raises ValueError for a run of another program."""

    def __init__(self, run: Run):
        if not run.program.meta.get("decoding"):
            raise ValueError(f"{run!r} is one step and no loop: build it from cuk.programs.decoding(program)")
        self.run, self.steps = run, 0
        self.batch, self.capacity = run.program.meta["batch"], run.program.meta["capacity"]

    def request(self, prompts: Sequence[Sequence[int]], tokens: int, **choice: Any) -> Request:
        """What `request` says of this run's program."""
        return request(self.run.program, prompts, tokens, **choice)

    def start(self, request: Request) -> None:
        """Puts the sequences at their first position: what the next step does is the request's first."""
        history = np.zeros((self.capacity, self.batch), np.int32)
        lengths, ends = np.ones(self.batch, np.int32), np.ones(self.batch, np.int32)  # a sequence too many stands still at position 0
        for b, prompt in enumerate(request.prompts):
            history[: len(prompt), b] = prompt
            lengths[b], ends[b] = len(prompt), request.ends[b]
        state = {"history": history, "lengths": lengths, "ends": ends, "positions": np.zeros(self.batch, np.int32), "tokens": history[0]}
        if self.run.program.meta.get("sampled"):
            scale = np.zeros(self.batch, np.float32)
            scale[: len(request.prompts)] = scale_of(request.temperature)
            state |= {
                "scale": scale,
                "keep": np.full(self.batch, keep_of(request.top_p), np.uint64),
                "seed": np.full(1, request.seed, np.uint64),
            }
        for name, value in state.items():
            _put(self.run.buffers[name], value)

    # ---- the loop ----
    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, **choice: Any) -> list[list[int]]:
        """The decoded tokens of each prompt, at most `tokens` and none after a stop token. `choice`: as `request` takes it."""
        asked = self.request(prompts, tokens, **choice)
        decoded: list[list[int]] = [[] for _ in asked.prompts]
        for pieces in self.run_request(asked, LOOK_EVERY if asked.stop else asked.steps):
            for tokens_of, piece in zip(decoded, pieces, strict=True):
                tokens_of += piece
        return decoded

    def stream(self, prompts: Sequence[Sequence[int]], tokens: int, *, every: int = LOOK_EVERY, **choice: Any) -> Iterator[list[list[int]]]:
        """Yields what `decode` returns, piece by piece: after some steps, the tokens that have come for each prompt, perhaps none. The request
        is checked before this returns."""
        if every < 1:
            raise ValueError(f"every={every}: must be at least 1 step")
        return self.run_request(self.request(prompts, tokens, **choice), every)

    def run_request(self, request: Request, every: int = LOOK_EVERY) -> Iterator[list[list[int]]]:
        """Yields as `stream` does, for a request that has been checked."""
        looker = _looker(self.run.buffers["history"])
        open_ = [True] * len(request.prompts)
        asked: deque[tuple[int, int, Any]] = deque()
        with looker.on_stream():
            self.start(request)
        self.steps = 0
        try:
            while any(open_) and (self.steps < request.steps or asked):
                if self.steps < request.steps:
                    rows = self.steps + 1, min(self.steps + every, request.steps) + 1
                    with looker.on_stream():
                        for _ in range(*rows):
                            self.run()
                    self.steps = rows[1] - 1
                    asked.append((*rows, looker.ask(*rows)))
                    if len(asked) <= LOOKS_AHEAD and self.steps < request.steps:
                        continue
                first, last, ticket = asked.popleft()
                yield self._taken(request, first, looker.take(first, last, ticket), open_)
        finally:
            looker.close()

    @staticmethod
    def _taken(request: Request, first: int, rows: np.ndarray, open_: list[bool]) -> list[list[int]]:
        """The decoded tokens of each prompt among `rows` of the history, which begin with position `first`; closes those that have ended."""
        pieces: list[list[int]] = []
        for b, (prompt, end) in enumerate(zip(request.prompts, request.ends, strict=True)):
            piece: list[int] = []
            for position in range(max(first, len(prompt)), min(first + len(rows), end)):
                if open_[b]:
                    piece.append(int(rows[position - first, b]))
                    open_[b] = piece[-1] not in request.stop and position + 1 < end
            pieces.append(piece)
        return pieces


def _put(array: Any, value: np.ndarray) -> None:
    """Copies to a NumPy or CuPy array, on the current stream."""
    value = np.ascontiguousarray(value, array.dtype)
    if isinstance(array, np.ndarray):
        array[...] = value
    else:
        array.set(value)


# ---- looking at the history while it grows ----
def _looker(history: Any) -> Any:
    return _HostLooker(history) if isinstance(history, np.ndarray) else _DeviceLooker(history)


class _HostLooker:
    """A step is done when its call returns."""

    def __init__(self, history: np.ndarray):
        self.history = history

    def on_stream(self) -> Any:
        return contextlib.nullcontext()

    def ask(self, first: int, last: int) -> None:
        return None

    def take(self, first: int, last: int, ticket: None) -> np.ndarray:
        return self.history[first:last].copy()

    def close(self) -> None:
        """Nothing is on its way."""


class _DeviceLooker:
    """Copies rows of the history to pinned memory on a stream of its own, once the steps enqueued so far are done. Later steps write other
    rows, so they need not wait; steps go to the stream that was current at first."""

    def __init__(self, history: Any):
        import cupy
        import cupyx

        self.history = history
        self.landed = cupyx.empty_pinned(history.shape, history.dtype)
        self.steps, self.copies = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)

    def on_stream(self) -> Any:
        return self.steps

    def ask(self, first: int, last: int) -> Any:
        from cupy.cuda import runtime

        self.copies.wait_event(self.steps.record())
        rows = self.history[first:last]
        runtime.memcpyAsync(self.landed[first:last].ctypes.data, rows.data.ptr, rows.nbytes, runtime.memcpyDeviceToHost, self.copies.ptr)
        return self.copies.record()

    def take(self, first: int, last: int, ticket: Any) -> np.ndarray:
        ticket.synchronize()
        return self.landed[first:last].copy()

    def close(self) -> None:
        """Waits for copies on their way: the memory that they go to is about to be given back."""
        self.copies.synchronize()
