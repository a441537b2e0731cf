"""Which sentences of a transcript matter most, as a language model sees it.

A sentence's score is the sum of two figures, each made comparable over its part of the text
(mean 0, deviation 1):

    answer       log P(sentence | transcript, "Summarise") per token: how readily the model says
                 it as a summary
    centrality   cosine between the sentence's mean hidden state and that of the whole part,
                 two thirds up the network

Both come from one forward pass over the transcript and, behind it, its sentences once more; each
of those sees the transcript and itself, not the other sentences:

    [ head | transcript | tail ] [ sentence 1 ] [ sentence 2 ] ...

`benchmarks/summary_methods.py` compares this with other ways on a small labelled set.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from omnicli.data import Ranking, Segment
from omnicli.execution.chat import SLOT, Chat
from omnicli.execution.nets.llama import Llama
from omnicli.execution.sentences import split_sentences
from omnicli.execution.stage import MapStage
from omnicli.operators.ragged import pad_to

PROMPT = (
    ("system", "You summarise transcripts of speech."),
    ("user", f'Summarise this transcript in one sentence:\n"{SLOT}"'),
)
UNIT_WORDS, UNIT_CHARS = 45, 300  # longer stretches without a full stop are cut
UNIT_TOKENS = 96  # of a unit that are read
PART_TOKENS = 512  # of transcript that are ranked together
LOGIT_ROWS = 256  # positions whose logits are in memory at once
FEWEST_PICKS, USUAL_PICKS, MOST_PICKS = 2, 5, 12
SHARE = 3  # one sentence in three is picked
DEPTH = 2 / 3  # of the network, for the hidden states


# --- text ---


def units_of(text: str, segments: Sequence[Segment] = ()) -> list[str]:
    """The stretches of a text that are ranked and picked: its sentences, in order.

    What runs on without a full stop is cut at the borders of segments, then by words.
    """
    borders = _borders(text, segments)
    units, begin = [], 0
    for sentence in split_sentences(text):
        words = sentence.split()
        within = [b - begin for b in borders if begin < b < begin + len(words)]
        units += [sentence] if _short(words) else list(_cut(words, within))
        begin += len(words)
    return units


def _borders(text: str, segments: Sequence[Segment]) -> list[int]:
    """Word counts at which segments end; none if the text is not theirs."""
    ends = list(accumulate(len(s.text.split()) for s in segments))
    return ends if ends and ends[-1] == len(text.split()) else []


def _short(words: Sequence[str]) -> bool:
    return len(words) <= UNIT_WORDS and sum(map(len, words)) <= UNIT_CHARS


def _cut(words: list[str], borders: list[int]) -> Iterator[str]:
    for begin, end in pairwise([0, *borders, len(words)]):
        stretch = words[begin:end]
        pieces = 1 if _short(stretch) else -(-len(stretch) // UNIT_WORDS)
        for a, b in pairwise(len(stretch) * i // pieces for i in range(pieces + 1)):
            yield from _chunks(" ".join(stretch[a:b]))


def _chunks(text: str) -> Iterator[str]:
    """Text without spaces, by characters; others are short enough by now."""
    size = len(text) if " " in text else UNIT_CHARS
    for begin in range(0, len(text), max(1, size)):
        yield text[begin : begin + size]


def join_units(units: Sequence[str]) -> str:
    """One text again; scripts that put no space between sentences get none."""
    joined = ""
    for unit in units:
        gap = "" if not joined or (_unspaced(joined[-1]) and _unspaced(unit[0])) else " "
        joined += gap + unit
    return joined


def _unspaced(char: str) -> bool:
    """Chinese, Japanese and their full-width marks."""
    return "\u3000" <= char <= "\u9fff" or "\uff00" <= char <= "\uffef"


# --- items ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RankItem:
    """One part of a transcript: token ids of its sentences, in their place and by themselves."""

    placed: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    frame: int  # tokens around the transcript

    @property
    def tokens(self) -> int:
        """Length of the row."""
        return self.frame + sum(map(len, self.placed)) + sum(map(len, self.alone))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A transcript's sentences with what is known of them."""

    units: tuple[str, ...]
    parts: tuple[int, ...]  # sentences in each part
    scores: tuple[float, ...] = field(default=())


