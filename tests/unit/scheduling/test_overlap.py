"""All stages at a time: the same results as one after the other, bounded, and stoppable."""

import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from omnicli.config import faults_of
from omnicli.data import Answer, Draft, Encoded, Inputs, Ranking, Request, Speech, Waveform
from omnicli.errors import RequestError, RunError, StoppedError, TimeUpError
from omnicli.execution.shared import Shared
from omnicli.execution.stage import MapStage, StageSpec
from omnicli.io.store import RunStore
from omnicli.observe import Observer
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver
from omnicli.scheduling.faults import Faults
from omnicli.scheduling.handover import overlap, stages
from omnicli.scheduling.openings import Openings
from omnicli.scheduling.watchdog import Watchdog, Work
from omnicli.scheduling.wave import Member, needed, tensor_bytes

FRAMES = 256
SPEECH_BYTES = 4 * FRAMES  # of one item of `talk`


class Each(MapStage):
    """A function of each item; `before` hears of each batch."""

    def __init__(self, make, before=lambda items: None):
        self.make, self.before = make, before

    def run(self, items):
        self.before(items)
        return [self.make(item) for item in items]


def spec(name, make, *, before=lambda items: None, **more):
    def opened():
        return nullcontext(Each(make, before))

    return StageSpec(name=name, open=opened, fill_rows=1, **more)


class Keeper:
    """Remembers who is done, and the thread that said so."""

    def __init__(self, breaks=None):
        self.done, self.threads, self.joins, self.breaks = {}, set(), [], breaks

    def settle(self, product):
        self.threads.add(threading.get_ident())
        return product

    def joined(self, member, spec, product):
        self.joins.append((member.request.request_id, spec.name))

    def finished(self, member):
        self.threads.add(threading.get_ident())
        name = member.request.request_id
        assert name not in self.done
        if name == self.breaks:
            raise OSError(28, "No space left on device")
        wave = member.inputs.one("vocode", Waveform)
        self.done[name] = (
            member.failure,
            sorted(member.passed),
            None if wave is None else torch.cat(wave.pieces).numpy().tobytes(),
            set(member.timings),
        )


class Flight:
    """What is on record as in hand."""

    def __init__(self):
        self.now, self.most = {}, 0

    @contextmanager
    def holding(self, stage, ids):
        assert stage not in self.now
        self.now[stage] = ids
        self.most = max(self.most, len(self.now))
        try:
            yield
        finally:
            del self.now[stage]


class Ran:
    """A wave that has passed the stages."""

    def __init__(self, handover, specs, requests, *, breaks=None, rows=4, faults="", **more):
        self.keeper, self.flight, self.events = Keeper(breaks), Flight(), []
        self.members = [
            Member(request=Request(request_id=name), needs=needed(specs, Inputs()))
            for name in requests
        ]
        self.driver = Driver(
            budget=Budget(max_rows=rows, max_bytes=1 << 30),
            observer=Observer(None, (self.events.append,)),
            in_flight=self.flight.holding,
            faults=Faults(faults_of(faults)),
            **more,
        )
        self.handover, self.specs = handover, specs

    def go(self):
        openings = Openings(keep=False)
        try:
            self.handover.run(self.members, self.specs, self.driver, self.keeper, openings)
        finally:
            openings.close()
            assert [t.name for t in threading.enumerate() if t.name.startswith("stage ")] == []
            assert self.flight.now == {}
        return self

    def told(self, kind, stage=None):
        return [e for e in self.events if e["event"] == kind and stage in (None, e["stage"])]


def line(**before):
    """think, then talk, then vocode: each item its own size; `before` hears of batches."""

    def heard(name):
        return before.get(name, lambda items: None)

    def number(request, inputs):
        return [int(request.request_id[1:])]

    def speech(n):
        return Speech(latents=torch.full((FRAMES, 1), float(n)).sin())

    def wave(spoken):
        samples = spoken.latents.flatten().cumsum(0)
        return Waveform(pieces=(samples,), rate_hz=8000, peak=1.0, samples=len(samples))

    return [
        spec("think", lambda n: Draft(text=str(n), finish_reason="stop"), before=heard("think"),
             split=number),
        spec("talk", lambda d: speech(int(d.text)), before=heard("talk"), reads=("think",),
             split=lambda request, inputs: inputs.parts("think", Draft)),
        spec("vocode", wave, before=heard("vocode"), reads=("talk",),
             split=lambda request, inputs: inputs.parts("talk", Speech)),
    ]  # fmt: skip


