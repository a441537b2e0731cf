"""Ways to pick the sentences of a summary, compared on a small labelled set.

    python benchmarks/summary_methods.py MODEL_FOLDER [--dtype float32]

MODEL_FOLDER is a language model in the canonical layout (`omni models path`). The set,
`summary_set.jsonl`, has voice messages, calls, dictated notes, meetings and bits of lectures,
written for this purpose, with the sentences marked that a summary must have. Every way picks as
many sentences as `omni` would; precision is the share of the picked ones that are marked, recall
the share of the marked ones that are picked, both averaged over the texts. The last line is JSON.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from omnicli.execution.chat import Chat
from omnicli.execution.families.cascade.ranking import (
    Figures,
    Rank,
    RankItem,
    make_items,
    picks,
    standard,
)
from omnicli.execution.nets.llama import load_llama

SET = Path(__file__).with_name("summary_set.jsonl")
ROWS = 4  # as the scheduler fills batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A labelled text and what the model says about it."""

    sentences: list[str]
    key: frozenset[int]
    tokens: list[int]  # per sentence
    figures: Figures
    neutral: list[float]  # log P of each sentence as a summary of nothing

    @property
    def gain(self) -> list[float]:
        return [a - p for a, p in zip(self.figures.asked, self.figures.placed, strict=True)]

    @property
    def told(self) -> list[float]:
        return [a - n for a, n in zip(self.figures.asked, self.neutral, strict=True)]


Way = Callable[[Text], Sequence[float]]


def summed(*ways: Way) -> Way:
    """The sum of several ways, each made comparable first."""

    def score(text: Text) -> list[float]:
        return [sum(v) for v in zip(*(standard(list(w(text))) for w in ways), strict=True)]

    return score


def lead(text: Text) -> Sequence[float]:
    return [-float(i) for i in range(len(text.sentences))]


def longest(text: Text) -> Sequence[float]:
    return [float(len(s)) for s in text.sentences]


def surprise(text: Text) -> Sequence[float]:
    return [-p for p in text.figures.placed]


def answer(text: Text) -> Sequence[float]:
    return [a / n for a, n in zip(text.figures.asked, text.tokens, strict=True)]


def gain(text: Text) -> Sequence[float]:
    return text.gain


def told(text: Text) -> Sequence[float]:
    return text.told


def central(text: Text) -> Sequence[float]:
    return text.figures.central


WAYS: dict[str, Way] = {
    "the first sentences": lead,
    "the longest sentences": longest,
    "surprise: -log P(s | what precedes it)": surprise,
    "answer: log P(s | transcript, summarise) per token": answer,
    "told: log P(s | transcript, summarise) - log P(s | summarise)": told,
    "gain: log P(s | transcript, summarise) - log P(s | what precedes it)": gain,
    "centrality of hidden states": central,
    "answer + centrality (what omni does)": summed(answer, central),
    "told + centrality": summed(told, central),
    "surprise + centrality": summed(surprise, central),
    "gain + centrality": summed(gain, central),
    "gain + centrality + the first": summed(gain, central, lead),
    "gain + centrality + told": summed(gain, central, told),
}


def picked(way: Way, text: Text) -> list[int]:
    """Places of the sentences that this way picks."""
    scores = way(text)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return order[: picks(len(scores))]


def quality(way: Way, texts: Sequence[Text]) -> tuple[float, float]:
    """Precision and recall, averaged over texts."""
    hits = [len(text.key.intersection(picked(way, text))) for text in texts]
    precision = sum(h / picks(len(t.sentences)) for h, t in zip(hits, texts, strict=True))
    recall = sum(h / len(t.key) for h, t in zip(hits, texts, strict=True))
    return precision / len(texts), recall / len(texts)


def read_texts(rank: Rank, chat: Chat) -> list[Text]:
    """The labelled set with the model's figures."""
    return [
        _text(rank, chat, json.loads(line)) for line in SET.read_text(encoding="utf-8").splitlines()
    ]


def _text(rank: Rank, chat: Chat, line: dict) -> Text:
    item = make_items(chat, line["sentences"], part_tokens=4096)[0]
    nothing = RankItem(placed=(tuple(chat.encode("...")),), alone=item.alone, frame=item.frame)
    return Text(
        sentences=line["sentences"],
        key=frozenset(line["key"]),
        tokens=[len(ids) for ids in item.alone],
        figures=rank.figures([item] * ROWS)[0],
        neutral=list(rank.figures([nothing] * ROWS)[0].asked),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    began = time.perf_counter()
    net = load_llama(options.model, dtype=getattr(torch, options.dtype), device="cpu")
    chat = Chat(options.model)
    with torch.inference_mode():
        texts = read_texts(Rank(net, chat), chat)
    table = {name: quality(way, texts) for name, way in WAYS.items()}
    chance = sum(len(t.key) / len(t.sentences) for t in texts) / len(texts)
    best = sum(min(1.0, len(t.key) / picks(len(t.sentences))) for t in texts) / len(texts)
    print(f"{len(texts)} texts; precision by chance {chance:.2f}, at best {best:.2f}\n")
    print("| way | precision | recall |\n| --- | --- | --- |")
    for name, (precision, recall) in sorted(table.items(), key=lambda row: row[1]):
        print(f"| {name} | {precision:.2f} | {recall:.2f} |")
    report = {
        "benchmark": "summary_methods",
        "model": options.model.name,
        "dtype": options.dtype,
        "texts": len(texts),
        "precision_chance": round(chance, 3),
        "precision_best": round(best, 3),
        "ways": {
            n: {"precision": round(p, 3), "recall": round(r, 3)} for n, (p, r) in table.items()
        },
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "wall_s": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
