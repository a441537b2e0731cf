"""What a Whisper checkpoint says about its tokens: languages, tasks, times, what never to say."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from omnicli.errors import UserError
from omnicli.operators.timestamps import TimestampIds

TIME_PRECISION_S = 0.02  # one timestamp step: two mel frames


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """Special ids and the text tokenizer of one checkpoint."""

    tokenizer: Tokenizer
    start: int
    end: int
    no_timestamps: int
    languages: dict[str, int]  # "en" -> id; empty for English-only models
    tasks: dict[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial: int

    @property
    def no_speech(self) -> int:
        """The token that stands for "nobody speaks"; it lies before `no_timestamps`."""
        return self.no_timestamps - 1

    @property
    def times(self) -> TimestampIds:
        """Where the timestamps are."""
        return TimestampIds(
            end=self.end, first=self.no_timestamps + 1, max_initial=self.max_initial
        )

    def prompt(self, language: str, task: str) -> list[int]:
        """The ids that a text begins with."""
        if not self.languages:
            return [self.start]
        return [self.start, self.languages[language], self.tasks[task]]

    def code(self, language: str) -> str:
        """The model's code of a language tag: "en" of "en-US"."""
        return language.lower().replace("_", "-").split("-")[0]

    def knows(self, language: str) -> bool:
        """Whether the model was trained on the language."""
        return self.code(language) in (self.languages or {"en": 0})

    def text(self, ids: list[int]) -> str:
        """Words of token ids, special ones left out."""
        words: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return words


def read_tokens(folder: Path) -> WhisperTokens:
    """From a checkpoint's tokenizer.json and generation_config.json."""
    tokenizer = _tokenizer(folder / "tokenizer.json")
    config = _json(folder / "generation_config.json")
    languages = {k.strip("<|>"): int(v) for k, v in (config.get("lang_to_id") or {}).items()}
    tasks = {k: int(v) for k, v in (config.get("task_to_id") or {}).items()}
    return WhisperTokens(
        tokenizer=tokenizer,
        start=_id(tokenizer, "<|startoftranscript|>", folder),
        end=_id(tokenizer, "<|endoftext|>", folder),
        no_timestamps=_id(tokenizer, "<|notimestamps|>", folder),
        languages=languages if tasks else {},
        tasks=tasks,
        suppressed=tuple(config.get("suppress_tokens") or ()),
        suppressed_first=tuple(config.get("begin_suppress_tokens") or ()),
        max_initial=int(config.get("max_initial_timestamp_index") or 50),
    )


def _id(tokenizer: Tokenizer, token: str, folder: Path) -> int:
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise UserError(f"{folder}/tokenizer.json has no {token}", hint="is it a Whisper model?")
    return found


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UserError(f"no {path}", hint="a model folder needs its tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"cannot read {path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return row
