"""The stage `listen`: what it finds in speech and in other sounds, what it does with a batch."""

import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchaudio.functional import resample

from omnicli.config import ModelFolder, Task
from omnicli.data import Failure, Heard, Inputs, Recording, Request
from omnicli.errors import RequestError
from omnicli.execution.listen import (
    Listen,
    claim_warning,
    listen_spec,
    minutes,
)
from omnicli.execution.nets.silero import load_vad
from omnicli.execution.stage import Settings
from omnicli.operators.speech_regions import RATE_HZ

AUDIO = Path(__file__).parents[4] / "shared" / "audio"
FILES = [*sorted(AUDIO.glob("ljspeech/*.wav")), AUDIO / "jfk.flac"]
needs_recordings = pytest.mark.skipif(not AUDIO.is_dir(), reason="no shared recordings")
PAD_S = 0.3
TIMES_S = torch.arange(10 * RATE_HZ) / RATE_HZ


@pytest.fixture(scope="module")
def net(model_cache):
    return load_vad(model_cache / "vad" / "silero-vad")


@pytest.fixture(scope="module")
def speech():
    """The shared recordings at 16 kHz, by name."""
    found = {}
    for path in FILES:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
        found[path.stem] = resample(torch.from_numpy(samples).mean(1), rate_hz, RATE_HZ)
    return found


def recording(*tracks, channels=("",), warnings=()):
    return Recording(
        tracks=tracks,
        channels=channels,
        rate_hz=RATE_HZ,
        duration_s=len(tracks[0]) / RATE_HZ,
        source_rate_hz=RATE_HZ,
        source_channels=len(tracks),
        warnings=warnings,
    )


def request(name, **more):
    return Request(request_id=name, audio=Path(name), **more)


def listen(net, sounds):
    """Listen to sounds by name: tensors, recordings, or errors."""

    def decode(request):
        sound = sounds[request.audio.name]
        if isinstance(sound, Exception):
            raise sound
        return recording(sound) if isinstance(sound, torch.Tensor) else sound

    results = Listen(net, decode).run([request(name) for name in sounds])
    return dict(zip(sounds, results, strict=True))


def hear(net, sound):
    return listen(net, {"it": sound})["it"]


def silence(duration_s):
    return torch.zeros(round(duration_s * RATE_HZ))


def spans(heard):
    return [(clip.start_s, clip.start_s + clip.duration_s) for clip in heard.clips]


def level(samples, peak_db):
    return samples / samples.abs().max() * 10 ** (peak_db / 20)


def rms_level(samples, rms_db):
    return samples / samples.square().mean().sqrt() * 10 ** (rms_db / 20)


def spoken(samples, share=0.05):
    """From the first to the last 10 ms that reach a share of the peak, in samples."""
    peaks = samples.unfold(0, 160, 160).abs().amax(1)
    loud = (peaks > peaks.max() * share).nonzero()[:, 0]
    return int(loud[0]) * 160, int(loud[-1]) * 160 + 160


# What is speech


@needs_recordings
def test_each_short_recording_is_one_clip_around_its_speech(net, speech):
    for name, heard in listen(net, speech).items():
        ((start_s, end_s),) = spans(heard)
        first, last = (at / RATE_HZ for at in spoken(speech[name]))
        assert max(0, first - 2 * PAD_S) <= start_s <= first
        assert last - 0.1 <= end_s <= heard.decoded_s  # one recording ends in a breath
        assert 0.7 * (last - first) < heard.speech_s <= heard.decoded_s


@needs_recordings
def test_speech_between_silences_is_found_in_its_place(net, speech):
    names, at, parts, places = list(speech)[:5], 0.0, [], []
    for name in names:
        first, last = spoken(speech[name])
        words = speech[name][first:last]
        parts += [silence(4), words]
        places.append((at + 4, at + 4 + len(words) / RATE_HZ))
        at = places[-1][1]
    heard = hear(net, torch.cat([*parts, silence(6)]))
    assert len(heard.clips) == len(places)
    for (start_s, end_s), (first, last) in zip(spans(heard), places, strict=True):
        assert first - 2 * PAD_S <= start_s <= first
        assert last <= end_s <= last + 2 * PAD_S
    assert heard.speech_s < sum(last - first for first, last in places) + 1


@needs_recordings
def test_speech_that_starts_at_once_keeps_its_first_word(net, speech):
    cut = {name: x[spoken(x, 0.1)[0] :] for name, x in speech.items()}
    assert all(spans(heard)[0][0] == 0 for heard in listen(net, cut).values())


@needs_recordings
def test_a_quiet_speaker_is_heard(net, speech):
    noise = torch.randn(60 * RATE_HZ, generator=torch.Generator().manual_seed(0)) * 1e-4
    quiet = {n: rms_level(x, -35) + noise[: len(x)] for n, x in speech.items()}
    faint = {n: level(x, -50) for n, x in speech.items()}
    for heard in (listen(net, quiet), listen(net, faint)):
        for name, clear in listen(net, speech).items():
            assert heard[name].speech_s == pytest.approx(clear.speech_s, rel=0.15, abs=0.15)


