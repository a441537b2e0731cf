"""The run log: what is due, what stands, what a second run sees."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from omnicli.config import Resume
from omnicli.data import Answer, Failure, Outcome, Request, Segment, Transcript
from omnicli.errors import BusyError, UserError
from omnicli.io.discover import read_inputs
from omnicli.io.results import line
from omnicli.io.store import MAX_CRASHES, Origin, RunStore, digest_of, key_of, stat_of


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


def due(store, settings="s", versions="", **resume):
    return list(store.due(settings, versions, Resume(**resume)))


def finish(store, one, status="ok", *, versions="", digest=""):
    failure = Failure(code="oom", stage="talk", message="m") if status == "failed" else None
    outcome = Outcome(request=one.request, status=status, stem=Path(one.stem), failure=failure)
    store.finish(one, status, line(outcome, "run"), versions=versions, digest=digest)


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
    origin = Origin(stage="transcript", settings="s", versions="listen=2")
    with open_store(out, requests) as store:
        first, second, _ = due(store)
        store.put_product(second, origin, made)
        assert store.product(second, origin, Transcript) == made
        assert store.product(second, replace(origin, settings="t"), Transcript) is None
        assert store.product(replace(second, identity="another"), origin, Transcript) is None
        assert store.product(first, origin, Answer) is None
        newer = replace(origin, versions="listen=3")
        assert store.product(second, newer, Transcript) == made
        assert store.product(replace(second, refresh=True), newer, Transcript) is None


def test_a_key_does_not_hang_on_place(requests):
    moved = replace(requests[0], index=7, where="n:9")
    assert key_of(moved, "", "s") == key_of(requests[0], "", "s") != key_of(requests[1], "", "s")


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


# -- another input, another version


def test_the_folder_of_another_input_is_refused(out, requests):
    with open_store(out, requests, root="/calls") as store:
        finish(store, due(store)[0])
    open_store(out, requests, root="/calls").close()
    open_store(out, requests, root=None).close()
    with pytest.raises(UserError, match=r"another input, /calls \(1 of them\)") as refused:
        RunStore(out, "transcribe", root="/lectures")
    assert "-o" in refused.value.hint
    open_store(out, requests, root="/lectures", overwrite=True).close()
    open_store(out, requests, root="/lectures").close()


def test_results_of_older_stages_are_named_and_redone_on_demand(out, requests):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one, versions="listen=2 talk=3")
    with open_store(out, requests) as store:
        assert due(store, versions="listen=2 talk=4") == []
        assert (store.older.results, store.older.stages) == (3, {"talk"})
    with open_store(out, requests) as store:
        assert len(due(store, versions="listen=2 talk=4", refresh=True)) == 3


def test_a_log_of_the_first_schema_goes_on(out, requests):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one)
        store._db.executescript(
            "".join(
                f"ALTER TABLE requests DROP COLUMN {column};"
                for column in ("identity", "digest", "versions", "crashes", "crash_stage")
            )
            + "ALTER TABLE products DROP COLUMN versions; DROP TABLE in_flight;"
            "DELETE FROM meta WHERE name = 'schema'"
        )
    with open_store(out, requests) as store:
        assert due(store) == []
        assert store.counts() == {"ok": 3}


def test_a_log_of_a_later_schema_is_left_alone(out, requests):
    with open_store(out, requests) as store:
        store._set_meta("schema", "99")
    with pytest.raises(UserError, match="newer version of omni"):
        RunStore(out, "transcribe")


# -- content instead of time


def done_with_digests(out, requests):
    with open_store(out, requests) as store:
        for one in due(store):
            finish(store, one, digest=digest_of(one.request.audio))


def touched(path):
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def test_with_checksums_a_new_time_is_no_change(out, requests):
    done_with_digests(out, requests)
    touched(requests[1].audio)
    with open_store(out, requests) as store:
        assert due(store, checksum=True) == []
    with open_store(out, requests) as store:
        assert [one.stem for one in due(store)] == ["a"]


def test_with_checksums_a_change_that_the_time_hides_is_one(out, requests):
    done_with_digests(out, requests)
    path = requests[1].audio
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stat_of(path) == f"{before.st_size},{before.st_mtime_ns},{before.st_ino}"
    with open_store(out, requests) as store:
        assert due(store) == []
    with open_store(out, requests) as store:
        assert [one.stem for one in due(store, checksum=True)] == ["a"]


# -- what processes died over


def die(out, requests, ids, stage="talk"):
    """A process that is killed with these in hand."""
    store = open_store(out, requests)
    due(store)
    with pytest.raises(KeyboardInterrupt), store.in_flight(stage, ids):
        store._db.execute("CREATE TEMP TABLE kept AS SELECT * FROM in_flight")
        raise KeyboardInterrupt
    store._db.execute("INSERT INTO in_flight SELECT * FROM kept")
    store._held.close()


def test_what_was_in_hand_runs_last_and_the_guilty_fails_after_three(out, requests):
    die(out, requests, ["b.wav", "a.wav"])
    with open_store(out, requests) as store:
        assert [(one.stem, one.crashes) for one in due(store)] == [
            ("sub/c", 0),
            ("b", 1),
            ("a", 1),
        ]
    die(out, requests, ["a.wav"])
    with open_store(out, requests) as store:
        _, b, a = due(store)
        assert [(one.stem, one.crashes) for one in (b, a)] == [("b", 1), ("a", 2)]
        finish(store, b)
    die(out, requests, ["a.wav"])
    with open_store(out, requests) as store:
        a = due(store)[-1]
        assert (a.crashes, a.crash_stage) == (MAX_CRASHES, "talk")
        finish(store, a, "failed")
    with open_store(out, requests) as store:
        assert [one.stem for one in due(store)] == ["sub/c"]
        again = due(store, retry_failed=True)
        assert [(one.stem, one.crashes) for one in again] == [("sub/c", 0), ("a", 2)]
        finish(store, again[1])
    with open_store(out, requests) as store:
        assert store._db.execute("SELECT sum(crashes) FROM requests").fetchone() == (0,)


def test_an_orderly_end_leaves_nothing_in_hand(out, requests):
    with (
        open_store(out, requests) as store,
        pytest.raises(ValueError, match="x"),
        store.in_flight("talk", ["a.wav"]),
    ):
        raise ValueError("x")
    with open_store(out, requests) as store:
        assert [one.crashes for one in due(store)] == [0, 0, 0]


def test_leaving_at_once_is_no_crash(out, requests):
    die(out, requests, ["b.wav"])
    (out / ".omni" / "left-at-once").touch()
    with open_store(out, requests) as store:
        assert [one.crashes for one in due(store)] == [0, 0, 0]
    assert not (out / ".omni" / "left-at-once").exists()


# -- what failed, as a manifest


def test_errors_can_be_fed_back(out, requests):
    with open_store(out, requests) as store:
        for one, status in zip(due(store), ("ok", "failed", "failed"), strict=True):
            finish(store, one, status)
        store.write_results()
    fed = list(read_inputs([str(out / "errors.jsonl")], stdin=sys.stdin))
    assert [(r.request_id, r.audio) for r in fed] == [(r.request_id, r.audio) for r in requests[1:]]
    assert fed[0].raw["x"] == [1, {"y": None}]
    with open_store(out, requests) as store:
        for one in due(store, retry_failed=True):
            finish(store, one)
        store.write_results()
    assert not (out / "errors.jsonl").exists()


def test_the_log_is_for_its_owner(out, requests):
    open_store(out, requests).close()
    assert (out / ".omni").stat().st_mode & 0o077 == 0
