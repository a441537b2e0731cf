"""Paths, names, folders."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from case_run import check, files_of, manifest, put_base, same_base, settled
from case_sounds import DEMO, speech, wav

from omnicli.models import DEFAULTS

YES = DEMO / "yes-please.flac"
NOBODY = 65534
LONG = "я" * 122  # 244 bytes
SOUNDS = (
    *("a/x.wav", "b/x.wav", "a/x.mp3", "A/X.wav", "call.2024-01-02.wav", "a.b.c.wav", "-x.wav"),
    *("-rf.wav", f"{LONG}.flac", f"{LONG[:-1]}й.flac", "CON.wav", "what?.wav", "a: b.wav"),
    *("line\nbreak.wav", "x.summary.wav", "results.wav", "spa ce .wav", "UPPER.WAV", "%s{0}.wav"),
    *("*.wav", "[x].wav", "日本語.wav", "🎙.wav", "'; rm -rf $HOME.wav", "e\u0301.wav", "é.wav"),
)
IGNORED = ("._x.wav", ".DS_Store", "Thumbs.db", "y.wav.part", "z.tmp", ".wav", "x.tar.gz", "n.txt")


@pytest.fixture(scope="module")
def named(omni, solo, base, tmp_path_factory):
    """Many names, and files that do not count, in one run."""
    root = put_base(base, tmp_path_factory.mktemp("names") / "in")
    tiny = wav(root.parent / "tiny.wav", speech("yes-please"))
    for name in SOUNDS:
        (root / "n" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny, root / "n" / name)
    (root / "n" / os.fsdecode(b"latin-\xe9.wav")).write_bytes(tiny.read_bytes())
    for name in IGNORED:
        (root / "n" / name).write_bytes(b"junk")
    out = root.parent / "out"
    return check(omni, solo, "transcribe", root, "-o", out, count=9 + len(SOUNDS), code=0)


def path_of(case, name):
    return case.out / f"{case[f'n/{name}']['stem']}.txt"


@pytest.mark.case("FS-01")
def test_every_recording_has_files_of_its_own(named):
    stems = [line["stem"] for line in named.lines.values()]
    assert len({stem.casefold() for stem in stems}) == len(stems)
    for line in named.lines.values():
        assert (named.out / f"{line['stem']}.txt").is_file()
        assert (named.out / f"{line['stem']}.json").is_file()
    assert path_of(named, "a/x.wav") != path_of(named, "b/x.wav")
    assert named["n/b/x.wav"]["stem"] == "n/b/x"


@pytest.mark.case("FS-01")
def test_nothing_is_written_elsewhere(named):
    known = {f"{line['stem']}{e}" for line in named.lines.values() for e in (".txt", ".json")}
    assert set(files_of(named.out)) == known | {"results.jsonl"}
    assert all(line["status"] in ("ok", "empty") for line in named.lines.values())


@pytest.mark.case("FS-03")
@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("call.2024-01-02.wav", "n/call.2024-01-02"),
        ("a.b.c.wav", "n/a.b.c"),
        ("UPPER.WAV", "n/UPPER"),
    ],
)
def test_only_a_known_suffix_is_dropped(named, name, stem):
    assert named[f"n/{name}"]["stem"] == stem


@pytest.mark.case("FS-03")
def test_a_hidden_name_is_no_suffix(omni, tmp_path):
    shutil.copy(YES, tmp_path / ".wav")
    shutil.copy(YES, tmp_path / "x.tar.gz")
    out = tmp_path / "out"
    ran = omni("transcribe", tmp_path / ".wav", tmp_path / "x.tar.gz", "-o", out, "--quiet")
    case = settled(out, ran, None, count=2, code=0)
    assert {line["stem"] for line in case.lines.values()} == {".wav", "x.tar.gz"}


@pytest.mark.case("FS-05")
def test_a_name_like_an_option_is_a_name_in_a_folder(named):
    assert named["n/-x.wav"]["status"] == "ok"
    assert named["n/-rf.wav"]["status"] == "ok"


@pytest.mark.case("FS-05")
def test_a_name_like_an_option_after_two_hyphens(omni, tmp_path):
    shutil.copy(YES, tmp_path / "-x.wav")
    ran = omni("transcribe", "-o", "out", "-q", "--", "-x.wav", cwd=tmp_path)
    assert settled(tmp_path / "out", ran, None, count=1, code=0)["-x.wav"]["status"] == "ok"
    refused = omni("transcribe", "-x.wav", "-o", "other", cwd=tmp_path)
    assert refused.code == 2
    assert "--" in refused.err


@pytest.mark.case("FS-07")
def test_a_name_that_fills_its_room_is_shortened_and_found_again(named):
    stems = {named[f"n/{name}"]["stem"] for name in SOUNDS if name.startswith("я")}
    assert len(stems) == 2
    assert all(len(Path(stem).name.encode()) <= 230 for stem in stems)
    assert all((named.out / f"{stem}.txt").read_text(encoding="utf-8").strip() for stem in stems)


@pytest.mark.case("FS-09")
def test_what_is_no_recording_is_passed_over_in_a_folder(named):
    assert not [name for name in named.lines if Path(name).name in IGNORED]


@pytest.fixture(scope="module")
def listed(omni, solo, base, tmp_path_factory):
    """Such names in a manifest."""
    root = tmp_path_factory.mktemp("listed")
    shutil.copy(YES, root / "-x.wav")
    for name in IGNORED[:5]:
        (root / name).write_bytes(b"\0\5\x16\7\0\2" + bytes(range(256)) * 8)
    rows = [{"id": name, "audio_filepath": name} for name in ("-x.wav", *IGNORED[:5])]
    path = manifest(root / "m.jsonl", base, rows)
    return check(omni, solo, "transcribe", path, "-o", root / "out", count=14, code=3)


@pytest.mark.case("FS-05")
def test_a_name_like_an_option_in_a_manifest(listed):
    assert listed.text("-x.wav") == "yes please"


@pytest.mark.case("FS-09")
def test_what_a_manifest_names_fails_by_itself(listed):
    assert {listed.failed(name) for name in IGNORED[:5]} <= {"not_audio", "unsupported_format"}


@pytest.mark.case("FS-01")
def test_a_folder_whose_name_is_no_text(omni, solo, base, tmp_path):
    """Bytes that are no UTF-8, on the way to the input and to the output."""
    latin = os.fsdecode(b"caf\xe9")
    folder = put_base(base, tmp_path / latin / "in")
    args = ("transcribe", folder, "-o", tmp_path / latin / "out")
    check(omni, solo, *args, count=8, code=0)


@contextmanager
def unprivileged():
    """As somebody to whom permissions apply."""
    if os.geteuid():
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def readable_by_all(cache: Path, place: Path) -> Path:
    """The models again where everybody may read them; the cache itself may lie in a closed home."""
    for path in cache.glob("*/*/*"):
        if path.parent.parent.name in DEFAULTS:
            copy = place / path.relative_to(cache)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return place


@pytest.mark.case("FS-11")
def test_what_may_not_be_read_is_listed_and_the_rest_is_done(omni, solo, base):
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as models:
        root = Path(place)
        Path(models).chmod(0o755)
        cache = readable_by_all(omni.cache, Path(models))
        folder = put_base(base, root / "in")
        for name in ("closed/in.flac", "file.flac", "open/in.flac"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(YES, folder / name)
        for path in (root, *root.rglob("*")):
            if not os.geteuid():
                os.chown(path, NOBODY, NOBODY)
        root.chmod(0o755)
        (folder / "file.flac").chmod(0)
        (folder / "closed").chmod(0)
        try:
            with unprivileged():
                args = ("transcribe", folder, "-o", root / "out")
                case = check(omni, None, *args, count=11, code=3, OMNI_CACHE=cache)
        finally:
            (folder / "closed").chmod(0o755)
        same_base(case, solo)
        assert case["open/in.flac"]["status"] == "ok"
        assert case.failed("file.flac") == "unreadable"
        assert case.failed("closed") == "unreadable"
        assert "failed: closed: unreadable" in case.ran.err


@pytest.mark.case("FS-13")
def test_our_own_speech_is_no_input_of_the_next_night(omni, inbox):
    """`check` runs it twice; then a new recording comes."""
    out = inbox / "out"
    texts = inbox.parent / "lines.txt"
    texts.write_text("The window is open.\n")
    assert omni("say", texts, "-o", inbox / "spoken").code == 0
    assert list((inbox / "spoken").glob("*.wav"))
    case = check(omni, None, "transcribe", inbox, "-o", out, count=8, code=0)
    assert all(name.startswith("base/") for name in case.lines)
    shutil.copy(YES, inbox / "new.flac")
    ran = omni("transcribe", inbox, "-o", out, "--quiet")
    case = settled(out, ran, None, count=9, code=0)
    assert case.text("new.flac") == "yes please"
