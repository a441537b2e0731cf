"""The voice with its noise off, in float32, against onnxruntime on the file it was made from.

Tolerance: every sample within 2e-3 of the reference, which has exactly as many samples.
"""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

from omnicli import models
from omnicli.data import Request
from omnicli.execution.families.cascade.speak import (
    Talk,
    Vocode,
    Voiced,
    utterances,
    voice_info,
)
from omnicli.execution.nets.vits import load_talker, load_voice

TEXTS = (
    "Yes, please.",
    "Your appointment on Tuesday has been moved to Thursday at half past ten.",
    "The kitchen window is 94 centimeters wide, and the glass comes from Peterson.",
)


@pytest.fixture(scope="module")
def voice(model_cache):
    found = voice_info(models.find("voice", None, model_cache).folder)
    return replace(found, noise_scale=0.0, duration_noise=0.0)


@pytest.fixture(scope="module")
def reference(voice_onnx):
    session = onnxruntime.InferenceSession(str(voice_onnx), providers=["CPUExecutionProvider"])

    def speak(ids):
        feed = {
            "input": np.array([ids], dtype=np.int64),
            "input_lengths": np.array([len(ids)], dtype=np.int64),
            "scales": np.array([0.0, 1.0, 0.0], dtype=np.float32),
        }
        return torch.from_numpy(session.run(None, feed)[0].reshape(-1))

    return speak


def test_waveforms_are_those_of_onnxruntime(voice, reference):
    said = [
        u
        for text in TEXTS
        for u in utterances(voice, Request(request_id=text), text, seed=0, speaking_rate=1.0)
    ]
    talk = Talk(load_talker(voice.folder, voice.config, "cpu"), voice, "cpu")
    vocode = Vocode(load_voice(voice.folder, voice.config, torch.float32, "cpu"), voice, "cpu")
    waves = vocode.run([Voiced(speech=speech) for speech in talk.run(said)])
    assert len(waves) == len(said)
    for utterance, wave in zip(said, waves, strict=True):
        expected = reference(utterance.ids)
        [ours] = wave.pieces
        assert len(ours) == len(expected), utterance.text
        assert float((ours - expected).abs().max()) < 2e-3, utterance.text
