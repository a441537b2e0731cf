"""Sounds, good and odd."""

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile

DEMO = Path(__file__).parents[2] / "manifests" / "demo"
RATE_HZ = 16_000


def speech(name: str, begin_s: float = 0.0, end_s: float | None = None) -> np.ndarray:
    """A stretch of one of the demo's recordings: [T] float64 at 16 kHz."""
    samples, rate_hz = soundfile.read(DEMO / f"{name}.flac")
    assert rate_hz == RATE_HZ, name
    return samples[round(begin_s * rate_hz) : None if end_s is None else round(end_s * rate_hz)]


def padded(samples: np.ndarray, seconds: float) -> np.ndarray:
    """Exactly that long, silence at the end."""
    size = round(seconds * RATE_HZ)
    return np.pad(samples, (0, max(0, size - len(samples))))[:size]


def silence(seconds: float) -> np.ndarray:
    """Zeros."""
    return np.zeros(round(seconds * RATE_HZ))


def noise(seconds: float, level_db: float, *, pink: bool = False) -> np.ndarray:
    """Noise of that level below full scale (of its mean power)."""
    white = np.random.default_rng(5).standard_normal(round(seconds * RATE_HZ))
    if pink:
        spectrum = np.fft.rfft(white)
        spectrum /= np.sqrt(np.maximum(1, np.arange(len(spectrum))))
        white = np.fft.irfft(spectrum, len(white))
    return white / white.std() * 10 ** (level_db / 20)


def tones(seconds: float, *pitches_hz: float, level: float = 0.1) -> np.ndarray:
    """Sines together."""
    t = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    return level * sum(np.sin(2 * np.pi * f * t) for f in pitches_hz) / len(pitches_hz)


def chords(seconds: float) -> np.ndarray:
    """A loop of three chords, struck every half second."""
    struck = [
        tones(0.5, *c, level=0.3) for c in ((262, 330, 392), (294, 370, 440), (247, 294, 392))
    ]
    envelope = np.exp(-4 * np.arange(len(struck[0])) / RATE_HZ)
    loop = np.concatenate([s * envelope for s in struck])
    return np.tile(loop, int(seconds / 1.5) + 1)[: round(seconds * RATE_HZ)]


def wav(
    path: Path, samples: np.ndarray, *, subtype: str = "PCM_16", rate_hz: int = RATE_HZ
) -> Path:
    """Write [T] or [T, C]; the suffix tells the container."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate_hz, subtype=None if path.suffix == ".flac" else subtype)
    return path


def _ran(command: Sequence[str]) -> bytes:
    """What a program writes; it is a witness from outside, which not every machine has."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def ffmpeg(source: Path, target: Path, *options: str) -> Path:
    """Convert."""
    quiet = ("ffmpeg", "-nostdin", "-v", "error", "-y", "-i", str(source))
    _ran([*quiet, *options, str(target)])
    return target


def piped(source: Path, target: Path, *options: str) -> Path:
    """Convert into a pipe: nobody can go back and fill the header in."""
    quiet = ("ffmpeg", "-nostdin", "-v", "error", "-i", str(source), *options, "-")
    target.write_bytes(_ran(quiet))
    return target


def sox(source: Path, target: Path, *options: str) -> Path:
    """Convert; options are those of the target."""
    _ran(["sox", str(source), *options, str(target)])
    return target


def espeak(text: str, path: Path, voice: str) -> Path:
    """A robot's voice in any language, at 16 kHz."""
    raw = path.with_suffix(".raw.wav")
    _ran(["espeak-ng", "-v", voice, "-s", "150", "-w", str(raw), text])
    sox(raw, path, "-r", str(RATE_HZ))
    raw.unlink()
    return path


def with_chunk(source: Path, target: Path, name: bytes, body: bytes) -> Path:
    """A WAV with one more chunk before its samples."""
    raw = source.read_bytes()
    place = raw.index(b"data")
    chunk = name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
    size = struct.pack("<I", len(raw) + len(chunk) - 8)
    target.write_bytes(raw[:4] + size + raw[8:place] + chunk + raw[place:])
    return target


def rifx(target: Path, samples: np.ndarray) -> Path:
    """A big-endian WAV."""
    data = (samples * 32767).astype(">i2").tobytes()
    form = b"fmt " + struct.pack(">IHHIIHH", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16)
    body = b"WAVE" + form + b"data" + struct.pack(">I", len(data)) + data
    target.write_bytes(b"RIFX" + struct.pack(">I", len(body)) + body)
    return target


def wav_with_codec(target: Path, tag: int) -> Path:
    """A WAV whose samples are in a code of that number."""
    data = np.random.default_rng(1).integers(0, 256, 8000, dtype=np.uint8).tobytes()
    form = b"fmt " + struct.pack("<IHHIIHH", 16, tag, 1, 8000, 8000, 1, 8)
    body = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    target.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    return target
