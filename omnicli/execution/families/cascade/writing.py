"""The stage `write`: a language model continues a prompt: replies, prompts, free summaries.

A draft that loops, or that has no words, is written once more, sampled: `write.again`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnicli.data import Draft
from omnicli.execution.chat import Chat
from omnicli.execution.families.cascade.ranking import edge_tokens
from omnicli.execution.kv_cache import KVCache
from omnicli.execution.looping import loops
from omnicli.execution.nets.llama import Llama
from omnicli.execution.stage import LoopStage, RowEnd, StepOut
from omnicli.operators.ragged import pad_to

LOOP = (3, 12)  # a text that says the same thrice, in so many tokens at the least, loops
AGAIN_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItem:
    """A prompt, and how much may follow it."""

    ids: tuple[int, ...]
    max_new_tokens: int
    seed: int = 0


@dataclass(slots=True)
class WriteState:
    """The cache, and what each row has said: it is stopped when it loops."""

    cache: KVCache
    said: list[list[int]]

    def keep(self, rows: Tensor) -> None:
        """See `LoopState`."""
        self.cache.keep(rows)
        self.said = [self.said[row] for row in rows.tolist()]


class Write(LoopStage[WriteItem, WriteState]):
    """Prompts to drafts."""

    def __init__(self, net: Llama, chat: Chat) -> None:
        self.net, self.chat = net, chat
        self.end_ids = chat.end_ids
        device = net.embed_tokens.weight.device
        self.bias = torch.zeros(net.config.vocab, device=device)
        self.bias[[i for i in chat.control_ids if i < net.config.vocab]] = float("-inf")
        self.bias[chat.vocab :] = float("-inf")

    def limit(self, item: WriteItem) -> int:
        """See `LoopStage`."""
        return item.max_new_tokens

    def start(self, items: Sequence[WriteItem]) -> tuple[WriteState, StepOut]:
        """See `LoopStage`."""
        device = self.bias.device
        edge = edge_tokens(max(len(item.ids) for item in items))
        ids, lengths = pad_to([torch.tensor(item.ids) for item in items], edge)
        ids, lengths = ids.to(device), lengths.to(device)
        room = max(item.max_new_tokens for item in items)
        cache = self.net.new_cache(len(items), edge + room)
        hidden = self.net(ids, cache)
        cache.advance(lengths)
        last = hidden[torch.arange(len(items), device=device), lengths - 1]
        state = WriteState(cache, [[] for _ in items])
        return state, StepOut(self.net.logits(last) + self.bias)

    def step(self, frames: Tensor, state: WriteState) -> StepOut:
        """See `LoopStage`."""
        hidden = self.net(frames, state.cache)
        state.cache.advance(1)
        logits = self.net.logits(hidden[:, 0]) + self.bias
        for row, token in enumerate(frames[:, 0].tolist()):
            state.said[row].append(token)
            if loops(state.said[row], *LOOP):
                logits[row] = float("-inf")
                logits[row, min(self.end_ids)] = 0.0
        return StepOut(logits)

    def finish(self, item: WriteItem, end: RowEnd, state: WriteState, row: int) -> Draft:
        """See `LoopStage`."""
        ids = end.frames[:, 0].tolist()
        period = loops(ids, *LOOP)
        said = ids[: len(ids) - period * (LOOP[0] - 1)] if period else ids
        text = spoken_prose(self.chat.decode(said))
        return Draft(text=text, finish_reason="loop" if period else end.reason)


def trouble_of(draft: Draft) -> str:
    """Why a draft is no answer, as an error code; empty if it is one."""
    if draft.finish_reason == "loop":
        return "runaway"
    return "" if re.search(r"\w", draft.text) else "no_answer"


def spoken_prose(text: str) -> str:
    """A model's text as one would say it: no thoughts, no Markdown, no blanks left to fill in."""
    text = re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.DOTALL)
    text = re.sub(r"\[[^\]\n]{1,40}\]", "", text)
    text = re.sub(r"^[ \t]*(#{1,6}|[-*•]|\d{1,2}[.)])[ \t]+", "", text, flags=re.MULTILINE)
    text = re.sub(r"[*_`]{1,3}(\S.*?\S|\S)[*_`]{1,3}", r"\1", text)
    text = " ".join(text.split())
    return re.sub(r" +([,.!?])", r"\1", text).strip('" ')
