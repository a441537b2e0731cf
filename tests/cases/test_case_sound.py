"""Containers, codecs, headers, signal."""

import numpy as np
import pytest
from case_run import check, loads, put_base, settled
from case_sounds import (
    RATE_HZ,
    ffmpeg,
    noise,
    piped,
    rifx,
    silence,
    sox,
    speech,
    wav,
    wav_with_codec,
    with_chunk,
)

BOTH_SIDES = ("excuse me", "yes please")


def float_wav(path, samples, place, value):
    spoilt = samples.astype(np.float32)
    spoilt[place] = value
    return wav(path, spoilt, subtype="FLOAT")


def make_pipes(folder, ok_wav):
    piped(ok_wav, folder / "pipe.flac", "-f", "flac")
    piped(ok_wav, folder / "pipe.wav", "-f", "wav")
    piped(ok_wav, folder / "pipe.au", "-f", "au")
    piped(ok_wav, folder / "pipe.caf", "-f", "caf")


def make_cut(folder):
    long = wav(folder / "whole.wav", speech("train-question"))
    raw = long.read_bytes()
    (folder / "third.wav").write_bytes(raw[: len(raw) // 3])
    (folder / "odd-byte.wav").write_bytes(raw[: len(raw) // 2 | 1])
    packed = wav(folder / "whole.flac", speech("train-question")).read_bytes()
    (folder / "third.flac").write_bytes(packed[: len(packed) // 3])
    mp3 = ffmpeg(long, folder / "whole.mp3").read_bytes()
    (folder / "in-a-frame.mp3").write_bytes(mp3[: len(mp3) // 2 + 7])
    m4a = ffmpeg(long, folder / "whole.m4a", "-movflags", "+faststart").read_bytes()
    (folder / "third.m4a").write_bytes(m4a[: len(m4a) // 2])
    for path in folder.glob("whole.*"):
        path.unlink()


def make_glued(folder, ok_wav):
    for name, options in (("mp3", ()), ("ogg", ("-c:a", "libvorbis")), ("flac", ())):
        one = ffmpeg(ok_wav, folder / f"one.{name}", *options).read_bytes()
        (folder / f"twice.{name}").write_bytes(one + one)
        (folder / f"one.{name}").unlink()
    (folder / "twice.wav").write_bytes(ok_wav.read_bytes() * 2)


def make_liars(folder, ok_wav):
    mp3 = ffmpeg(ok_wav, folder / "a.mp3")
    mp3.rename(folder / "mp3.wav")
    (folder / "wav.mp3").write_bytes(ok_wav.read_bytes())
    m4a = ffmpeg(ok_wav, folder / "a.m4a")
    (folder / "m4a.wav").write_bytes(m4a.read_bytes())
    m4a.rename(folder / "m4a.mp3")
    ffmpeg(ok_wav, folder / "a.opus").rename(folder / "opus.flac")
    (folder / "no-suffix").write_bytes(ok_wav.read_bytes())


def make_telephone(folder, ok_wav):
    for name in ("u-law", "a-law", "gsm-full-rate", "ima-adpcm", "ms-adpcm"):
        sox(ok_wav, folder / f"{name}.wav", "-r", "8000", "-e", name)
    sox(ok_wav, folder / "u-law.au", "-r", "8000", "-e", "u-law")
    ffmpeg(ok_wav, folder / "g722.wav", "-c:a", "g722")
    ffmpeg(ok_wav, folder / "narrow.gsm", "-ar", "8000")


def make_levels(folder, ok):
    float_wav(folder / "nan.wav", ok, 8000, np.nan)
    float_wav(folder / "inf.wav", ok, 8000, np.inf)
    float_wav(folder / "minus-inf.wav", ok, slice(8000, 8100), -np.inf)
    wav(folder / "zeros.wav", silence(5))
    wav(folder / "constant.wav", silence(5) + 0.5)
    wav(folder / "6.002.wav", np.pad(noise(6.0, -70), (0, 32)))
    wav(folder / "one-sample.wav", silence(1)[:1])
    wav(folder / "10ms.wav", noise(0.01, -20))
    sox(wav(folder / "16-bit.wav", ok), folder / "192k.wav", "-r", "192000", "-b", "24")


def make_channels(folder):
    first, second = speech("train-question", 0, 1.0), speech("yes-please")
    gap = silence(0.3)
    left = np.concatenate([first, gap, silence(len(second) / RATE_HZ)])
    right = np.concatenate([silence(len(first) / RATE_HZ), gap, second])
    wav(folder / "two-sides.wav", np.stack([left, right], 1))
    wav(folder / "identical.wav", np.stack([second, second], 1))
    wav(folder / "inverted.wav", np.stack([second, -second], 1))
    wav(folder / "one-silent.wav", np.stack([second, 0 * second], 1))
    six = np.zeros((len(second), 6))
    six[:, 2] = second
    wav(folder / "six.wav", six)


def make_chunks(folder, ok_wav, ok):
    with_chunk(ok_wav, folder / "list.wav", b"LIST", bytes(393_164))
    with_chunk(ok_wav, folder / "bext.wav", b"bext", bytes(70_001))
    with_chunk(ok_wav, folder / "id3.wav", b"id3 ", b"\xff" * 999)
    rifx(folder / "rifx.wav", ok)
    for name in ("rf64", "w64", "aiff", "caf", "voc"):
        options = ("-rf64", "always") if name == "rf64" else ()
        suffix = "wav" if name == "rf64" else name
        ffmpeg(ok_wav, folder / f"{name}.{suffix}", *options)


def make_mp3s(folder, ok_wav):
    plain = ffmpeg(ok_wav, folder / "no-xing.mp3", "-write_xing", "0", "-id3v2_version", "0")
    junk = np.random.default_rng(3).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    (folder / "junk-tail.mp3").write_bytes(plain.read_bytes() + junk)
    (folder / "junk-head.mp3").write_bytes(bytes(3000) + plain.read_bytes())
    (folder / "text-tail.mp3").write_bytes(plain.read_bytes() + b"TAG" + b"x" * 9000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base, ok):
    """Odd recordings that can be heard, beside the base set."""
    root = put_base(base, tmp_path_factory.mktemp("sound") / "in")
    odd = root / "odd"
    ok_wav = wav(odd / "ok.wav", ok)
    make_pipes(odd, ok_wav)
    make_cut(odd)
    make_glued(odd, ok_wav)
    make_liars(odd, ok_wav)
    make_telephone(odd, ok_wav)
    make_levels(odd, ok)
    make_channels(odd)
    make_chunks(odd, ok_wav, ok)
    make_mp3s(odd, ok_wav)
    return root


@pytest.fixture(scope="module")
def heard(omni, solo, folder):
    """All of them in one run, with a summary on stdout."""
    count = sum(path.is_file() for path in folder.rglob("*"))
    args = ("transcribe", folder, folder / "odd" / "no-suffix")
    return check(omni, solo, *args, "-o", folder.parent / "out", "--json", count=count, code=0)


def is_ok(case, name, seconds=2.0, within=0.06):
    line = case[f"odd/{name}"]
    assert line["status"] == "ok", line
    assert case.text(f"odd/{name}") == "yes please"
    assert line["duration"] == pytest.approx(seconds, abs=within)
    return case.warned(f"odd/{name}")


@pytest.mark.case("IN-01")
@pytest.mark.parametrize("name", ["pipe.flac", "pipe.wav", "pipe.au", "pipe.caf"])
def test_what_was_written_into_a_pipe_is_as_long_as_it_is(heard, name):
    assert is_ok(heard, name, within=0.001) == set()
    total_s = sum(line["duration"] for line in heard.lines.values())
    told = loads(heard.ran.out)
    assert told["audio_s"] == pytest.approx(total_s, abs=1)


@pytest.mark.case("IN-01")
def test_no_plan_believes_an_endless_header(omni, folder, tmp_path):
    ran = omni(
        "transcribe", folder / "odd" / "pipe.flac", "-o", tmp_path / "o", "--dry-run", "--json"
    )
    assert ran.code == 0, ran.err
    assert loads(ran.out)["audio_s"] < 60


@pytest.mark.case("IN-03")
@pytest.mark.parametrize(
    ("name", "seconds"),
    [("third.wav", 1.6), ("odd-byte.wav", 2.4), ("third.flac", None), ("third.m4a", None)],
)
def test_a_recording_that_was_cut_short_says_so(heard, name, seconds):
    line = heard[f"odd/{name}"]
    assert (line["status"], heard.text(f"odd/{name}")[:9]) == ("ok", "excuse me")
    assert "truncated_input" in heard.warned(f"odd/{name}")
    if seconds:
        assert line["duration"] == pytest.approx(seconds, abs=0.05)


@pytest.mark.case("IN-03")
def test_an_mp3_cut_in_a_frame_is_heard_so_far(heard):
    line = heard["odd/in-a-frame.mp3"]
    assert line["status"] == "ok"
    assert heard.text("odd/in-a-frame.mp3").startswith("excuse me")
    assert heard.warned("odd/in-a-frame.mp3") & {"truncated_input", "decode_errors"}


@pytest.mark.case("IN-05")
@pytest.mark.parametrize("name", ["twice.mp3", "twice.ogg", "twice.flac", "twice.wav"])
def test_what_was_glued_together_is_heard_whole_or_reported(heard, name):
    line = heard[f"odd/{name}"]
    assert line["status"] == "ok"
    if line["duration"] > 3.9:
        assert heard.text(f"odd/{name}") == "yes please yes please"
        assert line["duration"] == pytest.approx(4, abs=0.2)
    else:
        trailing = [w for w in line["warnings"] if w.startswith("trailing_data")]
        assert any(c.isdigit() for c in trailing[0])


@pytest.mark.case("IN-07")
@pytest.mark.parametrize(
    "name", ["mp3.wav", "wav.mp3", "m4a.mp3", "m4a.wav", "opus.flac", "no-suffix"]
)
def test_content_counts_and_not_the_name(heard, name):
    assert is_ok(heard, name, within=0.15) == set()


@pytest.mark.case("IN-09")
@pytest.mark.parametrize(
    ("name", "rate_hz"),
    [
        ("u-law.wav", 8000),
        ("a-law.wav", 8000),
        ("gsm-full-rate.wav", 8000),
        ("ima-adpcm.wav", 8000),
        ("ms-adpcm.wav", 8000),
        ("u-law.au", 8000),
        ("g722.wav", 16_000),
        ("narrow.gsm", 8000),
        ("192k.wav", 192_000),
    ],
)
def test_telephone_codes_keep_their_seconds(heard, name, rate_hz):
    assert is_ok(heard, name, within=0.04) == set()
    assert heard[f"odd/{name}"]["audio_in"]["rate_hz"] == rate_hz


@pytest.mark.case("IN-11")
@pytest.mark.parametrize("name", ["nan.wav", "inf.wav", "minus-inf.wav"])
def test_samples_that_are_no_numbers_are_silence_and_told(heard, name):
    assert is_ok(heard, name) == {"nonfinite_samples"}


@pytest.mark.case("IN-15")
@pytest.mark.parametrize(
    "name", ["zeros.wav", "constant.wav", "6.002.wav", "one-sample.wav", "10ms.wav"]
)
def test_nothing_to_hear_is_empty(heard, name):
    line = heard[f"odd/{name}"]
    assert (line["status"], line["pred_text"], line["segments"]) == ("empty", "", [])


@pytest.mark.case("IN-17")
def test_a_mix_has_both_sides_and_no_side_twice(heard):
    text = heard.text("odd/two-sides.wav")
    assert all(side in text for side in BOTH_SIDES)
    for name in ("identical.wav", "one-silent.wav", "six.wav"):
        assert is_ok(heard, name, 1.257) <= {"identical_channels"}
    assert is_ok(heard, "inverted.wav", 1.257) == {"phase_inverted"}


@pytest.mark.case("IN-19")
@pytest.mark.parametrize(
    "name",
    [
        *("list.wav", "bext.wav", "id3.wav", "rifx.wav"),
        *("rf64.wav", "w64.w64", "aiff.aiff", "caf.caf", "voc.voc"),
    ],
)
def test_chunks_before_the_samples_do_not_matter(heard, name):
    rounded = name == "voc.voc"  # its header has eight bits for the rate
    assert is_ok(heard, name, within=0.005 if rounded else 0.001) == set()


@pytest.mark.case("IN-21")
@pytest.mark.parametrize("name", ["no-xing.mp3", "junk-tail.mp3", "junk-head.mp3", "text-tail.mp3"])
def test_decoders_print_nothing_and_junk_is_a_warning(heard, name):
    assert heard.ran.err == ""
    warned = is_ok(heard, name, within=0.15)
    assert warned <= {"trailing_data", "decode_errors"}
    assert name != "junk-tail.mp3" or warned


# -- what cannot be heard


@pytest.fixture(scope="module")
def refused(omni, solo, base, ok, tmp_path_factory):
    """Files without sound, and one whose code nobody knows, in a strict run by channel."""
    root = put_base(base, tmp_path_factory.mktemp("refused") / "in")
    odd = root / "odd"
    ok_wav = wav(odd / "ok.wav", ok)
    (odd / "empty.wav").touch()
    (odd / "header.wav").write_bytes(ok_wav.read_bytes()[:44])
    wav(odd / "no-samples.wav", silence(0))
    (odd / "half-header.wav").write_bytes(ok_wav.read_bytes()[:20])
    (odd / "page.wav").write_text("<!DOCTYPE html><html><body>504 Gateway Time-out</body></html>")
    (odd / "text.mp3").write_text("This is no sound, only a line of text.\n" * 20)
    (odd / "json.mp3").write_text('{"error": "not found"}')
    (odd / "image.wav").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    wav_with_codec(odd / "atrac.wav", 0x4A44)
    make_cut(odd)
    make_channels(odd)
    count = sum(path.is_file() for path in root.rglob("*"))
    args = ("transcribe", root, "-o", root.parent / "out", "--strict", "--channels", "split")
    return check(omni, solo, *args, count=count, code=3)


@pytest.mark.case("IN-13")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("empty.wav", "empty_file"),
        ("no-samples.wav", "no_samples"),
        ("page.wav", "not_audio"),
        ("text.mp3", "not_audio"),
        ("json.mp3", "not_audio"),
        ("image.wav", "not_audio"),
    ],
)
def test_files_without_sound_fail_by_their_kind(refused, name, code):
    assert refused.failed(f"odd/{name}") == code
    assert refused["odd/ok.wav"]["status"] == "ok"


@pytest.mark.case("IN-13")
@pytest.mark.parametrize("name", ["header.wav", "half-header.wav"])
def test_a_header_alone_is_no_recording(refused, name):
    assert refused.failed(f"odd/{name}") in ("no_samples", "decode_error", "truncated_input")


@pytest.mark.case("IN-07")
def test_a_code_that_nobody_knows_is_named(refused):
    assert refused.failed("odd/atrac.wav") == "unsupported_format"
    message = refused["odd/atrac.wav"]["error"]["message"]
    assert "WAV" in message or "4a44" in message.lower()


@pytest.mark.case("IN-03")
@pytest.mark.parametrize("name", ["third.wav", "odd-byte.wav", "third.flac", "third.m4a"])
def test_strictly_a_cut_recording_has_failed(refused, name):
    assert refused.failed(f"odd/{name}") == "truncated_input"


@pytest.mark.case("IN-17")
def test_split_channels_are_two_voices_in_order(refused):
    segments = refused["odd/two-sides.wav"]["segments"]
    assert {s["channel"] for s in segments} == {"left", "right"}
    assert [s["start"] for s in segments] == sorted(s["start"] for s in segments)
    assert segments[0]["channel"] == "left"
    text = refused.text("odd/two-sides.wav")
    assert text.index(BOTH_SIDES[0]) < text.index(BOTH_SIDES[1])


@pytest.mark.case("IN-17")
def test_the_same_on_both_channels_is_written_once(refused):
    assert refused.text("odd/identical.wav") == "yes please"
    assert "identical_channels" in refused.warned("odd/identical.wav")
    assert "channels_dropped" in refused.warned("odd/six.wav")


@pytest.mark.case("IN-13")
def test_what_failed_is_a_manifest(omni, refused, tmp_path):
    out = tmp_path / "out"
    ran = omni("transcribe", refused.out / "errors.jsonl", "-o", out, "--quiet")
    assert ran.code == 3
    failed = {name for name, line in refused.lines.items() if line["status"] == "failed"}
    assert set(settled(out, ran, None, count=len(failed), code=3).lines) == failed
