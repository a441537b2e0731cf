"""Faults that tests put into a run, so that isolation can be shown: see `config.Fault`.

raise   the batch raises                     oom     the batch does not fit (`oom>8`: of more rows)
nan     the row's numbers are no numbers     noend   an autoregressive row never ends by itself
hang    the batch never returns              exit    the process is killed
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from omnicli.config import Fault
from omnicli.data import Failure, ItemKey, Product
from omnicli.execution.stage import LoopStage, RowEnd, StepOut


class Faults:
    """The faults of a run; mostly there are none."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)

    def strike(self, stage: str, keys: Sequence[ItemKey]) -> None:
        """What befalls a batch before it runs."""
        for fault in self._of(stage):
            if any(self._meant(fault, keys)):
                _strike(fault, len(keys))

    def rows(self, stage: str, keys: Sequence[ItemKey], kind: str) -> list[bool]:
        """Which rows a fault of that kind is meant for."""
        marks = [self._meant(fault, keys) for fault in self._of(stage) if fault.kind == kind]
        return [any(marked) for marked in zip(*marks, strict=True)] if marks else []

    def bent(
        self, stage: LoopStage[Any, Any], name: str, keys: Sequence[ItemKey], items: Sequence[Any]
    ) -> Any:
        """The stage, its predictions bent for some of the items."""

        def meant(kind: str) -> set[int]:
            marks = self.rows(name, keys, kind)
            return {id(item) for item, mark in zip(items, marks, strict=False) if mark}

        nan, endless = meant("nan"), meant("noend")
        return _Bent(stage, nan, endless) if nan or endless else stage

    def _of(self, stage: str) -> list[Fault]:
        return [fault for fault in self._faults if fnmatchcase(stage, fault.stage)]

    def _meant(self, fault: Fault, keys: Sequence[ItemKey]) -> list[bool]:
        return [fnmatchcase(key.request_id, fault.request_id) for key in keys]


def _strike(fault: Fault, rows: int) -> None:
    if fault.kind == "raise":
        raise RuntimeError("a fault for a test")
    if fault.kind == "oom" and rows > fault.rows:
        raise MemoryError("a fault for a test")
    if fault.kind == "exit":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault.kind == "hang":
        time.sleep(0.05)


def spoilt(product: Product | Failure) -> Product | Failure:
    """A product whose numbers are no numbers."""
    changed: dict[str, Any] = {}
    for field in fields(product):
        value = getattr(product, field.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            changed[field.name] = torch.full_like(value, torch.nan)
        elif isinstance(value, float):
            changed[field.name] = float("nan")
    return replace(product, **changed)


@dataclass(slots=True)
class _BentState:
    inner: Any
    nan: Tensor  # [B] bool
    endless: Tensor  # [B] bool

    def keep(self, rows: Tensor) -> None:
        self.inner.keep(rows)
        self.nan, self.endless = self.nan[rows], self.endless[rows]

    def put(self, rows: Tensor, other: "_BentState") -> None:
        self.inner.put(rows, other.inner)
        self.nan[rows] = other.nan[: len(rows)]
        self.endless[rows] = other.endless[: len(rows)]


class _Bent(LoopStage[Any, _BentState]):
    """A loop stage whose predictions are bent for some of its rows."""

    def __init__(self, inner: LoopStage[Any, Any], nan: set[int], endless: set[int]) -> None:
        """`nan` and `endless` are the `id` of items."""
        self.inner = inner
        self.books, self.end_ids, self.scored = inner.books, inner.end_ids, inner.scored
        self.seen_ids, self.refills = inner.seen_ids, inner.refills
        self._nan, self._endless = nan, endless

    def limit(self, item: Any) -> int:
        return self.inner.limit(item)

    def start(self, items: Sequence[Any]) -> tuple[_BentState, StepOut]:
        state, out = self.inner.start(items)
        bent = _BentState(
            state,
            torch.tensor([id(item) in self._nan for item in items]),
            torch.tensor([id(item) in self._endless for item in items]),
        )
        return bent, self._bend(out, bent)

    def step(self, frames: Tensor, state: _BentState) -> StepOut:
        return self._bend(self.inner.step(frames, state.inner), state)

    def next_book(self, frames: Tensor, last: StepOut, state: _BentState) -> Tensor:
        return self.inner.next_book(frames, last, state.inner)

    def finish(self, item: Any, end: RowEnd, state: _BentState, row: int) -> Product | Failure:
        return self.inner.finish(item, end, state.inner, row)

    def _bend(self, out: StepOut, state: _BentState) -> StepOut:
        logits = out.logits.clone()
        logits[state.nan] = torch.nan
        endless = logits[state.endless].nan_to_num(neginf=-1e4)
        endless[:, sorted(self.end_ids)] = -torch.inf
        logits[state.endless] = endless
        return replace(out, logits=logits)
