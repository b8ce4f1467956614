"""How far a run's logits stand from a float32 run of the same checkpoint, beside how far transformers' own bf16 run does."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuk.bench import paired_interval
from cuk.program import Program
from cuk.programs import llama
from cuk.runs import build
from cuk.runs.memory import to_numpy
from cuk.text import Speller

POSITIONS, PROMPTS = 64, 8
MOST_RMS_RATIO = 1.1
"""RMS error of the logits over that of transformers' bf16 run, above which a run does not do the same arithmetic."""
LEAST_DECIDED = 0.5
"""Share of positions whose margin tells what the greedy token must be, below which equal tokens show little."""

Logits = Callable[[np.ndarray], np.ndarray]
"""tokens [n] int -> logits [n, vocab] float32 of the token after each, given those up to it."""
Models = Callable[[Path, str], contextlib.AbstractContextManager[Logits]]
"""(directory of a checkpoint, "float32" or "bfloat16") -> its logits by somebody else, while the context lasts."""


# ---- what is told ----
@dataclass(frozen=True)
class Pair:
    """A distance from the float32 run: ours, the rival's, their ratio, and its 95% bootstrap interval over prompts (None for one prompt)."""

    ours: float
    rival: float
    ratio: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, ours: np.ndarray, rival: np.ndarray, root: bool = False, seed: int = 0) -> Pair:
        """From the mean of each prompt [prompts]; `root`: of squares. Prompts are what is drawn again, not positions: the logits of one prompt
        err together. Ours and the rival's go in pairs, since a hard prompt is hard for both."""

        def mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
            return np.sqrt(np.mean(values, axis=axis)) if root else np.mean(values, axis=axis)

        def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(mean(a, axis) == mean(b, axis), 1.0, mean(a, axis) / mean(b, axis))  # two exact runs are equally far

        found = float(ratio(ours, rival))
        interval = paired_interval(ours, rival, ratio, seed) if len(ours) > 1 and np.isfinite(found) else (None, None)
        return cls(float(mean(ours)), float(mean(rival)), found, *interval)

    def __str__(self) -> str:
        return f"{self.ratio:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None else "")


@dataclass(frozen=True)
class Differing:
    """A greedy token that differs where it is decided: the float32 run's two best logits are further apart than twice the rival's error."""

    prompt: int
    position: int
    ours: int
    exact: int
    margin: float
    error: float


@dataclass(frozen=True)
class Fidelity:
    """kl: mean over prompts and positions of KL(float32 || run), in nats. nll: mean |difference of -log p| of the token that follows in the
    prompt, in nats. rms: RMS error of the logits. decided: positions whose float32 margin exceeds twice the largest error of the rival's logits
    there; `differing`: those of them where our greedy token is another. Rival: transformers in bf16."""

    model: str
    run: str
    prompts: int
    positions: int
    logits_rms: float
    kl: Pair
    nll: Pair
    rms: Pair
    decided: int
    differing: tuple[Differing, ...]

    @property
    def problems(self) -> list[str]:
        """Why the run is not as faithful as the rival, or this does not show it; none where it is."""
        found = []
        if not self.rms.ratio <= MOST_RMS_RATIO:  # NaN is one
            found.append(
                f"the RMS error of the logits is {self.rms.ratio:.3f} times that of transformers in bf16, at most {MOST_RMS_RATIO}"
            )
        for d in self.differing[:3]:
            found.append(
                f"prompt {d.prompt}, position {d.position}: greedy token {d.ours}, in float32 {d.exact} by a margin of {d.margin:.3g}, over twice "
                f"the {d.error:.3g} by which transformers errs in bf16"
            )
        if len(self.differing) > 3:
            found.append(f"and {len(self.differing) - 3} more greedy tokens differ")
        total = self.prompts * self.positions
        if self.decided < LEAST_DECIDED * total:
            found.append(f"only {self.decided} of {total} positions have a margin that decides the greedy token: equal tokens show little")
        return found

    def to_json(self) -> dict[str, Any]:
        def finite(found: Any) -> Any:  # JSON has no NaN
            if isinstance(found, dict):
                return {name: finite(value) for name, value in found.items()}
            return None if isinstance(found, float) and not np.isfinite(found) else found

        return {**finite(asdict(self)), "faithful": not self.problems, "problems": self.problems}

    def rich(self) -> Any:
        """The table as a rich renderable."""
        from rich.table import Table

        title = f"{self.model}: distance from float32, {self.prompts} prompts of {self.positions} positions"
        table = Table(title=title, title_justify="left", header_style="bold")
        for name in ("", self.run, "transformers bf16", "ratio [95%]"):
            table.add_column(name, justify="right" if name else "left")
        rows = (
            ("mean KL, nats", self.kl),
            ("mean |NLL difference|, nats", self.nll),
            (f"RMS error of logits (RMS {self.logits_rms:.3g})", self.rms),
        )
        for name, pair in rows:
            table.add_row(name, f"{pair.ours:.3e}", f"{pair.rival:.3e}", str(pair))
        return table

    def print(self) -> None:
        from rich.console import Console

        console = Console()
        console.print(self.rich())
        same = self.decided - len(self.differing)
        console.print(
            f"greedy tokens: {same} of {self.decided} decided ones are those of float32; {self.prompts * self.positions} positions in all"
        )
        for problem in self.problems:
            console.print(f"NOT FAITHFUL: {problem}", markup=False)


