"""Terminals, logs, locales; environments and settings."""

import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from case_process import Processes, finished
from case_run import Ran, check, events, loads, put_base, results, settled, words
from case_sounds import DEMO, ffmpeg
from test_case_names import NOBODY, readable_by_all, unprivileged

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


# -- as cron starts it


@pytest.fixture(scope="module")
def night(base, model_cache, tmp_path_factory):
    """A run without HOME, terminal, network or UTF-8."""
    root = tmp_path_factory.mktemp("night")
    folder = put_base(base, root / "in")
    shutil.copy(DEMO / "station-spanish.flac", folder)
    processes = Processes(model_cache, Path("/"))
    try:
        args = ("transcribe", folder, "-o", root / "out", "-f", "txt,json,srt")
        environ = {**C_LOCALE, **NO_NETWORK, "CUDA_VISIBLE_DEVICES": ""}
        code, out, err = finished(processes(*args, **environ))
    finally:
        processes.close()
    return Ran(code, out, err), root


@pytest.mark.case("TE-01")
def test_without_a_terminal_there_are_lines_and_nothing_else(night):
    ran, _ = night
    assert (ran.code, ran.out) == (0, "")
    assert "\r" not in ran.err
    assert "\x1b" not in ran.err
    assert 1 <= len(ran.err.splitlines()) < 20
    assert "9 worked on" in ran.err


@pytest.mark.case("TE-01")
def test_quiet_success_is_silence(omni, night, solo):
    """The same run again, and all that must hold of the first one."""
    _, root = night
    batches = events(root / "out", "batch")
    args = ("transcribe", root / "in", "-o", root / "out", "-f", "txt,json,srt")
    ran = omni(*args, "--quiet")
    settled(root / "out", ran, solo, count=9, code=0)
    assert ran.out == ""
    assert events(root / "out", "batch") == batches


@pytest.mark.case("TE-03")
def test_files_are_utf8_whatever_the_locale(night):
    _, root = night
    assert "días" in results(root / "out")["station-spanish.flac"]["pred_text"]
    for suffix in ("txt", "srt"):
        assert "días" in (root / "out" / f"station-spanish.{suffix}").read_text(encoding="utf-8")


@pytest.mark.case("TE-03")
@pytest.mark.parametrize("folder", ["in", "äöü"])
def test_names_and_failures_are_told_in_any_locale(process, base, tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "日本.wav").write_text("no sound")
    shutil.copy(base / "yes-please.flac", tmp_path / folder / "日本語.flac")
    code, _, err = finished(process("transcribe", folder, "-o", "out", "-q", **C_LOCALE))
    assert code == 3, err
    assert "failed: 日本.wav: not_audio" in err
    assert results(tmp_path / "out")["日本語.flac"]["status"] == "ok"
    assert (tmp_path / "out" / "日本語.txt").exists()


@pytest.mark.case("EN-03")
def test_it_works_without_home_and_network(night):
    ran, root = night
    assert ran.code == 0
    assert {path.name for path in root.iterdir()} == {"in", "out"}


