"""Answers: the company in a batch changes nothing, bit for bit on the CPU."""

import pytest
import torch

from omnicli import models
from omnicli.config import ModelFolder, Task
from omnicli.data import Draft, Inputs, Ranking, Request, Segment, Transcript
from omnicli.execution.families.cascade.respond import Responder
from omnicli.scheduling.loops import lockstep
from omnicli.scheduling.policies.greedy import Greedy
from omnicli.scheduling.policies.sample import Sample

TEXTS = (
    "Hello, this is Karen from the dental office. Your appointment on Tuesday has been moved to "
    "Thursday. Please bring your insurance card. Call us back if that does not suit you.",
    "Does the train to Boston leave from platform four or from platform nine? I must know it.",
    "The heating has been cold since Saturday. My sister can open the door. Please send somebody.",
    "Note for Monday. The window is 94 centimeters wide. Order the glass from Peterson today.",
    "Yes, please.",
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def model(model_cache):
    found = models.find("llm", None, model_cache)
    return ModelFolder(name=found.name, folder=found.folder, digest=found.digest)


def responder(model, dtype, **task):
    made = Task(command="respond", max_new_tokens=24, **task)
    return Responder(model, made, voice_language="en", device="cpu", dtype=dtype)


def inputs_of(text):
    inputs = Inputs()
    words = Segment(start_s=0, end_s=5, text=text)
    transcript = Transcript(text=text, language="en", language_probability=None, segments=(words,))
    inputs.put("transcript", (transcript,))
    return inputs


def filled(items):
    """As the scheduler does it."""
    return items + [items[-1]] * (-len(items) % 4)


def split(spec, texts, draft=None):
    items = []
    for text in texts:
        inputs = inputs_of(text)
        if draft and "write" in spec.reads:
            inputs.put("write", (draft,))
        items += spec.split(Request(request_id=text), inputs)
    return items


def by_edge(spec, items):
    found = {}
    for item in items:
        found.setdefault(spec.edge(spec.length(item)), []).append(item)
    return found.values()


@torch.inference_mode()
def test_rankings(model, dtype):
    spec = responder(model, dtype).specs()[0]
    with spec.open() as stage:
        for items in by_edge(spec, split(spec, TEXTS)):
            together = stage.run(filled(items))
            for item, ranking in zip(items, together, strict=False):
                assert isinstance(ranking, Ranking)
                assert stage.run(filled([item]))[0] == ranking


@pytest.mark.parametrize("name", ["write", "write.again"])
@torch.inference_mode()
def test_drafts(model, dtype, name):
    made = responder(model, dtype, say="reply")
    spec = {spec.name: spec for spec in made.specs()}[name]
    policy = Greedy() if name == "write" else Sample(0.7)
    with spec.open() as stage:
        for items in by_edge(spec, split(spec, TEXTS, Draft(text="", finish_reason="stop"))):
            together = grown(stage, spec, items, policy)
            for i, item in enumerate(items):
                alone = grown(stage, spec, [item], policy)[0]
                assert isinstance(alone, Draft)
                assert alone.text
                assert alone == together[i]


def grown(stage, spec, items, policy):
    rows = filled(items)
    return dict(lockstep.run(stage, rows, [spec.seed(row) for row in rows], [policy]))


def test_a_summary_is_made_of_the_transcripts_own_sentences(model, dtype):
    made = responder(model, dtype)
    rank, *_, answer = made.specs()
    request, inputs = Request(request_id="a"), inputs_of(TEXTS[0])
    with rank.open() as stage, torch.inference_mode():
        inputs.put("rank", tuple(stage.run(filled(rank.split(request, inputs)))[:1]))
    said = answer.join(request, inputs, ())
    assert said.summary_method == "extractive"
    assert 0 < len(said.text) < len(TEXTS[0])
    assert all(f"{part.strip()}" in TEXTS[0] for part in said.text.split(". "))


def test_silence_gives_no_answer(model, dtype):
    made = responder(model, dtype, say="reply")
    for spec in made.specs():
        assert not spec.split(Request(request_id="a"), inputs_of(" "))
    assert made.specs()[-1].join(Request(request_id="a"), inputs_of(" "), ()) is None


def test_a_free_summary_that_invents_is_replaced(model, dtype):
    made = responder(model, dtype, summary_method="generated")
    *_, again, answer = made.specs()
    request, inputs = Request(request_id="a"), inputs_of(TEXTS[0])
    inputs.put("rank", ())
    inputs.put("write", (Draft(text="Karen was moved to Friday.", finish_reason="stop"),))
    items = again.split(request, inputs)
    assert len(items) == 1
    with again.open() as stage, torch.inference_mode():
        inputs.put("rank.again", tuple(stage.run(filled(items))[:1]))
    said = answer.join(request, inputs, ())
    assert (said.summary_method, said.warnings) == ("extractive", ("summary_guard",))
    inputs.put("write", (Draft(text="Karen has moved the appointment.", finish_reason="stop"),))
    assert answer.join(request, inputs, ()).summary_method == "generated"


def test_a_long_transcript_is_condensed_and_its_end_is_heard(model, dtype):
    made = responder(model, dtype, say="prompt", prompt="What is the code?")
    made.context = 700
    filler = " ".join(f"Then we spoke about item {i} for a while." for i in range(120))
    text = f"{filler} The code for the door is 4711."
    rank, write, *_ = made.specs()
    request, inputs = Request(request_id="a"), inputs_of(text)
    items = rank.split(request, inputs)
    assert sum(len(item.placed) for item in items) == 121, "every sentence is ranked"
    scores = [Ranking(scores=tuple(0.0 for _ in item.placed)) for item in items]
    scores[-1] = Ranking(scores=(*scores[-1].scores[:-1], 9.0))
    inputs.put("rank", tuple(scores))
    [item] = write.split(request, inputs)
    assert len(item.ids) + item.max_new_tokens <= made.context
    assert "4711" in made.chat.decode(list(item.ids))
