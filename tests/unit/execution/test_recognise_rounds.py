"""What becomes of clips that stay in trouble; the networks are replaced by a script."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from omnicli import models
from omnicli.config import ModelFolder, Task
from omnicli.data import AudioClip, Encoded, Heard, Request, Segment, Thought, Transcript
from omnicli.execution.families.cascade import recognise
from omnicli.execution.shared import Shared
from omnicli.execution.stage import MapStage
from omnicli.observe import Observer
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver
from omnicli.scheduling.handover import stages as handover
from omnicli.scheduling.wave import Member, needed

RATE_HZ, CLIP_S = 16_000, 10.0
CIRCLE = "we are we are " * 12
ENDS = {"runaway": "length", "repetition": "loop"}


class Encoder(MapStage):
    def __init__(self, net, *, full):
        pass

    def run(self, items):
        return [Encoded(embeds=torch.zeros(4, 2), clip=c, valid_frames=4) for c, _ in items]


class Writer(MapStage):
    """Says of every clip what the script says; a text covers its share of the clip."""

    script: ClassVar[dict] = {}

    def __init__(self, net, tokens):
        pass

    def run(self, items):
        return [self._thought(item) for item in items]

    def _thought(self, item):
        fields = self.script.get(item.encoded.clip, {})
        fields = fields.get(item.window, fields)
        text = fields.get("text", "All is well here.")
        end_s = item.clip.start_s + fields.get("share", 1.0) * item.clip.duration_s
        words = Segment(
            start_s=item.clip.start_s, end_s=end_s, text=text, channel=item.clip.channel
        )
        return Thought(
            text=text,
            segments=(words,) if text else (),
            clip=item.encoded.clip,
            task=item.task,
            window=item.window,
            temperature=item.temperature,
            avg_logprob=-0.3,
            compression_ratio=1.0,
            no_speech_prob=0.1,
            finish_reason=ENDS.get(fields.get("problem"), "stop"),
            problem=fields.get("problem", ""),
        )


class Keeper:
    def settle(self, product):
        return product

    def joined(self, member, spec, product):
        pass

    def finished(self, member):
        pass


@pytest.fixture
def transcribed(model_cache, monkeypatch):
    """Run a script over clips of ten seconds: the member after all rounds."""
    found = models.find("asr", None, model_cache)
    monkeypatch.setattr(recognise, "Encode", Encoder)
    monkeypatch.setattr(recognise, "Transcribe", Writer)

    def run(script, channels=("", "", "")):
        monkeypatch.setattr(Writer, "script", script)
        made = recognise.Recogniser(
            ModelFolder(name=found.name, folder=found.folder, digest=found.digest),
            Task(command="transcribe", language="en"),
            device="cpu",
            dtype=torch.float32,
        )
        made.encoder = made.decoder = Shared(lambda: None)
        member = Member(request=Request(request_id="a", audio=Path("a")))
        clips = tuple(
            AudioClip(
                samples=torch.zeros(round(CLIP_S * RATE_HZ)),
                rate_hz=RATE_HZ,
                start_s=i * CLIP_S,
                channel=channel,
            )
            for i, channel in enumerate(channels)
        )
        heard = Heard(
            clips=clips,
            decoded_s=len(clips) * CLIP_S,
            speech_s=len(clips) * CLIP_S,
            source_rate_hz=RATE_HZ,
            source_channels=1,
        )
        member.inputs.put("listen", (heard,))
        specs = tuple(made.specs())
        member.needs = needed(specs, member.inputs)
        driver = Driver(budget=Budget(max_rows=64, max_bytes=1 << 30), observer=Observer(None))
        handover.run([member], specs, driver, Keeper(), handover.Openings(keep=False))
        return member

    return run


def transcript(member):
    assert member.failure is None, member.failure
    return member.inputs.one("transcript", Transcript)


def test_all_is_well(transcribed):
    made = transcript(transcribed({}))
    assert (made.warnings, made.scores["coverage"], made.finish_reason) == ((), 1.0, "stop")


def test_a_clip_that_comes_out_empty_is_told(transcribed):
    made = transcript(transcribed({1: {"text": "", "problem": "uncovered"}}))
    assert made.warnings == ("low_coverage: 1 of 3 clips, first at 10.0 s",)
    assert made.scores["coverage"] == pytest.approx(2 / 3, abs=1e-4)


def test_a_clip_that_ends_early_is_told_unless_the_rest_is_heard(transcribed):
    early = {"share": 0.3, "problem": "uncovered"}
    deaf = transcript(transcribed({1: {"short": early, "full": early, "rest": {"text": ""}}}))
    assert deaf.warnings == ("low_coverage: 1 of 3 clips, first at 10.0 s",)
    made = transcript(transcribed({1: {"short": early, "full": early, "rest": {"text": "More."}}}))
    assert made.warnings == ()
    assert "All is well here. More." in made.text


def test_a_channel_without_words_is_told(transcribed):
    silent = {"text": "", "problem": "uncovered"}
    made = transcript(transcribed({1: silent}, channels=("left", "right", "left")))
    assert made.warnings == ("low_coverage: 0.0 of 10.0 s of speech, right channel",)


@pytest.mark.parametrize("problem", ["runaway", "repetition"])
def test_a_clip_that_never_comes_right_is_left_out(transcribed, problem):
    member = transcribed({1: {"text": CIRCLE, "problem": problem}})
    made = transcript(member)
    assert made.text == "All is well here. All is well here."
    assert f"suspect_text: {problem}" in made.warnings
    assert made.finish_reason == "length"


@pytest.mark.parametrize("problem", ["runaway", "repetition"])
def test_what_may_well_have_been_said_is_kept_and_told(transcribed, problem):
    made = transcript(transcribed({1: {"text": "Sound words.", "problem": problem}}))
    assert "Sound words." in made.text
    assert (made.warnings, made.finish_reason) == ((f"suspect_text: {problem}",), "length")


@pytest.mark.parametrize("problem", ["runaway", "repetition"])
def test_a_recording_that_never_comes_right_has_failed(transcribed, problem):
    bad = {"text": CIRCLE, "problem": problem}
    member = transcribed({0: bad, 2: bad})
    assert (member.failure.code, member.failure.stage) == ("runaway", "transcript")
    assert "2 of 3 clips" in member.failure.message


def test_a_later_round_that_is_sound_saves_the_clip(transcribed):
    bad = {"text": CIRCLE, "problem": "repetition"}
    script = {i: {"short": bad, "full": {"text": "Good."}} for i in range(3)}
    made = transcript(transcribed(script))
    assert (made.text, made.warnings, made.finish_reason) == ("Good. Good. Good.", (), "stop")
