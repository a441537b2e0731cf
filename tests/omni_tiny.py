"""Tiny Qwen-Omni checkpoints with random weights, in the published layout.

Special tokens, vocabulary sizes and widths are made to fit each other as transformers wants them;
matrices are scaled up, since with the usual 0.02 all that comes out is next to nothing.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

ROLES = ("user", "system", "assistant")
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>"),
    *("<|audio_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<tts_pad>", "<tts_bos>", "<tts_eos>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BANDS = 16
SCALE = 6.0


def tokenizer() -> Tokenizer:
    """Bytes, the names of roles, and the special tokens."""
    letters = sorted(ByteLevel.alphabet())
    pieces, merges = list(letters), []
    for role in ROLES:
        for n in range(1, len(role)):
            left, right = role[:n], role[n]
            if left + right not in pieces:
                merges.append((left, right))
                pieces.append(left + right)
    made = Tokenizer(BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens(list(SPECIAL))
    return made


IDS = {token: tokenizer().token_to_id(token) for token in (*ROLES, *SPECIAL)}
VOCAB = max(IDS.values()) + 1
EPS = {"rms_norm_eps": 1e-6}


def scaled(model, scale=SCALE, seed=1):
    """Larger matrices, and norms and biases that are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:  # transformers leaves them as it finds them in memory
                parameter.copy_(0.02 * scale * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() >= 2 and "code2wav" not in name and "token2wav" not in name:
                parameter.mul_(scale)
            elif name.endswith(("norm.weight", "bias")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        writes = {IDS["<|im_end|>"], *tokenizer().encode("abcdefghijklmnopqrstuvwxyz ").ids}
        silent = [i for i in range(VOCAB) if i not in writes]
        model.thinker.lm_head.weight[silent] = 0.0  # so that it writes letters
    return model.eval()


def save(model, folder: Path, *, shard="200KB", bands=BANDS) -> Path:
    """As on the hub: shards with an index, configs, tokenizer, template."""
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    extractor = {"feature_size": bands, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return folder


def _rope(*sections):
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


def qwen3(seed=0, *, scale=SCALE):
    """Nested dual-AR: 4 codebooks of 64 codes, experts in both decoders."""
    torch.manual_seed(seed)
    heads = {"num_key_value_heads": 1, "head_dim": 8, "hidden_size": 16, "intermediate_size": 32}
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(2, 1, 1),
        "pad_token_id": IDS["<|endoftext|>"],
    }
    audio = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "num_mel_bins": BANDS,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": 32,
        "downsample_hidden_size": 8,
        "conv_chunksize": 500,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 16,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0],
    }
    talker = {
        **heads,
        "vocab_size": 1024 + 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(2, 1, 1),
    }
    predictor = {
        **heads,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_code_groups": 4,
    }
    tokens = {
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
    }
    config = Qwen3OmniMoeConfig(
        thinker_config={
            **tokens,
            "text_config": text,
            "audio_config": audio,
            "vision_config": vision,
            "user_token_id": IDS["user"],
            "vision_end_token_id": IDS["<|vision_end|>"],
            "audio_end_token_id": IDS["<|audio_end|>"],
        },
        talker_config={
            **tokens,
            "text_config": talker,
            "code_predictor_config": predictor,
            "num_code_groups": 4,
            "thinker_hidden_size": 32,
            "accept_hidden_layer": 2,
            "codec_eos_token_id": 70,
            "codec_nothink_id": 71,
            "codec_think_bos_id": 72,
            "codec_think_eos_id": 73,
            "codec_pad_id": 74,
            "codec_bos_id": 75,
            "spatial_merge_size": 1,
            "speaker_id": {"ethan": 80, "chelsie": 81},
        },
        code2wav_config={
            "codebook_size": 64,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_quantizers": 4,
            "sliding_window": 8,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 32,
            "layer_scale_initial_scale": 1.0,
        },
        im_start_token_id=IDS["<|im_start|>"],
        im_end_token_id=IDS["<|im_end|>"],
        tts_pad_token_id=IDS["<tts_pad>"],
        tts_bos_token_id=IDS["<tts_bos>"],
        tts_eos_token_id=IDS["<tts_eos>"],
        system_token_id=IDS["system"],
        user_token_id=IDS["user"],
        assistant_token_id=IDS["assistant"],
    )
    return scaled(Qwen3OmniMoeForConditionalGeneration(config), scale)