def make_items(chat: Chat, units: Sequence[str], part_tokens: int = PART_TOKENS) -> list[RankItem]:
    """Cut a transcript into parts of about equal length at sentence borders."""
    placed = [
        tuple(chat.encode((" " if i else "") + unit)[:UNIT_TOKENS]) for i, unit in enumerate(units)
    ]
    alone = [tuple(chat.encode(unit)[:UNIT_TOKENS]) for unit in units]
    frame = sum(map(len, chat.slots(PROMPT)))
    return [
        RankItem(placed=tuple(placed[a:b]), alone=tuple(alone[a:b]), frame=frame)
        for a, b in pairwise(_part_borders([len(p) for p in placed], part_tokens))
    ]


def _part_borders(lengths: Sequence[int], most: int) -> list[int]:
    """Where parts begin and end, so that none is much longer than another."""
    total = sum(lengths)
    parts = max(1, -(-total // most))
    middles = [end - n / 2 for end, n in zip(accumulate(lengths), lengths, strict=True)]
    part_of = [min(parts - 1, int(middle * parts / total)) for middle in middles]
    begins = [i for i, part in enumerate(part_of) if i == 0 or part != part_of[i - 1]]
    return [*begins, len(lengths)]


# --- choosing ---


def picks(units: int, parts: int = 1) -> int:
    """How many sentences make a summary: of one or two all, else about a third, two at least.

    Long recordings get one for each part of their text and a few more.
    """
    if units <= 2:
        return units
    usual = min(USUAL_PICKS, max(FEWEST_PICKS, round(units / SHARE)))
    return usual if parts == 1 else min(MOST_PICKS, max(usual, USUAL_PICKS - 1 + parts))


def best_first(ranked: Ranked) -> list[int]:
    """Places of all sentences: the best of every part, then the others; what is said twice last.

    Scores are relative to their part, so the last minute can win against the first.
    """
    begins = list(accumulate(ranked.parts, initial=0))
    by_score = sorted(range(len(ranked.units)), key=lambda i: (-ranked.scores[i], i))
    firsts = {
        max(range(a, b), key=lambda i: (ranked.scores[i], -i)) for a, b in pairwise(begins) if b > a
    }
    order = sorted(by_score, key=lambda i: i not in firsts)
    seen: set[str] = set()
    repeated = []
    for i in order:
        key = ranked.units[i].casefold()
        repeated += [i] if key in seen else []
        seen.add(key)
    return [i for i in order if i not in repeated] + repeated


def extract(ranked: Ranked) -> str:
    """The sentences that are the summary, in the order in which they were said."""
    count = picks(len(ranked.units), len(ranked.parts))
    if count >= len(ranked.units):
        return join_units(ranked.units)
    chosen = sorted(best_first(ranked)[:count])
    return join_units([ranked.units[i] for i in chosen])


# --- the stage ---


@dataclass(frozen=True, slots=True)
class Figures:
    """What the network says about the S sentences of a part."""

    answer: tuple[float, ...]  # log P as an answer to the prompt, of the whole sentence
    central: tuple[float, ...]  # cosine
    tokens: tuple[int, ...]

    def score(self) -> tuple[float, ...]:
        """See the module's text."""
        answer = [total / max(1, n) for total, n in zip(self.answer, self.tokens, strict=True)]
        pairs = zip(standard(answer), standard(self.central), strict=True)
        return tuple(a + c for a, c in pairs)


class Rank(MapStage[RankItem]):
    """Scores the sentences of each part."""

    def __init__(self, net: Llama, chat: Chat) -> None:
        self.net = net
        self.head, self.tail = chat.slots(PROMPT)
        self.depth = max(1, round(DEPTH * net.config.layers))

    def run(self, items: Sequence[RankItem]) -> list[Ranking]:
        """See `MapStage`."""
        return [Ranking(scores=figures.score()) for figures in self.figures(items)]

    def figures(self, items: Sequence[RankItem]) -> list[Figures]:
        """What `run` scores by."""
        rows = [_Row(self.head, item, self.tail) for item in items]
        edge = edge_tokens(max(len(row.ids) for row in rows))
        device = self.net.embed_tokens.weight.device
        ids, positions, unit = (
            pad_to([torch.tensor(getattr(row, name)) for row in rows], edge)[0].to(device)
            for name in ("ids", "positions", "unit")
        )
        middle, last = self.net.read(ids, positions, packed_mask(unit), depth=self.depth)
        logprobs = self._logprobs(rows, last)
        return [row.figures(middle[b], logprobs[b]) for b, row in enumerate(rows)]

    def _logprobs(self, rows: Sequence["_Row"], last: Tensor) -> list[list[float]]:
        """Log P of every token that a row asks for; last [B, T, D]."""
        at = [(b, before) for b, row in enumerate(rows) for before, _ in row.asked]
        target = [token for row in rows for _, token in row.asked]
        fill = -len(at) % 4  # kernels round alike from four positions on
        row, column = torch.tensor(at + at[:1] * fill, device=last.device).unbind(1)
        wanted = torch.tensor(target + target[:1] * fill, device=last.device)
        found: list[float] = []
        for begin in range(0, len(row), LOGIT_ROWS):
            some = slice(begin, begin + LOGIT_ROWS)
            logits = self.net.logits(last[row[some], column[some]])
            chosen = logits.gather(1, wanted[some, None])[:, 0]
            found += (chosen - logits.logsumexp(dim=1)).tolist()
        ends = accumulate((len(r.asked) for r in rows), initial=0)
        return [found[a:b] for a, b in pairwise(ends)]


class _Row:
    """A part as one row: where its tokens stand and which of them are asked about."""

    def __init__(self, head: list[int], item: RankItem, tail: list[int]) -> None:
        said = [token for unit in item.placed for token in unit]
        context = [*head, *said, *tail]
        self.spans = list(pairwise(accumulate(map(len, item.placed), initial=len(head))))
        self.sizes = tuple(map(len, item.alone))
        self.ids = list(context)
        self.positions = list(range(len(context)))
        self.unit = [0] * len(context)  # 0: seen by all that follows
        self.asked: list[tuple[int, int]] = []  # (position of the state before, token)
        for number, unit in enumerate(item.alone, start=1):
            begin = len(self.ids)
            before = [len(context) - 1, *range(begin, begin + len(unit) - 1)]
            self.asked += zip(before, unit, strict=True)
            self.ids += unit
            self.positions += range(len(context), len(context) + len(unit))
            self.unit += [number] * len(unit)

    def figures(self, middle: Tensor, logprobs: Sequence[float]) -> Figures:
        """Sum up per sentence: middle [T, D], a logprob for each of `asked`."""
        ends = pairwise(accumulate(self.sizes, initial=0))
        answer = tuple(math.fsum(logprobs[a:b]) for a, b in ends)
        return Figures(answer, tuple(self._central(middle.float())), self.sizes)

    def _central(self, middle: Tensor) -> list[float]:
        first, last = self.spans[0][0], self.spans[-1][1]
        whole = middle[first:last].mean(dim=0, keepdim=True)
        means = torch.stack([middle[a:b].mean(dim=0) for a, b in self.spans])
        found: list[float] = torch.cosine_similarity(means, whole).tolist()
        return found


def packed_mask(unit: Tensor) -> Tensor:
    """Who sees whom: unit [B, T] int64 -> [B, 1, T, T] bool.

    Everything sees the context before it (unit 0), and its own unit up to itself.
    """
    size = unit.shape[1]
    order = torch.ones(size, size, dtype=torch.bool, device=unit.device).tril()
    same = (unit[:, None, :] == unit[:, :, None]) | (unit[:, None, :] == 0)
    return (same & order)[:, None]


def edge_tokens(tokens: int) -> int:
    """The padded length of a row: multiples of 32, each about a quarter above the one before."""
    edge = 32
    while edge < tokens:
        edge = -(-(edge * 5 // 4) // 32) * 32
    return edge


def standard(values: Sequence[float]) -> list[float]:
    """Mean 0, deviation 1; all 0 if they do not differ by more than rounding."""
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    differ = spread > 1e-9 * max(map(abs, values))
    return [(v - mean) / spread if differ else 0.0 for v in values]
