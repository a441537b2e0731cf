"""Make the demo: short recordings that nobody had to say, and the manifest that lists them.

    python manifests/make_demo.py --voice en_US-joe-medium.onnx --out manifests

Needs the `speech` extra and onnxruntime. `--voice` is the voice of the embedded model (CC0), with
its `.onnx.json` beside it, as they come in the wheel. All texts are our own. The same command makes
the same sound, up to the rounding of another machine.

A recording is spoken sentence by sentence, then made less perfect: another pitch and pace, a room
(noise that dies away, convolved), a hiss or a hum below the voice, another loudness.
"""

import argparse
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime
import soundfile
import torch
from piper import PiperVoice, SynthesisConfig
from torch import Generator, Tensor
from torchaudio.functional import fftconvolve, lowpass_biquad, resample

VOICE_HZ = 22_050
# The voice is an American, so Spanish is written down for it in sounds that it has made before.
NEAREST = {"a": "ɑː", "e": "ɛ", "i": "iː", "o": "ɔː", "u": "uː", "ɲ": "nj", "ʲ": ""}
NEAREST |= {"β": "b", "ɣ": "ɡ", "x": "h", "ʝ": "j", "ʎ": "j", "r": "ɾ"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is said, and how it sounds. `{n}` in `said` is a pause of n seconds."""

    name: str
    said: str
    seed: int = 0
    pace: float = 1.0  # 1.2 is slower
    pitch: float = 1.0  # 1.1 is higher, and faster too
    freedom: float = 2 / 3  # how freely the voice speaks; this much is its own
    level: float = 0.5  # peak
    noise_db: float | None = None  # below the peak
    hum: bool = False
    room_s: float = 0.0  # until the reverberation is 60 dB down
    rate_hz: int = 16_000
    language: str = "en-us"  # as espeak names it
    fields: dict[str, str] = field(default_factory=dict)  # of the manifest


RECORDINGS = (
    Recording(
        name="dentist-moved",
        said="Hello, this is Karen from the dental office on Maple Street. {0.35}"
        "Your appointment on Tuesday has been moved to Thursday at 10:30. {0.3}"
        "Please bring your insurance card, and call us back if the new time does not suit you. "
        "Goodbye.",
        seed=11,
        noise_db=42,
        fields={"caller": "dental office"},
    ),
    Recording(
        name="parcel-neighbor",
        said="Good afternoon, your parcel could not be delivered today because nobody was at home. "
        "{0.25} I left it with your neighbor, Mr. Jordan, at number 27. {0.3}"
        "He is at home until 6 o'clock.",
        seed=23,
        pace=0.92,
        pitch=1.12,
        level=0.8,
        noise_db=34,
        hum=True,
        fields={"caller": "driver"},
    ),
    Recording(
        name="kitchen-note",
        said="Note for Monday. {0.5}"
        "The kitchen window is 94 centimeters wide and 120 centimeters high. {0.4}"
        "Order the glass from Peterson, and ask whether they can deliver before the 20th of May.",
        seed=31,
        pace=1.08,
        pitch=0.94,
        level=0.35,
        room_s=0.25,
        rate_hz=22_050,
    ),
    Recording(
        name="train-question",
        said="Excuse me, does the train to Boston leave from platform 4 or from platform 9?",
        seed=47,
        pitch=1.06,
        noise_db=38,
        fields={"say": "reply"},
    ),
    Recording(
        name="station-spanish",
        said="Hola, buenos días. {0.2} No tengo tiempo esta semana. {0.2}"
        "Estamos en la estación. {0.2} Adiós.",
        seed=4,
        pace=1.1,
        pitch=1.2,
        freedom=0.3,
        language="es-419",
    ),
    Recording(name="empty-room", said="{3.5}", seed=61, noise_db=58),
    Recording(
        name="site-visit",
        said="Today is the 3rd of April, and I am at the house on Garden Lane. {1.2}"
        "The roof is finished, but two tiles on the north side are broken. {0.9}"
        "The electricians were here on Monday. "
        "They need three more days for the second floor. {1.6}"
        "In the basement the wall is still wet. We should not paint it before the summer. {1.1}"
        "The painter asks for 850 dollars, which is less than we expected. {1.2}"
        "Susan will bring the new keys on Friday afternoon. {0.8}"
        "The garden door does not close, so the carpenter has to come again. {1.4}"
        "The next visit is in two weeks, on Wednesday at 8:00 in the morning.",
        seed=73,
        pace=1.06,
        level=0.45,
        noise_db=40,
        room_s=0.35,
        fields={"project": "Garden Lane"},
    ),
    Recording(name="yes-please", said="Yes, please.", seed=82, pace=0.9, level=0.6),
    Recording(
        name="shopping-list",
        said="Could you stop at the store on your way home? {0.3}"
        "We need a bag of rice, two onions, a bottle of milk and some apples. {0.25}"
        "And do not forget the bread for tomorrow.",
        seed=91,
        pace=0.96,
        pitch=1.2,
        level=0.25,
        noise_db=36,
        room_s=0.2,
        fields={"prompt": "Which things should be bought? Answer with a short list."},
    ),
    Recording(
        name="heating-repair",
        said="Hi, this is Martin from apartment 12. {0.3}"
        "The heating in my bathroom has been cold since Saturday evening. {0.3}"
        "I am at work until 5, but my sister Anna can open the door. {0.2}"
        "Please send somebody before the weekend.",
        seed=104,
        pitch=0.9,
        level=0.97,
        noise_db=30,
        fields={"caller": "tenant"},
    ),
)


def speak(voice: PiperVoice, recording: Recording) -> Tensor:
    """The words, one sentence or pause after the other: [T] at VOICE_HZ."""
    style = SynthesisConfig(
        length_scale=recording.pace,
        noise_scale=recording.freedom,
        noise_w_scale=1.2 * recording.freedom,
        normalize_audio=False,
    )
    abroad = not recording.language.startswith("en")
    edge = torch.zeros(VOICE_HZ // 10)
    pieces = [edge]
    for number, part in enumerate(parts(recording)):
        if number % 2:
            pieces.append(torch.zeros(round(float(part) * VOICE_HZ)))
            continue
        for phonemes in voice.phonemize(part.strip()):
            known = as_an_american(phonemes) if abroad else phonemes
            spoken = voice.phoneme_ids_to_audio(voice.phonemes_to_ids(known), style)
            pieces.append(torch.from_numpy(spoken))
    return torch.cat([*pieces, edge])


def as_an_american(phonemes: list[str]) -> list[str]:
    """The nearest sounds; each vowel is stressed a little, or it would be swallowed."""
    stressed = re.sub("(?<![ˈˌaeiou])([aeou])", r"ˌ\1", "".join(phonemes))
    return list("".join(NEAREST.get(p, p) for p in stressed))


def parts(recording: Recording) -> list[str]:
    """Words and pauses in turn, words first."""
    return recording.said.replace("}", "{").split("{")


def in_a_room(sound: Tensor, recording: Recording, chance: Generator) -> Tensor:
    """The sound and what the walls send back: noise that falls by 60 dB in `room_s`."""
    if not recording.room_s:
        return sound
    time_s = torch.arange(round(recording.room_s * VOICE_HZ)) / VOICE_HZ
    walls = torch.randn(len(time_s), generator=chance) * 10 ** (-3 * time_s / recording.room_s)
    walls *= 0.5 / walls.norm()
    walls[0] = 1.0
    return fftconvolve(sound, walls)


def background(samples: int, recording: Recording, chance: Generator) -> Tensor:
    """Noise with little above 1 kHz, as of traffic or a fan; perhaps the mains' hum."""
    noise = torch.randn(samples, generator=chance)
    noise = lowpass_biquad(noise, VOICE_HZ, 1000, Q=0.5).div(0.25).clamp(-1, 1)
    if recording.hum:
        turns = 2 * torch.pi * torch.arange(samples) / VOICE_HZ
        noise += torch.sin(60 * turns) + 0.3 * torch.sin(180 * turns)
    return noise


def record(voice: PiperVoice, recording: Recording) -> Tensor:
    """The finished sound: [T] at the recording's own rate."""
    chance = Generator().manual_seed(recording.seed)
    sound = in_a_room(speak(voice, recording), recording, chance)
    # played faster than it was spoken
    sound = resample(sound, round(VOICE_HZ * recording.pitch / 50) * 50, VOICE_HZ)
    sound = sound / max(1e-9, float(sound.abs().max()))
    if recording.noise_db is not None:
        noise = background(len(sound), recording, chance)
        sound = sound + noise * 10 ** (-recording.noise_db / 20)
    return resample(sound * recording.level, VOICE_HZ, recording.rate_hz).clamp(-1, 1)


def reference(recording: Recording) -> str:
    """The text that a person would write down."""
    return " ".join(" ".join(parts(recording)[::2]).split())


def manifest_line(recording: Recording, sound: Tensor) -> str:
    """One line in NeMo's dialect."""
    line: dict[str, str | float] = {
        "id": recording.name,
        "audio_filepath": f"demo/{recording.name}.flac",
        "duration": round(len(sound) / recording.rate_hz, 3),
        "text": reference(recording),
    }
    return json.dumps(line | recording.fields, ensure_ascii=False)


def main() -> None:
    """Write `demo/*.flac` and `demo.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--voice", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    (args.out / "demo").mkdir(parents=True, exist_ok=True)
    lines = []
    for recording in RECORDINGS:
        onnxruntime.set_seed(recording.seed)  # for what is loaded from here on
        voice = PiperVoice.load(args.voice)
        voice.config.espeak_voice = recording.language
        sound = record(voice, recording)
        path = args.out / "demo" / f"{recording.name}.flac"
        soundfile.write(path, sound.numpy(), recording.rate_hz, subtype="PCM_16")
        lines.append(manifest_line(recording, sound))
    (args.out / "demo.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