def qwen2_5(seed=0, *, scale=SCALE, num_embeds=96):
    """One codebook, flow matching, BigVGAN; two speakers.

    Published vocoders know fewer codes (`num_embeds`) than their talkers.
    """
    torch.manual_seed(seed)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(1, 1, 2),
        "pad_token_id": IDS["<|endoftext|>"],
        "tie_word_embeddings": False,
    }
    audio = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "num_mel_bins": BANDS,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": 32,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 14,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "fullatt_block_indexes": [0],
    }
    talker = {
        "vocab_size": 96,
        "embedding_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(1, 1, 2),
        "audio_token_index": IDS["<|AUDIO|>"],
        "image_token_index": IDS["<|image_pad|>"],
        "video_token_index": IDS["<|video_pad|>"],
        "tts_text_start_token_id": IDS["<tts_bos>"],
        "tts_text_end_token_id": IDS["<tts_eos>"],
        "tts_text_pad_token_id": IDS["<tts_pad>"],
        "tts_codec_start_token_id": 85,
        "tts_codec_end_token_id": 86,
        "tts_codec_pad_token_id": 84,
        "tts_codec_mask_token_id": 88,
        "spatial_merge_size": 1,
        "pad_token_id": None,
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "audio_start_token_id": IDS["<|audio_bos|>"],
        "audio_end_token_id": IDS["<|audio_eos|>"],
    }
    dit = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "ff_mult": 2,
        "emb_dim": 16,
        "block_size": 24,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "repeats": 2,
        "num_embeds": num_embeds,
        "mel_dim": 20,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "enc_res2net_scale": 2,
    }
    gan = {
        "mel_dim": 20,
        "upsample_initial_channel": 64,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    }
    config = Qwen2_5OmniConfig(
        thinker_config={
            "text_config": text,
            "audio_config": audio,
            "vision_config": vision,
            "audio_token_index": IDS["<|AUDIO|>"],
            "image_token_index": IDS["<|image_pad|>"],
            "video_token_index": IDS["<|video_pad|>"],
            "user_token_id": IDS["user"],
            "audio_start_token_id": IDS["<|audio_bos|>"],
            "audio_end_token_id": IDS["<|audio_eos|>"],
            "vision_start_token_id": IDS["<|vision_start|>"],
            "vision_end_token_id": IDS["<|vision_end|>"],
            "pad_token_id": IDS["<|endoftext|>"],
        },
        talker_config=talker,
        token2wav_config={"dit_config": dit, "bigvgan_config": gan},
    )
    model = scaled(Qwen2_5OmniForConditionalGeneration(config), scale)
    model.speaker_map = speakers()
    return model


def speakers():
    """What lies in `spk_dict.pt`."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: {
            "bos_token": IDS["<tts_bos>"] + n,
            "cond": torch.randn(1, 8, generator=generator),
            "ref_mel": torch.randn(1, 30, 20, generator=generator),
        }
        for n, name in enumerate(("Chelsie", "Ethan"))
    }


def save_qwen2_5(model, folder: Path) -> Path:
    """`save`, with the speakers beside it."""
    save(model, folder)
    torch.save(model.speaker_map, folder / "spk_dict.pt")
    return folder


def prompt(tokens: int, *, audio=("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"), wish="ab"):
    """The ids of a system turn, a user's audio and wish, and the opening of the answer."""
    made = tokenizer()
    opens, pad, closes = audio
    text = (
        "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\n"
        f"{opens}{pad * tokens}{closes}{wish}<|im_end|>\n<|im_start|>assistant\n"
    )
    return made.encode(text, add_special_tokens=False).ids


def left_padded(rows):
    """ids and mask [B, L] as transformers' generate wants them."""
    most = max(map(len, rows))
    pad = IDS["<|endoftext|>"]
    ids = torch.tensor([[pad] * (most - len(r)) + list(r) for r in rows])
    mask = torch.tensor([[0] * (most - len(r)) + [1] * len(r) for r in rows])
    return {"input_ids": ids, "attention_mask": mask}


def sounds(frames, bands=BANDS):
    """Noise instead of features: [bands, F] per clip."""
    return [torch.randn(bands, n, generator=torch.Generator().manual_seed(n)) for n in frames]


def feature_batch(rows):
    """input_features [B, bands, F] and their mask, right-padded."""
    most = max(row.shape[1] for row in rows)
    sound = torch.zeros(len(rows), rows[0].shape[0], most)
    mask = torch.zeros(len(rows), most, dtype=torch.long)
    for n, row in enumerate(rows):
        sound[n, :, : row.shape[1]], mask[n, : row.shape[1]] = row, 1
    return {"input_features": sound, "feature_attention_mask": mask}