@needs_recordings
def test_an_offset_of_the_microphone_hides_nobody(net, speech):
    jfk = speech["jfk"]
    plain, shifted = hear(net, jfk), hear(net, level(jfk, -12) + 0.5)
    assert shifted.speech_s == pytest.approx(plain.speech_s, rel=0.05)


def short_words(samples):
    """Stretches of 0.15 to 0.25 s between dips of the loudness, as in 'to' or 'press'."""
    loud = samples.unfold(0, 320, 160).square().mean(1).sqrt()
    least = loud.max() * 0.06
    edges = torch.diff((loud > least).int()).nonzero()[:, 0].tolist()
    words = [(a, b) for a, b in pairwise(edges) if 15 <= b - a <= 25 and loud[a + 1] > least]
    return [samples[a * 160 : b * 160 + 320] for a, b in words]


@needs_recordings
def test_words_of_a_fifth_of_a_second_are_heard(net, speech):
    words = [level(word, -6) for samples in speech.values() for word in short_words(samples)][:40]
    lines = {f"{i}": torch.cat([silence(1.5), word, silence(1.5)]) for i, word in enumerate(words)}
    found = [name for name, heard in listen(net, lines).items() if heard.clips]
    assert len(words) == 40
    assert len(found) >= 36
    several = hear(net, torch.cat([lines[name] for name in found[:3]]))
    ((start_s, end_s),) = spans(several)
    assert start_s < 1.5 and end_s > several.decoded_s - 1.5


def tone(hz):
    return torch.sin(2 * math.pi * hz * TIMES_S)


def noise(colour):
    white = torch.randn(len(TIMES_S), generator=torch.Generator().manual_seed(0))
    spectrum = torch.fft.rfft(white)
    shaped = torch.fft.irfft(spectrum / torch.arange(1, len(spectrum) + 1) ** (colour / 2))
    return shaped / shaped.std() / 4


SOUNDS = {
    "zeros": silence(5),
    "constant": torch.full((5 * RATE_HZ,), 0.5),
    "one sample": torch.zeros(1),
    "no samples": torch.zeros(0),
    "white": noise(0),
    "pink": noise(1),
    "brown": noise(2),
    "tone": tone(440),
    "hum": tone(50) + 0.3 * tone(150),
    "chord": (tone(261.6) + tone(329.6) + tone(392.0)) / 3,
    "chords": (tone(220.0) + tone(277.2) + tone(329.6)) / 3 * (tone(1) > 0),
    "sweep": torch.sin(2 * math.pi * (100 * TIMES_S + 195 * TIMES_S**2)),
    "clicks": (torch.rand(10 * RATE_HZ, generator=torch.Generator().manual_seed(0)) < 2e-4) * 1.0,
}


@pytest.mark.parametrize("peak_db", [0, -20, -40, -60, -80])
def test_what_is_no_speech_gives_no_clips(net, peak_db):
    heard = listen(net, {name: x * 10 ** (peak_db / 20) for name, x in SOUNDS.items()})
    assert {name: h.speech_s for name, h in heard.items()} == dict.fromkeys(SOUNDS, 0)
    assert all(h.clips == () for h in heard.values())


@needs_recordings
def test_a_long_recording_is_cut_at_pauses(net, speech):
    long = torch.cat(list(speech.values()))
    heard = hear(net, long)
    assert all(2 < clip.duration_s <= 30 for clip in heard.clips)
    # Where one clip goes over into the next it is quiet: 60 ms there against the whole.
    for clip in heard.clips[1:]:
        at = round(clip.start_s * RATE_HZ)
        assert long[at - 480 : at + 480].square().mean() < 0.1 * long.square().mean()
    covered_s = sum(clip.duration_s for clip in heard.clips)
    assert covered_s > 0.9 * heard.decoded_s


# What is done with a batch


@needs_recordings
def test_the_company_in_a_batch_changes_nothing(net, speech):
    chosen = dict(list(speech.items())[:6])
    mixed = {
        **chosen,
        "noise": noise(1),
        "none": silence(0),
        "all": torch.cat(list(chosen.values())),
    }
    together = listen(net, mixed)
    for name, sound in mixed.items():
        alone = hear(net, sound)
        assert spans(alone) == spans(together[name])
        assert alone.speech_s == together[name].speech_s
        for a, b in zip(alone.clips, together[name].clips, strict=True):
            assert torch.equal(a.samples, b.samples)


