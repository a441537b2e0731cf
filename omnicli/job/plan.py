"""What a run would do, from what lines and headers claim (`--dry-run`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from omnicli.config import RunConfig
from omnicli.data import Inputs, ItemKey, Recording, Request
from omnicli.execution.dtypes import device_of
from omnicli.execution.stage import Family, StageSpec
from omnicli.io.store import MAX_CRASHES, RunStore
from omnicli.job.inputs import (
    budget_of,
    claimed_s,
    fingerprint,
    load_family,
    opened_store,
    origins,
    resumed,
    take_in,
    waves,
)
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import measured, plan
from omnicli.scheduling.wave import needed


@dataclass(slots=True, kw_only=True)
class StagePlan:
    """What one stage would run; lengths are forecast from claimed seconds."""

    stage: str
    items: int = 0
    batches: int = 0
    valid: int = 0
    padded: int = 0
    peak_bytes: int = 0  # activations and caches of the largest batch

    def add(self, spec: StageSpec, seconds: Sequence[float], budget: Budget) -> None:
        """One wave's recordings."""
        assert spec.forecast is not None
        lengths = [n for s in seconds for n in spec.forecast(s)]
        tickets = [measured(spec, ItemKey(str(i)), n, 0.0) for i, n in enumerate(lengths)]
        for batch in plan(spec, tickets, budget):
            self.items += len(batch.tickets)
            self.batches += 1
            self.valid += batch.valid
            self.padded += batch.padded
            self.peak_bytes = max(self.peak_bytes, batch.row_bytes)

    def __str__(self) -> str:
        padding = 1 - self.valid / self.padded if self.padded else 0.0
        mib = self.peak_bytes / (1 << 20)
        return f"{self.stage:<12} {self.items:>9} {self.batches:>9} {padding:>9.1%} {mib:>9.0f} MiB"


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a run would do."""

    requests: int = 0  # in the input
    due: int = 0
    replaced: int = 0  # of them: results that other settings made
    audio_s: float = 0.0
    unknown: int = 0  # recordings of which nobody says how long they are
    waves: int = 0
    weights_bytes: int = 0
    stages: list[StagePlan] = field(default_factory=list)

    def __str__(self) -> str:
        unknown = f", {self.unknown} of unknown length" if self.unknown else ""
        replaced = f" ({self.replaced} replace results of other settings)" if self.replaced else ""
        waves = f"{self.waves} wave{'' if self.waves == 1 else 's'}"
        head = (
            f"{self.requests} items, {self.due} due{replaced}, "
            f"{lasting(self.audio_s)} of audio{unknown}"
            f"\n{waves}, {self.weights_bytes / (1 << 20):.0f} MiB of weights\n"
            f"\n{'stage':<12} {'items':>9} {'batches':>9} {'padding':>9} {'a batch':>9}"
        )
        return "\n".join([head, *map(str, self.stages)])


def lasting(seconds: float) -> str:
    """A length for people: seconds below two minutes, minutes below two hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def plan_job(config: RunConfig) -> Plan:
    """What `run_job` would do. Leaves the folder as it was."""
    device = device_of(config.models.device)
    there = (config.output_dir / ".omni").is_dir()
    with TemporaryDirectory() as elsewhere:
        place = config.output_dir if there else Path(elsewhere)
        with opened_store(config, place) as store:
            take_in(config, store, keep=False)
            family = load_family(config, device, _undecoded)
            made = _planned(config, store, family)
            store.rollback()
            return made


def _undecoded(request: Request) -> Recording:
    raise AssertionError("a plan decodes nothing")


def _planned(config: RunConfig, store: RunStore, family: Family) -> Plan:
    forecast = [spec for spec in family.stages if spec.forecast is not None]
    made = Plan(
        requests=sum(store.counts().values()),
        weights_bytes=family.weights_bytes,
        stages=[StagePlan(stage=spec.name) for spec in forecast],
    )
    budget = budget_of(config)
    made_from = origins(family)
    versions = made_from[family.stages[-1].name].versions
    due = store.due(fingerprint(config, family), versions, config.resume)
    recorded = store.has_products()
    everything = needed(family.stages, Inputs())
    for wave in waves(due, config.limits):
        claims = [(one, claimed_s(one.request)) for one in wave if one.crashes < MAX_CRASHES]
        made.waves += 1
        made.due += len(wave)
        made.audio_s += sum(claim or 0.0 for _, claim in claims)
        made.unknown += sum(one.request.audio is not None and not c for one, c in claims)
        seconds: dict[str, list[float]] = {spec.name: [] for spec in forecast}
        for one, claim in claims:
            inputs = resumed(store, family, made_from, one) if recorded else None
            needs = needed(family.stages, inputs) if inputs is not None else everything
            for name in needs & seconds.keys() if claim else ():
                seconds[name].append(claim or 0.0)
        for stage, spec in zip(made.stages, forecast, strict=True):
            stage.add(spec, seconds[spec.name], budget)
    made.replaced = store.replaced
    return made
