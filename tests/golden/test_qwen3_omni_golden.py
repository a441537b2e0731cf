"""Every stage of Qwen3-Omni against transformers, on a tiny random checkpoint."""

import omni_tiny as tiny
import pytest
import torch
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference

from omnicli.config import ModelFolder, Task
from omnicli.data import AudioClip, Codes, Encoded, Failure, Said
from omnicli.execution import omni
from omnicli.execution.families import qwen3_omni as family
from omnicli.execution.hear import packed
from omnicli.execution.stage import Settings
from omnicli.execution.talker import TalkItem
from omnicli.execution.thinker import Think, ThinkItem
from omnicli.execution.weights import read_rows
from omnicli.operators.sampling import penalise

TOLERANCE = 2e-4  # of logits and states, which are of the order of 1 to 10
MARGIN = 4 * TOLERANCE  # above it the likeliest token has to be the same
WAVE_TOLERANCE = 1e-5
FRAMES = (240, 130, 333)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = tiny.qwen3()
    return model, tiny.save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def settings(checkpoint):
    folder = ModelFolder(name="tiny", folder=checkpoint[1], digest="0")
    return Settings(
        task=Task(command="respond"),
        folders={"model": folder, "vad": folder},
        device="cpu",
        dtype=torch.float32,
        decode=lambda request: None,
        claimed_s=lambda request: None,
    )


@pytest.fixture(scope="module")
def stages(settings):
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
        rows = tiny.sounds(frames)
        embeds = stages["encode"].embed(*packed(rows))
    return [
        Encoded(embeds=e, clip=0, valid_frames=n)
        for e, n in zip(embeds.split([family._tokens(n) for n in frames]), frames, strict=True)
    ]


# -- encode


def test_the_encoder_and_its_token_counts(checkpoint, stages):
    model, _ = checkpoint
    frames = (100, 240, 130, 333, 800, 1001)
    rows = tiny.sounds(frames)
    with torch.inference_mode():
        ours = encoded_of(stages, frames)
        for row, mine in zip(rows, ours, strict=True):
            theirs = model.thinker.model.audio_tower(
                row, feature_lens=torch.tensor([row.shape[1]])
            ).last_hidden_state
            assert theirs.shape == mine.embeds.shape
            torch.testing.assert_close(mine.embeds, theirs, atol=TOLERANCE, rtol=0)
    for n in range(1, 1300):
        assert family._tokens(n) == int(reference._get_feat_extract_output_lengths(torch.tensor(n)))


def test_a_clip_under_a_second_is_not_changed_by_its_company(checkpoint, stages):
    """In the reference it is: the only chunk is padded to the longest of the batch."""
    model, _ = checkpoint
    short, long = tiny.sounds((37, 240))
    with torch.inference_mode():
        alone = model.thinker.model.audio_tower(short, feature_lens=torch.tensor([37]))
        both = model.thinker.model.audio_tower(*packed([short, long])).last_hidden_state
    weak = (both[: family._tokens(37)] - alone.last_hidden_state).abs().max()
    assert weak > 10 * TOLERANCE, "mended upstream?"
    noise = 0.1 * torch.randn(48_000, generator=torch.Generator().manual_seed(1))
    clips = [AudioClip(samples=noise[:n], rate_hz=16_000) for n in (800, 6400, 15_999, 48_000)]
    with torch.inference_mode():
        together = stages["encode"].run(list(enumerate(clips)))
        for n, clip in enumerate(clips):
            (by_itself,) = stages["encode"].run([(n, clip)])
            torch.testing.assert_close(together[n].embeds, by_itself.embeds, atol=1e-5, rtol=0)
            assert len(by_itself.embeds) >= 13


# -- think


