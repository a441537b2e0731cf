"""CTranslate2 checkpoints: a small Whisper is written byte by byte and read back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ct2_files import FIRST_SPECIAL, packed, quantised, small_whisper, variables, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperForConditionalGeneration

from omnicli.errors import UserError
from omnicli.models import ct2, whisper_ct2
from omnicli.models.weights import write


def write_canonical(folder: Path, model) -> Path:
    folder.mkdir()
    for name, content in model.files.items():
        if not isinstance(content, Path):
            (folder / name).write_text(json.dumps(content))
    write(folder / "model.safetensors", model.weights, lambda _: None)
    return folder


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [("float32", 0), ("float16", 1e-3), ("bfloat16", 8e-3), ("int8", 4e-3), ("int16", 1e-3)],
)
def test_every_type_gives_the_original_model_back(tmp_path, how, tolerance):
    original = small_whisper(mels=128)
    raw = packed(quantised(variables(original), how), bfloat16=how == "bfloat16")
    canonical = whisper_ct2.convert(write_folder(tmp_path / "ct2", raw))
    assert {weight.dtype for weight in canonical.weights} == {"F16" if how == "float16" else "F32"}
    folder = write_canonical(tmp_path / "hf", canonical)
    found, loading = WhisperForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values()), loading
    expected = original.state_dict()
    for name, tensor in found.state_dict().items():
        scale = expected[name].abs().max()
        assert (tensor - expected[name]).abs().max() <= tolerance * scale, name
    config = found.config
    assert (config.num_mel_bins, config.vocab_size, config.encoder_attention_heads) == (128, 40, 4)
    assert (config.decoder_layers, config.decoder_ffn_dim, config.eos_token_id) == (
        2,
        20,
        FIRST_SPECIAL,
    )


def test_generation_settings_of_a_multilingual_model_and_an_english_one(tmp_path):
    english = packed(variables(small_whisper()))
    settings_ = whisper_ct2.convert(write_folder(tmp_path / "en", english)).files[
        "generation_config.json"
    ]
    assert settings_["suppress_tokens"] == [1, 2]
    assert settings_["begin_suppress_tokens"] == [3]
    assert settings_["no_timestamps_token_id"] == FIRST_SPECIAL + 7
    assert settings_["is_multilingual"] is False
    assert "lang_to_id" not in settings_
    many = packed(variables(small_whisper(vocabulary=51_865)))
    settings_ = whisper_ct2.convert(write_folder(tmp_path / "many", many)).files[
        "generation_config.json"
    ]
    assert settings_["is_multilingual"] is True
    assert settings_["lang_to_id"] == {"<|en|>": FIRST_SPECIAL + 2, "<|es|>": FIRST_SPECIAL + 3}
    assert settings_["task_to_id"] == {
        "translate": FIRST_SPECIAL + 4,
        "transcribe": FIRST_SPECIAL + 5,
    }


def test_a_second_copy_of_the_embedding_is_accepted_and_another_projection_refused(tmp_path):
    found = variables(small_whisper())
    embedding = found["decoder/embeddings/weight"]
    tied = packed(found | {"decoder/projection/weight": embedding.copy()}, aliases=())
    assert whisper_ct2.convert(write_folder(tmp_path / "tied", tied)).weights
    other = packed(found | {"decoder/projection/weight": embedding + 1}, aliases=())
    with pytest.raises(UserError, match="projection of its own"):
        whisper_ct2.convert(write_folder(tmp_path / "other", other))


def test_what_is_no_whisper_is_refused_by_name(tmp_path):
    found = variables(small_whisper())
    with pytest.raises(UserError, match="TransformerSpec"):
        whisper_ct2.convert(write_folder(tmp_path / "a", packed(found, spec="TransformerSpec")))
    biased = dict(found)
    biased["encoder/layer_0/self_attention/linear_0/bias"] = np.ones(48, "f4")
    with pytest.raises(UserError, match="keys have a bias"):
        whisper_ct2.convert(write_folder(tmp_path / "b", packed(biased)))
    folder = write_folder(tmp_path / "c", packed(found))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        whisper_ct2.convert(folder)


SMALL = packed(variables(small_whisper()))
QUANTISED = packed(quantised(variables(small_whisper()), "int8"))


def survives(folder: Path, raw: bytes) -> None:
    """Either it converts, or it says what is wrong; nothing else."""
    try:
        canonical = whisper_ct2.convert(write_folder(folder, raw))
        write(folder / "model.safetensors", canonical.weights, lambda _: None)
    except UserError as error:
        assert error.hint


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(SMALL) - 1))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, length):
    folder = write_folder(tmp_path_factory.mktemp("cut", numbered=True), SMALL[:length])
    with pytest.raises(UserError):
        ct2.read(folder / "model.bin")


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([SMALL, QUANTISED]),
    st.lists(
        st.tuples(st.integers(0, len(SMALL)), st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=6,
    ),
)
def test_garbled_bytes_never_do_worse_than_an_error(tmp_path_factory, raw, changes):
    garbled = bytearray(raw)
    for at, new in changes:
        at %= len(garbled)
        garbled[at : at + len(new)] = new
    survives(tmp_path_factory.getbasetemp() / "garbled", bytes(garbled))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_a_garbled_beginning_never_does_worse_than_an_error(tmp_path_factory, at, new):
    survives(tmp_path_factory.getbasetemp() / "begun", SMALL[:at] + new + SMALL[at + len(new) :])


def test_the_embedded_whisper_loads_into_transformers(model_cache):
    folder = model_cache / "asr" / "whisper-base"
    model, loading = WhisperForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values()), loading
    assert model.config.d_model == 512
    generation = model.generation_config
    assert len(generation.lang_to_id) == 99
    assert generation.lang_to_id["<|en|>"] == 50259
    assert generation.task_to_id == {"translate": 50358, "transcribe": 50359}
    assert generation.no_timestamps_token_id == 50363
    assert generation.begin_suppress_tokens == [220, 50257]
