"""Batches: company, failures inside, memory, sizes."""

import json
import shutil
import time

import pytest
from case_run import check, events, loads, put_base, results, same_base
from case_sounds import DEMO, speech, wav

LINES, PLAN_S = 20_000, 20


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    wav(folder / "1.wav", speech("yes-please"))
    wav(folder / "5.wav", speech("train-question", 0.9))
    wav(folder / "7.wav", speech("dentist-moved", 0, 7.3))
    return [folder / name for name in ("1.wav", "5.wav", "7.wav")]


@pytest.mark.case("BA-01")
def test_company_and_order_change_no_letter(omni, solo, lengths, base, tmp_path):
    short, middle, long = lengths
    apart = {}
    for n, path in enumerate((short, middle)):
        ran = omni("transcribe", path, "-o", tmp_path / f"alone-{n}", "-q")
        assert ran.code == 0
        apart |= results(tmp_path / f"alone-{n}")
    rows = [{"id": p.name, "audio_filepath": str(p)} for p in (long, short, middle)]
    rows += [{"id": f"base/{p.name}", "audio_filepath": str(p)} for p in base.iterdir()]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = ("transcribe", tmp_path / "m.jsonl", "-o", tmp_path / "out")
    case = check(omni, solo, *args, count=11, code=0)
    for name, line in apart.items():
        for field in ("pred_text", "segments", "scores", "status"):
            assert case[name][field] == line[field]
    assert case.text("7.wav").startswith("hello this is karen")


FAULTS = ";".join(
    (
        "encode:bad/encode.flac:raise",
        "transcribe:bad/oom.flac:oom",
        "transcribe:*:oom>3",
        "transcribe*:bad/nan.flac:nan",
        "encode:bad/nan-encode.flac:nan",
    )
)
BAD = {
    "bad/encode.flac": ("internal", "encode"),
    "bad/oom.flac": ("oom", "transcribe"),
    "bad/nan-encode.flac": ("not_finite", "encode"),
    "bad/decode.flac": ("decode_error", "listen"),
}


@pytest.fixture(scope="module")
def struck(omni, solo, base, tmp_path_factory):
    """Sixteen and more recordings, some of which fail at one stage or another."""
    root = put_base(base, tmp_path_factory.mktemp("faults") / "in")
    for name in (*BAD, "bad/nan.flac", *(f"good/{n}.flac" for n in range(4))):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(DEMO / "yes-please.flac", root / name)
    (root / "bad/decode.flac").write_bytes(b"fLaC\x00\x00\x00\x22" + bytes(500))
    args = ("transcribe", root, "-o", root.parent / "out")
    return check(omni, solo, *args, count=17, code=3, OMNI_TEST_FAULTS=FAULTS)


@pytest.mark.case("BA-03")
@pytest.mark.parametrize("name", list(BAD))
def test_the_guilty_one_fails_where_it_failed(struck, name):
    assert struck[name]["status"] == "failed"
    code, stage = BAD[name]
    assert struck[name]["error"]["stage"] == stage
    assert struck.failed(name) in (code, "no_samples")


@pytest.mark.case("BA-03")
def test_the_others_are_done(struck):
    assert all(struck.text(f"good/{n}.flac") == "yes please" for n in range(4))
    failed = {name for name, line in struck.lines.items() if line["status"] == "failed"}
    assert set(BAD) <= failed <= {*BAD, "bad/nan.flac"}


@pytest.mark.case("BA-03")
def test_numbers_that_are_none_are_no_transcript(struck):
    line = struck["bad/nan.flac"]
    sure = line["status"] == "ok" and not line["warnings"]
    assert not sure


@pytest.mark.case("BA-05")
def test_a_batch_that_does_not_fit_is_halved_and_not_tried_again(struck):
    batches = [e for e in events(struck.out, "batch") if e["stage"] == "transcribe"]
    assert any(e.get("oom") and e["items"] > 3 for e in batches)
    done = [e for e in batches if "error" not in e]
    assert done
    assert all(e["items"] <= 3 for e in done)
    assert sum(bool(e.get("oom")) for e in batches) < len(batches)


@pytest.mark.case("BA-05")
def test_little_memory_makes_small_batches(omni, solo, alone, tmp_path):
    """A cap below what is in use now leaves nothing: each item fails by itself, none is lost."""
    args = ("transcribe", alone, "-o", tmp_path / "out", "--max-memory", "1")
    case = check(omni, None, *args, count=8, code=3)
    assert {line["error"]["code"] for line in case.lines.values() if line["error"]} == {"oom"}
    ran = omni("transcribe", alone, "-o", tmp_path / "out", "--retry-failed", "-q")
    assert ran.code == 0
    again = type(case)(ran, case.out, results(case.out))
    same_base(again, solo)


@pytest.mark.case("BA-07")
def test_many_lines_are_planned_in_seconds(omni, base, tmp_path):
    """A fifth of the report's number, in a fifth of the time that is still seconds."""
    files = [str(path) for path in sorted(base.iterdir())]
    with (tmp_path / "m.jsonl").open("w") as file:
        for n in range(LINES):
            seconds = 1 + n % 29
            file.write(
                f'{{"id": "{n}", "audio_filepath": "{files[n % 8]}", "duration": {seconds}}}\n'
            )
    start_s = time.monotonic()
    args = ("transcribe", tmp_path / "m.jsonl", "-o", tmp_path / "out", "--dry-run", "--json")
    ran = omni(*args)
    assert ran.code == 0, ran.err
    plan = loads(ran.out)
    assert time.monotonic() - start_s < PLAN_S
    assert (plan["requests"], plan["due"]) == (LINES, LINES)
    encode = next(stage for stage in plan["stages"] if stage["stage"] == "encode")
    assert encode["items"] >= LINES
    assert encode["valid"] / encode["padded"] > 0.7
    assert encode["batches"] < LINES / 8
    assert not (tmp_path / "out").exists()
    shown = omni("transcribe", base, "-o", tmp_path / "out", "--dry-run").out
    assert "padding" in shown


@pytest.mark.case("BA-09")
@pytest.mark.parametrize("size", [7, 8])
def test_the_last_batch_is_run_whatever_is_in_it(omni, solo, alone, tmp_path, size):
    """Eight items in batches of eight, and of seven."""
    args = ("transcribe", alone, "-o", tmp_path / "out", "--batch-size", size)
    check(omni, solo, *args, count=8, code=0)
    heard = [e["items"] for e in events(tmp_path / "out", "batch") if e["stage"] == "listen"]
    assert sum(heard) == 8
    assert max(heard) <= size
    assert len(heard) == (1 if size == 8 else 2)


@pytest.mark.case("BA-09")
def test_a_single_item_is_as_good(omni, solo, base, tmp_path):
    shutil.copytree(base, tmp_path / "in" / "base")
    for path in (tmp_path / "in" / "base").iterdir():
        if path.stem != "store":
            path.unlink()
    ran = omni("transcribe", tmp_path / "in", "-o", tmp_path / "out", "-q")
    assert ran.code == 0
    line, alone = results(tmp_path / "out")["base/store.flac"], solo["base/store.flac"]
    assert line["segments"] == alone["segments"]
