"""Settings: what beats what, and that nothing misspelt is passed over."""

import json

import pytest

from omnicli.cli import COMMANDS
from omnicli.cli.settings import read_settings, told
from omnicli.errors import UserError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder with settings in it, and a home with others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "omni").mkdir(parents=True)
    return tmp_path


def settings(*args, **environ):
    return read_settings(COMMANDS, environ, args)


def effective(found, command="transcribe"):
    return {name: setting.value for name, setting in found.by_command[command].items()}


def test_a_flag_beats_a_variable_beats_a_file_beats_the_users_own(place, omni, monkeypatch):
    (place / "home" / "omni" / "config.toml").write_text("seed = 1\nworkers = 7\nbatch-size = 3\n")
    (place / "omni.toml").write_text("seed = 2\nbatch_size = 5\n")
    home = {"XDG_CONFIG_HOME": str(place / "home")}
    assert effective(settings(**home)) == {"seed": 2, "workers": 7, "batch_size": 5}
    found = settings(**home, OMNI_SEED="3")
    assert (found.by_command["respond"]["seed"].origin, effective(found)["seed"]) == (
        "OMNI_SEED",
        "3",
    )
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMNI_SEED", "3")
    shown = omni("config", "show", "transcribe").out
    assert 'seed = "3"  # OMNI_SEED\n' in shown or "seed = 3  # OMNI_SEED\n" in shown
    assert "workers = 7  # " in shown
    assert "batch-size = 5  # omni.toml\n" in shown
    assert 'dtype = "auto"  # default\n' in shown


def test_the_settings_reach_the_run(place, omni, tmp_path):
    bad = tmp_path / "in"
    bad.mkdir()
    (bad / "x.wav").write_text("no sound")
    (place / "omni.toml").write_text(
        'output-dir = "results"\n[transcribe]\noutput-format = ["srt"]\n'
    )
    assert omni("transcribe", bad, "--json").code == 3
    assert (place / "results" / "results.jsonl").exists()
    summary = next((place / "results" / ".omni" / "runs").glob("*/summary.json"))
    assert json.loads(summary.read_text())["config"]["writers"] == ["srt"]
    assert omni("transcribe", bad, "-o", place / "flag").code == 3
    assert (place / "flag" / "results.jsonl").exists()


def test_tables_and_profiles(place):
    (place / "omni.toml").write_text(
        'language = "en"\n[respond]\nsay = "reply"\n'
        '[profile.nightly]\nlanguage = "de"\nmax-runtime = "6h"\n'
        '[profile.nightly.respond]\nsay = "transcript"\n'
    )
    assert effective(settings()) == {"language": "en"}
    assert effective(settings(), "respond") == {"language": "en", "say": "reply"}
    nightly = settings("--profile", "nightly")
    assert effective(nightly, "respond") == {
        "language": "de",
        "max_runtime": "6h",
        "say": "transcript",
    }
    assert effective(settings(OMNI_PROFILE="nightly")) == {"language": "de", "max_runtime": "6h"}
    with pytest.raises(UserError, match="no profile 'weekly'"):
        settings("--profile=weekly")


def test_paths_start_from_the_file_that_names_them(place):
    for folder in ("conf", "a [b]"):
        (place / folder).mkdir()
        (place / folder / "x.toml").write_text('output-dir = "out"\naudio-root = "/a"\n')
        found = effective(settings("--config", f"{folder}/x.toml"))
        assert found == {"output_dir": f"{folder}/out", "audio_root": "/a"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("batch_secnds = 3", "did you mean batch-size?"),
        ("batch_siz = 3", "did you mean batch-size?"),
        ("[trancribe]\nseed = 1", "did you mean transcribe?"),
        ("[transcribe]\nvoice = 'x'", "it belongs to respond"),
        ("[profile.a]\nsede = 1", "did you mean seed?"),
        ("batch-size = 'many'", "a whole number is expected"),
        ("quiet = 1", "true or false is expected"),
        ("config = 'x'", "known: "),
    ],
)
def test_what_is_misspelt_is_an_error_with_the_nearest_name(place, text, hint):
    (place / "omni.toml").write_text(text)
    with pytest.raises(UserError, match=r"omni\.toml") as refused:
        settings()
    assert hint in refused.value.hint


def test_no_toml_and_no_file(place):
    (place / "omni.toml").write_text("a = ")
    with pytest.raises(UserError, match=r"omni\.toml"):
        settings()
    with pytest.raises(UserError, match="no settings at nowhere"):
        settings("--config", "nowhere")


def test_variables_that_are_slips_are_errors_and_those_of_others_are_not(place):
    with pytest.raises(UserError, match="OMNI_BATCH_SIZ") as refused:
        settings(OMNI_BATCH_SIZ="3")
    assert refused.value.hint == "did you mean OMNI_BATCH_SIZE?"
    assert effective(settings(OMNI_KIT_PATH="/opt", OMNI_CACHE="/c", OMNI_TEST_FAULTS="")) == {}


def test_secrets_are_not_shown(place):
    found = settings(OMNI_PING_URL="https://hc.example/secret")
    lines = list(told(found, COMMANDS, "respond"))
    assert "ping-url = (set)  # OMNI_PING_URL" in lines
    assert "secret" not in "\n".join(lines)


def test_a_wrong_value_in_a_variable_is_a_wrong_value(omni, monkeypatch, tmp_path):
    monkeypatch.setenv("OMNI_BATCH_SIZE", "many")
    ran = omni("transcribe", tmp_path, "-o", tmp_path / "out")
    assert (ran.code, "batch-size" in ran.err) == (2, True)


def test_the_version(omni):
    for flag in ("--version", "-V"):
        ran = omni(flag)
        assert (ran.code, ran.out.startswith("omni 0.")) == (0, True)


def test_names_like_options_are_told_how(omni, tmp_path):
    ran = omni("transcribe", "-x.wav", "-o", tmp_path / "out")
    assert (ran.code, "./-x.wav" in ran.err) == (2, True)


def test_threads_are_those_that_were_asked_for(omni, monkeypatch, tmp_path):
    import torch

    (tmp_path / "x.wav").write_text("no sound")
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        omni("transcribe", tmp_path / "x.wav", "-o", tmp_path / "out")
        assert torch.get_num_threads() == 1
        omni("transcribe", tmp_path / "x.wav", "-o", tmp_path / "out", "--threads", "2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