@pytest.mark.case("EN-03")
def test_a_home_and_a_cache_that_may_not_be_touched(omni, solo, base):
    """The home may not even be read; the cache belongs to somebody else where that is possible."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as models:
        root = Path(place)
        Path(models).chmod(0o755)
        cache = readable_by_all(omni.cache, Path(models))
        put_base(base, root / "in")
        home = root / "home"
        (home / ".config").mkdir(parents=True)
        if not os.geteuid():
            for path in (root, *root.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        root.chmod(0o755)
        home.chmod(0)
        try:
            with unprivileged():
                args = ("transcribe", root / "in", "-o", root / "out", "-q")
                ran = omni(*args, HOME=str(home), OMNI_CACHE=cache)
                without = omni(*args, HOME=str(home), OMNI_CACHE="")
        finally:
            home.chmod(0o755)
        settled(root / "out", ran, solo, count=8, code=0)
        if not os.geteuid():
            assert without.code == 2
            assert f"the model cache cannot be used: {home}" in without.err
            assert "OMNI_CACHE" in without.err


@pytest.mark.case("EN-03")
def test_no_models_and_no_network_is_an_error_that_names_the_place(process, base, tmp_path):
    put_base(base, tmp_path / "in")
    environ = {**NO_NETWORK, "OMNI_CACHE": str(tmp_path / "none"), "PIP_RETRIES": "0"}
    environ |= {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_DEFAULT_TIMEOUT": "1"}
    started = process("transcribe", "in", "-o", "out", "-q", **environ)
    code, _, err = finished(started)
    assert code == 2, err
    assert "Traceback" not in err
    assert str(tmp_path / "none") in err
    assert not (tmp_path / "out" / "results.jsonl").exists() or not results(tmp_path / "out")


# -- what is told, and where


@pytest.fixture(scope="module")
def logged(omni, solo, alone, tmp_path_factory):
    """The base set with a log of everything; and a run that may tell what was said."""
    root = tmp_path_factory.mktemp("logged")
    args = ("transcribe", alone, "-o", root / "out", "--json")
    log = ("--log-file", root / "log", "--log-level", "debug", "--log-format", "json")
    metrics = ("--metrics-file", root / "omni.prom")
    case = check(omni, solo, *args, *log, *metrics, count=8, code=0)
    return case, root


def long_words(lines):
    texts = [line["pred_text"] for line in lines.values()]
    return {word for text in texts for word in words(text).split() if len(word) > 4}


@pytest.mark.case("TE-05")
def test_stdout_is_json_and_nothing_else(omni, logged, base, tmp_path):
    case, _ = logged
    assert loads(case.ran.out)["counts"] == {"ok": 7, "empty": 1}
    mp3 = ffmpeg(base / "yes-please.flac", tmp_path / "in.mp3", "-write_xing", "0")
    mp3.write_bytes(bytes(997) + mp3.read_bytes() + b"\xff\xfb\x90" * 400)
    ran = omni("transcribe", mp3, base / "empty.flac", "-o", tmp_path / "out", "--json")
    assert loads(ran.out)["counts"] == {"ok": 1, "empty": 1}
    plan = omni("transcribe", mp3, "-o", tmp_path / "other", "--json", "--dry-run")
    assert loads(plan.out)["requests"] == 1


@pytest.mark.case("TE-07")
def test_no_log_holds_what_was_said(logged):
    case, root = logged
    kept = [root / "log", case.out / ".omni" / "events.jsonl"]
    kept += (case.out / ".omni" / "runs").glob("*/summary.json")
    text = "\n".join(path.read_text(encoding="utf-8") for path in kept).lower()
    said = long_words(case.lines)
    assert {"today", "bread"} & said
    names = words(" ".join(case.lines))
    assert not [word for word in said if word in text and word not in names]
    for line in (root / "log").read_text(encoding="utf-8").splitlines():
        assert {"ts", "level"} <= loads(line).keys()


@pytest.mark.case("TE-07")
def test_by_choice_the_log_holds_what_was_said(omni, base, tmp_path):
    args = ("transcribe", base / "store.flac", "-o", tmp_path / "out", "-q", "--log-content")
    assert omni(*args, "--log-file", tmp_path / "log", "--log-level", "debug").code == 0
    assert "stop at the store" in (tmp_path / "log").read_text(encoding="utf-8").lower()


@pytest.mark.case("TE-09")
@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("respond", ".", "--voise", "x"), "--voice"),
        (("transcribe", ".", "--langage", "en"), "--language"),
        (("transcribe", ".", "--batch_sise=3"), "--batch-size"),
        (("trancribe", "."), "transcribe"),
        (("say", "x.txt", "--speaking-rates", "2"), "--speaking-rate"),
        (("transcribe", ".", "-f", "srtt"), "srt"),
        (("respond", ".", "--say", "sumary"), "summary"),
        (("transcribe", ".", "--channels", "stereo"), "split"),
        (("transcribe", ".", "--batch-size", "0"), "batch-size"),
        (("transcribe", ".", "--min-age", "soon"), "min-age"),
    ],
)
def test_a_slip_is_an_error_with_the_way_out(omni, tmp_path, args, hint):
    ran = omni(*args, cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert hint in ran.err
    assert not list(tmp_path.iterdir())


# -- devices and settings


@pytest.mark.case("EN-01")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_an_error(omni, alone, out, device):
    args = ("transcribe", alone, "-o", out, "--device", device)
    ran = omni(*args, CUDA_VISIBLE_DEVICES="")
    assert ran.code == 2
    assert device in ran.err
    assert not (out / "results.jsonl").exists()


@pytest.mark.case("EN-01")
def test_what_it_ran_on_is_told_everywhere(logged):
    case, root = logged
    assert {line["device"] for line in case.lines.values()} == {"cpu"}
    assert loads(case.ran.out)["device"] == "cpu"
    assert re.search(r'device="cpu"', (root / "omni.prom").read_text())


@pytest.mark.case("EN-01")
def test_no_gpu_is_told_once_where_none_was_asked_for(night):
    ran, _ = night
    assert sum("CPU" in line or "GPU" in line for line in ran.err.splitlines()) == 1, ran.err


@pytest.mark.case("EN-05")
@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("batch_secnds = 600", "batch-size"),
        ("[respond]\nvoise = 'x'", "voice"),
        ("[transcribe]\nvoice = 'x'", "respond"),
        ("[profile.n.transcribe]\nlanguag = 'en'", "language"),
        ("batch-size = true", "batch-size"),
    ],
)
def test_a_misspelt_setting_is_an_error_with_the_nearest_name(omni, tmp_path, text, hint):
    (tmp_path / "omni.toml").write_text(text)
    (tmp_path / "in").mkdir()
    ran = omni("transcribe", "in", "-o", "out", cwd=tmp_path)
    assert ran.code == 2
    assert "omni.toml" in ran.err
    assert hint in ran.err


@pytest.mark.case("EN-05")
def test_a_misspelt_variable_is_an_error_and_origins_are_shown(omni, tmp_path):
    (tmp_path / "in").mkdir()
    args = ("transcribe", "in", "-o", "out")
    ran = omni(*args, cwd=tmp_path, OMNI_BATCH_SIZZE="600")
    assert ran.code == 2
    assert "OMNI_BATCH_SIZE" in ran.err
    (tmp_path / "mine.toml").write_text("batch-size = 5\n[profile.night]\nworkers = 3\n")
    shown = omni(
        *("config", "show", "transcribe", "--config", "mine.toml", "--profile", "night"),
        cwd=tmp_path,
        OMNI_SEED="3",
    )
    assert shown.code == 0, shown.err
    for name, value, origin in (
        ("batch-size", "5", "mine.toml"),
        ("workers", "3", "night"),
        ("seed", "3", "OMNI_SEED"),
        ("dtype", "auto", "default"),
    ):
        line = next(x for x in shown.out.splitlines() if x.startswith(f"{name} = "))
        assert value in line
        assert origin in line


@pytest.mark.case("EN-05")
def test_what_ran_is_on_record(logged):
    case, _ = logged
    for path in (case.out / ".omni" / "runs").glob("*/summary.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        assert told["config"]["models"]["device"] == "auto"
        assert told["exit_code"] == 0
    assert stat.S_IMODE((case.out / ".omni").stat().st_mode) == 0o700
