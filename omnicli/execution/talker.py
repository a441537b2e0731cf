"""What autoregressive talkers share: how long they may talk, when they have gone astray.

    talk -> talk.again -> vocode

A talker that does not come to an end within what its text allows, that goes in circles or says
nothing is tried once more with another seed (`talk.again`). What is no better then fails: a
vocoder never runs over it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omnicli.config import ModelFolder, PolicySpec, Task
from omnicli.data import Answer, Codes, Inputs, Request, Said, Waveform
from omnicli.errors import RequestError, UserError
from omnicli.execution.looping import loops
from omnicli.execution.seeds import row_seed
from omnicli.execution.stage import RowEnd, StageSpec
from omnicli.execution.thinker import best

TALK, AGAIN, VOCODE = "talk", "talk.again", "vocode"
LEAST_S, S_PER_TOKEN = 3.0, 0.8  # of speech: nobody takes longer for a text, numbers included
LOOP_S = 4.0  # of frames that repeat themselves
LOOP_REPEATS = 4
PAUSE_S = 0.3  # between the answers to parts of a long recording
LEAST_EDGE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkItem:
    """Something to say."""

    said: Said
    voice: str
    limit: int  # frames
    seed: int

    @property
    def positions(self) -> int:
        """Of the thinker's states; a talker's prompt is no longer than a few more."""
        assert self.said.states is not None
        return len(self.said.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkPlan:
    """What a family tells of its talker."""

    model: ModelFolder
    open: Callable[[], AbstractContextManager[Any]]
    voices: tuple[str, ...]
    voice: str  # where nobody names one
    frames_per_s: float
    most_frames: int
    policy: PolicySpec
    inner_policy: PolicySpec | None = None
    kv_values: int
    active_values: int
    width: int  # of a state
    vocab: int
    dtype: torch.dtype
    device: str
    weights_bytes: int = 0


def talk_edge(positions: int) -> int:
    """What a prompt is padded to: a power of two, since it costs little beside the frames."""
    return max(LEAST_EDGE, 1 << (positions - 1).bit_length())


def cap_frames(plan: TalkPlan, said: Said) -> int:
    """Frames that a text may take."""
    assert said.ids is not None
    tokens = len(said.ids) - said.prompt_tokens
    return min(plan.most_frames, math.ceil(plan.frames_per_s * (LEAST_S + S_PER_TOKEN * tokens)))


def voice_of(plan: TalkPlan, wanted: str | None) -> str | None:
    """The voice by its name, in whatever letters; None if there is none of that name."""
    known = {name.lower(): name for name in plan.voices}
    return known.get((wanted or plan.voice).lower())


def check_voice(plan: TalkPlan, wanted: str | None) -> None:
    """UserError if the run names a voice that the model has not."""
    if voice_of(plan, wanted) is None:
        hint = f"known: {', '.join(plan.voices)}"
        raise UserError(f"{plan.model.name} has no voice named {wanted!r}", hint=hint)


def items(
    plan: TalkPlan, request: Request, inputs: Inputs, seed: int, voice: str | None
) -> list[TalkItem]:
    """What an answer gives a talker to say; nothing if it is not to be spoken."""
    answer = inputs.one("answer", Answer)
    if answer is None or not answer.speak:
        return []
    name = voice_of(plan, request.voice or voice)
    if name is None:
        known = ", ".join(plan.voices)
        raise RequestError("unknown_voice", f"no voice named {request.voice!r}; known: {known}")
    spoken = [said for said in best(inputs) if said.states is not None and said.text]
    seed = seed if request.seed is None else request.seed
    return [
        TalkItem(
            said=said,
            voice=name,
            limit=cap_frames(plan, said),
            seed=row_seed(seed, request.request_id, TALK, part),
        )
        for part, said in enumerate(spoken)
    ]


def codes_of(end: RowEnd, frames_per_s: float) -> Codes:
    """A row's codes, and how it ended."""
    ids = end.frames[:, 0].tolist()
    circles = loops(ids, LOOP_REPEATS, math.ceil(LOOP_S * frames_per_s))
    return Codes(codes=end.frames, finish_reason="loop" if circles else end.reason)


