"""Decoding, on files that are made here: of every kind, whole and broken."""

import io
import os
import struct
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnicli.errors import RequestError, RunError
from omnicli.io.audio import decode, probe, sndfile, takes

RATE_HZ = 16_000


def tone(seconds, rate_hz=RATE_HZ, hz=300.0, level=0.3):
    return (level * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(
        np.float32
    )


def noise(seconds, rate_hz=RATE_HZ, seed=0):
    rows = np.random.default_rng(seed).standard_normal(round(seconds * rate_hz))
    return (0.1 * rows).astype(np.float32)


def encode(path, codec, samples, rate_hz, container, **options):
    """Samples [n] or [C, n] through one of FFmpeg's encoders."""
    samples = np.atleast_2d(samples)
    layout = "mono" if len(samples) == 1 else "stereo"
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate_hz, layout=layout, options=options)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples), format="fltp", layout=layout
        )
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate_hz)
        fifo = av.AudioFifo()
        for part in resampler.resample(frame):
            fifo.write(part)
        while (part := fifo.read(stream.frame_size or 1024, partial=True)) is not None:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return path


def wav_bytes(samples, rate_hz=RATE_HZ, subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, subtype=subtype, format="WAV")
    return file.getvalue()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The same two seconds in several containers: name -> path."""
    folder = tmp_path_factory.mktemp("kinds")
    sound = tone(2, 44_100) + 0.1 * noise(2, 44_100)
    files = {
        "mp3": encode(folder / "a.mp3", "libmp3lame", sound, 44_100, "mp3"),
        "m4a": encode(folder / "a.m4a", "aac", sound, 44_100, "mp4"),
        "adts": encode(folder / "a.aac", "aac", sound, 44_100, "adts"),
        "webm": encode(folder / "a.webm", "libopus", tone(2, 48_000), 48_000, "webm"),
        "opus": encode(folder / "a.opus", "libopus", tone(2, 48_000), 48_000, "ogg"),
    }
    for name, subtype in (("wav", "PCM_16"), ("flac", "PCM_16"), ("ogg", "VORBIS")):
        files[name] = folder / f"a.{name}"
        soundfile.write(files[name], sound, 44_100, subtype=subtype)
    return files


def error_of(path, **options):
    with pytest.raises(RequestError) as caught:
        decode(path, **options)
    assert str(path) in str(caught.value)
    return caught.value.code


def codes(recording):
    return [warning.partition(":")[0] for warning in recording.warnings]


# -- what comes out


def test_a_wav_is_what_the_standard_library_reads(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(0.5), RATE_HZ)
    with wave.open(str(path)) as file:
        pcm = np.frombuffer(file.readframes(-1), "<i2")

    made = decode(path)

    assert torch.equal(made.tracks[0], torch.from_numpy(pcm.astype(np.float32) / 32768))
    assert (made.duration_s, made.source_rate_hz, made.source_channels) == (0.5, RATE_HZ, 1)
    assert made.channels == ("",) and made.warnings == ()


def test_resampling_is_that_of_the_whole_signal(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(4, 44_100), 44_100, subtype="FLOAT")  # several blocks

    made = decode(path).tracks[0]

    signal = torch.from_numpy(noise(4, 44_100)).double()
    wanted = torchaudio.functional.resample(signal, 44_100, RATE_HZ).float()
    torch.testing.assert_close(made, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["wav", "mp3", "m4a", "adts", "webm", "opus", "flac", "ogg"])
@pytest.mark.parametrize("name", ["x", "x.wav", "x.mp3", "x.txt"])
def test_a_file_is_known_by_its_content(kind, name, kinds, tmp_path):
    path = tmp_path / name
    path.write_bytes(kinds[kind].read_bytes())

    made = decode(path)

    assert made.duration_s == pytest.approx(2.0, abs=0.05)
    spectrum = torch.fft.rfft(made.tracks[0][:RATE_HZ]).abs()
    assert int(spectrum.argmax()) == 300
    assert made.warnings == ()


@pytest.mark.parametrize("subtype", ["ULAW", "ALAW", "GSM610", "IMA_ADPCM", "MS_ADPCM", "PCM_U8"])
def test_telephone_formats_keep_their_seconds(subtype, tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(2, 8_000), 8_000, subtype=subtype)

    made = decode(path)

    assert made.source_rate_hz == 8_000
    assert made.duration_s == pytest.approx(2.0, abs=0.05)  # one block of ADPCM
    assert made.tracks[0].abs().max() == pytest.approx(0.3, abs=0.05)


def test_a_flac_of_unknown_length_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(2), RATE_HZ)
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0  # the 36 bits of `total samples` in STREAMINFO
    data[22:26] = bytes(4)
    path.write_bytes(data)

    made = decode(path)

    assert made.duration_s == 2.0 and made.warnings == ()
    assert probe(path) is None


@pytest.mark.parametrize("kind", ["mp3", "flac", "ogg"])
def test_glued_recordings_are_read_to_the_end_of_the_last(kind, kinds, tmp_path):
    path = tmp_path / "ab"
    path.write_bytes(kinds[kind].read_bytes() * 2)

    made = decode(path)

    assert made.duration_s == pytest.approx(4.0, abs=0.1)
    assert made.tracks[0][-RATE_HZ:].abs().max() > 0.2


def test_glued_mp3s_may_differ_in_rate_and_channels(kinds, tmp_path):
    stereo = np.stack([tone(2, 22_050, 600)] * 2)
    other = encode(tmp_path / "b.mp3", "libmp3lame", stereo, 22_050, "mp3")
    path = tmp_path / "ab.mp3"
    path.write_bytes(kinds["mp3"].read_bytes() + other.read_bytes())

    made = decode(path, channels="split")

    assert made.duration_s == pytest.approx(4.0, abs=0.15)
    late = made.tracks[0][-RATE_HZ - 2000 : -2000]
    assert int(torch.fft.rfft(late).abs().argmax()) == pytest.approx(600, abs=1)


def test_a_huge_list_chunk_before_the_samples_does_no_harm(tmp_path):
    path = tmp_path / "a.wav"
    data = wav_bytes(tone(1))
    path.write_bytes(data[:36] + b"LIST" + struct.pack("<I", 393_164) + bytes(393_164) + data[36:])

    made = decode(path)

    assert made.duration_s == 1.0 and made.warnings == ()


# -- selecting


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "m4a", "adts", "ogg", "opus", "gsm"])
def test_a_selection_is_a_part_of_the_whole(kind, tmp_path):
    path, rate_hz = tmp_path / f"long.{kind}", 48_000 if kind == "opus" else RATE_HZ
    sound = np.concatenate([tone(1, rate_hz, hz=200 + 100 * i) for i in range(8)])
    encoders = {"mp3": "libmp3lame", "m4a": "aac", "adts": "aac", "opus": "libopus"}
    if kind in encoders:
        containers = {"m4a": "mp4", "opus": "ogg"}
        encode(path, encoders[kind], sound, rate_hz, containers.get(kind, kind))
    elif kind == "gsm":
        soundfile.write(path, sound, rate_hz, subtype="GSM610", format="WAV")
    else:
        soundfile.write(path, sound, rate_hz)

    whole = decode(path, rate_hz=rate_hz).tracks[0]
    part = decode(path, rate_hz=rate_hz, offset_s=4.321, duration_s=1.5)

    begin = round(4.321 * rate_hz)
    wanted = whole[begin : begin + round(1.5 * rate_hz)]
    torch.testing.assert_close(part.tracks[0], wanted, atol=2e-3, rtol=0)
    assert part.duration_s == 1.5 and part.warnings == ()


def test_a_selection_reads_no_more_than_it_needs(tmp_path, monkeypatch):
    path = tmp_path / "long.wav"
    soundfile.write(path, noise(60), RATE_HZ)
    read = []
    blocks = sndfile._sound_blocks
    monkeypatch.setattr(
        sndfile,
        "_sound_blocks",
        lambda sound, frames: (read.append(len(b[0][0])) or b for b in blocks(sound, frames)),
    )

    decode(path, offset_s=50.0, duration_s=1.0)

    assert sum(read) <= sndfile.BLOCK_FRAMES


@pytest.mark.parametrize("kind", ["wav", "mp3", "m4a"])
def test_an_offset_beyond_the_end_is_an_error_and_a_duration_a_warning(kind, kinds):
    assert error_of(kinds[kind], offset_s=99.0) == "no_samples"

    made = decode(kinds[kind], offset_s=1.5, duration_s=5.0)

    assert made.duration_s == pytest.approx(0.5, abs=0.05)
    assert codes(made) == ["short_selection"]


# -- channels


@pytest.fixture
def two_voices(tmp_path):
    left, right = tone(1, hz=300), tone(1, hz=700, level=0.2)
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([left, right], axis=1), RATE_HZ, subtype="FLOAT")
    return path, torch.from_numpy(left), torch.from_numpy(right)


def test_channels_are_mixed_chosen_or_kept_apart(two_voices):
    path, left, right = two_voices

    split = decode(path, channels="split")

    torch.testing.assert_close(decode(path).tracks[0], (left + right) / 2)
    assert torch.equal(decode(path, channels="left").tracks[0], left)
    assert torch.equal(decode(path, channels="right").tracks[0], right)
    assert split.channels == ("left", "right")
    assert torch.equal(split.tracks[0], left) and torch.equal(split.tracks[1], right)


@pytest.mark.parametrize("channels", ["mix", "left", "right", "split"])
def test_mono_has_one_track_however_it_is_asked_for(channels, tmp_path):
    path = tmp_path / "mono.wav"
    soundfile.write(path, tone(0.5), RATE_HZ, subtype="FLOAT")

    made = decode(path, channels=channels)

    assert made.channels == ("",)
    assert torch.equal(made.tracks[0], torch.from_numpy(tone(0.5)))


def test_phase_inverted_stereo_is_not_mixed_away(tmp_path):
    path = tmp_path / "inverted.wav"
    soundfile.write(path, np.stack([tone(1), -0.95 * tone(1)], axis=1), RATE_HZ, subtype="FLOAT")

    made = decode(path)

    assert torch.equal(made.tracks[0], torch.from_numpy(tone(1)))
    assert codes(made) == ["phase_inverted"]
    assert len(decode(path, channels="split").tracks) == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_the_same_on_both_channels_is_one_track(sign, tmp_path):
    path = tmp_path / "twice.wav"
    soundfile.write(path, np.stack([tone(1), sign * tone(1)], axis=1), RATE_HZ, subtype="FLOAT")

    made = decode(path, channels="split")

    assert made.channels == ("",) and codes(made) == ["identical_channels"]
    assert torch.equal(made.tracks[0], torch.from_numpy(tone(1)))


def test_one_silent_channel_is_no_inversion(tmp_path):
    path = tmp_path / "half.wav"
    soundfile.write(path, np.stack([tone(1), 0 * tone(1)], axis=1), RATE_HZ, subtype="FLOAT")

    assert decode(path).warnings == ()
    assert decode(path, channels="split").channels == ("left", "right")


def test_of_many_channels_the_mix_has_all_and_split_two(tmp_path):
    rows = np.stack([tone(0.5, hz=hz, level=0.1) for hz in (200, 300, 400, 500)])
    path = tmp_path / "four.wav"
    soundfile.write(path, rows.T, RATE_HZ, subtype="FLOAT")

    split = decode(path, channels="split")

    torch.testing.assert_close(decode(path).tracks[0], torch.from_numpy(rows.mean(axis=0)))
    assert torch.equal(torch.stack(split.tracks), torch.from_numpy(rows[:2]))
    assert codes(split) == ["channels_dropped"]


def test_eight_channels_of_a_lossy_codec_are_mixed(tmp_path):
    rows = np.stack([tone(1, 48_000, hz=200 + 100 * i, level=0.5) for i in range(8)])
    flat = np.ascontiguousarray(rows.T).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(flat, format="flt", layout="7.1")
    frame.sample_rate = 48_000
    path = tmp_path / "film.m4a"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=48_000, layout="7.1", options={"b": "512k"})
        cutter = av.AudioResampler(format="fltp", layout="7.1", rate=48_000, frame_size=1024)
        for part in [*cutter.resample(frame), *cutter.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))

    made = decode(path)

    assert made.source_channels == 8
    spectrum = torch.fft.rfft(made.tracks[0][:RATE_HZ]).abs()
    assert {200, 300, 400, 600, 700, 800, 900} <= set(spectrum.topk(8).indices.tolist())


# -- samples that are wrong


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_sample_that_is_no_number_becomes_silence(value, tmp_path):
    sound = tone(1)
    sound[8000] = value
    path = tmp_path / "nan.wav"
    soundfile.write(path, sound, RATE_HZ, subtype="FLOAT")

    made = decode(path)

    wanted = torch.from_numpy(tone(1))
    wanted[8000] = 0
    assert torch.equal(made.tracks[0], wanted)
    assert made.warnings == ("nonfinite_samples: 1",)


def test_a_double_that_is_no_single_becomes_silence_too(tmp_path):
    sound = tone(1).astype(np.float64)
    sound[8000] = 1e300
    frame = av.AudioFrame.from_ndarray(sound[None], format="dbl", layout="mono")
    frame.sample_rate = RATE_HZ
    path = tmp_path / "double.mka"
    with av.open(str(path), "w", format="matroska") as out:
        stream = out.add_stream("pcm_f64le", rate=RATE_HZ, layout="mono")
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))

    made = decode(path)

    assert made.warnings == ("nonfinite_samples: 1",)
    assert made.tracks[0][8000] == 0 and torch.equal(
        made.tracks[0][:8000], torch.from_numpy(tone(0.5))
    )


def test_a_header_that_points_nowhere_prints_nothing(tmp_path, capfd):
    path = tmp_path / "nowhere.caf"
    soundfile.write(path, tone(1), RATE_HZ)
    data = bytearray(path.read_bytes())
    data[52:64] = b"free" + struct.pack(">q", 1 << 62)  # the chunk behind the description
    path.write_bytes(data)

    assert error_of(path) == "decode_error"
    assert capfd.readouterr() == ("", "")


def test_clipping_is_told(tmp_path):
    path = tmp_path / "loud.wav"
    soundfile.write(path, np.clip(tone(1, level=1.5), -1, 1), RATE_HZ)

    assert codes(decode(path)) == ["clipped"]


def test_integers_written_as_floats_are_scaled(tmp_path):
    path = tmp_path / "int.wav"
    soundfile.write(path, tone(1) * 32768, RATE_HZ, subtype="FLOAT")

    made = decode(path)

    assert codes(made) == ["out_of_range"]
    torch.testing.assert_close(made.tracks[0], torch.from_numpy(tone(1) / 0.3), atol=2e-3, rtol=0)


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50), st.sampled_from([8_000, 16_000]))
def test_samples_are_finite_and_in_range_whatever_the_file_holds(tmp_path, values, rate_hz):
    path = tmp_path / "any.wav"
    soundfile.write(path, np.array(values, np.float32), rate_hz, subtype="FLOAT")

    samples = decode(path).tracks[0]

    assert samples.isfinite().all() and samples.abs().max() <= 1


# -- files that are cut short, or too long


def test_a_wav_that_was_cut_short_says_so(tmp_path):
    path = tmp_path / "cut.wav"
    data = wav_bytes(tone(2))
    path.write_bytes(data[: len(data) // 3])

    made = decode(path)

    assert made.duration_s == pytest.approx(0.67, abs=0.01)
    assert codes(made) == ["truncated_input"] and "of 64000 bytes" in made.warnings[0]


@pytest.mark.parametrize("kind", ["flac", "mp3"])
def test_a_compressed_file_that_was_cut_short_says_so(kind, kinds, tmp_path):
    path = tmp_path / "cut"
    data = kinds[kind].read_bytes()
    path.write_bytes(data[: len(data) // 2])

    made = decode(path)

    assert 0.5 < made.duration_s < 1.5
    assert "truncated_input" in codes(made)


@pytest.mark.parametrize("rate_hz", [8_000, 44_100])
@pytest.mark.parametrize("more", [b"TAG" + bytes(125), bytes(5000), b"\x55" * 5000])
def test_bytes_behind_an_mp3_are_no_truncation(rate_hz, more, tmp_path, capfd):
    path = encode(tmp_path / "a.mp3", "libmp3lame", tone(2, rate_hz), rate_hz, "mp3")
    path.write_bytes(path.read_bytes() + more)

    made = decode(path)

    assert made.duration_s == pytest.approx(2.0, abs=0.1)
    assert set(codes(made)) <= {"decode_errors"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF, 0x7FFF_FFFF])
def test_a_length_that_was_never_filled_in_is_no_truncation(size, tmp_path):
    path = tmp_path / "pipe.wav"
    data = wav_bytes(tone(1))
    path.write_bytes(data[:40] + struct.pack("<I", size) + data[44:])

    made = decode(path)

    assert made.duration_s == 1.0 and made.warnings == ()


def test_what_follows_a_wav_is_told(tmp_path):
    path = tmp_path / "ab.wav"
    data = wav_bytes(tone(2))
    path.write_bytes(data * 2)

    made = decode(path)

    assert made.duration_s == 2.0
    assert made.warnings == (f"trailing_data: {len(data)} bytes",)


def test_chunks_behind_the_samples_are_no_trailing_data(tmp_path):
    path = tmp_path / "a.wav"
    data = wav_bytes(tone(1)[:-1], subtype="PCM_U8")  # an odd number of bytes
    assert len(data) % 2 == 0  # the writer has made it even
    unpadded = data[:-1] if data[-1] == 0 else data
    chunk = b"LIST" + struct.pack("<I", 3000) + bytes(3000)
    for front in (data, unpadded):
        path.write_bytes(front + chunk)
        assert decode(path).warnings == ()


# -- files that cannot be read


def bad_files():
    return {
        "empty": ("empty_file", b""),
        "header": ("no_samples", wav_bytes(np.zeros(0, np.float32))),
        "half a header": ("no_samples", wav_bytes(tone(1))[:20]),
        "html": ("not_audio", b"<!DOCTYPE html>\n<html><body>404</body></html>"),
        "text": ("not_audio", b"no recording, just words\n" * 100),
        "latin": ("not_audio", "né à Zürich\n".encode("latin-1") * 10),
        "utf16": ("not_audio", "plain text".encode("utf-16")),
        "playlist": ("not_audio", b"#EXTM3U\n#EXTINF:2,\n/etc/passwd\n"),
        "png": ("not_audio", b"\x89PNG\r\n\x1a\n" + bytes(100)),
        "zip": ("not_audio", b"PK\x03\x04" + bytes(100)),
        "zeros": ("not_audio", bytes(50_000)),
        "ones": ("not_audio", b"\xff" * 50_000),
        "random": ("not_audio", np.random.default_rng(1).bytes(50_000)),
        "hidden": ("not_audio", b"\0\1\2\3" + wav_bytes(tone(1))),
        "mp4": ("decode_error", b"\x00\x00\x00\x18ftypM4A " + bytes(3000)),
        "rate": ("unsupported_format", wav_bytes(tone(1), rate_hz=1)),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_each_kind_of_trouble_has_its_code(name, tmp_path, capfd):
    code, data = bad_files()[name]
    path = tmp_path / f"{name}.wav"
    path.write_bytes(data)

    assert error_of(path) == code
    assert capfd.readouterr() == ("", "")


def test_an_unknown_codec_is_named(tmp_path):
    path = tmp_path / "odd.wav"
    data = bytearray(wav_bytes(tone(1)))
    data[20:22] = b"\x34\x12"
    path.write_bytes(data)

    with pytest.raises(RequestError, match="WAV in an unknown codec \\(tag 0x1234\\)") as caught:
        decode(path)
    assert caught.value.code == "unsupported_format"


def test_a_video_without_sound_is_named(tmp_path):
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        out.mux(stream.encode(picture))
        out.mux(stream.encode(None))

    assert error_of(path) == "no_audio_stream"


def test_what_is_no_file_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo.wav")

    assert error_of(tmp_path / "fifo.wav") == "not_a_file"
    assert error_of(tmp_path) == "not_a_file"
    assert error_of(tmp_path / "none.wav") == "missing_file"
    assert error_of(tmp_path / ("x" * 300)) == "missing_file"
    assert error_of(tmp_path / "fifo.wav" / "a.wav") == "missing_file"
    assert probe(tmp_path / "fifo.wav") is None


def test_a_link_in_a_circle_is_missing(tmp_path):
    (tmp_path / "a.wav").symlink_to(tmp_path / "a.wav")

    assert error_of(tmp_path / "a.wav") == "missing_file"


def test_a_file_without_permission_is_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    path.write_bytes(b"x")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    assert error_of(path) == "unreadable"


def test_a_name_that_is_no_utf8_is_spelt_out(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.wav"))

    with pytest.raises(RequestError, match=r"caf\\xe9\.wav"):
        decode(path)


# -- resources


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open(kinds, tmp_path):
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF\0\0\0\0WAVEjunkjunkjunk")
    before = open_files()
    for path in [*kinds.values(), bad]:
        for action in (decode, probe, lambda p: decode(p, offset_s=1.2, duration_s=0.1)):
            try:
                action(path)
            except RequestError as error:
                assert path == bad, error

    assert open_files() == before


@pytest.mark.parametrize("channels", ["mix", "split"])
def test_a_long_recording_lies_in_a_file_without_a_name(channels, tmp_path, monkeypatch):
    path, scratch = tmp_path / "long.wav", tmp_path / "scratch"
    scratch.mkdir()
    rows = np.stack([noise(12, 22_050), noise(12, 22_050, seed=1)], axis=1)
    soundfile.write(path, rows, 22_050)
    held = decode(path, channels=channels)
    before = open_files()
    monkeypatch.setattr(takes, "SPILL_S", 2.0)
    monkeypatch.setattr(torch, "cat", forbid_large(torch.cat, 11 * RATE_HZ))

    mapped = decode(path, channels=channels, scratch=scratch)

    assert open_files() == before and not list(scratch.iterdir())
    assert len(mapped.tracks) == len(held.tracks)
    for ours, theirs in zip(mapped.tracks, held.tracks, strict=True):
        assert torch.equal(ours, theirs)


def forbid_large(cat, most):
    def checked(tensors, dim=0):
        made = cat(tensors, dim=dim)
        assert made.numel() <= most, "that much was to lie in the file"
        return made

    return checked


def test_a_scratch_folder_that_is_full_ends_the_run(tmp_path, monkeypatch):
    path = tmp_path / "long.wav"
    soundfile.write(path, noise(3), RATE_HZ)
    monkeypatch.setattr(takes, "SPILL_S", 1.0)

    with pytest.raises(RunError, match="cannot write to"):
        decode(path, scratch=tmp_path / "gone")


def test_threads_do_not_disturb_each_other(kinds):
    alone = {name: decode(path).tracks[0] for name, path in kinds.items()}
    names = list(kinds) * 5

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda name: decode(kinds[name]).tracks[0], names))

    assert all(torch.equal(made, alone[name]) for name, made in zip(names, together, strict=True))


# -- headers


@pytest.mark.parametrize("kind", ["wav", "mp3", "m4a", "adts", "webm", "opus", "flac", "ogg"])
def test_a_header_tells_about_how_long_it_will_be(kind, kinds):
    assert probe(kinds[kind]) == pytest.approx(2.0, abs=0.1)


def test_what_has_no_length_has_none(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"just words")

    assert probe(tmp_path / "a.wav") is None
    assert probe(tmp_path / "none.wav") is None


# -- garbage


FLOAT_WAV = wav_bytes(tone(0.25, 8_000), 8_000, "FLOAT")
edits = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=6)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits, st.integers(0, len(FLOAT_WAV)))
def test_a_garbled_wav_is_decoded_or_refused(tmp_path, edits, length):
    data = bytearray(FLOAT_WAV)
    for place, value in edits:
        data[place] = value
    path = tmp_path / "garbled.wav"
    path.write_bytes(data[:length])
    try:
        made = decode(path)
    except RequestError:
        return
    assert sum(len(track) for track in made.tracks) <= 64 * len(FLOAT_WAV)
    assert all(track.isfinite().all() for track in made.tracks)


@pytest.mark.parametrize("kind", ["mp3", "m4a", "flac", "ogg", "webm"])
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 1))
def test_a_garbled_file_of_another_kind_is_decoded_or_refused(kinds, kind, tmp_path, seed, share):
    data = bytearray(kinds[kind].read_bytes())
    random = np.random.default_rng(seed)
    for place in random.integers(0, len(data), 20):
        data[place] = random.integers(0, 256)
    path = tmp_path / "garbled"
    path.write_bytes(data[: round(share * len(data))])
    try:
        made = decode(path)
    except RequestError:
        return
    assert all(track.isfinite().all() and track.abs().max() <= 1 for track in made.tracks)


def test_a_message_holds_nothing_that_a_terminal_obeys(tmp_path):
    path = tmp_path / "\x1b[31mred\n.wav"
    path.write_text("no sound")
    with pytest.raises(RequestError) as refused:
        decode(path)
    assert str(refused.value).isprintable()
    assert "\\x1b[31mred" in str(refused.value)
