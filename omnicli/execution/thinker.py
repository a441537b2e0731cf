"""The thinker of an omni model: clips and a wish to text, and the states that its talker reads.

A loop row is a recording and a *pass*: what is said is written down, and what the run asks for
(a summary, a reply ...) is answered, over the same encoded audio. Passes of one recording run in
one batch; what they begin with alike, the audio, is prefilled once and its cache forked.

    think -> think.again -> transcript -> answer

`think.again` writes once more, with chance, what went in circles or has no words.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from omnicli.config import SAY, ModelFolder, PolicySpec, Task
from omnicli.data import Answer, Encoded, Heard, Inputs, Request, Said, Segment, Transcript
from omnicli.errors import RequestError
from omnicli.execution.chat import SLOT, Chat, Message
from omnicli.execution.kv_cache import REACH_STEP, KVCache
from omnicli.execution.looping import before_loop, loops
from omnicli.execution.nets.llama import Llama
from omnicli.execution.seeds import row_seed
from omnicli.execution.shared import Shared
from omnicli.execution.stage import LoopStage, RowEnd, StageSpec, StepOut
from omnicli.operators.ragged import pad_to

THINK, AGAIN = "think", "think.again"
TRANSCRIBE = "transcribe"
AGAIN_TEMPERATURE = 0.7
LOOP = (3, 12)  # what is said thrice, in so many tokens at the least, goes in circles
MIN_TOKENS, TOKENS_PER_S = 24, 10  # more than anyone speaks
SUFFIX_STEP = 64
EVEN = 4  # rows: with fewer, kernels round differently
MOST_CHARS_PER_S = 40  # fast talkers reach 30: what is longer was made up
MAX_LOST = 0.5  # of the clips; with more, there is no transcript
UNWRITTEN_S = 2.0  # of speech without a word, before the transcript carries a warning

_WISHES = {
    TRANSCRIBE: "Write down what is said in the recording, word for word, and nothing else.",
    "translate": "Translate what is said in the recording into English. Write nothing else.",
    "translation": "Translate what is said in the recording into English. Write nothing else.",
    "summary": "Summarise the recording in one to three sentences. Use only what is said in it.",
    "reply": "The recording is a message to you. Answer it politely in one or two sentences.",
}

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerPlan:
    """What a family tells of its thinker."""

    model: ModelFolder
    chat: Chat
    net: Shared[Llama]
    device: str
    dtype: torch.dtype
    audio_tokens: tuple[str, str, str]  # that open, stand for and close a piece of audio
    tokens_per_s: float  # of audio
    context: int  # tokens
    system: str = ""
    depth: int = 0  # layers after which `mix` gets the middle states; 0: the embeddings
    mix: Mix  # (embeddings, middle, last [..., D], heard [...] bool) -> what the talker reads
    width: int
    kv_values: int
    active_values: int
    vocab: int
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkItem:
    """One pass over some clips of a recording."""

    about: str
    clip: int
    prefix: tuple[int, ...]  # up to and with the audio
    suffix: tuple[int, ...]  # the wish, and the opening of the answer
    encoded: tuple[Encoded, ...]
    limit: int
    speaks: bool
    seed: int = 0

    @property
    def suffix_edge(self) -> int:
        """What the suffix is padded to."""
        return -(-len(self.suffix) // SUFFIX_STEP) * SUFFIX_STEP


@dataclass(slots=True)
class ThinkState:
    """The cache, what each row has said, and what a talker will read of it."""

    cache: KVCache
    said: list[list[int]]
    prompts: list[Tensor | None]  # [L, D]
    heard: list[Tensor | None]  # [L] bool
    grown: list[list[Tensor]] = field(default_factory=list)  # [D] each

    def keep(self, rows: Tensor) -> None:
        """See `LoopState`."""
        self.cache.keep(rows)
        kept = rows.tolist()
        self.said = [self.said[row] for row in kept]
        self.prompts = [self.prompts[row] for row in kept]
        self.heard = [self.heard[row] for row in kept]
        self.grown = [self.grown[row] for row in kept]

    def put(self, rows: Tensor, other: "ThinkState") -> None:
        """See `RefillState`."""
        self.cache.put(rows, other.cache)
        for theirs, row in enumerate(rows.tolist()):
            self.said[row], self.grown[row] = other.said[theirs], other.grown[theirs]
            self.prompts[row], self.heard[row] = other.prompts[theirs], other.heard[theirs]


class Think(LoopStage[ThinkItem, ThinkState]):
    """Passes to text; see the module's text."""

    scored = True
    refills = True

    def __init__(self, net: Llama, plan: ThinkerPlan, max_new_tokens: int) -> None:
        self.net, self.plan, self.max_new_tokens = net, plan, max_new_tokens
        self.end_ids = plan.chat.end_ids
        self.audio_id = audio_id(plan)
        self.device = net.embed_tokens.weight.device
        self.bias = torch.zeros(net.config.vocab, device=self.device)
        self.bias[[i for i in plan.chat.control_ids if i < net.config.vocab]] = -torch.inf
        self.bias[plan.chat.vocab :] = -torch.inf

    def limit(self, item: ThinkItem) -> int:
        """See `LoopStage`."""
        return item.limit

    def start(self, items: Sequence[ThinkItem]) -> tuple[ThinkState, StepOut]:
        """See `LoopStage`."""
        distinct, rows = _distinct(items)
        edge = think_edge(max(len(item.prefix) for item in items))
        size = edge + items[0].suffix_edge + most_tokens(self.plan, edge, self.max_new_tokens)
        shared = self.net.new_cache(len(distinct), -(-size // REACH_STEP) * REACH_STEP)
        head = self._prefill([i.prefix for i in distinct], edge, shared, distinct)
        cache = shared.fork(torch.tensor(rows, device=self.device))
        tail = self._prefill([i.suffix for i in items], items[0].suffix_edge, cache, ())
        state = ThinkState(cache, [[] for _ in items], [], [], [[] for _ in items])
        for row, item in enumerate(items):
            states, heard = head.row(rows[row])
            more, silent = tail.row(row)
            state.prompts.append(torch.cat([states, more]) if item.speaks else None)
            state.heard.append(torch.cat([heard, silent]) if item.speaks else None)
        return state, StepOut(self.net.logits(tail.last) + self.bias)

    def _prefill(
        self, ids: Sequence[tuple[int, ...]], edge: int, cache: KVCache, hear: Sequence[ThinkItem]
    ) -> "_Prefilled":
        padded, lengths = pad_to([torch.tensor(row) for row in ids], edge)
        padded, lengths = padded.to(self.device), lengths.to(self.device)
        heard = padded == self.audio_id
        x = self.net.embed_tokens(padded)
        for row, item in enumerate(hear):
            audio = torch.cat([e.embeds for e in item.encoded]).to(x)
            x[row, heard[row]] = audio
        middle, last = self.net.decode(x, cache, depth=self.plan.depth)
        cache.advance(lengths)
        mixed = self.plan.mix(x, middle, last, heard)
        ends = last[torch.arange(len(ids), device=self.device), lengths - 1]
        return _Prefilled(mixed, heard, lengths.tolist(), ends)

    def step(self, frames: Tensor, state: ThinkState) -> StepOut:
        """See `LoopStage`."""
        x = self.net.embed_tokens(frames)
        middle, last = self.net.decode(x, state.cache, depth=self.plan.depth)
        state.cache.advance(1)
        if any(prompt is not None for prompt in state.prompts):
            mixed = self.plan.mix(x, middle, last, torch.zeros_like(frames, dtype=torch.bool))
            for row, grown in enumerate(state.grown):
                grown.append(mixed[row, 0])
        logits = self.net.logits(last[:, 0]) + self.bias
        for row, token in enumerate(frames[:, 0].tolist()):
            state.said[row].append(token)
            if loops(state.said[row], *LOOP):
                logits[row] = -torch.inf
                logits[row, min(self.end_ids)] = 0.0
        return StepOut(logits)

    def finish(self, item: ThinkItem, end: RowEnd, state: ThinkState, row: int) -> Said:
        """See `LoopStage`. What a talker reads is kept for what was fed back, as it is for one."""
        ids = end.frames[:, 0].tolist()
        period = loops(ids, *LOOP)
        kept = ids[: len(ids) - period * (LOOP[0] - 1)] if period else ids
        said = Said(
            text=self.plan.chat.decode(kept).strip(),
            about=item.about,
            clip=item.clip,
            finish_reason="loop" if period else end.reason,
            logprob=end.logprob / max(1, end.steps),
            prompt_tokens=len(item.prefix) + len(item.suffix),
        )
        prompt, heard = state.prompts[row], state.heard[row]
        if prompt is None or heard is None or period:
            return said
        grown = state.grown[row][: len(ids)]
        states = torch.cat([prompt, torch.stack(grown)]) if grown else prompt
        spoken = [*item.prefix, *item.suffix, *ids[: len(grown)]]
        return replace(said, states=states.cpu(), heard=heard.cpu(), ids=torch.tensor(spoken))


@dataclass(frozen=True, slots=True)
class _Prefilled:
    mixed: Tensor  # [B, T, D]
    heard: Tensor  # [B, T] bool
    lengths: list[int]
    last: Tensor  # [B, D]

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's states [L, D] and which of them hold audio [L]."""
        length = self.lengths[row]
        return self.mixed[row, :length].clone(), self.heard[row, :length].clone()


def _distinct(items: Sequence[ThinkItem]) -> tuple[list[ThinkItem], list[int]]:
    """Items with different beginnings, a multiple of `EVEN`, and each item's place among them."""
    places: dict[tuple[object, ...], int] = {}
    first: list[ThinkItem] = []
    rows = []
    for item in items:
        key = (item.prefix, tuple(id(e) for e in item.encoded))
        if key not in places:
            places[key] = len(first)
            first.append(item)
        rows.append(places[key])
    return first + [first[-1]] * (-len(first) % EVEN), rows


def audio_id(plan: ThinkerPlan) -> int:
    """The token that stands for a piece of audio."""
    _, token, _ = plan.audio_tokens
    found = plan.chat.slots([("user", token)])[0]
    wanted = plan.chat.token_id(token)
    assert wanted in found, f"the chat template writes no {token}"
    return wanted


def think_edge(tokens: int) -> int:
    """What a beginning is padded to: at most a quarter more, in multiples of 32."""
    step = max(32, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


def most_tokens(plan: ThinkerPlan, edge: int, max_new_tokens: int) -> int:
    """Tokens that any row of an edge may grow: the caches of an edge are equally large."""
    return max(max_new_tokens, MIN_TOKENS + math.ceil(TOKENS_PER_S * edge / plan.tokens_per_s))


# -- the stages


class Thinking:
    """Builds the stages of one thinker; `answers` is false for `omni transcribe`."""

    def __init__(self, plan: ThinkerPlan, task: Task, *, answers: bool) -> None:
        self.plan, self.task, self.answers = plan, task, answers

    def specs(self) -> list[StageSpec]:
        """All stages; those that nobody needs are never opened."""
        return [
            self._think(THINK, self._items),
            self._think(AGAIN, self._items_again),
            self._transcript(),
            *([self._answer()] if self.answers else []),
        ]

    # -- what is wanted

    def kind(self, request: Request) -> str:
        """What is said about a recording, after the line's own wishes."""
        kind = request.say or ("prompt" if request.prompt else self.task.say)
        prompt = request.prompt or self.task.prompt or ""
        if kind not in SAY or (kind == "prompt" and not prompt):
            raise RequestError("bad_request", f"cannot say {kind!r}; one of: {', '.join(SAY)}")
        return kind

    def speaks(self, request: Request) -> bool:
        """Whether the answer is to be spoken."""
        return self.answers and (self.task.speak if request.speak is None else request.speak)

    def spoken_pass(self, request: Request) -> str:
        """The pass whose text is spoken."""
        kind = self.kind(request)
        return TRANSCRIBE if kind == "transcript" else kind

    # -- think

    def _items(self, request: Request, inputs: Inputs) -> list[ThinkItem]:
        heard = inputs.one("listen", Heard)
        encoded = inputs.parts("encode", Encoded)
        if heard is None or not encoded:
            return []
        items = []
        if not inputs.has("transcript") or self._speaks_transcript(request):
            items += [
                self._item(request, TRANSCRIBE, [e], self._most_tokens(heard, e)) for e in encoded
            ]
        if self.answers and (kind := self.kind(request)) != "transcript":
            most = self.task.max_new_tokens
            if kind == "translation":
                most = max(most, max(self._most_tokens(heard, e) for e in encoded))
            for some in self._groups(request, kind, encoded, most):
                items.append(self._item(request, kind, some, most))
        return items

    def _speaks_transcript(self, request: Request) -> bool:
        return self.speaks(request) and self.spoken_pass(request) == TRANSCRIBE

    def _most_tokens(self, heard: Heard, encoded: Encoded) -> int:
        return MIN_TOKENS + round(TOKENS_PER_S * heard.clips[encoded.clip].duration_s)

    def _groups(
        self, request: Request, kind: str, encoded: Sequence[Encoded], most: int
    ) -> Iterator[list[Encoded]]:
        """Clips that fit into the context together: usually all."""
        some: list[Encoded] = []
        for one in encoded:
            item = self._item(request, kind, [*some, one], most)
            if some and len(item.prefix) + item.suffix_edge + most > self.plan.context:
                yield some
                some = []
            some.append(one)
        yield some

    def _item(
        self, request: Request, about: str, encoded: Sequence[Encoded], limit: int
    ) -> ThinkItem:
        open_, _, close = self.plan.audio_tokens
        audio = f"{open_}{SLOT}{close}" * len(encoded)
        messages: list[Message] = [("user", f"{audio}{SLOT}")]
        if self.plan.system:
            messages.insert(0, ("system", self.plan.system))
        head, *between, tail = self.plan.chat.slots(messages)
        prefix, placeholder = list(head), audio_id(self.plan)
        for one, piece in zip(encoded, between, strict=True):
            prefix += [placeholder] * len(one.embeds) + piece
        suffix = (*self.plan.chat.encode(self._wish(request, about)), *tail)
        if len(prefix) + len(suffix) + limit > self.plan.context:
            limit = self.plan.context - len(prefix) - len(suffix)
        if limit < 1:
            raise RequestError(
                "too_long", f"{len(prefix) + len(suffix)} tokens of {self.plan.context}"
            )
        speaks = self.speaks(request) and about == self.spoken_pass(request)
        return ThinkItem(
            about=about,
            clip=encoded[0].clip,
            prefix=tuple(prefix),
            suffix=suffix,
            encoded=tuple(encoded),
            limit=limit,
            speaks=speaks,
        )

    def _wish(self, request: Request, about: str) -> str:
        if about == "prompt":
            return request.prompt or self.task.prompt or ""
        if about == TRANSCRIBE and self.task.task == "translate":
            return _WISHES["translate"]
        language = request.language or self.task.language
        if about == TRANSCRIBE and language:
            return f"{_WISHES[about]} The language is {language}."
        return _WISHES[about]

    def _items_again(self, request: Request, inputs: Inputs) -> list[ThinkItem]:
        first = inputs.parts(THINK, Said)
        if not any(trouble_of(said) for said in first):
            return []
        seed = self.task.seed if request.seed is None else request.seed
        return [
            replace(item, seed=row_seed(seed, request.request_id, AGAIN, part))
            for part, (item, said) in enumerate(
                zip(self._items(request, inputs), first, strict=True)
            )
            if trouble_of(said)
        ]

    def _think(
        self, name: str, split: Callable[[Request, Inputs], Sequence[ThinkItem]]
    ) -> StageSpec:
        plan, size = self.plan, self.plan.dtype.itemsize

        @contextmanager
        def opened() -> Iterator[Think]:
            with plan.net.use() as net:
                yield Think(net, plan, self.task.max_new_tokens)

        def row_bytes(edge: int) -> int:
            cached = 2 * (edge + SUFFIX_STEP + most_tokens(plan, edge, self.task.max_new_tokens))
            states = 2 * edge * plan.width
            return (
                size * (cached * plan.kv_values + edge * plan.active_values + states)
                + 12 * plan.vocab
            )

        sampled = PolicySpec(name="sample", options={"temperature": AGAIN_TEMPERATURE})
        return StageSpec(
            name=name,
            reads=("listen", "encode", *(() if name == THINK else (THINK,))),
            split=split,
            open=opened,
            length=lambda item: len(item.prefix),
            edge=think_edge,
            row_bytes=row_bytes,
            apart=lambda item: item.suffix_edge,
            audio_s=lambda item: sum(len(e.embeds) for e in item.encoded) / plan.tokens_per_s,
            seed=lambda item: item.seed,
            max_rows=64,
            pool_rows=4,
            policy=PolicySpec() if name == THINK else sampled,
            device=plan.device,
            weights_bytes=plan.weights_bytes,
            settings=self._settings(),
        )

    def _settings(self) -> str:
        t = self.task
        return f"{self.plan.model} {self.plan.dtype} {t.language} {t.task} seed={t.seed}"

    # -- transcript

    def _transcript(self) -> StageSpec:
        return StageSpec(
            name="transcript",
            reads=("listen", THINK, AGAIN),
            join=self._written,
            record=Transcript,
        )

    def _written(
        self, request: Request, inputs: Inputs, parts: Sequence[object]
    ) -> Transcript | None:
        heard = inputs.one("listen", Heard)
        if heard is None:
            return None
        said = [one for one in best(inputs) if one.about == TRANSCRIBE]
        segments = tuple(filter(None, (_segment(heard, one) for one in said)))
        lost = len([one for one in said if trouble_of(one) == "runaway"])
        if lost > MAX_LOST * len(heard.clips):
            raise RequestError("runaway", f"the text of {lost} of {len(heard.clips)} clips runs on")
        warnings = [*heard.warnings, *(["suspect_text: runaway"] if lost else [])]
        mute = [one for one in said if not re.search(r"\w", one.text)]
        if mute and sum(heard.clips[one.clip].duration_s for one in mute) > UNWRITTEN_S:
            warnings.append(f"low_coverage: {len(mute)} of {len(said)} clips have no words")
        scores = {"avg_logprob": round(_mean([one.logprob for one in said]), 4)} if said else {}
        language = request.language or self.task.language or ""
        return Transcript(
            text=" ".join(segment.text for segment in segments),
            language="en" if self.task.task == "translate" else language,
            language_probability=None,
            segments=segments,
            task=self.task.task,
            decoded_s=heard.decoded_s,
            speech_s=heard.speech_s,
            source_rate_hz=heard.source_rate_hz,
            source_channels=heard.source_channels,
            scores=scores,
            finish_reason=_reason(said),
            warnings=tuple(warnings),
        )

    # -- answer

    def _answer(self) -> StageSpec:
        task = self.task
        wishes = (task.say, task.prompt, task.max_new_tokens, task.speak)
        return StageSpec(
            name="answer",
            reads=("transcript", THINK, AGAIN),
            join=self._answered,
            record=Answer,
            settings=" ".join(map(str, wishes)),
        )

    def _answered(self, request: Request, inputs: Inputs, parts: Sequence[object]) -> Answer | None:
        kind, transcript = self.kind(request), inputs.one("transcript", Transcript)
        if transcript is None or not transcript.text:
            return None
        if kind == "transcript":
            text, said = transcript.text, []
        else:
            said = [one for one in best(inputs) if one.about == kind]
            for one in said:
                if trouble := trouble_of(one):
                    raise RequestError(trouble, f"{_TROUBLES[trouble]}, both times")
            text = " ".join(one.text for one in said)
        cut = _reason(said) == "length"
        return Answer(
            kind=kind,
            text=text,
            language="en" if kind == "translation" else transcript.language,
            summary_method="generated" if kind == "summary" else None,
            finish_reason=_reason(said),
            speak=self.speaks(request),
            warnings=("cut_by_max_new_tokens",) if cut else (),
        )


_TROUBLES = {"runaway": "the answer repeats itself", "no_answer": "the model wrote no words"}


def trouble_of(said: Said) -> str:
    """Why a text is not to be trusted, as an error code; empty if it is."""
    if said.finish_reason == "loop":
        return "runaway"
    return "" if re.search(r"\w", said.text) or said.about == TRANSCRIBE else "no_answer"


def best(inputs: Inputs) -> list[Said]:
    """What counts as said, in the order of the passes."""
    again = {(one.about, one.clip): one for one in inputs.parts(AGAIN, Said)}
    return [again.get((one.about, one.clip), one) for one in inputs.parts(THINK, Said)]


def _segment(heard: Heard, said: Said) -> Segment | None:
    clip = heard.clips[said.clip]
    text = before_loop(said.text) if said.finish_reason == "loop" else said.text
    if len(text) > MOST_CHARS_PER_S * max(1.0, clip.duration_s) or not text:
        return None
    return Segment(
        start_s=round(clip.start_s, 3),
        end_s=round(clip.start_s + clip.duration_s, 3),
        text=text,
        channel=clip.channel,
        avg_logprob=said.logprob,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _reason(said: Sequence[Said]) -> str:
    reasons = {one.finish_reason for one in said}
    return next((reason for reason in ("loop", "length") if reason in reasons), "stop")
