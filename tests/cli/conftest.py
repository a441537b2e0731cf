"""The command line, in this process, and real recordings to run it on."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from omnicli import cli

DEMO = Path(__file__).parents[2] / "manifests" / "demo"


class Ran:
    """What a command did."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def omni(monkeypatch, capfd, model_cache):
    """Run a command; returns its exit code and what it wrote."""
    monkeypatch.setenv("OMNI_CACHE", str(model_cache))

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["omni", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Ran(ended.value.code or 0, out, err)

    return run


@pytest.fixture
def inbox(tmp_path):
    """Three good recordings in a folder with a sub-folder."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(DEMO / "yes-please.flac", folder / "yes.flac")
    shutil.copy(DEMO / "dentist-moved.flac", folder / "sub" / "appointment.flac")
    shutil.copy(DEMO / "parcel-neighbor.flac", folder / "delivery.flac")
    return folder


@pytest.fixture
def read():
    """The lines of a run's results.jsonl, strictly read, by id."""

    def lines(out):
        def refuse(constant):
            raise AssertionError(f"{constant} is no JSON")

        text = (out / "results.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(x, parse_constant=refuse) for x in text.splitlines()]
        return {row["id"]: row for row in rows}

    return lines


@pytest.fixture
def demo():
    """The demo's manifest."""
    return DEMO.parent / "demo.jsonl"
