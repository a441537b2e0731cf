"""Qwen2.5-Omni's vocoder against transformers, in float32: small networks of random weights.

The spectrogram and every sample are within `GOLDEN` of the reference's, relative to the largest of
them, and within `ALONE` of what the same row becomes without company.
"""

from unittest import mock

import pytest
import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as reference
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
)

from omnicli.errors import UserError
from omnicli.execution.nets.bigvgan import BigVGAN, BigVGANConfig, reach_frames
from omnicli.execution.nets.flow_dit import DiTConfig, FlowDiT
from omnicli.execution.weights import hollow

GOLDEN = 1e-4  # of the largest value
ALONE = 1e-5

BLOCK_CODES = 12
DIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,  # one looks back, one at its own block, one ahead, one both ways
    "num_attention_heads": 2,
    "head_dim": 16,
    "ff_mult": 2,
    "emb_dim": 16,
    "block_size": 2 * BLOCK_CODES,
    "look_ahead_layers": [2, 3],
    "look_backward_layers": [0, 3],
    "repeats": 2,
    "num_embeds": 96,
    "mel_dim": 20,
    "enc_emb_dim": 8,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "enc_res2net_scale": 2,
}
BIGVGAN = {
    "mel_dim": 20,
    "upsample_initial_channel": 64,
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 2, 4]],
    "upsample_rates": [5, 3, 2, 2],
    "upsample_kernel_sizes": [11, 7, 4, 4],
}
HOP = 60
REF_FRAMES = 30
STEPS = 3  # as good as ten for telling whether the arithmetic is the same

# Codes per row: within a block, a whole one, one and a bit, several, several whole ones.
LENGTHS = (5, 12, 17, 40, 48)
RAGGED = ((5, 1, 3), (12, 12, 5), (17, 12, 2), (40, 25, 36), (48, 1, 13))


