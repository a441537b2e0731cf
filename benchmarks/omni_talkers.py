"""Frames per second of the Qwen-Omni talkers against `generate()` of transformers, same weights.

    python benchmarks/omni_talkers.py qwen3_omni [--equal] [--turns 1]
    python benchmarks/omni_talkers.py qwen2_5_omni [--equal] [--rows 32]

Random weights of about 100M parameters with the real layer counts. All requests are in one batch;
how many frames each is to have is forced on both sides: lognormal (median 100, sigma 0.6, cut to
40..400), or all alike. Prompts are alike too. Both run greedily, in one process, by turns.

qwen3_omni times the nested talker (backbone and code predictor); qwen2_5_omni talker, flow matching
and BigVGAN together.
"""

import argparse
import time

import torch
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

from omnicli.data import Codes, Said
from omnicli.execution.families import qwen2_5_omni, qwen3_omni
from omnicli.execution.nets.bigvgan import BigVGAN, BigVGANConfig
from omnicli.execution.nets.flow_dit import DiTConfig, FlowDiT
from omnicli.execution.nets.llama import config_of
from omnicli.execution.talker import TalkItem
from omnicli.scheduling.loops import lockstep
from omnicli.scheduling.policies.greedy import Greedy

PROMPT = 40  # thinker's states in front of the answer
THINKER = 64


def lengths_of(rows, equal):
    if equal:
        return [100] * rows
    drawn = 100 * torch.exp(0.6 * torch.randn(rows, generator=torch.Generator().manual_seed(1)))
    return drawn.round().clamp(40, 400).int().tolist()


def rope(*sections):
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}


def thinker(text, audio_out):
    small = {"vocab_size": 400, "hidden_size": THINKER, "intermediate_size": 64}
    return {
        "text_config": {
            **small,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **text,
        },
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 16,
            "output_dim": THINKER,
            **audio_out,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 4,
            "out_hidden_size": THINKER,
            "patch_size": 14,
            "spatial_merge_size": 1,
        },
    }