def names(count):
    return [f"r{n}" for n in range(count)]


# -- the same results


def clips(request, inputs):
    """As many as the request's number says, all of their own lengths; one request has none."""
    n = int(request.request_id[1:])
    if n == 11:
        raise RequestError("not_audio", "is no recording")
    return [torch.arange(10 + 3 * n + part).float() for part in range(n % 4)]


def encode(clip):
    return Encoded(embeds=clip.sin()[:, None], clip=0, valid_frames=len(clip))


def rank(encoded):
    if len(encoded.embeds) == 10 + 3 * 9:
        raise RequestError("no_answer", "nobody can rank this")
    return Ranking(scores=(float(encoded.embeds.sum()),))


def write(encoded):
    finish = "loop" if len(encoded.embeds) % 5 == 0 else "stop"
    return Draft(text=f"{float(encoded.embeds.norm()):.4f}", finish_reason=finish)


def write_again(draft):
    return Draft(text=draft.text[:3], finish_reason="stop")


def in_trouble(request, inputs):
    return [d for d in inputs.parts("write", Draft) if d.finish_reason == "loop"]


def answer(request, inputs, parts):
    scores = [str(s) for one in inputs.parts("rank", Ranking) for s in one.scores]
    drafts = inputs.parts("write", Draft) + inputs.parts("write.again", Draft)
    text = " ".join([*scores, *(draft.text for draft in drafts)])
    return Answer(kind="say", text=text, language="en") if text else None


def words(request, inputs):
    answer = inputs.one("answer", Answer)
    return answer.text.split() if answer else []


def say(word):
    return Speech(latents=torch.tensor([[float(word)] * len(word)]).T)


def spoken(request, inputs):
    found = inputs.parts("talk", Speech)
    return [found] if found else []


def voice(parts):
    pieces = tuple(p.latents.flatten() for p in parts)
    return Waveform(pieces=pieces, rate_hz=8000, peak=1.0, samples=sum(map(len, pieces)))


