"""The doctor tells what is wrong with a machine, and falls over none of it."""

import json
import os
import sys
import time
import warnings
from dataclasses import asdict

import pytest
import torch

from omnicli import machine, models
from omnicli.errors import UserError
from omnicli.models import folders
from omnicli.report import doctor
from omnicli.report.doctor import Check

VOICE = "en_US-joe-medium"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    """A machine without anything that Linux would tell about it."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/proc/self").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def look(cache, root, tmp_path):
    def look(output_dir=tmp_path / "out", **more) -> dict[str, Check]:
        found = list(doctor.checks(cache, output_dir, root=root, **more))
        named = {check.name: check for check in found}
        assert len(named) == len(found)
        assert all(check.told for check in found)
        assert all(
            check.hint for check in found if check.ok is False and "broken" not in check.told
        )
        return named

    return look


def make_voice(cache):
    folder = cache / "voice" / VOICE
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    made = folders.Manifest(
        kind="voice",
        name=VOICE,
        licence="MIT",
        digest="0",
        conversion=folders.CONVERSION,
        bytes={"config.json": 2},
    )
    (folder / folders.MANIFEST).write_text(json.dumps(asdict(made)))
    return folder


def test_all_is_looked_at_and_nothing_changed(look, tmp_path, cache):
    before = sorted(tmp_path.rglob("*"))
    found = look(hub_cache=tmp_path / "hub")
    assert sorted(tmp_path.rglob("*")) == before
    assert found["torch"].told == torch.__version__.partition("+")[0]
    assert "not here" in found["hub cache"].told
    assert {*models.EMBEDDED, "omni", "CPU", "memory", "phonemiser", "libsndfile"} <= found.keys()
    assert {"file names", "clock", "file system", "free space", "output folder"} <= found.keys()
    assert found["FFmpeg"].told.startswith("libavcodec 6")
    assert "free space" not in look(None)


@pytest.mark.parametrize(
    ("module", "checks"),
    [
        ("torch", "CPU GPU"),
        ("soundfile", "libsndfile"),
        ("av", "FFmpeg"),
        ("omnicli.models", "models"),
        ("omnicli.execution.phonemes", "phonemiser"),
    ],
)
def test_what_does_not_load_is_told_and_the_rest_goes_on(cache, monkeypatch, module, checks):
    monkeypatch.setitem(sys.modules, module, None)
    package, _, name = module.rpartition(".")
    if package:
        monkeypatch.delattr(sys.modules[package], name)
    found = {check.name: check for check in doctor.checks(cache)}
    for name in checks.split():
        assert found[name].ok is False
        assert module.rpartition(".")[2] in found[name].told
    assert "clock" in found


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, UserError, PermissionError])
def test_whatever_breaks_is_told_in_one_line(look, monkeypatch, error):
    def breaks(*_):
        raise error("broken\nat length")

    monkeypatch.setattr(models, "listing", breaks)
    monkeypatch.setattr(machine, "memory_left_bytes", breaks)
    monkeypatch.setattr(machine, "free_bytes", breaks)
    found = look()
    assert found["models"] == Check("models", False, "broken")
    assert found["memory"] == Check("memory", False, "broken")
    assert found["disk"].told == "broken"
    assert found["clock"].ok


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "flags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16 avx",
            "avx2 avx512f avx512_bf16 amx_bf16",
        ),
        ("Features\t: fp asimd bf16", "asimd bf16"),
    ],
)
def test_the_cpu(look, root, line, told):
    assert "allowed" in look()["CPU"].told
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t: x\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    found = look()["CPU"].told
    assert found.startswith(f"1 of {os.cpu_count()} allowed, {torch.get_num_threads()} threads")
    assert found.endswith(f" {told}")


# -- GPUs


def test_no_gpu_is_nothing_wrong(look, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert look()["GPU"] == Check("GPU", None, "none: everything runs on the CPU")


def test_a_gpu_that_torch_cannot_use(look, root, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (root / "dev/nvidiactl").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert look()["GPU"].ok is False
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert look()["GPU"].ok is None
    assert "hidden" in look()["GPU"].told


def test_a_driver_that_is_too_old(look, monkeypatch):
    def complains():
        warnings.warn("The NVIDIA driver is too old\nand so on", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", complains)
    assert look()["GPU"].told == "The NVIDIA driver is too old"
    assert look()["GPU"].ok is False


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that torch finds, and that are CPUs."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "mem_get_info": (60_000_000_000, 80_000_000_000),
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_gpus_that_work(look, gpus):
    found = look()
    assert found["GPU 0"].ok
    assert found["GPU 1"].told.startswith("NVIDIA H100, 60.0 GB left of 80.0 GB, compute")


def test_gpus_that_do_not_compute(look, gpus, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no kernel image is available\nCompile with ...")

    zeros = torch.zeros(64, 64)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: zeros)
    assert look()["GPU 1"].ok is False
    monkeypatch.setattr(torch, "ones", refuses)
    assert look()["GPU 0"].ok is False
    assert look()["GPU 0"].told == "no kernel image is available"


# -- memory, models, surroundings


@pytest.mark.parametrize(("left_bytes", "ok"), [(1 << 30, False), (3 << 30, True)])
def test_memory(look, root, left_bytes, ok):
    (root / "proc/meminfo").write_text(f"MemAvailable: {left_bytes >> 10} kB\n")
    assert look()["memory"].ok is ok


def test_models_that_are_here_damaged_or_missing(look, cache):
    folder = make_voice(cache)
    found = look()
    assert (found[VOICE].ok, found[VOICE].told) == (True, "here")
    assert (found["whisper-base"].ok, found["whisper-base"].told) == (False, "not here")
    (folder / "config.json").write_text("{")
    assert (look()[VOICE].ok, look()[VOICE].told) == (False, "damaged or outdated")
    (folder / "config.json").unlink()
    assert look()[VOICE].told == "damaged or outdated"


def test_a_cache_that_cannot_be_written_matters_while_something_is_missing(
    look, cache, monkeypatch
):
    make_voice(cache)
    rows = models.listing(cache)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = look()["model cache"]
    assert found.ok is False
    assert "cannot be written" in found.told
    here = [row for row in rows if row.name == VOICE]
    monkeypatch.setattr(models, "listing", lambda cache: here)
    assert look()["model cache"].ok


def test_texts_that_are_not_utf8(look, monkeypatch):
    assert look()["file names"].ok
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert look()["file names"].ok is False


def test_a_clock_that_was_never_set(look, monkeypatch):
    assert look()["clock"].ok
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    assert look()["clock"].ok is False


# -- the output folder


def test_where_results_go(look, root, tmp_path):
    (root / "proc/self/mountinfo").write_text(
        f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {tmp_path}/net rw - nfs4 server:/x rw\n"
    )
    found = look(tmp_path / "a/b")
    assert found["output folder"].ok
    assert found["file system"].told == "ext4"
    assert "lease" in look(tmp_path / "net/a")["file system"].told


def test_results_that_can_go_nowhere(look, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert look(tmp_path / "file/out")["output folder"].ok is False
    monkeypatch.setattr(machine, "free_bytes", lambda _: 1 << 20)
    assert look()["free space"].ok is False
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert look()["output folder"].ok is False
