"""Every stage of Qwen2.5-Omni against transformers, on a tiny random checkpoint."""

import omni_tiny as tiny
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as reference

from omnicli.config import ModelFolder, Task
from omnicli.data import AudioClip, Codes, Encoded, Failure, Said
from omnicli.errors import UserError
from omnicli.execution.families import qwen2_5_omni as family
from omnicli.execution.hear import features, packed
from omnicli.execution.stage import Settings
from omnicli.execution.talker import TalkItem
from omnicli.execution.thinker import ThinkItem
from omnicli.operators.sampling import penalise

TOLERANCE = 2e-4  # of logits and states, which are of the order of 1 to 10
MARGIN = 4 * TOLERANCE  # above it the likeliest token has to be the same
FRAMES = (240, 130, 333)
AUDIO = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
ENDS = [84, 86]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = tiny.qwen2_5(num_embeds=80)
    return model, tiny.save_qwen2_5(model, tmp_path_factory.mktemp("qwen2_5"))


@pytest.fixture(scope="module")
def stages(checkpoint):
    folder = ModelFolder(name="tiny", folder=checkpoint[1], digest="0")
    settings = Settings(
        task=Task(command="respond"),
        folders={"model": folder, "vad": folder},
        device="cpu",
        dtype=torch.float32,
        decode=lambda request: None,
        claimed_s=lambda request: None,
    )
    specs = {spec.name: spec for spec in family.load(settings).stages}
    opened = {}
    for name in ("encode", "think", "talk", "vocode"):
        context = specs[name].open()
        opened[name] = (context, context.__enter__())
    think = opened["think"][1]
    think.bias = torch.zeros_like(think.bias)  # transformers suppresses no control tokens
    yield {name: stage for name, (_, stage) in opened.items()}
    for context, _ in opened.values():
        context.__exit__(None, None, None)


def encoded_of(stages, frames):
    with torch.inference_mode():
        embeds = stages["encode"].embed(*packed(tiny.sounds(frames)))
    return [
        Encoded(embeds=e, clip=0, valid_frames=n)
        for e, n in zip(embeds.split([family._tokens(n) for n in frames]), frames, strict=True)
    ]


def think_item(encoded):
    ids = tiny.prompt(len(encoded.embeds), audio=AUDIO)
    cut = ids.index(tiny.IDS["<|audio_eos|>"]) + 1
    return ThinkItem(
        about="summary",
        clip=0,
        prefix=tuple(ids[:cut]),
        suffix=tuple(ids[cut:]),
        encoded=(encoded,),
        limit=12,
        speaks=True,
    )


def forced(stage, items, texts):
    state, out = stage.start(items)
    logits = [out.logits]
    for t in range(len(texts[0])):
        out = stage.step(torch.tensor([[text[t]] for text in texts]), state)
        logits.append(out.logits)
    return torch.stack(logits, dim=1), state


def reference_batch(frames):
    rows = [tiny.prompt(family._tokens(n), audio=AUDIO) for n in frames]
    return {**tiny.left_padded(rows), **tiny.feature_batch(tiny.sounds(frames))}


@torch.inference_mode()
def test_the_encoder_and_its_token_counts(checkpoint, stages):
    model, _ = checkpoint
    frames = (40, 100, 240, 130, 333, 800, 1001)
    for row, mine in zip(tiny.sounds(frames), encoded_of(stages, frames), strict=True):
        batch = tiny.feature_batch([row])
        theirs = model.thinker.get_audio_features(
            batch["input_features"], feature_attention_mask=batch["feature_attention_mask"]
        ).last_hidden_state
        assert theirs.shape == mine.embeds.shape
        torch.testing.assert_close(mine.embeds, theirs, atol=TOLERANCE, rtol=0)
    _, sizes = model.thinker.model.audio_tower._get_feat_extract_output_lengths(
        torch.arange(4, 1300)
    )
    assert [family._tokens(n) for n in range(4, 1300)] == sizes.tolist()


