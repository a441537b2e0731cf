"""`omni respond` and `omni transcribe` with tiny Qwen-Omni checkpoints: qwen2_5_omni, qwen3_omni.

Their weights are random, so what they say is noise; that everything else holds is what counts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import omni_tiny as tiny
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from omnicli.execution import omni as thinking

FAMILIES = ("qwen2_5_omni", "qwen3_omni")
SAME = (
    *("status", "error", "warnings", "pred_text", "segments", "response_text", "response_kind"),
    *("audio_out_duration", "finish_reason", "scores"),
)


def saved(family, folder):
    if family == "qwen3_omni":
        return tiny.save(tiny.qwen3(), folder)
    return tiny.save_qwen2_5(tiny.qwen2_5(), folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: saved(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def checkpoint(request, checkpoints):
    return checkpoints[request.param]


@pytest.fixture
def clips(inbox):
    """Three recordings of one to three seconds, and one that is none."""
    samples, rate_hz = soundfile.read(inbox / "delivery.flac", dtype="float32")
    soundfile.write(inbox / "delivery.flac", samples[: int(2.1 * rate_hz)], rate_hz)
    samples, rate_hz = soundfile.read(inbox / "sub" / "appointment.flac", dtype="float32")
    soundfile.write(inbox / "sub" / "appointment.flac", samples[: int(3.2 * rate_hz)], rate_hz)
    (inbox / "broken.wav").write_text("no sound")
    return inbox


SHORT = ("--max-new-tokens", "6", "--device", "cpu")


def run(omni, clips, model, out, *options):
    return omni("respond", clips, "--model", model, "-o", out, *SHORT, *options)


def same(ours, theirs, names=None):
    assert names or ours.keys() == theirs.keys()
    for name in names or ours:
        assert {f: ours[name][f] for f in SAME} == {f: theirs[name][f] for f in SAME}, name


def sounds(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.wav"))}


def test_hears_thinks_and_speaks(omni, read, clips, checkpoint, tmp_path):
    out = tmp_path / "out"
    ran = run(omni, clips, checkpoint, out, "--json")
    lines = read(out)
    assert set(lines) == {"yes.flac", "delivery.flac", "sub/appointment.flac", "broken.wav"}
    assert lines["broken.wav"]["error"]["code"] == "not_audio"
    spoken = [line for line in lines.values() if line["status"] == "ok"]
    assert spoken, ran.err
    assert ran.code == 3
    for line in spoken:
        assert line["pred_text"]
        assert line["response_text"]
        assert (line["response_kind"], line["summary_method"]) == ("summary", "generated")
        info = soundfile.info(out / line["audio_out"])
        assert (info.samplerate, info.channels) == (24_000, 1)
        assert info.frames / 24_000 == pytest.approx(line["audio_out_duration"], abs=1e-3)
    for line in lines.values():
        if line["status"] == "failed":
            assert line["error"]["code"] in ("not_audio", "runaway", "no_speech", "no_answer")
    before = (out / "results.jsonl").read_bytes()
    assert run(omni, clips, checkpoint, out, "-q").code == 3
    assert (out / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "options", [("--loop", "refill", "--schedule", "overlap"), ("--batch-size", "4")]
)
def test_loops_and_batches_change_nothing(omni, read, clips, checkpoint, tmp_path, options):
    for n in range(5):
        shutil.copy(clips / "delivery.flac", clips / f"more-{n}.flac")
    whole, other = tmp_path / "whole", tmp_path / "other"
    run(omni, clips, checkpoint, whole, "-q")
    run(omni, clips, checkpoint, other, "-q", *options)
    same(read(other), read(whole))
    assert sounds(other) == sounds(whole)


def test_company_changes_nothing(omni, read, clips, checkpoint, tmp_path):
    run(omni, clips, checkpoint, tmp_path / "all", "-q")
    for path in (clips / "yes.flac", clips / "broken.wav"):
        path.unlink()
    run(omni, clips, checkpoint, tmp_path / "some", "-q")
    all_, some = read(tmp_path / "all"), read(tmp_path / "some")
    same(some, all_, names=some)
    assert sounds(tmp_path / "some").items() <= sounds(tmp_path / "all").items()


@pytest.mark.parametrize("stage", ["encode", "think", "talk", "vocode"])
@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_fault_harms_its_row_only(  # noqa: PLR0913
    omni, read, clips, checkpoints, monkeypatch, stage, kind
):
    model, tmp_path = checkpoints["qwen3_omni"], clips.parent
    run(omni, clips, model, tmp_path / "sound", "-q")
    sound = read(tmp_path / "sound")
    victim = next(name for name, line in sound.items() if line["status"] == "ok")
    monkeypatch.setenv("OMNI_TEST_FAULTS", f"{stage}:{victim}:{kind}")
    assert run(omni, clips, model, tmp_path / "out", "-q").code == 3
    lines = read(tmp_path / "out")
    assert lines[victim]["error"]["stage"].startswith(stage)
    same(lines, sound, names=sound.keys() - {victim})


def test_a_row_that_never_ends_is_tried_again_and_then_fails(
    omni, read, clips, checkpoints, tmp_path, monkeypatch
):
    model = checkpoints["qwen3_omni"]
    run(omni, clips, model, tmp_path / "sound", "-q")
    sound = read(tmp_path / "sound")
    victim = next(name for name, line in sound.items() if line["status"] == "ok")
    monkeypatch.setenv("OMNI_TEST_FAULTS", f"talk*:{victim}:noend")
    run(omni, clips, model, tmp_path / "out", "-q")
    lines = read(tmp_path / "out")
    assert lines[victim]["error"]["code"] == "runaway"
    assert not list((tmp_path / "out").glob(f"{lines[victim]['stem']}*.wav"))
    same(lines, sound, names=sound.keys() - {victim})


def test_killed_and_run_again_it_is_as_if_run_once(
    omni, read, clips, checkpoint, model_cache, tmp_path
):
    run(omni, clips, checkpoint, tmp_path / "once", "-q")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "omnicli", "respond", clips, "--model", checkpoint]
    environ = {**os.environ, "OMNI_CACHE": str(model_cache), "OMP_WAIT_POLICY": "PASSIVE"}
    started = subprocess.Popen(
        [*map(str, command), "-o", str(out), "--batch-size", "1", "-q", *SHORT],
        env=environ,
        stderr=subprocess.DEVNULL,
    )
    events = out / ".omni" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and started.poll() is None:
        if events.exists() and '"stage": "talk"' in events.read_text():
            break
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    run(omni, clips, checkpoint, out, "-q")
    same(read(out), read(tmp_path / "once"))
    assert sounds(out) == sounds(tmp_path / "once")


def test_voices_are_the_models_own(omni, read, clips, checkpoint, tmp_path):
    refused = run(omni, clips, checkpoint, tmp_path / "no", "--voice", "nobody")
    assert refused.code == 2
    assert "no voice named 'nobody'" in refused.err
    assert "chelsie" in refused.err.lower()
    rows = [
        {"id": voice, "audio_filepath": str(clips / "yes.flac"), "voice": voice}
        for voice in ("Chelsie", "ethan", "nobody")
    ]
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(omni, manifest, checkpoint, tmp_path / "out", "-q")
    lines = read(tmp_path / "out")
    assert lines["nobody"]["error"]["code"] == "unknown_voice"
    if lines["Chelsie"]["audio_out"] and lines["ethan"]["audio_out"]:
        mine, other = (
            soundfile.read(tmp_path / "out" / lines[v]["audio_out"])[0]
            for v in ("Chelsie", "ethan")
        )
        assert len(mine) != len(other) or not np.allclose(mine, other)


def test_transcribes_without_a_talker(omni, read, clips, checkpoint, tmp_path):
    ran = omni("transcribe", clips, "--model", checkpoint, "-o", tmp_path / "out", "-f", "all")
    assert ran.code == 3
    lines = read(tmp_path / "out")
    assert lines["yes.flac"]["pred_text"]
    assert lines["yes.flac"]["segments"][0]["end"] <= lines["yes.flac"]["duration"] + 0.01
    assert not list((tmp_path / "out").rglob("*.wav"))


def test_options_that_are_not_for_it(omni, clips, checkpoint, tmp_path):
    ran = run(omni, clips, checkpoint, tmp_path / "out", "--asr-model", "whisper-base")
    assert ran.code == 2
    assert "--asr-model is of no use" in ran.err
    ran = run(omni, clips, checkpoint, tmp_path / "out", "--place", "listen=cpu")
    assert ran.code == 2
    assert "no stage named 'listen' can be placed" in ran.err
    ran = run(omni, clips, checkpoint, tmp_path / "out", "--place", "think=cpu/float32")
    assert ran.code == 3


def test_too_little_memory_is_told_with_the_bytes(omni, clips, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(thinking, "weight_bytes", lambda *given: 3 << 50)
    ran = run(omni, clips, checkpoint, tmp_path / "out")
    assert ran.code == 1
    assert "the weights of encode need 3145728.00 GiB" in ran.err
    assert "--place" in ran.err


# -- checkpoints that are not whole


def edited(checkpoint, folder, edit):
    """A copy, with one tensor changed or gone from files and index."""
    shutil.copytree(checkpoint, folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    there = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    places["weight_map"] = {n: p for n, p in places["weight_map"].items() if n in there}
    index.write_text(json.dumps(places))
    return folder


@pytest.mark.parametrize(
    "name", ["thinker.model.layers.1.self_attn.q_proj.weight", "talker.codec_head.weight"]
)
def test_a_missing_tensor_and_a_wrong_shape(omni, clips, checkpoint, tmp_path, name):
    def drop(tensors):
        tensors.pop(name, None)

    def bend(tensors):
        if name in tensors:
            tensors[name] = tensors[name][:-1].clone()

    bare = name.split(".", 1)[1].removeprefix("model.")
    for edit, told in ((drop, "lacks"), (bend, "has other shapes for")):
        folder = edited(checkpoint, tmp_path / told.split()[0], edit)
        ran = run(omni, clips, folder, tmp_path / f"out-{told[:3]}")
        assert ran.code == 2
        assert told in ran.err
        assert bare in ran.err
        assert "Traceback" not in ran.err


def test_a_tensor_of_no_known_part(omni, clips, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "more")
    save_file({"singer.weight": torch.zeros(2)}, folder / "extra.safetensors")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["singer.weight"] = "extra.safetensors"
    index.write_text(json.dumps(places))
    ran = run(omni, clips, folder, tmp_path / "out")
    assert ran.code == 2
    assert "singer.weight" in ran.err


def test_an_unknown_kind_of_model(omni, clips, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "parrot"}))
    ran = run(omni, clips, folder, tmp_path / "out")
    assert ran.code == 2
    assert "'parrot'" in ran.err
    assert "qwen3_omni" in ran.err


def test_speakers_that_could_run_code_are_refused(omni, clips, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["qwen2_5_omni"], tmp_path / "evil")

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch ran",))

    torch.save({"Chelsie": Evil()}, folder / "spk_dict.pt")
    ran = run(omni, clips, folder, tmp_path / "out")
    assert ran.code == 2
    assert "spk_dict.pt" in ran.err


def test_the_list_of_models_names_the_families(omni):
    told = omni("models", "list").out
    assert all(name in told for name in FAMILIES)
