"""GGUF files, written with the `gguf` package's own writer from small random models."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omnicli.errors import UserError
from omnicli.models import gguf_file, ggufs
from omnicli.models.weights import write

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The byte alphabet of GPT-2: printable bytes stand for themselves, the others for U+0100 and up.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = [chr(byte) for byte in PRINTABLE] + [chr(256 + i) for i in range(len(OTHERS))]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ w", "12 3", "123 4"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<tool>"]
END, TOOL = len(TOKENS) - 2, len(TOKENS) - 1


def small_model(kind: str, **options):
    torch.manual_seed(0)
    config, model = MODELS[kind]
    found = model(config(**{**SIZES, **options})).eval()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return found


def llama_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    module, _, what = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, index, inner = module.split(".", 3)
        return f"blk.{index}.{NAMES[inner]}.{what}"
    return f"{NAMES[module]}.{what}"


def write_gguf(path: Path, model, *, pre="smollm", quantised=None, extra=None, more=()) -> Path:
    config, kind = model.config, model.config.model_type
    out = gguf.GGUFWriter(path, kind)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "qwen3":
        out.add_key_length(config.head_dim)
    add_tokenizer(out, pre)
    for name, value in (extra or {}).items():
        out.add_uint32(name, value)
    for name, array in [*tensors(model).items(), *more]:
        if quantised and array.ndim > 1:
            out.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
        else:
            out.add_tensor(name, array)
    for step in ("header", "kv_data", "tensors"):
        getattr(out, f"write_{step}_to_file")()
    out.close()
    return path


def tensors(model) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, part = tensor.numpy(), name.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            array = llama_order(array, heads[part])
        found[gguf_name(name)] = array
    return found


def add_tokenizer(out, pre: str) -> None:
    tokens = TOKENS + [f"[PAD{i}]" for i in range(SIZES["vocab_size"] - len(TOKENS))]
    kinds = [gguf.TokenType.NORMAL] * len(TOKENS) + [gguf.TokenType.UNUSED] * (300 - len(TOKENS))
    kinds[END], kinds[TOOL] = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges(MERGES)
    out.add_bos_token_id(END)
    out.add_eos_token_id(END)
    out.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def converted(folder: Path, path: Path) -> Path:
    canonical = ggufs.convert(path)
    folder.mkdir()
    for name, content in canonical.files.items():
        (folder / name).write_text(json.dumps(content))
    write(folder / "model.safetensors", canonical.weights, lambda _: None)
    return folder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "rope_theta": 50_000.0}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ],
)
def test_a_model_comes_back_as_it_was(tmp_path, kind, options):
    original = small_model(kind, **options)
    folder = converted(tmp_path / "hf", write_gguf(tmp_path / "m.gguf", original))
    found, loading = MODELS[kind][1].from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values()), loading
    for name, tensor in original.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.half().float()), name
    ids = torch.arange(12)[None]
    half = MODELS[kind][1](original.config).eval()
    half.load_state_dict({n: t.half().float() for n, t in original.state_dict().items()})
    assert torch.equal(found(ids).logits, half(ids).logits)
    assert found.config.rms_norm_eps == original.config.rms_norm_eps


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q5_0", "BF16"])
def test_quantised_tensors_are_those_of_the_reference_reader(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    path = write_gguf(tmp_path / "m.gguf", small_model("qwen2"), quantised=kind)
    _, ours = gguf_file.read(path)
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert set(ours) == set(reference)
    for tensor_name, tensor in ours.items():
        theirs = reference[tensor_name]
        values = gguf.dequantize(theirs.data, theirs.tensor_type).astype(np.float16)
        assert tensor.shape == tuple(theirs.shape[::-1])
        assert np.array_equal(tensor.values(), values.reshape(tensor.shape)), tensor_name


def test_metadata_is_that_of_the_reference_reader(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"))
    values, _ = gguf_file.read(path)
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF."):
            assert values[name] == field.contents(), name


def test_llama_31_position_scaling_is_recognised(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    model = small_model("llama", rope_parameters=scaling, head_dim=16)
    slow, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = [("rope_freqs.weight", (plain / slow).numpy())]
    path = write_gguf(tmp_path / "m.gguf", model, more=factors)
    found = ggufs.convert(path).files["config.json"]["rope_scaling"]
    assert found == {k: v for k, v in scaling.items() if k != "rope_theta"}
    strange = [("rope_freqs.weight", np.linspace(1, 3, 8, dtype="f4"))]
    path = write_gguf(tmp_path / "n.gguf", model, more=strange)
    with pytest.raises(UserError, match="scales its positions"):
        ggufs.convert(path)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hello", "Ġw", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["hello", "Ġw", "Ġ", "1234"]),
        ("qwen2", ["hello", "Ġw", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["hello", "Ġw", "Ġ", "123", "4"]),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_says(tmp_path, pre, pieces):
    folder = converted(
        tmp_path / "hf", write_gguf(tmp_path / "m.gguf", small_model("llama"), pre=pre)
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello w 1234", add_special_tokens=False).tokens == pieces


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(tmp_path_factory, text):
    tokenizer = Tokenizer.from_file(str(shared_tokenizer(tmp_path_factory) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def shared_tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    if not folder.exists():
        path = tmp_path_factory.getbasetemp() / "tokenizer.gguf"
        converted(folder, write_gguf(path, small_model("llama")))
    return folder


def test_special_tokens_and_the_chat_template(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"), pre="llama-bpe")
    folder = converted(tmp_path / "hf", path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer("<tool>hello<|end|>")["input_ids"] == [END, TOOL, TOKENS.index("hello"), END]
    assert tokenizer.decode([TOOL, END], skip_special_tokens=True) == "<tool>"
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"
    assert tokenizer.eos_token_id == END


def test_several_tokens_may_end_a_text(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": TOOL}
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"), extra=extra)
    assert ggufs.convert(path).files["generation_config.json"]["eos_token_id"] == [END, TOOL]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "viking"}, "cuts words in an unknown way"),
        ({"extra": {"split.count": 2}}, "one part of several"),
        ({"extra": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"more": [("blk.0.ssm_a.weight", np.zeros(4, "f4"))]}, "unknown use"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(tmp_path, options, message):
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"), **options)
    with pytest.raises(UserError, match=message) as raised:
        ggufs.convert(path)
    assert raised.value.hint


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_files_never_do_worse_than_an_error(tmp_path_factory, data):
    base = tmp_path_factory.getbasetemp()
    sound = base / "sound.gguf"
    raw = (sound if sound.exists() else write_gguf(sound, small_model("llama"))).read_bytes()
    # Most of a file is weights; what can go wrong is in its first tenth.
    at = data.draw(st.integers(0, len(raw) // 10))
    new = data.draw(st.binary(max_size=8))
    rest = raw[at + len(new) :] if data.draw(st.booleans()) else b""
    damaged = base / "damaged.gguf"
    damaged.write_bytes(raw[:at] + new + rest)
    try:
        canonical = ggufs.convert(damaged)
        write(base / "damaged.safetensors", canonical.weights, lambda _: None)
    except UserError as error:
        assert error.hint
    else:
        assert rest, "a file that was cut short was taken for whole"


def test_the_embedded_model_loads_into_transformers_and_knows_a_capital(model_cache):
    folder = model_cache / "llm" / "smollm2-135m-instruct"
    model, loading = LlamaForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values()), loading
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    assert tokenizer.decode(answer[0, ids.shape[1] :]).startswith("The capital of France is Paris")


def test_the_embedded_tokenizer_splits_numbers_into_digits(model_cache):
    path = model_cache / "llm" / "smollm2-135m-instruct" / "tokenizer.json"
    tokens = Tokenizer.from_file(str(path)).encode("Call 555-0199 now, <|im_end|>").tokens
    assert tokens == [*["Call", "Ġ", *"555", "-", *"0199", "Ġnow", ","], "Ġ", "<|im_end|>"]
