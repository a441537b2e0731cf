"""Whisper on the embedded weights against transformers, in float32.

Tolerances: encoder 2e-3 (its outputs reach 30), decoder logits 2e-3 (they reach 45); greedy tokens
equal.
"""

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from omnicli import models
from omnicli.data import AudioClip
from omnicli.execution.families.cascade.hearing import Encode, Hearing, Transcribe
from omnicli.execution.nets.whisper import load_decoder, load_encoder
from omnicli.execution.whisper_tokens import read_tokens
from omnicli.operators.mel import log_mel
from omnicli.scheduling.loops import lockstep
from omnicli.scheduling.policies.greedy import Greedy

TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def folder(model_cache):
    return models.find("asr", None, model_cache).folder


@pytest.fixture(scope="module")
def reference(folder):
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def encoder(folder):
    return load_encoder(folder, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def decoder(folder):
    return load_decoder(folder, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def mel(speech):
    """Two recordings, each padded to 30 s: [2, 80, 3000]."""
    samples = torch.zeros(2, 30 * 16_000)
    for row, name in zip(samples, ("dentist-moved", "parcel-neighbor"), strict=True):
        row[: len(speech[name])] = speech[name]
    return log_mel(samples, 80)


@torch.inference_mode()
def test_encoder(mel, encoder, reference):
    expected = reference.model.encoder(mel).last_hidden_state
    torch.testing.assert_close(encoder(mel), expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_decoder_logits_all_at_once_and_step_by_step(mel, encoder, decoder, reference):
    audio = encoder(mel)
    tokens = torch.tensor([[50258, 50259, 50359, 50364, 400, 370, 452, 7177]] * 2)
    expected = reference(encoder_outputs=(audio,), decoder_input_ids=tokens).logits

    cross = decoder.listen(audio, None)
    at_once = decoder.logits(decoder(tokens, decoder.new_cache(2, 16), cross))
    torch.testing.assert_close(at_once, expected, atol=TOLERANCE, rtol=0)

    cache = decoder.new_cache(2, 16)
    steps = [decoder.logits(decoder(tokens[:, t : t + 1], cache, cross)) for t in range(8)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_greedy_text_with_timestamps(mel, encoder, decoder, reference, folder, speech):
    names = ("dentist-moved", "parcel-neighbor")
    clips = [AudioClip(samples=speech[name], rate_hz=16_000) for name in names]
    encoded = Encode(encoder, full=True).run(list(enumerate(clips)))
    hearings = [
        Hearing(
            encoded=e,
            clip=c,
            language="en",
            task="transcribe",
            window="full",
            temperature=0,
            seed=0,
        )
        for e, c in zip(encoded, clips, strict=True)
    ]
    stage = Kept(decoder, read_tokens(folder))
    ends = dict(lockstep.run(stage, hearings, [0, 0], [Greedy()]))
    asked = {"language": "en", "task": "transcribe", "return_timestamps": True}
    expected = reference.generate(mel, do_sample=False, num_beams=1, **asked).tolist()
    for i, ids in enumerate(expected):
        theirs = [t for t in ids if t < 50257 or t > 50363]
        assert ends[i].frames[:, 0].tolist() == theirs


class Kept(Transcribe):
    """Gives the tokens themselves."""

    def finish(self, item, end, state, row):
        return end
