"""What a stage is: the seam between scheduling (who runs together) and execution (what runs).

A family lists its stages as `StageSpec`s. They name what they read, so they are no chain by
position, and a retry is simply one more stage that splits off the parts in trouble.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from omnicli.config import ModelFolder, PolicySpec, Task
from omnicli.data import Failure, Inputs, Product, Recording, Request

In = TypeVar("In")
State = TypeVar("State", bound="LoopState")


class MapStage(ABC, Generic[In]):
    """A stage that answers in one go."""

    @abstractmethod
    def run(self, items: Sequence[In]) -> Sequence[Product | Failure]:
        """One product (or that item's own failure) per item, in order."""


class LoopState(Protocol):
    """What a loop stage carries from step to step: caches and whatever belongs to a row."""

    def keep(self, rows: Tensor) -> None:
        """Keep these rows [B'] int64, in this order; the others have left."""


class RefillState(LoopState, Protocol):
    """A state that takes rows in; for stages with `LoopStage.refills`."""

    def put(self, rows: Tensor, other: Any) -> None:
        """Overwrite rows [N] int64 with the first N of another state of the same stage and edge."""


@dataclass(frozen=True, slots=True)
class StepOut:
    """One step's prediction for every row."""

    logits: Tensor  # [B, V] float32, already filtered: policies never see a model
    hidden: Tensor | None = None  # [B, D], for stages with several codebooks


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnd:
    """How a row ended."""

    frames: Tensor  # [T, K] int64, the end token not among them
    reason: str  # "stop" (an end token) or "length" (the row's limit)
    logprob: float  # sum over the chosen tokens, the end token among them; 0 if not scored
    steps: int  # choices made


class LoopStage(ABC, Generic[In, State]):
    """A stage that grows its answers frame by frame: it owns the caches, the scheduler the loop."""

    books = 1  # K codebooks per frame; text has one
    end_ids: frozenset[int] = frozenset()
    seen_ids: frozenset[int] = frozenset()  # count as said from the start, for a penalty
    refills = False  # whether rows that have ended may be given to other items
    scored = False  # whether `RowEnd.logprob` is wanted: it costs a pass over the logits

    @abstractmethod
    def limit(self, item: In) -> int:
        """The most frames that this item may grow: bounded by its own input."""

    @abstractmethod
    def start(self, items: Sequence[In]) -> tuple[State, StepOut]:
        """Prefill: a state with room for each item's limit, and the first prediction."""

    @abstractmethod
    def step(self, frames: Tensor, state: State) -> StepOut:
        """Take the chosen frames [B, K] int64 in and predict the next ones."""

    def next_book(self, frames: Tensor, last: StepOut, state: State) -> Tensor:
        """Nested dual-AR: logits [B, V] of codebook k, given this frame's first k codes [B, k]."""
        raise AssertionError(f"{type(self).__name__} has one codebook")

    @abstractmethod
    def finish(self, item: In, end: RowEnd, state: State, row: int) -> Product | Failure:
        """Make the product of a row that ended; `row` is its place in `state`."""


Stage = MapStage[Any] | LoopStage[Any, Any]


def no_parts(request: Request, inputs: Inputs) -> Sequence[Any]:
    """The split of a stage that only joins."""
    return ()


def one_unit(item: Any) -> int:
    """The length of items that all cost the same."""
    return 1


def itself(length: int) -> int:
    """The edge of a stage that pads nothing."""
    return length


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage before it is opened: how its items are made, measured and joined again.

    `split` turns what `reads` names into items, none if the request has no business here.
    `edge` rounds a length up to what it will be padded to, from that length alone: rows of one
    batch share an edge, so on a CPU the company in a batch changes no bit.
    """

    name: str
    reads: tuple[str, ...] = ()
    split: Callable[[Request, Inputs], Sequence[Any]] = no_parts
    join: Callable[[Request, Inputs, Sequence[Any]], Product | Failure | None] | None = None
    open: Callable[[], AbstractContextManager[Stage]] | None = None  # None: `join` does it all
    length: Callable[[Any], int] = one_unit
    edge: Callable[[int], int] = itself
    row_bytes: Callable[[int], int] = one_unit
    audio_s: Callable[[Any], float] | None = None  # seconds of sound in an item, for progress
    forecast: Callable[[float], Sequence[int]] | None = None  # seconds heard -> likely lengths
    seed: Callable[[Any], int] | None = None
    max_rows: int = 64
    fill_rows: int = 4  # a batch is filled to a multiple of this; 1 where the stage regroups rows
    policy: PolicySpec = field(default_factory=PolicySpec)
    inner_policy: PolicySpec | None = None  # of the codes after a frame's first; None: the same
    pool_rows: int = 1  # a loop that refills takes so many batches' rows as one
    apart: Callable[[Any], int] | None = None  # items with other numbers never share a batch
    device: str | None = None  # where it computes; None: where the family does
    weights_bytes: int = 0  # that it loads when it is opened; 0: not told
    record: type[Product] | None = None  # plain data: kept in the run log, not made again
    settings: str = ""  # whatever else decides the product; part of its fingerprint
    version: int = 1  # of the code; grows when the same settings give another product


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a family is built from."""

    task: Task
    folders: Mapping[str, ModelFolder]  # role -> checkpoint: asr, llm, voice, vad, or model
    device: str
    dtype: torch.dtype
    decode: Callable[[Request], Recording]  # raises RequestError
    claimed_s: Callable[[Request], float | None]  # what a line or a header says, unchecked
    workers: int = 2
    voice: str | None = None  # a speaker of the model; lines may name others
    places: Mapping[str, tuple[str, torch.dtype]] = field(default_factory=dict)  # by stage

    def place(self, stage: str) -> tuple[str, torch.dtype]:
        """Where a stage computes, and in what."""
        return self.places.get(stage, (self.device, self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model, or several that work together, cut into stages."""

    name: str
    stages: tuple[StageSpec, ...]
    models: dict[str, str]  # role -> name@hash, for the results
    device: str
    weights_bytes: int  # of all stages together
