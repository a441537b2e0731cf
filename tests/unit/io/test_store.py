"""The run log: what is due, what stands, what a second run sees."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from omnicli.data import Answer, Outcome, Request, Segment, Transcript
from omnicli.errors import BusyError, UserError
from omnicli.io.results import line
from omnicli.io.store import RunStore, key_of


@pytest.fixture
def requests(tmp_path):
    made = []
    for i, name in enumerate(("b.wav", "a.wav", "sub/c.wav")):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"RIFF" + name.encode())
        made.append(
            Request(
                request_id=name,
                index=i,
                where=f"m:{i + 1}",
                audio=path,
                raw={"x": [1, {"y": None}]},
            )
        )
    return made


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def open_store(out, requests, **more):
    store = RunStore(out, "transcribe", **more)
    assert list(store.ingest(requests)) == []
    store.commit()
    return store


def due(store, settings="s", *, retry_failed=False):
    return list(store.due(settings, retry_failed=retry_failed))


def finish(store, one, status="ok"):
    outcome = Outcome(request=one.request, status=status, stem=Path(one.stem))
    store.finish(one, status, line(outcome, "run"))


def lines(out):
    return [json.loads(x) for x in (out / "results.jsonl").read_text().splitlines()]


def test_requests_come_back_as_they_were_in_the_inputs_order(out, requests):
    with open_store(out, requests) as store:
        assert [one.request for one in due(store)] == requests
        assert [one.stem for one in due(store)] == ["b", "a", "sub/c"]


def test_what_is_done_is_not_due_again(out, requests):
    with open_store(out, requests) as store:
        for one in due(store)[:2]:
            finish(store, one)
    with open_store(out, requests) as store:
        assert [one.request.request_id for one in due(store)] == ["sub/c.wav"]
        assert store.counts() == {"ok": 2, "todo": 1}


def test_failures_stand_until_they_are_asked_for_again(out, requests):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one, "failed" if one.stem == "a" else "empty")
    with open_store(out, requests) as store:
        assert due(store) == []
        assert [one.stem for one in due(store, retry_failed=True)] == ["a"]


@pytest.mark.parametrize("change", ["file", "line", "settings", "missing"])
def test_what_changed_is_due_again(out, requests, change):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one)
    settings = "s"
    if change == "file":
        requests[1].audio.write_bytes(b"other content")
    elif change == "line":
        requests[1] = replace(requests[1], prompt="Who called?")
    elif change == "missing":
        requests[1].audio.unlink()
    else:
        settings = "t"
    with open_store(out, requests) as store:
        found = [one.stem for one in due(store, settings)]
        assert found == (["b", "a", "sub/c"] if change == "settings" else ["a"])


def test_results_are_appended_and_in_the_inputs_order_at_the_end(out, requests):
    with open_store(out, requests) as store:
        for one in reversed(due(store)):
            finish(store, one)
            assert lines(out)[-1]["id"] == one.request.request_id
        store.write_results()
        assert [x["id"] for x in lines(out)] == ["b.wav", "a.wav", "sub/c.wav"]


def test_a_new_order_changes_the_index_and_nothing_else(out, requests):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one)
        store.write_results()
    before = {x["id"]: x for x in lines(out)}
    again = [replace(r, index=i) for i, r in enumerate(reversed(requests))]
    with open_store(out, again) as store:
        assert due(store) == []
        store.write_results()
    assert [x["id"] for x in lines(out)] == ["sub/c.wav", "a.wav", "b.wav"]
    assert [x["index"] for x in lines(out)] == [0, 1, 2]
    assert all(before[x["id"]] | {"index": x["index"]} == x for x in lines(out))


def test_a_request_that_is_gone_keeps_its_line_if_it_was_done(out, requests):
    with open_store(out, requests) as store:
        for one, status in zip(due(store), ("ok", "failed", "ok"), strict=True):
            finish(store, one, status)
    with open_store(out, requests[:1]) as store:
        store.write_results()
        assert store.counts() == {"ok": 1}
    assert [x["id"] for x in lines(out)] == ["b.wav", "sub/c.wav"]


def test_an_id_that_is_taken_is_named_with_both_places(out, requests):
    twice = [*requests, replace(requests[0], index=3, where="m:4")]
    with RunStore(out, "transcribe") as store:
        assert list(store.ingest(twice)) == ["m:4: the id 'b.wav' is taken by m:1"]
        store.rollback()
        assert store.counts() == {}


def test_stems_stay_as_they_were_given(out, requests, tmp_path):
    mp3 = tmp_path / "in" / "b.mp3"
    mp3.write_bytes(b"x")
    late = replace(requests[0], request_id="b.mp3", audio=mp3, index=0)
    with open_store(out, requests) as store:
        due(store)
    with open_store(out, [late, *(replace(r, index=r.index + 1) for r in requests)]) as store:
        assert [one.stem for one in due(store)] == ["b.mp3", "b", "a", "sub/c"]


def test_products_are_kept_under_their_key(out, requests):
    words = (Segment(start_s=0.5, end_s=2.0, text="Grüße, 你好"),)
    made = Transcript(
        text="x", language="de", language_probability=None, segments=words, warnings=("w",)
    )
    with open_store(out, requests) as store:
        store.put_product("a.wav", "transcript", "k1", made)
        assert store.product("a.wav", "transcript", "k1", Transcript) == made
        assert store.product("a.wav", "transcript", "k2", Transcript) is None
        assert store.product("b.wav", "transcript", "k1", Answer) is None


def test_a_key_does_not_hang_on_place(requests):
    moved = replace(requests[0], index=7, where="n:9")
    assert key_of(moved, "s") == key_of(requests[0], "s") != key_of(requests[1], "s")


def test_the_folder_of_another_command_is_refused(out, requests):
    open_store(out, requests).close()
    with pytest.raises(UserError, match="omni transcribe") as refused:
        RunStore(out, "respond")
    assert "--overwrite" in refused.value.hint
    with RunStore(out, "respond", overwrite=True) as store:
        list(store.ingest(requests))
        assert len(due(store)) == 3


def test_a_second_run_is_kept_out_while_the_first_one_lives(out, requests):
    with open_store(out, requests), pytest.raises(BusyError) as busy:
        RunStore(out, "transcribe")
    assert busy.value.exit_code == 75
    open_store(out, requests).close()


def test_speech_never_takes_the_place_of_a_recording(tmp_path):
    """The output folder is the input folder: the answer to a.mp3 is not a.wav, which is there."""
    made = []
    for i, name in enumerate(("a.mp3", "a.wav", "b.mp3")):
        (tmp_path / name).write_bytes(b"x")
        made.append(Request(request_id=name, index=i, audio=tmp_path / name))
    with RunStore(tmp_path, "respond") as store:
        assert list(store.ingest(made)) == []
        assert [one.stem for one in due(store)] == ["a.mp3", "a.wav", "b"]


def test_what_a_killed_run_left_half_written_is_swept(out, requests):
    store = open_store(out, requests)
    half = out / ".a.txt.123.part"
    half.write_text("half")
    store._held.close()  # as a kill does: the folder is let go, nothing is noted
    open_store(out, requests).close()
    assert not half.exists()


def test_a_dead_holder_blocks_nobody(out):
    code = (
        "import os, sys; from pathlib import Path; from omnicli.io.store import RunStore\n"
        "store = RunStore(Path(sys.argv[1]), 'transcribe'); os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert died.returncode == -9
    RunStore(out, "transcribe").close()


def test_a_damaged_log_is_a_clear_error(out):
    (out / ".omni").mkdir(parents=True)
    (out / ".omni" / "run.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match="run log"):
        RunStore(out, "transcribe")


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        RunStore(tmp_path / "out", "transcribe")
