"""Looks at this machine as a run would find it."""

import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnicli import __version__, machine

LEAST_BYTES = 2 << 30  # of memory and of disk
EARLIEST_S = 1_700_000_000.0  # a clock before that is wrong


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `ok` is None where there is nothing to judge."""

    name: str
    ok: bool | None
    told: str
    hint: str = ""


def checks(cache: Path, output_dir: Path | None = None) -> Iterator[Check]:
    """All checks, one after the other. Changes nothing."""
    yield from _versions()
    yield from _devices()
    yield from _memory()
    yield from _models(cache)
    yield from _libraries()
    yield from _surroundings()
    if output_dir is not None:
        yield from _disk(output_dir)


def _versions() -> Iterator[Check]:
    yield Check("omni", None, f"{__version__}, Python {platform.python_version()}")
    for name in ("torch", "torchaudio", "transformers", "piper-tts"):
        try:
            yield Check(name, None, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            needed = name.startswith("torch")
            yield Check(name, False if needed else None, "not installed", f"pip install {name}")


def _devices() -> Iterator[Check]:
    import torch

    allowed, threads = machine.cpu_count(), torch.get_num_threads()
    told = f"{allowed} allowed, {threads} threads, {platform.machine()}"
    fast = [n for n, has in torch.cpu.get_capabilities().items() if has is True and "bf16" in n]
    yield Check("CPU", None, f"{told}, {'bfloat16' if fast else 'float32'}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check("GPU", True, ", ".join(names))
    elif Path("/dev/nvidiactl").exists():
        hint = "see the driver's version with nvidia-smi"
        yield Check("GPU", False, "there is one that torch cannot use", hint)
    else:
        yield Check("GPU", None, "none: everything runs on the CPU")


def _memory() -> Iterator[Check]:
    left, whole = machine.memory_left_bytes(), machine.memory_bytes()
    told = f"{left / 1e9:.1f} GB left of {whole / 1e9:.1f} GB"
    yield Check("memory", left >= LEAST_BYTES, told, "2 GB are needed by the embedded models")


def _models(cache: Path) -> Iterator[Check]:
    from omnicli import models
    from omnicli.execution import phonemes

    yield Check("model cache", None, str(cache))
    for row in models.listing(cache):
        if row.default:
            hint = "omni models pull, where there is a network"
            yield Check(row.name, row.present, "here" if row.present else "not here", hint)
    installed = phonemes.installed()
    hint = "pip install 'omnicli[speech]'; without it there are no spoken answers"
    yield Check("phonemiser", installed, "installed" if installed else "not installed", hint)


def _libraries() -> Iterator[Check]:
    import av
    import soundfile

    yield Check("libsndfile", None, soundfile.__libsndfile_version__)
    yield Check("FFmpeg", None, f"PyAV {av.__version__}")


def _surroundings() -> Iterator[Check]:
    encoding = sys.getfilesystemencoding()
    yield Check("file names", encoding == "utf-8", encoding, "set PYTHONUTF8=1")
    right = time.time() > EARLIEST_S
    yield Check("clock", right, time.strftime("%Y-%m-%d %H:%M:%S %z"), "set the date")


def _disk(folder: Path) -> Iterator[Check]:
    kind = machine.filesystem_of(folder)
    network = machine.is_network(kind)
    told = f"{kind or 'unknown'}{': a lease instead of a lock' if network else ''}"
    yield Check("file system", None, told)
    free = machine.free_bytes(folder)
    yield Check("free space", free >= LEAST_BYTES, f"{free / 1e9:.1f} GB", "make some room")