# ---- the statistics ----
def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, float64, over the last axis."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(exact: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(exact || other) of each position [n], nats, from logits [n, vocab]. Never negative, though the sum's rounding may be."""
    p, q = log_softmax(exact), log_softmax(other)
    return np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)


def nll_difference(exact: np.ndarray, other: np.ndarray, following: np.ndarray) -> np.ndarray:
    """|difference of -log p| of the following token [n] at each position, nats, from logits [n, vocab]."""
    at = np.arange(len(following)), following
    return np.abs(log_softmax(exact)[at] - log_softmax(other)[at])


def margins(exact: np.ndarray, rival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(margin, error) of each position [n]: between the two best logits of the float32 run; the largest error of the rival's logits. The error
    is the rival's and not ours: where a margin exceeds twice one's own largest error, the greedy token is the same by arithmetic."""
    best = np.partition(np.asarray(exact, np.float64), -2, axis=-1)[:, -2:] if exact.shape[1] > 1 else np.zeros((len(exact), 2))
    return best[:, 1] - best[:, 0], np.abs(np.asarray(rival, np.float64) - exact).max(axis=-1)


def judge(
    model: str, run: str, prompts: Sequence[np.ndarray], exact: Sequence[np.ndarray], rival: Sequence[np.ndarray], ours: Sequence[np.ndarray],
    seed: int = 0,
) -> Fidelity:  # fmt: skip
    """The Fidelity of logits [positions, vocab] of each prompt [positions + 1], whose last token only follows."""
    squares, divergences, differences = [], [], []
    num_decided, differing = 0, []
    for i, (tokens, e, r, o) in enumerate(zip(prompts, exact, rival, ours, strict=True)):
        divergences.append([divergence(e, x).mean() for x in (o, r)])
        differences.append([nll_difference(e, x, np.asarray(tokens)[1:]).mean() for x in (o, r)])
        squares.append([np.mean(np.square(np.asarray(x, np.float64) - e)) for x in (o, r)])
        margin, error = margins(e, r)
        sure, mine, theirs = margin > 2 * error, o.argmax(axis=-1), e.argmax(axis=-1)
        num_decided += int(sure.sum())
        differing += [
            Differing(i, int(n), int(mine[n]), int(theirs[n]), float(margin[n]), float(error[n]))
            for n in np.flatnonzero(sure & (mine != theirs))
        ]
    logits_rms = float(np.sqrt(np.mean([np.mean(np.square(e, dtype=np.float64)) for e in exact])))
    kl, nll = (Pair.of(*np.transpose(values), seed=seed) for values in (divergences, differences))
    rms = Pair.of(*np.transpose(squares), root=True, seed=seed)
    return Fidelity(model, run, len(prompts), len(exact[0]), logits_rms, kl, nll, rms, num_decided, tuple(differing))


# ---- prompts ----
def passages() -> list[str]:
    """PROMPTS short texts of several kinds."""
    return Path(__file__).with_name("passages.txt").read_text(encoding="utf-8").split("\n\n\n")


def random_prompts(vocab: int, positions: int = POSITIONS, count: int = PROMPTS, seed: int = 0) -> list[list[int]]:
    """Tokens drawn alike: for a checkpoint without a tokenizer."""
    return np.random.default_rng(seed).integers(0, vocab, (count, positions + 1)).tolist()


def prompts_for(
    directory: str | Path, vocab: int, texts: Sequence[str], ids: Sequence[Sequence[int]], positions: int, seed: int
) -> tuple[list[list[int]], str]:
    """(prompts, what they are): the given ones; or else the passages, by the checkpoint's tokenizer; or random tokens where there is none."""
    if texts or ids:
        speller = Speller(directory) if texts else None
        return [speller.tokens(text) for text in texts] + [list(tokens) for tokens in ids], "given"
    try:
        speller = Speller(directory)
    except (ImportError, FileNotFoundError):
        return random_prompts(vocab, positions, seed=seed), "random tokens"
    spelled = [speller.tokens(text) for text in passages()]
    kept = [tokens for tokens in spelled if len(tokens) > positions]
    return (kept, "passages") if len(kept) > 1 else (random_prompts(vocab, positions, seed=seed), "random tokens")


# ---- the runs ----
def transformers_models(directory: Path, dtype: str) -> contextlib.AbstractContextManager[Logits]:
    """The checkpoint by transformers, on the GPU where PyTorch has one. It is loaded in `dtype`, which leaves RoPE's frequencies in float32, as its
    users have them; a model converted afterwards has them rounded too. Raises ImportError naming what to install."""
    torch, transformers = require_transformers()

    @contextlib.contextmanager
    def loaded():
        # The argument had the name torch_dtype up to release 4.55, and float32 was what it loaded without one.
        release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        name = "dtype" if release >= (4, 56) else "torch_dtype"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, **{name: getattr(torch, dtype)}
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = model.to(device).eval()

        def logits(tokens: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return model(torch.as_tensor(np.asarray(tokens, np.int64)[None], device=device)).logits[0].float().cpu().numpy()

        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # no TF32
        try:
            yield logits
        finally:
            torch.set_float32_matmul_precision(precision)
            model = None
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()

    return loaded()


def require_transformers() -> tuple[Any, Any]:
    """The modules torch and transformers. Raises ImportError naming what to install."""
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except (ImportError, OSError) as error:  # a wheel whose libraries are missing
        raise ImportError(
            f"fidelity is told beside transformers, which cannot be imported ({error}): pip install 'cuk[models]' (torch and transformers)"
        ) from None


def logits_of(program: Program, run: str, prompts: Sequence[Sequence[int]], positions: int, device: int | None = None,
              progress: Callable[[str], None] = lambda message: None, **switches: Any) -> list[np.ndarray]:  # fmt: skip
    """Our logits [positions, vocab] of each prompt: its tokens go through the program's decode step one after another, as many prompts at a
    time as the program has sequences, each from an empty cache. The reference takes the run's own precision."""
    if run == "reference":
        switches = {"precision": "storage", **switches}
    batch, made = program.meta["batch"], build(program, run, device=device, **switches)
    found = []
    for first in range(0, len(prompts), batch):
        progress(f"{run}: prompt {first + 1} of {len(prompts)}")
        group = list(prompts[first : first + batch])
        tokens = np.array([prompt[:positions] for prompt in group + [group[-1]] * (batch - len(group))], np.int32)
        logits = np.empty((batch, positions, program.meta["vocab"]), np.float32)
        for position in range(positions):
            for name, value in (("tokens", tokens[:, position]), ("positions", np.full(batch, position, np.int32))):
                _put(made.buffers[name], value)
            made()
            logits[:, position] = to_numpy(made.buffers["logits"])
        found += list(logits[: len(group)])
    return found


def _put(array: Any, value: np.ndarray) -> None:
    if isinstance(array, np.ndarray):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value, array.dtype))


