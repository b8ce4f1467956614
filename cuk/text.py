"""Text to tokens and back, by a checkpoint's tokenizer.json; and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuk.checkpoint import CheckpointError, read_json

REPLACEMENT = "\ufffd"


def stop_tokens(directory: str | Path) -> tuple[int, ...]:
    """The checkpoint's eos_token_id: of generation_config.json, or else of config.json; none where neither has one. Raises CheckpointError for
    one that is no token."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if not path.exists():
            continue
        found = read_json(path).get("eos_token_id")
        if found is not None:
            tokens = found if isinstance(found, list) else [found]
            if not all(isinstance(token, int) and token >= 0 for token in tokens):
                raise CheckpointError(f"{path}: eos_token_id={found!r}: must be a token or a list of tokens")
            return tuple(tokens)
    return ()


class Speller:
    """The tokenizer of a checkpoint's directory. Raises ImportError without the package `tokenizers`, FileNotFoundError without the file,
    CheckpointError for one that cannot be read."""

    def __init__(self, directory: str | Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(f"text needs the package tokenizers ({error}): pip install 'cuk[text]', or give tokens by --ids") from None
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file; give tokens by --ids")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(f"{path}: not a tokenizer ({error})") from None

    def tokens(self, text: str) -> list[int]:
        """The text's tokens, with those that the tokenizer puts around a text."""
        return list(self._tokenizer.encode(text).ids)

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class Spelled:
    """Text as tokens come: each call gives what they add. A character whose bytes have not all come is held back; `rest` is that."""

    def __init__(self, speller: Speller):
        self._speller, self._tokens, self._given = speller, [], 0

    def __call__(self, tokens: list[int]) -> str:
        self._tokens += tokens
        text = self._speller.text(self._tokens)
        whole = len(text.rstrip(REPLACEMENT))
        piece, self._given = text[self._given : whole], max(self._given, whole)
        return piece

    @property
    def rest(self) -> str:
        return self._speller.text(self._tokens)[self._given :]