def trouble_of(codes: Codes) -> str:
    """Why codes are no speech, as an error code; empty if they are."""
    if codes.finish_reason != "stop":
        return "runaway"
    return "" if len(codes.codes) else "no_speech"


_TROUBLES = {
    "runaway": "the talker came to no end within what the text allows, twice",
    "no_speech": "the talker said nothing, twice",
}


def spoken(inputs: Inputs) -> list[Codes]:
    """The codes of all parts; RequestError if the talker went astray both times."""
    first, again = inputs.parts(TALK, Codes), list(inputs.parts(AGAIN, Codes))
    said = [again.pop(0) if trouble_of(codes) and again else codes for codes in first]
    for codes in said:
        if trouble := trouble_of(codes):
            raise RequestError(trouble, _TROUBLES[trouble])
    return said


def talk_specs(plan: TalkPlan, task: Task, voice: str | None) -> list[StageSpec]:
    """The stages `talk` and `talk.again`."""

    def split(request: Request, inputs: Inputs) -> Sequence[TalkItem]:
        return items(plan, request, inputs, task.seed, voice)

    def split_again(request: Request, inputs: Inputs) -> Sequence[TalkItem]:
        first = inputs.parts(TALK, Codes)
        if not any(map(trouble_of, first)):
            return ()
        again = zip(items(plan, request, inputs, task.seed, voice), first, strict=True)
        return [_reseeded(item) for item, codes in again if trouble_of(codes)]

    def row_bytes(edge: int) -> int:
        grown = min(plan.most_frames, math.ceil(plan.frames_per_s * (LEAST_S + edge)))
        cached = (edge + grown) * plan.kv_values
        states = 3 * edge * plan.width + edge * plan.active_values
        return plan.dtype.itemsize * (cached + states) + 12 * plan.vocab

    first = StageSpec(
        name=TALK,
        reads=("answer", "think", "think.again"),
        split=split,
        open=plan.open,
        length=lambda item: item.positions,
        edge=talk_edge,
        row_bytes=row_bytes,
        audio_s=lambda item: (len(item.said.ids) - item.said.prompt_tokens) / 3,
        seed=lambda item: item.seed,
        apart=lambda item: cap_edge(item.limit),
        pool_rows=4,
        policy=plan.policy,
        inner_policy=plan.inner_policy,
        device=plan.device,
        weights_bytes=plan.weights_bytes,
        settings=f"{plan.model} {plan.dtype} voice={voice} seed={task.seed}",
    )
    reads = ("answer", "think", "think.again", TALK)
    return [first, replace(first, name=AGAIN, reads=reads, split=split_again)]


def cap_edge(frames: int) -> int:
    """Room for frames in a cache: powers of two, so that texts of like length run together."""
    return max(64, 1 << (frames - 1).bit_length())


def _reseeded(item: TalkItem) -> TalkItem:
    return replace(item, seed=row_seed(item.seed, "", AGAIN, 0))


# -- sound


def joined(rate_hz: int, parts: Sequence[Waveform], pauses_s: Sequence[float]) -> Waveform:
    """One after the other, each followed by its pause."""
    pieces: list[Tensor] = []
    for part, pause_s in zip(parts, pauses_s, strict=True):
        pieces += part.pieces
        if silence := round(pause_s * rate_hz):
            pieces.append(torch.zeros(silence))
    return Waveform(
        pieces=tuple(pieces),
        rate_hz=rate_hz,
        peak=max(p.peak for p in parts),
        samples=sum(len(p) for p in pieces),
    )


def one_after_the_other(
    request: Request, inputs: Inputs, parts: Sequence[Waveform]
) -> Waveform | None:
    """The `join` of a vocoder: all parts, a short pause between them."""
    if not parts:
        return None
    return joined(parts[0].rate_hz, parts, [*[PAUSE_S] * (len(parts) - 1), 0.0])
