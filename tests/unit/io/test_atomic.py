"""Whole files or none."""

import errno
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from omnicli.io import atomic


@contextmanager
def full_disk(most_bytes):
    """A disk that takes no file longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_folders_are_made_and_text_is_utf8(tmp_path):
    path = atomic.write_text(tmp_path / "a" / "b" / "x.txt", "日本 ё\n")
    assert path.read_bytes() == "日本 ё\n".encode()
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_half_a_surrogate_does_not_stop_a_text(tmp_path):
    assert atomic.write_text(tmp_path / "x.txt", "caf\udce9").read_bytes() == rb"caf\udce9"


def test_until_the_end_the_old_file_stands(tmp_path):
    path = atomic.write_text(tmp_path / "x.txt", "old")
    with atomic.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        assert sorted(p.name for p in tmp_path.iterdir()) == [f".x.txt.{os.getpid()}.part", "x.txt"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(error, tmp_path):
    path = atomic.write_text(tmp_path / "x.txt", "old")
    with pytest.raises(error), atomic.replacing(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path):
    with full_disk(100), pytest.raises(OSError, match="too large") as caught:
        atomic.write_text(tmp_path / "x.txt", "x" * 1000)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_is_an_oserror_and_leaves_nothing(tmp_path):
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic.write_text(tmp_path / "x.txt", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    seen = []
    fsync = os.fsync

    def watched(handle):
        seen.append((path.exists(), os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    atomic.write_text(path, "four")
    assert seen[0] == (False, 4)  # the file, whole, under its other name
    assert seen[1][0]  # then the folder


KILLED = """
import os, signal, sys
from pathlib import Path
from omnicli.io.atomic import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_swept(tmp_path):
    path = atomic.write_text(tmp_path / "sub" / "x.txt", "old")
    others = [tmp_path / n for n in ("movie.part", ".x.part", ".x.txt.12.part.txt", "x.12.part")]
    for other in others:
        other.touch()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 2
    assert atomic.sweep(tmp_path) == 1
    assert list(path.parent.iterdir()) == [path]
    assert all(other.exists() for other in others)
    assert atomic.sweep(tmp_path) == 0
