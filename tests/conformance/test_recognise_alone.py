"""Recognition: the company in a batch changes nothing, bit for bit on the CPU."""

from pathlib import Path

import pytest
import torch

from omnicli import models
from omnicli.config import ModelFolder, Task
from omnicli.data import AudioClip, Heard, Request
from omnicli.execution.families.cascade.hearing import Encode
from omnicli.execution.families.cascade.recognise import Recogniser
from omnicli.observe import Observer
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver
from omnicli.scheduling.handover import stages as handover
from omnicli.scheduling.wave import Member, needed

RATE_HZ = 16_000


class Keeper:
    """Keeps what was joined, by request and stage."""

    def __init__(self):
        self.made = {}

    def settle(self, product):
        return product

    def joined(self, member, spec, product):
        self.made[member.request.request_id, spec.name] = product

    def finished(self, member):
        assert member.failure is None, member.failure


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def recogniser(request, model_cache):
    found = models.find("asr", None, model_cache)
    made = Recogniser(
        ModelFolder(name=found.name, folder=found.folder, digest=found.digest),
        Task(command="transcribe"),
        device="cpu",
        dtype=getattr(torch, request.param),
    )
    with made.encoder.use(), made.decoder.use():
        yield made


def recognise(recogniser, clips):
    """Through all stages: {(name, stage): product}."""
    specs = tuple(recogniser.specs())
    members = []
    for name, samples in clips.items():
        member = Member(request=Request(request_id=name, audio=Path(name)))
        seconds = len(samples) / RATE_HZ
        heard = Heard(
            clips=(AudioClip(samples=samples, rate_hz=RATE_HZ),),
            decoded_s=seconds,
            speech_s=seconds,
            source_rate_hz=RATE_HZ,
            source_channels=1,
        )
        member.inputs.put("listen", (heard,))
        member.needs = needed(specs, member.inputs)
        members.append(member)
    keeper = Keeper()
    driver = Driver(budget=Budget(max_rows=64, max_bytes=1 << 30), observer=Observer(None))
    handover.run(members, specs, driver, keeper, handover.Openings(keep=False))
    return keeper.made


def test_encoder_frames_are_the_same_alone_and_in_company(recogniser, speech):
    said = speech["site-visit"]
    with recogniser.encoder.use() as net, torch.inference_mode():
        stage = Encode(net, full=False)
        for seconds in (0.3, 1.0, 2.7, 9.1):
            size = round(seconds * RATE_HZ)
            cut = [said[i * 9000 : i * 9000 + size] for i in range(7)]
            clips = [AudioClip(samples=samples, rate_hz=RATE_HZ) for samples in cut]
            together = stage.run(list(enumerate(clips)))
            for i in (0, 3, 6):
                [alone] = stage.run([(i, clips[i])])
                assert torch.equal(alone.embeds, together[i].embeds), f"{seconds} s"


def test_texts_and_scores_are_the_same_alone_and_in_company(recogniser, speech):
    """Scores are compared exactly: they would show a single other bit in the logits.

    Noise is among the clips, so that the fallback rounds run too, sampling included.
    """
    clips = {name: samples[: RATE_HZ * 9] for name, samples in speech.items()}
    noise = torch.randn(RATE_HZ * 4, generator=torch.Generator().manual_seed(1))
    clips["noise"] = 0.1 * noise
    together = recognise(recogniser, clips)
    for name in ("dentist-moved", "yes-please", "noise", "train-question"):
        assert (
            recognise(recogniser, {name: clips[name]})[name, "transcript"]
            == (together[name, "transcript"])
        )