@needs_recordings
def test_clips_are_views_of_what_was_recording(net, speech):
    (clip,) = hear(net, speech["jfk"]).clips
    inside = clip.samples.data_ptr() - speech["jfk"].data_ptr()
    assert inside == round(clip.start_s * RATE_HZ) * 4
    assert torch.equal(clip.samples, speech["jfk"][inside // 4 :][: len(clip.samples)])


@needs_recordings
def test_split_channels_are_two_tracks_merged_by_time(net, speech):
    a, b = speech["LJ001-0002"], speech["LJ001-0001"]
    left = torch.cat([a, silence(8), a, torch.zeros(len(b))])
    right = torch.cat([torch.zeros(len(a) + 4 * RATE_HZ), b, silence(4), torch.zeros(len(a))])
    length = max(len(left), len(right))
    left, right = (torch.cat([x, torch.zeros(length - len(x))]) for x in (left, right))
    heard = hear(net, recording(left, right, channels=("left", "right")))
    assert [clip.channel for clip in heard.clips] == ["left", "right", "left"]
    assert [c.start_s for c in heard.clips] == sorted(c.start_s for c in heard.clips)
    alone = [hear(net, recording(x)).speech_s for x in (left, right)]
    assert heard.speech_s == pytest.approx(sum(alone))


def test_one_bad_file_harms_only_itself(net):
    error = RequestError("not_audio", "a text file")
    bad, good = listen(net, {"bad": error, "good": silence(1)}).values()
    assert bad == Failure(code="not_audio", stage="listen", message="a text file")
    assert isinstance(good, Heard)


def test_what_else_goes_wrong_is_not_hidden(net):
    with pytest.raises(ZeroDivisionError):
        listen(net, {"bug": ZeroDivisionError(), "good": silence(1)})


def test_the_same_part_of_a_file_is_decoded_once(net):
    seen, lock = [], threading.Lock()

    def decode(request):
        with lock:
            seen.append(request)
        return recording(silence(1), warnings=("odd",))

    part = request("a", offset_s=1.0, duration_s=2.0)
    items = [
        request("a"),
        replace(request("a"), request_id="again"),
        request("a", duration_s=5.0),
        part,
        replace(part, request_id="too"),
        replace(part, duration_s=3.0),
        request("b"),
    ]
    results = Listen(net, decode, workers=3).run(items)
    assert len(seen) == 4
    assert sorted(r.duration_s for r in seen if r.offset_s) == [2, 3]
    assert [r.warnings for r in results].count(("odd",)) == 6
    assert results[2].warnings == ("odd", "duration_claim: 5!=1.000")


def test_files_are_decoded_at_the_same_time(net):
    both = threading.Barrier(2, timeout=20)

    def decode(request):
        both.wait()
        return recording(silence(1))

    assert len(Listen(net, decode, workers=2).run([request("a"), request("b")])) == 2


@pytest.mark.parametrize(
    ("claimed_s", "decoded_s", "offset_s", "warns"),
    [
        (1.0, 60.0, None, True),
        (9999.0, 1.0, None, True),
        (60.0, 62.0, None, False),
        (60.0, 64.0, None, True),
        (1.0, 1.09, None, False),
        (None, 1.0, None, False),
        (1.0, 60.0, 3.0, False),
    ],
)
def test_a_claimed_duration_is_checked(claimed_s, decoded_s, offset_s, warns):
    asked = request("a", duration_s=claimed_s, offset_s=offset_s)
    assert bool(claim_warning(asked, decoded_s)) is warns


def test_facts_about_the_source_are_kept(net):
    sound = replace(recording(silence(2)), source_rate_hz=8000, source_channels=2, warnings=("w",))
    heard = hear(net, sound)
    assert heard == Heard(
        clips=(), decoded_s=2, speech_s=0, source_rate_hz=8000, source_channels=2, warnings=("w",)
    )


def test_the_stage_opens_and_runs(model_cache):
    weights = ModelFolder(name="vad", folder=model_cache / "vad" / "silero-vad", digest="0a1b")
    spec = listen_spec(
        Settings(
            task=Task(command="transcribe", channels="split"),
            folders={"vad": weights},
            device="cpu",
            dtype=torch.float32,
            decode=lambda request: recording(silence(1)),
            claimed_s=lambda request: request.duration_s,
        )
    )
    item, unknown = request("a", duration_s=150.0), request("b")
    assert spec.split(item, Inputs()) == (item,)
    assert spec.split(Request(request_id="c", speech_text="Hello."), Inputs()) == ()
    assert (spec.length(item), spec.length(unknown)) == (4, 1)
    assert (spec.audio_s(item), spec.audio_s(unknown)) == (150, 0)
    assert spec.row_bytes(spec.edge(4)) >= 150 * RATE_HZ * 4
    assert "0a1b" in spec.settings and "split" in spec.settings
    with spec.open() as stage:
        assert isinstance(stage.run([item] * 5)[4], Heard)


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_lengths_are_minutes_up_to_a_power_of_two(duration_s):
    length = minutes(duration_s)
    assert length & (length - 1) == 0
    assert duration_s <= 60 * length
    assert length == 1 or 60 * length < 2 * (duration_s + 60)
