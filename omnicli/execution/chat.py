"""Text to tokens and back for a chat model: its tokenizer and its chat template.

The template is the checkpoint's own Jinja text, rendered in a sandbox with what Hugging Face
templates expect to find. Text that people said or wrote never becomes a control token: it is
encoded apart from the template, as plain text.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from omnicli.errors import UserError

Message = tuple[str, str]  # role, content
SLOT = "\ue000"  # stands in a message for text that is put in later (private use, nobody says it)
# End a turn in one model or another, whatever its config names.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Chat:
    """The tokenizer and template of a canonical folder, read on first use."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` where the folder has no tokenizer.json."""
        self.folder, self._given = folder, tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        named = [self._json(n).get("eos_token_id") for n in ("config", "generation_config")]
        ids = [i for n in named for i in (n if isinstance(n, list) else [n])]
        texts = (self._token("eos_token"), *_ENDS)
        ids += [self._tokenizer.token_to_id(text) for text in texts if text in self._special]
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are no text: never to be written, the ends apart."""
        return frozenset(self._special.values()) - self.end_ids

    @cached_property
    def vocab(self) -> int:
        """Tokens that the tokenizer knows; a network's table may be larger."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; what looks like a control token is spelled out."""
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_id(self, token: str) -> int:
        """The id of a token by its text; UserError if the tokenizer has none."""
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(f"the tokenizer of {self.folder} knows no {token}")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, without control tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the model's template writes it, open for the assistant's turn."""
        try:
            return self._render(messages)
        except TemplateError as error:
            if messages[0][0] != "system":
                raise UserError(f"the chat template of {self.folder} fails: {error}") from error
        (_, system), (role, content), *rest = messages  # some templates know no system
        return self.render([(role, f"{system}\n\n{content}"), *rest])

    def slots(self, messages: Sequence[Message]) -> tuple[list[int], ...]:
        """Ids of what the template writes around each `SLOT` in the messages, in order."""
        self._tokenizer.encode_special_tokens = False
        pieces = self.render(messages).split(SLOT)
        assert len(pieces) == 1 + sum(content.count(SLOT) for _, content in messages)
        encoded = (self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
        return tuple(list(piece.ids) for piece in encoded)

    def _render(self, messages: Sequence[Message]) -> str:
        return self._template.render(
            messages=[{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            enable_thinking=False,  # Qwen3: answer at once
            bos_token=self._token("bos_token"),
            eos_token=self._token("eos_token"),
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._given is not None:
            return self._given
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"no tokenizer.json in {self.folder}", hint="omni models pull")
        return Tokenizer.from_file(str(path))

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self._template_text())

    def _template_text(self) -> str:
        beside = self.folder / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
        known = self._json("chat_template").get("chat_template")  # of a processor
        known = known or self._json("tokenizer_config").get("chat_template")
        if isinstance(known, list):  # several, by name
            known = {entry["name"]: entry["template"] for entry in known}.get("default")
        if not isinstance(known, str):
            hint = "a model that was trained to chat has one"
            raise UserError(f"{self.folder} has no chat template", hint=hint)
        return known

    def _token(self, name: str) -> str:
        token = self._json("tokenizer_config").get(name) or ""
        return token["content"] if isinstance(token, dict) else str(token)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return {}
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to chat templates (`utils/chat_template_utils.py`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime(form: str) -> str:
    """A fixed day: results must not depend on when they were made."""
    return datetime(2024, 1, 1).strftime(form)
