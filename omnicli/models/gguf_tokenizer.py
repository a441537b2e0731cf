"""The tokenizer inside a GGUF file as a tokenizer.json: byte-level BPE.

The file names its pre-tokenizer, the rule that cuts text into words before merging, but does not
hold it. The rules are those of the tokenizers the names stand for (github.com/ggml-org/llama.cpp,
convert_hf_to_gguf_update.py lists the originals).
"""

import json
from pathlib import Path
from typing import Any

from omnicli.errors import UserError
from omnicli.models.canonical import Json

CONTROL, USER_DEFINED = 3, 4  # llama_token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2, LLAMA3 = _WORDS % "", _WORDS % "{1,3}"  # single digits; up to three together
GPT2, DIGITS = "gpt2", "digits"  # ByteLevel's own rule; the same with single digits

PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": DIGITS,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": LLAMA3,
}


def files(values: dict[str, Any], path: Path) -> dict[str, Path | Json]:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokens = _tokens(values, path)
    return {
        "tokenizer.json": _tokenizer(values, tokens, path),
        "tokenizer_config.json": _tokenizer_config(values, tokens),
        "generation_config.json": ids(values),
    }


def ids(values: dict[str, Any]) -> Json:
    """Ids of the tokens that begin, end and fill a text; several may end one."""
    named = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {id_ for id_ in named if isinstance(id_, int)}
    found = {
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends) if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: id_ for name, id_ in found.items() if id_ is not None}


def _tokens(values: dict[str, Any], path: Path) -> list[str]:
    kind = values.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            f"{path} has a tokenizer of the kind {kind!r}; only byte-level BPE can be read",
            hint="take the model's Hugging Face folder instead",
        )
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path} has no list of tokens", hint="fetch the file again")
    return tokens


def _tokenizer(values: dict[str, Any], tokens: list[str], path: Path) -> Json:
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = _rule(values, path)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(values.get("tokenizer.ggml.merges"), vocabulary, path)
    # Llama 3 takes a word that is a token as it is, even where the merges lead elsewhere.
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == LLAMA3)
    tokenizer = Tokenizer(model)
    if rule == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, values, tokens)
    begin = _special(values, tokens, "bos")
    if begin and values.get("tokenizer.ggml.add_bos_token", rule == LLAMA3):
        tokenizer.post_processor = _begin_with(begin, vocabulary[begin])
    found: Json = json.loads(tokenizer.to_str())
    return found


def _rule(values: dict[str, Any], path: Path) -> str:
    name = values.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{path} cuts words in an unknown way: {name!r}",
            hint=f"known: {', '.join(PRE_TOKENIZERS)}",
        )
    return PRE_TOKENIZERS[name]


def _merges(found: Any, vocabulary: dict[str, int], path: Path) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in found] if isinstance(found, list) else []
    pairs = [(pair[0], pair[1]) for pair in merges if len(pair) == 2]
    if len(pairs) < max(len(merges), 1) or not all(
        a in vocabulary and b in vocabulary and a + b in vocabulary for a, b in pairs
    ):
        raise UserError(
            f"{path} has no merges, or ones beside its tokens", hint="fetch the file again"
        )
    return pairs


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if rule == GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == DIGITS:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    first = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _add_special(tokenizer: Any, values: dict[str, Any], tokens: list[str]) -> None:
    """Tokens that are found whole in a text; control tokens are left out when it is decoded."""
    from tokenizers import AddedToken

    kinds = values.get("tokenizer.ggml.token_type") or []
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in pairs if k == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == USER_DEFINED])


def _begin_with(token: str, id_: int) -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, id_)]
    )


def _tokenizer_config(values: dict[str, Any], tokens: list[str]) -> Json:
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: _special(values, tokens, key) for name, key in named.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": values.get("tokenizer.chat_template"),
        **{name: token for name, token in special.items() if token},
    }


def _special(values: dict[str, Any], tokens: list[str], key: str) -> str | None:
    id_ = values.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[id_] if isinstance(id_, int) and 0 <= id_ < len(tokens) else None
