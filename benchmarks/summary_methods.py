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
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
from omnicli.execution.nets.llama import Llama, load_llama

SET = Path(__file__).with_name("summary_set.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A labelled text and what the model says about it; log P are sums over a sentence."""

    sentences: list[str]
    key: frozenset[int]
    figures: Figures
    nothing: Figures  # the same with no transcript
    placed: list[float]  # log P of each sentence after those before it
    rest: list[float]  # log P of all others after it, less that without it


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
    return [-p for p in text.placed]


def rest(text: Text) -> Sequence[float]:
    return text.rest


def answer(text: Text) -> Sequence[float]:
    return [a / n for a, n in zip(text.figures.answer, text.figures.tokens, strict=True)]


def gain(text: Text) -> Sequence[float]:
    return [a - p for a, p in zip(text.figures.answer, text.placed, strict=True)]


def told(text: Text) -> Sequence[float]:
    return [a - n for a, n in zip(text.figures.answer, text.nothing.answer, strict=True)]


def central(text: Text) -> Sequence[float]:
    return text.figures.central


WAYS: dict[str, Way] = {
    "the first sentences": lead,
    "the longest sentences": longest,
    "rest: log P(others after s) - log P(others)": rest,
    "surprise: -log P(s after what precedes it)": surprise,
    "answer: log P(s after transcript, summarise) per token": answer,
    "told: log P(s after transcript, summarise) - log P(s after summarise)": told,
    "gain: log P(s after transcript, summarise) + surprise": gain,
    "centrality of hidden states": central,
    "answer + centrality (what omni does)": summed(answer, central),
    "told + centrality": summed(told, central),
    "surprise + centrality": summed(surprise, central),
    "gain + centrality": summed(gain, central),
    "answer + centrality + the first": summed(answer, central, lead),
    "answer + centrality + told": summed(answer, central, told),
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
    lines = SET.read_text(encoding="utf-8").splitlines()
    return [_text(rank, chat, json.loads(line)) for line in lines]


def _text(rank: Rank, chat: Chat, line: dict) -> Text:
    [item] = make_items(chat, line["sentences"], part_tokens=4096)
    nothing = replace(item, placed=(tuple(chat.encode("...")),))
    return Text(
        sentences=line["sentences"],
        key=frozenset(line["key"]),
        figures=rank.figures([item])[0],
        nothing=rank.figures([nothing])[0],
        placed=_placed(rank.net, item),
        rest=_rest(rank.net, item),
    )


def _placed(net: Llama, item: RankItem) -> list[float]:
    ends = list(accumulate(map(len, item.placed), initial=0))
    found = _logprobs(net, [token for unit in item.placed for token in unit])
    return [sum(found[max(0, a - 1) : b - 1]) for a, b in pairwise(ends)]


def _rest(net: Llama, item: RankItem) -> list[float]:
    found = []
    for i, unit in enumerate(item.placed):
        others = [t for j, other in enumerate(item.placed) if j != i for t in other]
        after = _logprobs(net, [*unit, *others])[len(unit) :]
        found.append(sum(after) - sum(_logprobs(net, others)))
    return found


def _logprobs(net: Llama, ids: list[int]) -> list[float]:
    """Log P of every token but the first after those before it."""
    row = torch.tensor([ids])
    logits = net.logits(net(row, net.new_cache(1, len(ids)))[0, :-1])
    chosen = logits.gather(1, row[0, 1:, None])[:, 0]
    return (chosen - logits.logsumexp(dim=1)).tolist()


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