def check_prompts(prompts: Sequence[Sequence[int]], positions: int, vocab: int) -> None:
    """Raises ValueError for prompts too few, too short or of tokens that the model does not have."""
    if positions < 1:
        raise ValueError(f"positions={positions}: must be at least 1")
    if not prompts:
        raise ValueError("no prompts: give at least one")
    for i, prompt in enumerate(prompts):
        if len(prompt) <= positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: {positions} positions need {positions + 1}, since the token after each is looked at; give a "
                f"longer one, or positions={max(1, len(prompt) - 1)}"
            )
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise ValueError(f"prompt {i}: token {bad} must be from 0 to {vocab - 1}")


def fidelity(
    directory: str | Path, prompts: Sequence[Sequence[int]], *, run: str = "pdl", positions: int = POSITIONS, batch: int = 1, seed: int = 0,
    device: int | None = None, models: Models | None = None, progress: Callable[[str], None] = lambda message: None, **switches: Any,
) -> Fidelity:  # fmt: skip
    """The Fidelity of a run on a Hugging Face checkpoint.

    prompts: each of at least positions + 1 tokens, of which so many are used. batch: prompts that go through our step together. models: who else
    computes it, by default transformers. switches: the run's. seed: of the bootstrap. Raises ValueError for prompts that do not do, before a weight
    is read; CheckpointError for a checkpoint that cannot be run; ImportError without transformers."""
    program = llama.from_pretrained(directory, batch=batch, context=max(positions, 1) - 1, capacity=max(positions, 1), progress=progress)
    check_prompts(prompts, positions, program.meta["vocab"])
    if models is None:
        require_transformers()
        models = transformers_models
    used = [np.asarray(prompt[: positions + 1], np.int64) for prompt in prompts]
    theirs = {}
    for dtype in ("float32", "bfloat16"):  # one after another: the float32 weights take twice the memory of ours
        progress(f"loading the model in {dtype}")
        with models(Path(directory), dtype) as logits:
            theirs[dtype] = []
            for i, tokens in enumerate(used):
                progress(f"{dtype}: prompt {i + 1} of {len(used)}")
                theirs[dtype].append(logits(tokens[:-1]))
    ours = logits_of(program, run, [tokens.tolist() for tokens in used], positions, device, progress, **switches)
    return judge(program.name, run, used, theirs["float32"], theirs["bfloat16"], ours, seed)
