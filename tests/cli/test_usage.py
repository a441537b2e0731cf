"""Wrong commands: a clear message, exit code 2, nothing done."""

import json
import os
import subprocess
import sys

import pytest


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys\nfrom omnicli import cli\nsys.argv = ['omni', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "heavy = {'torch', 'numpy', 'soundfile', 'tokenizers', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert all(
        name in ran.stdout for name in ("transcribe", "respond", "say", "manifest", "models")
    )


WRONG = [
    (["transcribe"], "no input"),
    (["transcribe", "IN", "--langage", "en"], "--language"),
    (["transcribe", "nowhere"], "nowhere"),
    (["transcribe", "none*.wav"], "none*.wav"),
    (["transcribe", "IN", "-f", "doc"], "no output format 'doc'"),
    (["transcribe", "IN", "-f", "wav"], "wav"),
    (["transcribe", "IN", "--language", "klingon"], "klingon"),
    (["transcribe", "IN", "--task", "sing"], "sing"),
    (["transcribe", "IN", "--channels", "middle"], "middle"),
    (["transcribe", "IN", "--device", "tpu"], "tpu"),
    (["transcribe", "IN", "--dtype", "int3"], "int3"),
    (["transcribe", "IN", "--model", "embeded"], "embedded"),
    (["transcribe", "IN", "--asr-model", "whisper-bass"], "whisper-base"),
    (["transcribe", "IN", "--asr-model", "/nowhere/whisper"], "/nowhere/whisper"),
    (["respond", "IN", "--voice", "/nowhere/joe.onnx"], "/nowhere/joe.onnx"),
    (["respond", "IN", "--llm-model", "/nowhere/llm.gguf"], "/nowhere/llm.gguf"),
    (["respond", "IN", "--say", "nothing"], "nothing"),
    (["respond", "IN", "--speaking-rate", "9"], "9"),
    (["respond", "IN", "--prompt", "a", "--prompt-file", "b"], "--prompt-file"),
    (["respond", "IN", "--prompt-file", "/nowhere/p.txt"], "/nowhere/p.txt"),
    (["say", "/nowhere/lines.txt"], "/nowhere/lines.txt"),
    (["manifest", "build", "/nowhere"], "/nowhere"),
    (["manifest", "check", "/nowhere/m.jsonl"], "/nowhere/m.jsonl"),
    (["models", "path", "whisper-bass"], "whisper-base"),
    (["models", "add", "/nowhere/x.whl"], "/nowhere/x.whl"),
]


@pytest.mark.parametrize(
    ("args", "told"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_a_wrong_command_is_told_what_is_wrong(omni, inbox, tmp_path, args, told):
    args = [str(inbox) if arg == "IN" else arg for arg in args]
    place = ["-o", tmp_path / "out"] if args[0] in ("transcribe", "respond", "say") else []
    ran = omni(*args, *place)
    assert ran.code == 2, ran.err
    assert told in ran.err.replace("\n", ""), ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_cuda_that_is_not_there_is_an_error_not_a_cpu_run(omni, inbox, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = omni("transcribe", inbox, "-o", tmp_path / "out", "--device", "cuda")
    assert ran.code == 2
    assert "no GPU" in ran.err


def test_all_bad_lines_are_named_at_once_before_any_work(omni, tmp_path):
    lines = (
        '{"audio_filepath": 7}',
        "nonsense",
        '{"id": "a", "audio_filepath": "a.wav"}',
        '{"id": "a", "audio_filepath": "b.wav"}',
    )
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    ran = omni("transcribe", tmp_path / "m.jsonl", "-o", tmp_path / "out")
    assert ran.code == 2
    assert all(f"m.jsonl:{n}" in ran.err for n in (1, 2, 4)), ran.err
    assert "bad lines in the input: 3" in ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_the_first_hundred_bad_lines_and_a_count(omni, tmp_path):
    (tmp_path / "m.jsonl").write_text("nonsense\n" * 250)
    ran = omni("transcribe", tmp_path / "m.jsonl", "-o", tmp_path / "out")
    assert "bad lines in the input: 250" in ran.err
    assert "m.jsonl:100:" in ran.err
    assert "m.jsonl:101:" not in ran.err
    assert "150 more" in ran.err


def test_respond_without_the_phonemiser_stops_before_any_work(omni, inbox, tmp_path, monkeypatch):
    monkeypatch.setattr("omnicli.execution.phonemes.find_spec", lambda name: None)
    ran = omni("respond", inbox, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "omnicli[speech]" in ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert omni("respond", inbox, "-o", tmp_path / "out", "--no-speak", "--dry-run").code == 0


def test_a_missing_cache_without_network_says_what_to_do(omni, inbox, tmp_path, monkeypatch):
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    ran = omni("transcribe", inbox, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "omni models add" in ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_lead_nowhere(inbox, tmp_path, model_cache, closed):
    """Without them the next file that is opened would get their numbers, and our messages."""
    close = " ".join(f"{number}>&-" for number in closed)
    out = tmp_path / "out"
    command = f'"{sys.executable}" -m omnicli transcribe "{inbox}/yes.flac" -o "{out}" {close}'
    environment = os.environ | {"OMNI_CACHE": str(model_cache)}
    ran = subprocess.run(command, shell=True, env=environment, check=False, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    [line] = (out / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "ok"


def test_underscores_in_options_are_hyphens(omni, inbox, tmp_path):
    ran = omni("transcribe", inbox, "--output_dir", tmp_path / "out", "--dry_run", "--json")
    assert ran.code == 0, ran.err
    assert '"requests": 3' in ran.out


def test_a_dry_run_leaves_nothing(omni, inbox, tmp_path):
    ran = omni("respond", inbox, "-o", tmp_path / "out", "--dry-run")
    assert ran.code == 0, ran.err
    assert "3 items, 3 due" in ran.out
    assert not (tmp_path / "out").exists()