def think_items(encoded, wish="ab", limit=12):
    items = []
    for one in encoded:
        ids = tiny.prompt(len(one.embeds), wish=wish)
        cut = ids.index(tiny.IDS["<|audio_end|>"]) + 1
        items.append(
            ThinkItem(
                about="summary",
                clip=0,
                prefix=tuple(ids[:cut]),
                suffix=tuple(ids[cut:]),
                encoded=(one,),
                limit=limit,
                speaks=True,
            )
        )
    return items


def forced(stage, items, texts):
    """Logits [B, T, V] along given ids, and what became of the rows."""
    state, out = stage.start(items)
    logits = [out.logits]
    for t in range(len(texts[0])):
        out = stage.step(torch.tensor([[text[t]] for text in texts]), state)
        logits.append(out.logits)
    return torch.stack(logits, dim=1), state


def test_the_thinkers_logits(checkpoint, stages):
    model, _ = checkpoint
    encoded = encoded_of(stages, (*FRAMES, 240))
    items = think_items(encoded)
    said = [[5 + n, 17, 33 + n, 60, 2] for n in range(4)]
    with torch.inference_mode():
        ours, state = forced(stages["think"], items, said)
        for n, item in enumerate(items):
            ids = torch.tensor([[*item.prefix, *item.suffix, *said[n]]])
            theirs = model.thinker(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                output_hidden_states=True,
                **tiny.feature_batch(tiny.sounds(((*FRAMES, 240)[n],))),
            )
            wanted = theirs.logits[0, -len(said[n]) - 1 :]
            torch.testing.assert_close(ours[n], wanted, atol=TOLERANCE, rtol=TOLERANCE)
            embeds, middle = theirs.hidden_states[0][0], theirs.hidden_states[2][0]
            length = len(item.prefix) + len(item.suffix)
            heard = state.heard[n]
            mine = torch.cat([state.prompts[n], torch.stack(state.grown[n])])
            torch.testing.assert_close(mine[:length][~heard], embeds[:length][~heard])
            torch.testing.assert_close(
                mine[:length][heard], middle[:length][heard], atol=TOLERANCE, rtol=TOLERANCE
            )
            torch.testing.assert_close(mine[length:], embeds[length:])


def test_passes_that_share_their_audio_are_as_good_as_alone(stages):
    encoded = encoded_of(stages, (240, 333))
    pair = [*think_items(encoded, wish="ab"), *think_items(encoded, wish="tell me")]
    shared = [pair[0], pair[2], pair[1], pair[3]]
    with torch.inference_mode():
        together, _ = forced(stages["think"], shared, [[5, 6, 7]] * 4)
        for n, item in enumerate(shared):
            alone, _ = forced(stages["think"], [item] * 4, [[5, 6, 7]] * 4)
            assert torch.equal(together[n], alone[0]), "not a bit differs"


# -- talk