def spread(model):
    """Weights that do not end in a tie everywhere."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and ("talker" in name or "experts" in name):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# -- Qwen3-Omni


def qwen3_model():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    talker = {
        **heads,
        "vocab_size": 3072,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 20,
        "moe_intermediate_size": 96,
        "num_experts": 16,
        "shared_expert_intermediate_size": 192,
        "num_experts_per_tok": 4,
        "rope_parameters": rope(16, 8, 8),
        "max_position_embeddings": 4096,
    }
    predictor = {
        **heads,
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "num_code_groups": 16,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker(
            {
                "moe_intermediate_size": 16,
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "head_dim": 16,
                "rope_parameters": rope(4, 2, 2),
                "pad_token_id": 0,
            },
            {"n_window": 50, "downsample_hidden_size": 8},
        ),
        talker_config={
            "text_config": talker,
            "code_predictor_config": predictor,
            "num_code_groups": 16,
            "thinker_hidden_size": THINKER,
            "accept_hidden_layer": 1,
            "spatial_merge_size": 1,
            "codec_eos_token_id": 2150,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "speaker_id": {"ethan": 2302},
        },
        code2wav_config={"num_hidden_layers": 1, "hidden_size": 32, "decoder_dim": 32},
    )
    torch.manual_seed(0)
    return spread(Qwen3OmniMoeForConditionalGeneration(config))


def qwen3_ours(model):
    raw = model.config.talker_config
    config = qwen3_omni.TalkerConfig(
        backbone=config_of(None, raw.text_config.to_dict(), "qwen3"),
        predictor=config_of(None, raw.code_predictor_config.to_dict(), "qwen3"),
        books=raw.num_code_groups,
        thinker_width=THINKER,
        codec_ids=(2155, 2156, 2157, 2148, 2149),
        end_id=2150,
        speakers=raw.speaker_id,
        user_id=2,
        im_start_id=1,
    )
    net = qwen3_omni.Talker(config)
    tensors = published(model.talker.state_dict())
    net.load_state_dict(tensors, strict=True)
    net.requires_grad_(False).eval()
    net.model.ready("cpu")
    net.code_predictor.model.ready("cpu")
    marks = torch.randn(3, THINKER, generator=torch.Generator().manual_seed(3))
    return qwen3_omni.Talk(net, config, marks), marks


def published(tensors):
    """The experts one by one, as checkpoints have them."""
    made = {}
    for name, tensor in tensors.items():
        head, is_expert, part = name.partition(".experts.")
        if not is_expert:
            made[name] = tensor
        elif part == "gate_up_proj":
            for n, both in enumerate(tensor):
                gate, up = both.chunk(2)
                made[f"{head}.experts.{n}.gate_proj.weight"] = gate
                made[f"{head}.experts.{n}.up_proj.weight"] = up
        else:
            for n, one in enumerate(tensor):
                made[f"{head}.experts.{n}.down_proj.weight"] = one
    return made


def items_of(lengths, voice):
    """Requests with a little text, each to have so many frames."""
    made = []
    for n, limit in enumerate(lengths):
        generator = torch.Generator().manual_seed(n)
        ids = torch.tensor([1, 2, *[5] * (PROMPT - 5), 1, 3, 4, *[6] * 10])
        said = Said(
            text="x",
            about="reply",
            clip=0,
            finish_reason="stop",
            logprob=0.0,
            prompt_tokens=PROMPT,
            states=torch.randn(PROMPT + 10, THINKER, generator=generator),
            heard=torch.zeros(PROMPT, dtype=torch.bool),
            ids=ids,
        )
        made.append(TalkItem(said=said, voice=voice, limit=limit, seed=n))
    return made


class Forced:
    """No row ends before its time, and then it does: a logits processor for transformers."""

    def __init__(self, lengths, end, others=()):
        self.lengths, self.end, self.others, self.step = torch.tensor(lengths), end, others, 0

    def __call__(self, ids, scores):
        done = self.lengths <= self.step
        scores = scores.clone()
        scores[:, [self.end, *self.others]] = -torch.inf
        scores[done] = -torch.inf
        scores[done, self.end] = 0.0
        self.step += 1
        return scores


def qwen3_theirs(model, talk, items, lengths):
    prompts, texts = zip(*(talk.prompt(item) for item in items), strict=True)
    texts = [text[:-1] for text in texts]
    ids = torch.zeros(len(items), len(prompts[0]), dtype=torch.long)
    kept = {}

    def run():
        made = model.talker.generate(
            inputs_embeds=torch.stack(prompts),
            trailing_text_hidden=torch.stack(texts),
            tts_pad_embed=talk.pad.expand(len(items), 1, -1),
            talker_input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths) + 1,
            do_sample=False,
            eos_token_id=2150,
            suppress_tokens=[i for i in range(2048, 3072) if i != 2150],
            logits_processor=[Forced(lengths, 2150)],
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        codes = [h[-1] for h in made.hidden_states if h[-1] is not None]
        kept["codes"] = torch.stack(codes, dim=1)

    return run, kept


def qwen3_run(talk, items):
    kept = {}

    def run():
        kept.update(lockstep.run(talk, items, [0] * len(items), [Greedy()]))

    return run, kept


# -- Qwen2.5-Omni


def qwen2_5_model():
    talker = {
        "vocab_size": 8448,
        "embedding_size": THINKER,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": rope(16, 8, 8),
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_mask_token_id": 8296,
        "tts_text_start_token_id": 10,
        "tts_text_end_token_id": 11,
        "tts_text_pad_token_id": 12,
        "spatial_merge_size": 1,
        "pad_token_id": None,
    }
    dit = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 22}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker({"rope_parameters": rope(4, 2, 2), "pad_token_id": 0}, {}),
        talker_config=talker,
        token2wav_config={
            "dit_config": {**dit, "emb_dim": 128},
            "bigvgan_config": {"upsample_initial_channel": 256},
        },
    )
    torch.manual_seed(0)
    return spread(Qwen2_5OmniForConditionalGeneration(config))


def qwen2_5_ours(model):
    raw = model.config.talker_config.to_dict()
    config = qwen2_5_omni.TalkerConfig(
        decoder=config_of(None, raw, "qwen2"),
        embedding_width=THINKER,
        codec_bos=8293,
        codec_pad=8292,
        codec_mask=8296,
        codec_eos=8294,
        text_eos=11,
        text_pad=12,
    )
    net = qwen2_5_omni.Talker(config)
    net.load_state_dict(model.talker.state_dict(), strict=True)
    net.requires_grad_(False).eval()
    net.model.ready("cpu")
    generator = torch.Generator().manual_seed(3)
    marks = torch.randn(2, THINKER, generator=generator)
    voice = torch.randn(THINKER, generator=generator)
    vocoder = model.config.token2wav_config
    dit = FlowDiT(DiTConfig.from_json(vocoder.dit_config.to_dict()))
    gan = BigVGAN(BigVGANConfig.from_json(vocoder.bigvgan_config.to_dict()))
    dit.load_state_dict(model.token2wav.code2wav_dit_model.state_dict(), strict=True)
    gan.load_state_dict(model.token2wav.code2wav_bigvgan_model.state_dict(), strict=True)
    for one in (dit, gan):
        one.requires_grad_(False).eval()
    gan.ready()
    speaker = qwen2_5_omni.Speaker(
        10,
        torch.randn(1, dit.config.enc_emb_dim, generator=generator),
        torch.randn(1, 100, dit.config.mel_dim, generator=generator),
    )
    vocode = qwen2_5_omni.Vocode(dit, gan, {"Chelsie": speaker})
    return qwen2_5_omni.Talk(net, config, marks, {"Chelsie": voice}), vocode, speaker


def qwen2_5_run(talk, vocode, items):
    kept = {}

    def run():
        codes = dict(lockstep.run(talk, items, [0] * len(items), [Greedy()]))
        kept.update(codes)
        batches = {}
        for n, made in codes.items():
            clean = Codes(codes=made.codes.clamp(max=8192), finish_reason="stop")
            item = qwen2_5_omni.VocodeItem(codes=clean, voice="Chelsie", seed=n)
            batches.setdefault(qwen2_5_omni.vocode_edge(len(clean.codes)), []).append(item)
        kept["talked_s"] = time.perf_counter()
        for batch in batches.values():
            for begin in range(0, len(batch), 16):
                vocode.run(batch[begin : begin + 16])

    return run, kept


def qwen2_5_theirs(model, talk, speaker, items, lengths):
    prompts, replies = zip(*(talk.prompt(item) for item in items), strict=True)
    prompts, replies = torch.stack(prompts), torch.stack(replies)
    ids = torch.full(prompts.shape[:2], 8296)
    ids[:, -2], ids[:, -1] = 8292, 8293
    kept = {}

    def run():
        made = model.talker.generate(
            input_ids=ids,
            input_text_ids=torch.zeros_like(ids),
            thinker_reply_part=replies,
            inputs_embeds=prompts.clone(),
            attention_mask=torch.ones_like(ids),
            suppress_tokens=[8293],
            max_new_tokens=max(lengths) + 1,
            do_sample=False,
            eos_token_id=[8292, 8294],
            pad_token_id=8292,
            logits_processor=[Forced(lengths, 8294, (8292,))],
        )[:, ids.shape[1] :]
        kept["codes"], kept["talked_s"] = made, time.perf_counter()
        for row, length in zip(made, lengths, strict=True):
            codes = row[None, :length].clamp(max=8192)
            model.token2wav(codes, speaker.cond, speaker.ref_mel)

    return run, kept


# -- both


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start, start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("qwen3_omni", "qwen2_5_omni"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--experts", default=None, help="transformers' experts implementation")
    given = parser.parse_args()
    lengths = lengths_of(given.rows, given.equal)
    print(f"{sum(lengths)} frames in {len(lengths)} rows of {min(lengths)} to {max(lengths)}")
    with torch.inference_mode():
        if given.family == "qwen3_omni":
            model = qwen3_model()
            if given.experts:
                model.set_experts_implementation(given.experts)
            talk, _ = qwen3_ours(model)
            talk.bias[talk.config.end_id] = -torch.inf
            items = items_of(lengths, "ethan")
            ours, kept = qwen3_run(talk, items)
            theirs, wanted = qwen3_theirs(model, talk, items, lengths)
            count = sum(p.numel() for p in model.talker.parameters())
        else:
            model = qwen2_5_model()
            talk, vocode, speaker = qwen2_5_ours(model)
            talk.bias[sorted(talk.end_ids)] = -torch.inf
            items = items_of(lengths, "Chelsie")
            ours, kept = qwen2_5_run(talk, vocode, items)
            theirs, wanted = qwen2_5_theirs(model, talk, speaker, items, lengths)
            parts = (model.talker, model.token2wav)
            count = sum(p.numel() for part in parts for p in part.parameters())
        print(f"{count / 1e6:.0f}M parameters, {torch.get_num_threads()} threads, float32")
        for turn in range(given.turns):
            mine, mine_start = timed(ours)
            other, other_start = timed(theirs)
            total = sum(lengths)
            print(
                f"turn {turn}: omni {mine:.1f} s ({total / mine:.1f} frames/s), transformers "
                f"{other:.1f} s ({total / other:.1f} frames/s): {other / mine:.2f} x"
            )
            if "talked_s" in kept:
                mine_talk = kept["talked_s"] - mine_start
                other_talk = wanted["talked_s"] - other_start
                print(f"  of it talking: {mine_talk:.1f} s and {other_talk:.1f} s")
        same = [
            bool(
                (
                    kept[n].codes[:20] == wanted["codes"][n, :20].view(-1, kept[n].codes.shape[1])
                ).all()
            )
            for n in range(len(items))
        ]
        print(f"rows whose first 20 frames are the same: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