def test_features_are_those_of_the_published_extractor():
    extractor = WhisperFeatureExtractor(feature_size=tiny.BANDS, sampling_rate=16_000, n_fft=400)
    for n in (1600, 16_000, 23_457):
        samples = 0.1 * torch.randn(n, generator=torch.Generator().manual_seed(n))
        given = extractor(
            samples.numpy(),
            sampling_rate=16_000,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = int(given["attention_mask"].sum())
        mine = features(AudioClip(samples=samples, rate_hz=16_000), tiny.BANDS)
        assert mine.shape[1] == frames
        torch.testing.assert_close(mine, given["input_features"][0, :, :frames], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_the_thinkers_logits_and_what_the_talker_reads(checkpoint, stages):
    model, _ = checkpoint
    frames = (*FRAMES, 240)
    items = [think_item(one) for one in encoded_of(stages, frames)]
    said = [[5 + n, 17, 33 + n, 60, 2] for n in range(4)]
    ours, state = forced(stages["think"], items, said)
    for n, item in enumerate(items):
        ids = torch.tensor([[*item.prefix, *item.suffix, *said[n]]])
        theirs = model.thinker(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            **tiny.feature_batch(tiny.sounds((frames[n],))),
        )
        wanted = theirs.logits[0, -len(said[n]) - 1 :]
        torch.testing.assert_close(ours[n], wanted, atol=TOLERANCE, rtol=TOLERANCE)
        embeds, last = theirs.hidden_states[0][0], theirs.hidden_states[-1][0]
        mine = torch.cat([state.prompts[n], torch.stack(state.grown[n])])
        embeds[: len(state.heard[n])][state.heard[n]] = 0.0
        torch.testing.assert_close(mine, embeds + last, atol=TOLERANCE, rtol=TOLERANCE)


def said_by(stages, frames, generated):
    (encoded,) = encoded_of(stages, (frames,))
    item = think_item(encoded)
    _, state = forced(stages["think"], [item] * 4, [generated] * 4)
    return Said(
        text="x",
        about="summary",
        clip=0,
        finish_reason="stop",
        logprob=0.0,
        prompt_tokens=len(item.prefix) + len(item.suffix),
        states=torch.cat([state.prompts[0], torch.stack(state.grown[0])]),
        heard=state.heard[0],
        ids=torch.tensor([*item.prefix, *item.suffix, *generated]),
    )


def item_of(said, voice="Chelsie"):
    return TalkItem(said=said, voice=voice, limit=40, seed=3)


def talked(model, frames, voice, most=16):
    """What `generate` hands to the reference's talker, what that makes of it, and all logits."""
    told, logits, inputs = {}, [], []
    real = model.talker.generate

    def generate(**given):
        told.update(given, inputs_embeds=given["inputs_embeds"].clone())
        told["result"] = real(**given)
        return told["result"]

    hooks = [
        model.talker.codec_head.register_forward_hook(lambda m, i, o: logits.append(o[:, -1])),
        model.talker.thinker_to_talker_proj.register_forward_hook(
            lambda m, i, o: inputs.append(i[0].clone())
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.talker, "generate", generate)
        patch.setattr(model.token2wav, "forward", lambda *a, **k: torch.zeros(10))
        sequences, _ = model.generate(
            **reference_batch(frames),
            speaker=voice,
            thinker_max_new_tokens=12,
            talker_max_new_tokens=most,
            talker_do_sample=False,
            thinker_do_sample=False,
            thinker_eos_token_id=tiny.IDS["<|im_end|>"],
            talker_eos_token_id=ENDS,
        )
    for hook in hooks:
        hook.remove()
    return sequences, told, logits, inputs


@pytest.mark.parametrize(("frames", "voice"), [(240, "Chelsie"), (130, "Ethan"), (333, "Chelsie")])
@torch.inference_mode()
def test_what_the_talker_is_given_and_what_it_says(checkpoint, stages, frames, voice):
    """Teacher-forced along the reference's greedy path, beside a longer row."""
    model, _ = checkpoint
    sequences, told, logits, inputs = talked(model, (frames, 400), voice)
    length = told["attention_mask"][0].sum() - 2
    generated = sequences[0, told["input_ids"].shape[1] - 2 :].tolist()[:-1]
    end = tiny.IDS["<|im_end|>"]
    generated = generated[: generated.index(end)] if end in generated else generated
    talk, item = stages["talk"], item_of(said_by(stages, frames, generated), voice)
    assert item.said.prompt_tokens == length
    prompt, reply = talk.prompt(item)
    wanted = inputs[0][0, -len(prompt) :]
    torch.testing.assert_close(prompt, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    queue = told["thinker_reply_part"][0]
    torch.testing.assert_close(reply, queue[: len(reply)], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(reply[-1], queue[-1], atol=TOLERANCE, rtol=TOLERANCE)

    codes = told["result"][0, told["input_ids"].shape[1] :].tolist()
    compared = flips = 0
    state, out = talk.start([item] * 4)
    seen = torch.zeros(4, out.logits.shape[1], dtype=torch.bool)
    seen[:, list(talk.seen_ids)] = True
    for t, code in enumerate(codes):
        if t and codes[t - 1] in ENDS:
            break
        torch.testing.assert_close(
            out.logits[0].masked_fill(talk.bias.isinf(), 0),
            logits[t][0].masked_fill(talk.bias.isinf(), 0),
            atol=TOLERANCE,
            rtol=TOLERANCE,
        )
        chosen = penalise(out.logits, seen, 1.05)[0]
        best, second = chosen.topk(2).values
        compared += bool(best - second > MARGIN)
        flips += bool(best - second > MARGIN) and int(chosen.argmax()) != code
        seen[:, code] = True
        out = talk.step(torch.tensor([[code]] * 4), state)
    assert compared > 3
    assert flips == 0


@torch.inference_mode()
def test_the_talker_is_told_where_the_codes_begin_in_any_company(checkpoint, stages):
    """The reference adds codec_pad and codec_bos only where some row of the batch is padded."""
    model, _ = checkpoint
    _, alone, _, inputs = talked(model, (240,), "Chelsie", most=2)
    weak = (inputs[0] - alone["inputs_embeds"]).abs().max()
    assert weak == 0, "mended upstream?"
    _, _, _, inputs = talked(model, (240, 400), "Chelsie", most=2)
    marks = model.talker.model.embed_tokens(torch.tensor([84, 85]))
    prompt, _ = stages["talk"].prompt(item_of(said_by(stages, 240, [9, 11])))
    text = stages["talk"].voices["Chelsie"]
    torch.testing.assert_close(prompt[-2], text + marks[0])
    torch.testing.assert_close(inputs[0][0, -2], text + marks[0], atol=TOLERANCE, rtol=TOLERANCE)


def vocode_item(frames, voice="Chelsie", seed=5):
    codes = torch.randint(0, 80, (frames, 1), generator=torch.Generator().manual_seed(frames))
    made = Codes(codes=codes, finish_reason="stop")
    return family.VocodeItem(codes=made, voice=voice, seed=seed)


@torch.inference_mode()
def test_codes_to_sound_in_one_batch_and_as_the_reference(checkpoint, stages, monkeypatch):
    """The reference draws its noise itself: it is given the row's."""
    model, _ = checkpoint
    rows = [vocode_item(30), vocode_item(61, "Ethan", 8), vocode_item(7), vocode_item(48, "Ethan")]
    made = stages["vocode"].run(rows)
    for item, sound in zip(rows, made, strict=True):
        frames = 2 * len(item.codes.codes)
        noise = stages["vocode"]._noise(item.seed, family.vocode_edge(len(item.codes.codes)))
        drawn = noise[None, :frames]
        monkeypatch.setattr(reference.torch, "randn", lambda *a, drawn=drawn, **k: drawn.clone())
        speaker = model.speaker_map[item.voice]
        theirs = model.token2wav(item.codes.codes.T, speaker["cond"], speaker["ref_mel"])
        monkeypatch.undo()
        assert sound.samples == len(theirs)
        scale = float(theirs.abs().max())
        assert float((sound.pieces[0] - theirs).abs().max()) < 1e-3 * scale + 1e-7
    (alone,) = stages["vocode"].run([rows[1]])
    torch.testing.assert_close(alone.pieces[0], made[1].pieces[0], atol=1e-6, rtol=1e-3)


@torch.inference_mode()
def test_a_code_outside_the_codebook_is_its_rows_failure(stages):
    """The talker's vocabulary is larger than the vocoder's."""
    bad, good = vocode_item(20), vocode_item(24)
    bad.codes.codes[3] = 90
    failed, sound = stages["vocode"].run([bad, good])
    assert isinstance(failed, Failure)
    assert failed.code == "bad_codes"
    assert sound.samples > 0


def test_speakers_are_read_without_running_code(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        family.read_speakers(tmp_path)

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"Chelsie": Evil()}, tmp_path / "spk_dict.pt")
    with pytest.raises(UserError, match="holds no speakers"):
        family.read_speakers(tmp_path)
    (tmp_path / "spk_dict.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match="holds no speakers"):
        family.read_speakers(tmp_path)