def heard_by_the_talker(model, batch, **how):
    """What `generate` hands to the reference's talker, its codes, and all its logits."""
    told, first, others = {}, [], []
    real = model.talker.generate

    def generate(**given):
        told.update(given)
        told["result"] = real(**given)
        return told["result"]

    hooks = [model.talker.codec_head.register_forward_hook(lambda m, i, o: first.append(o[:, -1]))]
    for head in model.talker.code_predictor.lm_head:
        hooks.append(head.register_forward_hook(lambda m, i, o: others.append(o[:, -1])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.talker, "generate", generate)
        sequences, _ = model.generate(
            **batch,
            thinker_max_new_tokens=12,
            talker_max_new_tokens=12,
            talker_do_sample=False,
            thinker_do_sample=False,
            thinker_eos_token_id=tiny.IDS["<|im_end|>"],
            return_audio=True,
            **how,
        )
    for hook in hooks:
        hook.remove()
    return sequences, told, first, others


def reference_batch(frames):
    rows = [tiny.prompt(family._tokens(n)) for n in frames]
    return {**tiny.left_padded(rows), **tiny.feature_batch(tiny.sounds(frames))}


def said_by(stages, frames, generated):
    """Our thinker's product along the reference's text (what was fed back, the end not)."""
    (encoded,) = encoded_of(stages, (frames,))
    (item,) = think_items([encoded])
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


def item_of(said, voice="ethan", limit=40, seed=3):
    return TalkItem(said=said, voice=voice, limit=limit, seed=seed)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize("frames", FRAMES)
@torch.inference_mode()
def test_what_the_talker_is_given_and_what_it_says(checkpoint, stages, frames):
    """Teacher-forced along the reference's greedy path, every codebook."""
    model, _ = checkpoint
    sequences, told, first, others = heard_by_the_talker(model, reference_batch((frames,)))
    generated = sequences[0, -12:].tolist()[:-1]  # the last one is never fed back
    talk = stages["talk"]
    item = item_of(said_by(stages, frames, generated))
    prompt, text = talk.prompt(item)
    torch.testing.assert_close(prompt, told["inputs_embeds"][0], atol=TOLERANCE, rtol=TOLERANCE)
    queue = told["trailing_text_hidden"][0]
    torch.testing.assert_close(text[: len(queue)], queue, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(text[-1], told["tts_pad_embed"][0, 0], atol=1e-5, rtol=1e-5)

    kept = [h[-1] for h in told["result"].hidden_states if h[-1] is not None]
    codes = torch.stack(kept, dim=1)
    compared = flips = 0
    state, out = talk.start([item] * 4)
    seen = torch.zeros(4, out.logits.shape[1], dtype=torch.bool)
    for t, frame in enumerate(codes[0].tolist()):
        torch.testing.assert_close(
            (out.logits - talk.bias)[0].nan_to_num(neginf=0, posinf=0)[: -family.SUPPRESSED],
            first[t][0][: -family.SUPPRESSED],
            atol=TOLERANCE,
            rtol=TOLERANCE,
        )
        chosen = penalise(out.logits, seen, 1.05)
        logits = [chosen[0]]
        for book in range(1, 4):
            logits.append(talk.next_book(torch.tensor([frame[:book]] * 4), out, state)[0])
            theirs = others[3 * t + book - 1][0]
            torch.testing.assert_close(logits[-1], theirs, atol=TOLERANCE, rtol=TOLERANCE)
        for code, row in zip(frame, logits, strict=True):
            best, second = row.topk(2).values
            compared += bool(best - second > MARGIN)
            flips += bool(best - second > MARGIN) and int(row.argmax()) != code
        seen[:, frame[0]] = True
        out = talk.step(torch.tensor([frame] * 4), state)
    assert compared > 3 * len(codes[0])
    assert flips == 0


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@torch.inference_mode()
def test_the_mark_for_the_texts_end_stands_where_it_stands_alone(checkpoint, stages):
    """In the reference's batch, rows that finish early get their own end token in between."""
    model, _ = checkpoint
    end = tiny.IDS["<|im_end|>"]
    alone = said_by(stages, 240, [9, 11, 13])
    _, text = stages["talk"].prompt(item_of(alone))
    eos, pad = stages["talk"].eos, stages["talk"].pad
    assert len(text) == 4, "two more tokens, the end's mark, and the pad for ever"
    torch.testing.assert_close(text[2], eos)
    torch.testing.assert_close(text[3], pad)
    company = stages["talk"].start(
        [item_of(alone), item_of(said_by(stages, 333, [5] * 9)), *[item_of(alone)] * 2]
    )[0]
    for _ in range(2):
        company.next_text()
    torch.testing.assert_close(company.next_text()[0], eos)
    for _ in range(5):
        torch.testing.assert_close(company.next_text()[0], pad)

    # the reference: force both rows' texts, of which one ends early
    texts = {0: [9, 11, 13, end], 1: [5, 6, 7, 8, 9, 10, 12, 14, end]}

    def force(ids, scores):
        step = force.step
        force.step += 1
        wanted = torch.full_like(scores, -1e9)
        for row, text in texts.items():
            wanted[row, text[min(step, len(text) - 1)]] = 0.0
        return wanted

    force.step = 0
    _, told, _, _ = heard_by_the_talker(
        model, reference_batch((240, 333)), thinker_logits_processor=[force]
    )
    theirs = told["trailing_text_hidden"][0]
    weak = (theirs[2] - eos).abs().max()
    assert weak > 10 * TOLERANCE, "mended upstream?"
    torch.testing.assert_close(theirs[3], eos, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_speakers_and_texts_belong_to_their_row(stages):
    said = said_by(stages, 240, [9, 11, 13])
    other = said_by(stages, 333, [5, 6, 7, 8, 10])
    rows = [item_of(said), item_of(said, "chelsie"), item_of(other), item_of(other, "chelsie")]
    frames = torch.tensor([[3, 4, 5, 6]] * 4)

    def rolled(items):
        state, out = stages["talk"].start(items)
        logits = [out.logits]
        for _ in range(6):
            out = stages["talk"].step(frames, state)
            logits += [out.logits, stages["talk"].next_book(frames[:, :1], out, state)]
            stages["talk"].next_book(frames[:, :2], out, state)
        return [torch.cat([one[n] for one in logits]) for n in range(4)]

    together = rolled(rows)
    for n, item in enumerate(rows):
        torch.testing.assert_close(together[n], rolled([item] * 4)[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together[0][:64], together[1][:64], atol=1e-2)


# -- vocode


def codes_of(frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 64, (frames, 4), generator=generator)
    return Codes(codes=made, finish_reason="stop")


@torch.inference_mode()
def test_no_sample_is_lost_at_the_seams(checkpoint, stages):
    model, _ = checkpoint
    codes = codes_of(650)
    whole = model.code2wav(codes.codes.T[None])[0, 0]
    weak = model.code2wav.chunked_decode(codes.codes.T[None])[0, 0]
    assert len(whole) - len(weak) == 2 * 555, "mended upstream?"
    (made,) = stages["vocode"].run([codes])
    assert made.samples == len(whole)
    scale = float(whole.abs().max())
    assert float((made.pieces[0] - whole).abs().max()) < WAVE_TOLERANCE * max(scale, 1.0)
    assert float((made.pieces[0] - whole).abs().max()) < 1e-4 * scale


@torch.inference_mode()
def test_rows_of_any_length_sound_as_they_do_alone(checkpoint, stages):
    model, _ = checkpoint
    items = [codes_of(n, n) for n in (1, 2, 7, 40)]
    made = stages["vocode"].run(items)
    for item, sound in zip(items, made, strict=True):
        alone = model.code2wav(item.codes.T[None])[0, 0]
        assert sound.samples == len(alone)
        scale = float(alone.abs().max()) + 1e-12
        assert float((sound.pieces[0] - alone).abs().max()) < 1e-4 * scale


@torch.inference_mode()
def test_a_code_outside_its_codebook_is_its_rows_failure(stages):
    bad = codes_of(7, 1)
    bad.codes[3, 2] = 64
    good = codes_of(9, 2)
    failed, sound = stages["vocode"].run([bad, good])
    assert isinstance(failed, Failure)
    assert failed.code == "bad_codes"
    (alone,) = stages["vocode"].run([good])
    torch.testing.assert_close(sound.pieces[0], alone.pieces[0], atol=1e-6, rtol=1e-4)


# -- loading


def test_tables_are_read_row_by_row(checkpoint):
    model, folder = checkpoint
    ids = [tiny.IDS[t] for t in ("<tts_bos>", "<tts_eos>", "<tts_pad>")]
    table = model.thinker.get_input_embeddings().weight
    assert torch.equal(read_rows(folder, omni.EMBEDDINGS, ids), table[ids])


def test_the_thinkers_states_are_those_two_layers_only(stages):
    assert isinstance(stages["think"], Think)
    said = said_by(stages, 130, [9, 11])
    assert said.states.shape == (len(said.ids), 32)
