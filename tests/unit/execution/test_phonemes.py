"""Phoneme ids are those that piper itself would give the voice."""

import pytest
from piper import PiperVoice

from omnicli import models
from omnicli.errors import UserError
from omnicli.execution import phonemes
from omnicli.execution.families.cascade.speak import voice_info

TEXTS = (
    "Yes, please.",
    "Hello, this is Karen from the dental office on Maple Street!",
    "Does the train to Boston leave from platform four; or from platform nine?",
    "Two sentences here. And the second one.",
    "Naïve café owners said: no.",
)


@pytest.fixture(scope="module")
def alphabet(model_cache):
    return voice_info(models.find("voice", None, model_cache).folder).alphabet


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_pipers(text, alphabet, piper_voice):
    expected = [piper_voice.phonemes_to_ids(p) for p in piper_voice.phonemize(text)]
    assert [list(ids) for ids in phonemes.phoneme_ids(text, alphabet)] == expected


@pytest.fixture(scope="module")
def piper_voice(voice_onnx):
    return PiperVoice.load(voice_onnx)


def test_without_the_extra_the_way_out_is_named(alphabet, monkeypatch):
    monkeypatch.setattr(phonemes, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        phonemes.require(alphabet)
    assert "omnicli[speech]" in refused.value.hint