def diamond():
    """encode forks into rank and write, answer joins them, what loops is written again."""
    again = write_again
    both = {
        "reads": ("encode",),
        "split": lambda request, inputs: inputs.parts("encode", Encoded),
        "length": lambda encoded: len(encoded.embeds),
        "edge": lambda n: -(-n // 8) * 8,
    }
    joins = ("rank", "write", "write.again")
    return [
        spec("encode", encode, split=clips, length=len, edge=lambda n: -(-n // 16) * 16),
        spec("rank", rank, **both),
        spec("write", write, **both),
        spec("write.again", again, reads=("write",), split=in_trouble),
        StageSpec(name="answer", reads=joins, join=answer, record=Answer),
        spec("talk", say, reads=("answer",), split=words, length=len),
        spec("vocode", voice, reads=("talk",), split=spoken),
    ]


@pytest.mark.parametrize("faults", ["", "rank:r5:raise; talk:r6:raise", "write:r7:oom", "*:r3:oom"])
@pytest.mark.parametrize("waiting_bytes", [1, 1 << 20])
def test_results_are_those_of_stages(faults, waiting_bytes):
    more = {"faults": faults, "waiting_bytes": waiting_bytes}
    one, other = (Ran(how, diamond(), names(24), **more).go() for how in (stages, overlap))
    assert other.keeper.done == one.keeper.done
    assert len(one.keeper.done) == 24
    assert sorted(other.keeper.joins) == sorted(one.keeper.joins)
    failed = {name for name, (failure, *_) in one.keeper.done.items() if failure}
    assert {"r9", "r11"} <= failed
    assert other.keeper.threads == {threading.get_ident()}
    assert {e["stage"]: 0 for e in other.told("load")}.keys() == {
        e["stage"] for e in one.told("load")
    }


@pytest.mark.parametrize("handover", [stages, overlap])
def test_who_needs_nothing_is_done_and_who_needs_the_end_begins_there(handover):
    ran = Ran(handover, line(), names(3))
    for n, name in ((0, "talk"), (1, "vocode")):
        inputs = ran.members[n].inputs
        inputs.put("talk", (Speech(latents=torch.ones(4, 1)),))
        if name == "vocode":
            inputs.put("vocode", (Waveform(pieces=(), rate_hz=1, peak=0.0, samples=0),))
        ran.members[n].needs = needed(ran.specs, inputs)
    ran.keeper.finished = lambda member: ran.keeper.done.setdefault(member.request.request_id)
    ran.go()
    assert sorted(ran.keeper.done) == names(3)
    assert [e["items"] for e in ran.told("stage")] == [1, 1, 2] or handover is overlap
    assert sum(e["items"] for e in ran.told("batch")) == 1 + 1 + 2


@pytest.mark.parametrize("handover", [stages, overlap])
def test_what_nobody_reads_any_more_is_forgotten(handover):
    held = []
    specs = line(vocode=lambda items: held.append([m.inputs.has("think") for m in ran.members]))
    ran = Ran(handover, specs, names(4))
    ran.go()
    assert held == [[False] * 4]
    assert not any(member.inputs.has(one.name) for member in ran.members for one in ran.specs)


def test_products_are_freed_while_the_wave_goes_on():
    made, alive = [], []

    def vocode(items):
        alive.append(sum(one() is not None for one in made))

    specs = line(vocode=vocode)
    real = specs[1].open

    def opened():
        stage = real().enter_result
        make = stage.make

        def noted(item):
            speech = make(item)
            made.append(weakref.ref(speech.latents))
            return speech

        stage.make = noted
        return nullcontext(stage)

    specs[1] = replace(specs[1], open=opened)
    Ran(overlap, specs, names(40), rows=1, waiting_bytes=SPEECH_BYTES).go()
    assert len(alive) == 40
    assert max(alive) <= 8


def test_an_error_halves_the_batch_and_only_its_row_fails():
    sizes = []

    def before(items):
        sizes.append(len(items))
        if any(d.text == "5" for d in items):
            raise RuntimeError("five")

    ran = Ran(overlap, line(talk=before), names(8), rows=8, waiting_bytes=1 << 20).go()
    failed = {name: done[0].code for name, done in ran.keeper.done.items() if done[0]}
    assert failed == {"r5": "internal"}
    assert sizes == [8, 4, 4, 2, 1, 1, 2]


# -- stages at a time


def test_the_thinker_thinks_the_next_batch_while_the_talker_talks():
    """Each waits for the other: with one stage after the other, nobody would ever come."""
    second_thought, first_word = threading.Event(), threading.Event()
    batches = {"think": 0}

    def think(items):
        batches["think"] += 1
        if batches["think"] == 2:
            second_thought.set()
            assert first_word.wait(20)

    def talk(items):
        first_word.set()
        assert second_thought.wait(20)

    ran = Ran(overlap, line(think=think, talk=talk), names(8), rows=4).go()
    assert len(ran.keeper.done) == 8
    assert ran.flight.most >= 2
    workers = {e["stage"]: e for e in ran.told("worker")}
    assert set(workers) == {"think", "talk", "vocode"}
    assert all(e[f"{s}_s"] >= 0 for e in workers.values() for s in ("busy", "starved", "blocked"))


def test_all_three_work_at_a_time():
    together = threading.Barrier(3, timeout=20)
    batch = {"think": 0, "talk": 0, "vocode": 0}

    def meets(stage, when):
        def before(items):
            batch[stage] += 1
            if batch[stage] == when:
                together.wait()

        return before

    specs = line(think=meets("think", 3), talk=meets("talk", 2), vocode=meets("vocode", 1))
    ran = Ran(overlap, specs, names(12), rows=4).go()
    assert len(ran.keeper.done) == 12


def test_batches_are_full_while_more_comes():
    """The talker waits for a batch's worth, no longer than its last: four come at a time."""
    sizes = []

    def talk(items):
        sizes.append(len(items))
        time.sleep(0.3)

    think, *others = line(think=lambda items: time.sleep(0.005), talk=talk)
    Ran(overlap, [replace(think, max_rows=4), *others], names(32), rows=16).go()
    assert sum(sizes) == 32
    assert len(sizes) <= 3


# -- queues are bounded


@pytest.mark.parametrize("waiting", [1, 3])
def test_no_more_waits_than_may(waiting):
    """The vocoder waits until the talker can go no further; then it has no more than the bound."""
    ahead, deepest = [], []

    def vocode(items):
        if not ahead:
            ahead.append(1)
            until_still(lambda: ran.talked)
            deepest.append(ran.talked)

    ran = Ran(overlap, line(vocode=vocode), names(40), rows=1,
              waiting_bytes=waiting * SPEECH_BYTES)  # fmt: skip
    ran.talked = 0
    make = ran.specs[1].open

    def counted():
        with make() as stage:
            stage.before = lambda items: setattr(ran, "talked", ran.talked + len(items))
            return nullcontext(stage)

    ran.specs[1] = replace(ran.specs[1], open=counted)
    ran.go()
    assert len(ran.keeper.done) == 40
    queued = [e["bytes"] for e in ran.told("queue", "vocode")]
    assert max(queued) <= (waiting + 1) * SPEECH_BYTES
    assert max(queued) >= waiting * SPEECH_BYTES
    assert deepest[0] <= waiting + 3, "one in the vocoder's hand, and one or two in the talker's"
    (talker,) = ran.told("worker", "talk")
    assert talker["blocked_s"] > 0


def until_still(value, seconds=0.15):
    last, since = value(), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.01)
        if value() != last:
            last, since = value(), time.monotonic()


def test_items_larger_than_the_bound_pass():
    ran = Ran(overlap, line(), names(12), rows=4, waiting_bytes=1).go()
    assert len(ran.keeper.done) == 12
    assert max(e["bytes"] for e in ran.told("queue", "vocode")) == SPEECH_BYTES


def test_the_bytes_of_a_product_are_those_of_its_tensors():
    wave = Waveform(pieces=(torch.ones(3), torch.ones(2)), rate_hz=8, peak=1.0, samples=5)
    assert tensor_bytes(wave) == 20
    assert tensor_bytes(Draft(text="a", finish_reason="stop")) == 0


# -- memory


def test_what_does_not_fit_beside_others_waits_for_its_turn():
    """Nothing is cut, nothing fails, and nothing waits forever: not even for who is held back."""
    specs = [replace(one, row_bytes=lambda n: 100) for one in line()]
    more = {"memory_left": lambda device: 600.0, "waiting_bytes": 1}
    ran = Ran(overlap, specs, names(16), rows=4, **more).go()
    assert [done[0] for done in ran.keeper.done.values()] == [None] * 16
    assert max(e["items"] for e in ran.told("batch", "think")) == 4
    assert ran.flight.most == 1


def test_only_what_computes_in_the_same_place_shares_its_memory():
    """The thinker's second batch and the talker's first meet, as neither takes from the other."""
    together, thought, talked = threading.Barrier(2, timeout=20), [], []

    def think(items):
        thought.append(len(items))
        if len(thought) == 2:
            together.wait()

    def talk(items):
        talked.append(len(items))
        if len(talked) == 1:
            together.wait()

    specs = [replace(one, row_bytes=lambda n: 100) for one in line(think=think, talk=talk)]
    specs[1] = replace(specs[1], device="elsewhere")
    Ran(overlap, specs, names(8), rows=4, memory_left=lambda device: 600.0).go()
    assert (thought, talked, together.broken) == ([4, 4], [4, 4], False)


# -- stops


@pytest.mark.parametrize("error", [StoppedError(2), TimeUpError(), RunError("lock")])
def test_a_stop_ends_with_the_batches_in_hand(error):
    asked, checks = threading.Event(), []

    def check():
        checks.append(threading.get_ident())
        if asked.is_set():
            raise error

    def talk(items):
        asked.set()
        time.sleep(0.05)

    ran = Ran(overlap, line(talk=talk), names(40), rows=2, check=check)
    with pytest.raises(type(error)) as raised:
        ran.go()
    assert raised.value is error
    assert set(checks) == {threading.get_ident()}
    talked = sum("talk" in member.passed for member in ran.members)
    assert talked == 2, "the batch in hand is finished and kept"
    assert ran.keeper.done == {}


def test_a_stop_is_heard_while_a_batch_goes_on():
    """A signal's handler runs in the main thread, which must not be inside a batch."""
    asked, heard = threading.Event(), threading.Event()

    def check():
        if asked.is_set():
            heard.set()
            raise StoppedError(15)

    def think(items):
        asked.set()
        assert heard.wait(20)

    with pytest.raises(StoppedError):
        Ran(overlap, line(think=think), names(2), check=check).go()


def test_a_full_disk_ends_the_run():
    ran = Ran(overlap, line(), names(40), rows=2, breaks="r7")
    with pytest.raises(OSError, match="No space"):
        ran.go()
    assert len(ran.keeper.done) < 40


def test_a_bug_in_a_stage_ends_the_run_and_is_told_as_it_is():
    class Bug(BaseException):
        pass

    def talk(items):
        raise Bug

    ran = Ran(overlap, line(talk=talk), names(8), rows=2)
    with pytest.raises(Bug):
        ran.go()
    assert [e["error"] for e in ran.told("batch", "talk")] == ["abandoned"]


def test_weights_are_let_go_of():
    opened = []

    @contextmanager
    def opening():
        stage = Each(lambda d: Speech(latents=torch.ones(1, 1)))
        opened.append(weakref.ref(stage))
        yield stage
        del stage

    specs = line()
    specs[1] = replace(specs[1], open=opening)
    Ran(overlap, specs, names(2)).go()
    assert [one() for one in opened] == [None]


# -- what several stages share


def test_what_is_on_record_is_where_a_request_went(tmp_path):
    with RunStore(tmp_path / "out", "respond") as store:

        def told():
            return dict(store._db.execute("SELECT id, stage FROM in_flight"))

        with ExitStack() as think:
            think.enter_context(store.in_flight("think", ["a", "b"]))
            with store.in_flight("talk", ["a"]):
                assert told() == {"a": "talk", "b": "think"}
                think.close()
                assert told() == {"a": "talk"}
        assert told() == {}


def test_the_watchdog_watches_several_works_at_a_time():
    told, heard = [], threading.Event()

    def stalled(work, idle_s):
        told.append(work.stage)
        heard.set()

    with Watchdog(0.2, stalled) as dog:
        one = Work(stage="one", ids=["a"], units=1, audio_s=0.0)
        two = Work(stage="two", ids=["a"], units=1, audio_s=0.0)
        with dog.watch(one), dog.watch(two):
            end = time.monotonic() + 10
            while not heard.is_set() and time.monotonic() < end:
                dog.beat(one)
                time.sleep(0.02)
    assert told == ["two"]


def test_who_is_held_back_is_not_stuck():
    told = []

    def vocode(items):
        time.sleep(0.6)

    with Watchdog(0.4, lambda work, idle_s: told.append(work.stage)) as dog:
        specs = [replace(one, audio_s=lambda item: 0.2) for one in line(vocode=vocode)]
        Ran(overlap, specs, names(4), rows=2, waiting_bytes=1, watchdog=dog).go()
    assert told == []


def test_what_stages_share_is_loaded_once():
    loads, inside = [], threading.Barrier(4, timeout=20)

    def load():
        loads.append(1)
        time.sleep(0.05)
        return object()

    shared, seen = Shared(load), []

    def use():
        with shared.use() as value:
            inside.wait()
            seen.append(value)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(loads), len(set(map(id, seen)))) == (1, 1)
    with shared.use():
        assert len(loads) == 2