def _spread(net):
    """Weights that keep signals at about their size, so that nothing is lost in nothing."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            gain = 0.4 if "resblocks" in name else 1.0 if "conv_post" in name else 0.8
            fan_in = weight[0].numel() if weight.ndim > 1 else 16
            weight.copy_(torch.randn_like(weight) * gain * fan_in**-0.5)
    return net.eval()


def _copied(ours, theirs):
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=True)
    return ours.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def their_dit():
    config = Qwen2_5OmniDiTConfig(**DIT)
    make = reference.Qwen2_5OmniToken2WavDiTModel._from_config
    return _spread(make(config, attn_implementation="sdpa"))


@pytest.fixture(scope="module")
def dit(their_dit):
    with hollow():
        net = FlowDiT(DiTConfig.from_json(DIT))
    return _copied(net, their_dit)


@pytest.fixture(scope="module")
def their_bigvgan():
    config = Qwen2_5OmniBigVGANConfig(**BIGVGAN)
    return _spread(reference.Qwen2_5OmniToken2WavBigVGANModel._from_config(config))


@pytest.fixture(scope="module")
def bigvgan(their_bigvgan):
    with hollow():
        net = BigVGAN(BigVGANConfig.from_json(BIGVGAN))
    _copied(net, their_bigvgan).ready()
    return net


def _rows(codes, rows=3):
    generator = torch.Generator().manual_seed(codes)
    normal = {"generator": generator}
    return (
        torch.randint(0, DIT["num_embeds"], (rows, codes), **normal),
        torch.randn(rows, DIT["enc_emb_dim"], **normal),
        torch.randn(rows, REF_FRAMES, DIT["mel_dim"], **normal),
        torch.randn(rows, 2 * codes, DIT["mel_dim"], **normal),
    )


def _row(batch, i, codes):
    ids, cond, ref_mel, noise = (x[i : i + 1] for x in batch)
    return ids[:, :codes], cond, ref_mel, noise[:, : 2 * codes]


def _theirs(net, row, guidance=0.5, sway=-1.0):
    """The reference draws its noise itself."""
    codes, cond, ref_mel, noise = row
    with mock.patch.object(torch, "randn", lambda *_, **__: noise.clone()):
        return net.sample(cond, ref_mel, codes, STEPS, guidance, sway)


def _mels(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, BIGVGAN["mel_dim"], batch, generator=generator) * 3 - 3


def _close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1
    return (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("codes", LENGTHS)
def test_spectrograms_are_those_of_transformers(dit, their_dit, codes):
    batch = _rows(codes)
    mels = dit.sample(*batch, None, steps=STEPS)
    for i, mel in enumerate(mels):
        assert _close(mel[None], _theirs(their_dit, _row(batch, i, codes)), GOLDEN)


@pytest.mark.parametrize(("guidance", "sway"), [(0.0, -1.0), (2.0, 0.5)])
def test_guidance_and_sway_are_those_of_transformers(dit, their_dit, guidance, sway):
    row = _row(_rows(17), 0, 17)
    mel = dit.sample(*row, None, steps=STEPS, guidance=guidance, sway=sway)
    assert _close(mel, _theirs(their_dit, row, guidance, sway), GOLDEN)


def test_every_hint_is_heard(dit):
    batch = _rows(17, 1)
    mel = dit.sample(*batch, None, steps=STEPS)
    for i in range(len(batch)):
        other = [x.flip(-1) if i == j else x for j, x in enumerate(batch)]
        assert not _close(dit.sample(*other, None, steps=STEPS), mel, 10 * GOLDEN)


@pytest.mark.parametrize("lengths", [(n,) * 3 for n in LENGTHS] + list(RAGGED))
def test_a_spectrogram_does_not_depend_on_its_company(dit, lengths):
    batch = _rows(max(lengths))
    mels = dit.sample(*batch, torch.tensor(lengths), steps=STEPS)
    for i, codes in enumerate(lengths):
        alone = dit.sample(*_row(batch, i, codes), None, steps=STEPS)
        assert _close(mels[i : i + 1, :, : 2 * codes], alone, ALONE)
        assert not mels[i, :, 2 * codes :].any()


def test_padding_may_hold_anything(dit):
    codes, cond, ref_mel, noise = _rows(17)
    lengths = torch.tensor([17, 9, 0])
    clean = dit.sample(codes, cond, ref_mel, noise, lengths, steps=STEPS)
    for i, end in enumerate(lengths.tolist()):
        codes[i, end:] = -1
        noise[i, 2 * end :] = torch.nan
    assert torch.equal(dit.sample(codes, cond, ref_mel, noise, lengths, steps=STEPS), clean)
    assert not clean[2].any()


@pytest.mark.parametrize("frames", [1, 2, 7, 40])
def test_samples_are_those_of_transformers(bigvgan, their_bigvgan, frames):
    mels = _mels(frames)
    for mel, wave in zip(mels, bigvgan(mels), strict=True):
        with torch.no_grad():
            assert _close(wave, their_bigvgan(mel[None]), GOLDEN)


@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 23, 1), (7, 6, 2), (2, 1, 2)])
def test_a_waveform_does_not_depend_on_its_company(bigvgan, lengths):
    mels = _mels(max(lengths))
    waves = bigvgan(mels, torch.tensor(lengths))
    for mel, wave, frames in zip(mels, waves, lengths, strict=True):
        alone = bigvgan(mel[None, :, :frames])[0]
        assert _close(wave[: HOP * frames], alone, ALONE)
        assert not wave[HOP * frames :].any()


def test_a_frame_is_not_heard_beyond_its_reach(bigvgan):
    reach = reach_frames(bigvgan.config)
    mels = _mels(2 * reach)
    other = mels.clone()
    other[..., -1] += 1
    changed = (bigvgan(mels) != bigvgan(other)).any(0).nonzero()
    assert HOP * (reach - 1) <= changed.min() < HOP * (2 * reach - 2)
    other = mels.clone()
    other[..., 0] += 1
    changed = (bigvgan(mels) != bigvgan(other)).any(0).nonzero()
    assert HOP * 2 < changed.max() < HOP * (reach + 1)
    assert reach_frames(BigVGANConfig()) == 34


def test_absent_keys_have_the_defaults_of_transformers():
    for ours, theirs in (
        (DiTConfig.from_json({}), Qwen2_5OmniDiTConfig()),
        (BigVGANConfig.from_json({}), Qwen2_5OmniBigVGANConfig()),
    ):
        names = set(ours.__dataclass_fields__) - {"rope_theta"}
        assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert DiTConfig.from_json({"rope_theta": 7.0}).rope_theta == 7.0
    assert DiTConfig.from_json({"rope_parameters": {"rope_theta": 8.0}}).rope_theta == 8.0


def test_unknown_kinds_are_refused():
    with pytest.raises(UserError, match="stretches positions"):
        DiTConfig.from_json({"rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(UserError, match="whole number of samples"):
        BigVGANConfig.from_json({"upsample_rates": [4, 3, 2, 2, 2, 2]})


def test_a_row_is_at_most_as_long_as_positions_go():
    with hollow():
        net = FlowDiT(DiTConfig.from_json(DIT | {"max_position_embeddings": 8}))
    with pytest.raises(ValueError, match="10 frames"):
        net.sample(*_rows(5), None)
