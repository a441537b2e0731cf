"""Looks at this machine as a run would find it."""

import importlib.metadata
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnicli import __version__, machine
from omnicli.errors import UserError

LEAST_BYTES = 2 << 30  # of memory and of disk
EARLIEST_S = 1_704_067_200.0  # 2024: a clock before that is wrong
# What makes products of matrices fast, as Linux names it; the second line is Arm's.
CPU_FEATURES = """avx2 avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8
    asimd sve i8mm bf16""".split()
_TROUBLE = (ImportError, OSError, RuntimeError, ValueError, UserError)  # of broken installations


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `ok` is None where there is nothing to judge."""

    name: str
    ok: bool | None
    told: str
    hint: str = ""


def checks(
    cache: Path,
    output_dir: Path | None = None,
    *,
    hub_cache: Path | None = None,
    root: Path = machine.ROOT,
) -> Iterator[Check]:
    """All checks, one after the other. Changes nothing; what cannot be looked at is told as wrong.

    `cache` is that of the models, `hub_cache` that of Hugging Face's tools.
    """
    looks = {
        "versions": _versions(),
        "CPU": _cpu(root),
        "GPU": _gpus(root),
        "memory": _memory(root),
        "models": _models(cache, hub_cache),
        "phonemiser": _phonemiser(),
        "libsndfile": _libsndfile(),
        "FFmpeg": _ffmpeg(),
        "surroundings": _surroundings(),
        "disk": _disk(output_dir, root) if output_dir is not None else (),
    }
    for name, look in looks.items():
        try:
            yield from look
        except _TROUBLE as error:
            yield Check(name, False, _first_line(error))


def _first_line(error: Exception | Warning | str) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _versions() -> Iterator[Check]:
    yield Check("omni", None, f"{__version__}, Python {platform.python_version()}")
    for name in ("torch", "torchaudio", "transformers", "piper-tts"):
        try:
            yield Check(name, None, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            needed = name.startswith("torch")
            yield Check(name, False if needed else None, "not installed", f"pip install {name}")


def _cpu(root: Path) -> Iterator[Check]:
    import torch

    try:
        about = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        about = ""  # not Linux
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", about, re.MULTILINE)
    flags = found[1].split() if found else []
    features = " ".join(name for name in CPU_FEATURES if name in flags)
    allowed = f"{machine.cpu_count(root)} of {os.cpu_count()} allowed"
    threads = f"{torch.get_num_threads()} threads"
    yield Check("CPU", None, f"{allowed}, {threads}, {platform.machine()} {features}".strip())


def _gpus(root: Path) -> Iterator[Check]:
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        yield from map(_gpu, range(torch.cuda.device_count()))
    elif said:
        yield Check("GPU", False, _first_line(str(said[0].message)), "nvidia-smi tells the driver")
    elif not (root / "dev/nvidiactl").exists():
        yield Check("GPU", None, "none: everything runs on the CPU")
    elif torch.version.cuda is None and torch.version.hip is None:
        hint = "install a torch that is built with CUDA; with this one everything runs on the CPU"
        yield Check(
            "GPU", False, f"there is one, but torch {torch.__version__} cannot use it", hint
        )
    else:
        yield Check("GPU", None, "there is one, hidden from torch: everything runs on the CPU")


def _gpu(index: int) -> Check:
    import torch

    name = f"GPU {index}"
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        is_right = bool(((ones @ ones) == 64).all())
        free, whole = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # of another generation than torch was built for, or taken
        return Check(name, False, _first_line(error), "--device cpu works without it")
    major, minor = torch.cuda.get_device_capability(index)
    told = (
        f"{torch.cuda.get_device_name(index)}, {free / 1e9:.1f} GB left of {whole / 1e9:.1f} GB, "
        f"compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    )
    return Check(name, is_right, told, "it computes wrong results: do not use it")


def _memory(root: Path) -> Iterator[Check]:
    left, whole = machine.memory_left_bytes(root), machine.memory_bytes(root)
    told = f"{left / 1e9:.1f} GB left of {whole / 1e9:.1f} GB"
    yield Check("memory", left >= LEAST_BYTES, told, "2 GB are needed by the embedded models")


def _models(cache: Path, hub_cache: Path | None) -> Iterator[Check]:
    from omnicli import models

    rows = [row for row in models.listing(cache) if row.default]
    can_write = os.access(machine.standing(cache), os.W_OK | os.X_OK)
    yield Check(
        "model cache",
        can_write or all(row.present for row in rows),
        f"{cache}{'' if can_write else ' (cannot be written)'}",
        "set OMNI_CACHE to a folder that can be written",
    )
    for row in rows:
        is_broken = not row.present and (cache / row.kind / row.name).is_dir()
        told = "here" if row.present else "damaged or outdated" if is_broken else "not here"
        yield Check(row.name, row.present, told, "omni models pull, where there is a network")
    if hub_cache is not None:
        yield Check("hub cache", None, f"{hub_cache}{'' if hub_cache.is_dir() else ' (not here)'}")


def _phonemiser() -> Iterator[Check]:
    from omnicli.execution import phonemes

    is_there = phonemes.installed()
    hint = f"{phonemes.INSTALL}; without it there are no spoken answers"
    yield Check("phonemiser", is_there, "installed" if is_there else "not installed", hint)


def _libsndfile() -> Iterator[Check]:
    import soundfile

    yield Check("libsndfile", None, soundfile.__libsndfile_version__)


def _ffmpeg() -> Iterator[Check]:
    import av

    libraries = {name: ".".join(map(str, found)) for name, found in av.library_versions.items()}
    told = f"libavcodec {libraries['libavcodec']}, libavformat {libraries['libavformat']}"
    yield Check("FFmpeg", None, f"{told}, by PyAV {av.__version__}")


def _surroundings() -> Iterator[Check]:
    for name, encoding in (
        ("file names", sys.getfilesystemencoding()),
        ("printed text", sys.stdout.encoding or "unknown"),
    ):
        is_utf8 = encoding.lower().replace("-", "") == "utf8"
        yield Check(name, is_utf8, encoding, "set PYTHONUTF8=1")
    right = time.time() > EARLIEST_S
    yield Check("clock", right, time.strftime("%Y-%m-%d %H:%M:%S %z"), "set the date")


def _disk(folder: Path, root: Path) -> Iterator[Check]:
    base = machine.standing(folder)
    can_write = base.is_dir() and os.access(base, os.W_OK | os.X_OK)
    told = f"{folder}{'' if can_write else f': {base} cannot be written'}"
    yield Check("output folder", can_write, told, "choose another folder with -o")
    kind = machine.filesystem_of(folder, root)
    network = machine.is_network(kind)
    told = f"{kind or 'unknown'}{': a lease instead of a lock' if network else ''}"
    yield Check("file system", None, told)
    free = machine.free_bytes(folder)
    yield Check("free space", free >= LEAST_BYTES, f"{free / 1e9:.1f} GB", "make some room")
