"""Speech: the company in a batch changes nothing, bit for bit on the CPU; chunks leave no seams."""

import pytest
import torch

from omnicli import models
from omnicli.data import Request, Speech
from omnicli.execution.families.cascade.speak import (
    Talk,
    Vocode,
    Voiced,
    utterances,
    voice_info,
)
from omnicli.execution.nets.vits import Span, load_talker, load_voice

TEXTS = (
    "Yes.",
    "Please bring your insurance card.",
    "The roof is finished, but two tiles on the north side are broken, and nobody has the keys.",
    "Hello, this is Martin from apartment twelve.",
    "Note for Monday.",
    "In the basement the wall is still wet; we should not paint it before the summer.",
    "Thank you.",
)


@pytest.fixture(scope="module")
def voice(model_cache):
    return voice_info(models.find("voice", None, model_cache).folder)


@pytest.fixture(scope="module")
def said(voice):
    return [
        u
        for text in TEXTS
        for u in utterances(voice, Request(request_id=text), text, seed=3, speaking_rate=1.0)
    ]


@pytest.fixture(scope="module")
def talk(voice):
    return Talk(load_talker(voice.folder, voice.config, "cpu"), voice, "cpu")


def vocoder(voice, dtype):
    return Vocode(load_voice(voice.folder, voice.config, dtype, "cpu"), voice, "cpu")


def test_latents(talk, said):
    together = talk.run(said)
    for i, utterance in enumerate(said):
        [alone] = talk.run([utterance])
        assert torch.equal(alone.latents, together[i].latents), utterance.text
    backwards = talk.run(said[::-1])
    assert all(
        torch.equal(a.latents, b.latents) for a, b in zip(backwards[::-1], together, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waveforms(voice, talk, said, dtype):
    vocode = vocoder(voice, dtype)
    items = [Voiced(speech=speech) for speech in talk.run(said)]
    together = vocode.run(items)
    hop = voice.config.hop_samples
    for item, wave in zip(items, together, strict=True):
        [alone] = vocode.run([item])
        assert torch.equal(alone.pieces[0], wave.pieces[0])
        assert wave.samples == len(item.speech.latents) * hop == len(wave.pieces[0])


def test_another_seed_is_another_reading(voice, talk):
    request = Request(request_id="a")
    one, same, other = (
        utterances(voice, request, TEXTS[1], seed=seed, speaking_rate=1.0)[0] for seed in (1, 1, 2)
    )
    a, b, c = (talk.run([u])[0].latents for u in (one, same, other))
    assert torch.equal(a, b)
    assert a.shape != c.shape or not torch.equal(a, c)


@torch.inference_mode()
def test_chunks_are_the_whole_without_seams(voice, talk, said):
    """In float32 every sample is that of the network run over all frames at once."""
    [speech] = talk.run([said[2]])
    net = load_voice(voice.folder, voice.config, torch.float32, "cpu")
    [chunked] = vocoder(voice, torch.float32).run([Voiced(speech=speech)])
    context = net.dec.context_frames
    frames = torch.nn.functional.pad(speech.latents, (0, 0, context, context))[None]
    whole = net.dec(frames, None, context, [Span(0, context, context + len(speech.latents))])
    assert float((whole[0][: chunked.samples] - chunked.pieces[0]).abs().max()) < 1e-5


def test_a_row_too_short_for_a_chunk(voice):
    latents = torch.randn(2, voice.config.latent)
    [wave] = vocoder(voice, torch.float32).run([Voiced(speech=Speech(latents=latents))])
    assert wave.samples == 2 * voice.config.hop_samples
