"""What the environment says: the only place besides `settings` that asks it."""

import os
from pathlib import Path

from omnicli.config import Fault, faults_of


def model_cache() -> Path:
    """Where models lie."""
    from omnicli.models import cache_dir

    return cache_dir(os.environ)


def hub_cache() -> Path | None:
    """Where huggingface_hub keeps its downloads: a model that is there needs no path."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME")
    if home is None and os.environ.get("HOME"):
        home = f"{os.environ['HOME']}/.cache/huggingface"
    return Path(home) / "hub" if home else None


def omp_threads() -> int | None:
    """Threads that OpenMP was told to use."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdecimal() and int(told) else None


def test_faults() -> tuple[Fault, ...]:
    """Faults that a test puts into the run."""
    return faults_of(os.environ.get("OMNI_TEST_FAULTS", ""))
