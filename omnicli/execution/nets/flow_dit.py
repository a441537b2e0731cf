"""The flow-matching transformer of Qwen2.5-Omni's voice: codec codes to a mel spectrogram.

From "Qwen2.5-Omni Technical Report" (2025): a DiT (Peebles & Xie 2023) in the manner of F5-TTS
(Chen et al. 2024) says how noise flows towards the spectrogram, an ODE solver follows it, and
classifier-free guidance (Ho & Salimans 2022) compares it with what the network would do without
being told codes and speaker. The speaker is known by an embedding (`cond`) and by a sample of the
voice (`ref_mel`), which an ECAPA-TDNN (Desplanques et al. 2020) reads.

Frames see only their own block of `block_size` frames and, in a few layers, the one before or
after it. So the blocks are what is batched here: a batch of rows of any lengths is laid out as the
blocks that hold something of it, [N, S, D], and padding costs at most a part of a block per row.

Whatever depends neither on time nor on the state is computed once per batch, and what depends on
time alone once per point in time. Parameters keep the names of the checkpoint below
`token2wav.code2wav_dit_model.`; older files also hold `rotary_embed.inv_freq`, which is not needed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.errors import UserError
from omnicli.operators.rope import frequencies

UNUSED = ("*rotary_embed.inv_freq",)  # for `load_into(ignore=...)`

TIME_WIDTH = 256  # of the sinusoids that tell the time
TIME_SCALE = 1000.0
TIME_PERIOD = 10_000.0
NORM_EPS = 1e-6
LEAST_VARIANCE = 1e-12  # of the pooling over the voice sample
LEAST_GUIDANCE = 1e-5  # with less the unguided half is not computed


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig:
    """Sizes of the network, by the names of config.json; defaults are those of transformers."""

    hidden_size: int = 1024
    num_hidden_layers: int = 22
    num_attention_heads: int = 16
    head_dim: int = 64
    ff_mult: int = 2
    emb_dim: int = 512
    block_size: int = 24  # frames
    look_ahead_layers: tuple[int, ...] = (10,)
    look_backward_layers: tuple[int, ...] = (0, 20)
    repeats: int = 2  # frames per code
    num_embeds: int = 8193
    mel_dim: int = 80
    max_position_embeddings: int = 32768  # frames
    rope_theta: float = 10_000.0
    enc_emb_dim: int = 192
    enc_dim: int = 128
    enc_channels: tuple[int, ...] = (256, 256, 256, 256, 768)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 64
    enc_res2net_scale: int = 2
    enc_se_channels: int = 64

    @property
    def views(self) -> tuple[tuple[bool, bool], ...]:
        """Per layer: whether a block sees the one before it, and the one after it."""
        layers = range(self.num_hidden_layers)
        return tuple((i in self.look_backward_layers, i in self.look_ahead_layers) for i in layers)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DiTConfig":
        """The config that `token2wav_config.dit_config` of config.json describes."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise UserError(f"a vocoder that stretches positions by {kind!r} is not supported")
        flat = raw | {key: rope[key] for key in ("rope_theta",) if key in rope}
        known = {f.name for f in fields(cls)}
        return cls(**{key: _frozen(flat[key]) for key in known & flat.keys()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a batch that hold something, row after row."""

    rows: Tensor  # [N] int64
    frames: Tensor  # [N, S] int64: place on the row
    real: Tensor  # [N, S] bool: whether it lies on the row
    opens: Tensor  # [N] bool: whether it is its row's first
    ends: Tensor  # [N] bool: whether it is its row's last

    @classmethod
    def of(cls, lengths: Tensor, size: int) -> "Blocks":
        """lengths [B] int64, in frames."""
        counts = (lengths + size - 1) // size
        longest = int(counts.max())
        numbers = torch.arange(longest, device=lengths.device)
        rows, places = (numbers < counts[:, None]).nonzero(as_tuple=True)
        frames = places[:, None] * size + torch.arange(size, device=lengths.device)
        real = frames < lengths[rows, None]
        return cls(rows, frames, real, places == 0, places == counts[rows] - 1)

    def mask(self, back: bool, ahead: bool) -> Tensor:
        """What is added to scores, 0 or -inf: [N, 1, 1, K], K the frames that a block sees."""
        seen = [self.real]
        if back:
            seen.insert(0, self.real.roll(1, 0) & ~self.opens[:, None])
        if ahead:
            seen.append(self.real.roll(-1, 0) & ~self.ends[:, None])
        hidden = ~torch.cat(seen, dim=1)
        mask = torch.zeros(hidden.shape, device=hidden.device)
        return mask.masked_fill_(hidden, -math.inf)[:, None, None]

    def take(self, x: Tensor, repeats: int = 1) -> Tensor:
        """Lay out x [B, F / repeats, D] -> [N, S, D], with zeros where there is nothing."""
        places = (self.frames // repeats).clamp(max=x.shape[1] - 1)
        return x[self.rows[:, None], places].masked_fill_(~self.real[..., None], 0)

    def put(self, x: Tensor, into: Tensor) -> Tensor:
        """Write x [N, S, D] to its place in `into` [B, F, D]."""
        rows = self.rows[:, None].expand_as(self.frames)
        into[rows[self.real], self.frames[self.real]] = x[self.real]
        return into


def _same_conv(width: int, out: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(width, out, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class TimeDelay(nn.Module):
    """A convolution and a ReLU."""

    def __init__(self, width: int, out: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _same_conv(width, out, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, T] -> [B, D', T]."""
        return F.relu(self.conv(x))


class Res2Net(nn.Module):
    """Parts of the channels, each convolved together with what came of the part before it."""

    def __init__(self, width: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        part = width // scale
        self.blocks = nn.ModuleList(
            TimeDelay(part, part, kernel, dilation) for _ in range(scale - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, T] -> [B, D, T]."""
        first, *parts = x.chunk(len(self.blocks) + 1, dim=1)
        done = [first]
        for block, part in zip(self.blocks, parts, strict=True):
            done.append(block(part + done[-1] if len(done) > 1 else part))
        return torch.cat(done, dim=1)


class SqueezeExcitation(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _same_conv(width, squeezed), _same_conv(squeezed, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, T] -> [B, D, T]."""
        squeezed = F.relu(self.conv1(x.mean(dim=2, keepdim=True)))
        return x * torch.sigmoid(self.conv2(squeezed))


class SqueezedRes2Net(nn.Module):
    """A residual block of the voice reader."""

    def __init__(self, c: DiTConfig, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = TimeDelay(width, width)
        self.res2net_block = Res2Net(width, c.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = TimeDelay(width, width)
        self.se_block = SqueezeExcitation(width, c.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, T] -> [B, D, T]."""
        y: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return x + y


class AttentivePooling(nn.Module):
    """Mean and spread over time, weighted by attention."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(3 * width, inner)
        self.conv = _same_conv(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, T] -> [B, 2D, 1]."""
        even = x.new_full((1, 1, x.shape[2]), 1 / x.shape[2])
        overall = torch.cat(_statistics(x, even), dim=1).expand(-1, -1, x.shape[2])
        scores = self.conv(self.tdnn(torch.cat([x, overall], dim=1)).tanh())
        return torch.cat(_statistics(x, scores.softmax(dim=2)), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x and weights [B, D, T] -> means and spreads [B, D, 1]."""
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, variance.clamp(LEAST_VARIANCE).sqrt()


class VoiceReader(nn.Module):
    """ECAPA-TDNN: what a voice is like."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        first, *between, last = zip(
            c.enc_channels, c.enc_kernel_sizes, c.enc_dilations, strict=True
        )
        layers = [SqueezedRes2Net(c, *sizes) for sizes in between]
        self.blocks = nn.ModuleList([TimeDelay(c.mel_dim, *first), *layers])
        self.mfa = TimeDelay(last[0], *last)
        self.asp = AttentivePooling(last[0], c.enc_attention_channels)
        self.fc = _same_conv(2 * last[0], c.enc_dim)

    def forward(self, mel: Tensor) -> Tensor:
        """[B, T, M] -> [B, E]."""
        x = self.blocks[0](mel.transpose(1, 2))
        states = []
        for block in self.blocks[1:]:
            x = block(x)
            states.append(x)
        out: Tensor = self.fc(self.asp(self.mfa(torch.cat(states, dim=1))))
        return out.squeeze(-1)


class CodecEmbedding(nn.Module):
    """Codes to vectors; code 0 is also what the unguided half is given."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        self.codec_embed = nn.Embedding(c.num_embeds + 1, c.emb_dim)


class InputEmbedding(nn.Module):
    """State and hints, side by side, to hidden states: hence a sum of what each contributes."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        self.parts = [c.mel_dim, c.enc_dim, c.emb_dim, c.enc_emb_dim]
        self.proj = nn.Linear(sum(self.parts), c.hidden_size)
        self.spk_encoder = VoiceReader(c)

    def state(self, x: Tensor) -> Tensor:
        """What the state contributes: [N, S, M] -> [N, S, D]."""
        return F.linear(x, self._weights()[0])

    def hints(self, codes: Tensor, cond: Tensor, ref_mel: Tensor) -> tuple[Tensor, Tensor]:
        """What all the rest does: embedded codes [B, T, E], cond [B, C], ref_mel [B, Tr, M].

        -> codes [B, T, D], speaker [B, D]
        """
        _, by_voice, by_code, by_cond = self._weights()
        speaker = F.linear(self.spk_encoder(ref_mel), by_voice) + F.linear(cond, by_cond)
        return F.linear(codes, by_code, self.proj.bias), speaker

    def _weights(self) -> tuple[Tensor, ...]:
        return torch.split(self.proj.weight, self.parts, dim=1)


class TimeEmbedding(nn.Module):
    """Points in time to vectors."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        width = c.hidden_size
        self.time_mlp = nn.Sequential(
            nn.Linear(TIME_WIDTH, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, times: Tensor) -> Tensor:
        """[E] -> [E, D]."""
        half = torch.arange(TIME_WIDTH // 2, device=times.device).float()
        rates = torch.exp(half * -(math.log(TIME_PERIOD) / (TIME_WIDTH // 2 - 1)))
        angles = TIME_SCALE * times[:, None] * rates
        out: Tensor = self.time_mlp(torch.cat((angles.sin(), angles.cos()), dim=-1))
        return out


class Modulation(nn.Module):
    """Norms' scales and shifts and branches' gates, as the time wants them."""

    def __init__(self, width: int, parts: int, scales: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.scales = parts, scales
        self.linear = nn.Linear(width, parts * width)

    def forward(self, time: Tensor) -> Tensor:
        """[E, D] -> [E, P, D]; scales have their 1 added."""
        out: Tensor = self.linear(F.silu(time)).unflatten(-1, (self.parts, -1))
        out[:, list(self.scales)] += 1
        return out


class BlockAttention(nn.Module):
    """Attention within a block and with its neighbours; only the first head knows positions."""

    def __init__(self, c: DiTConfig, back: bool, ahead: bool) -> None:
        super().__init__()
        inner = c.num_attention_heads * c.head_dim
        self.back, self.ahead, self.head_dim = back, ahead, c.head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(c.hidden_size, inner) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(inner, c.hidden_size)])

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """x [N, S, D], turns [N, S, d/2] complex, mask [N, 1, 1, K] -> [N, S, D]."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in self._projections())
        for first in (q[:, :, 0], k[:, :, 0]):
            torch.view_as_complex(first.unflatten(-1, (-1, 2))).mul_(turns)
        k, v = (self._seen(y) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.to_out[0](y.transpose(1, 2).flatten(2))
        return out

    def _projections(self) -> tuple[nn.Module, ...]:
        return self.to_q, self.to_k, self.to_v

    def _seen(self, x: Tensor) -> Tensor:
        """What a block sees, of x [N, S, H, d] -> [N, K, H, d]; the mask takes back strangers."""
        before = [x.roll(1, 0)] if self.back else []
        after = [x.roll(-1, 0)] if self.ahead else []
        return torch.cat([*before, x, *after], dim=1) if before or after else x


class FeedForward(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        between = (nn.GELU(approximate="tanh"), nn.Identity())  # in training a dropout
        self.ff = nn.Sequential(nn.Linear(width, inner), *between, nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, D] -> [N, S, D]."""
        out: Tensor = self.ff(x)
        return out


class DiTLayer(nn.Module):
    """Attention and feed-forward, both normed, scaled, shifted and gated by the time."""

    def __init__(self, c: DiTConfig, back: bool, ahead: bool) -> None:
        super().__init__()
        self.attn_norm = Modulation(c.hidden_size, 6, (1, 4))
        self.attn = BlockAttention(c, back, ahead)
        self.ff = FeedForward(c.hidden_size, c.hidden_size * c.ff_mult)

    def forward(self, x: Tensor, time: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """x [N, S, D], time [6, D] of `attn_norm`, turns and mask of the attention -> [N, S, D]."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = time
        x = torch.addcmul(x, gate, self.attn(_norm(x, scale, shift), turns, mask))
        return torch.addcmul(x, ff_gate, self.ff(_norm(x, ff_scale, ff_shift)))


def _norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale, shift, NORM_EPS)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What stays the same while a batch is solved. N is twice the blocks if there is guidance."""

    hints: Tensor  # [N, S, D]
    turns: Tensor  # [N, S, d/2] complex
    masks: Sequence[Tensor]  # per layer [N, 1, 1, K]
    guidance: float


class FlowDiT(nn.Module):
    """Codes and noise to a mel spectrogram."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        c = self.config = config
        self.time_embed = TimeEmbedding(c)
        self.text_embed = CodecEmbedding(c)
        self.input_embed = InputEmbedding(c)
        self.transformer_blocks = nn.ModuleList(DiTLayer(c, back, ahead) for back, ahead in c.views)
        self.norm_out = Modulation(c.hidden_size, 2, (0,))
        self.proj_out = nn.Linear(c.hidden_size, c.mel_dim)

    @torch.no_grad()
    def sample(  # noqa: PLR0913 - a row's parts and the solver's three numbers
        self,
        codes: Tensor,
        cond: Tensor,
        ref_mel: Tensor,
        noise: Tensor,
        lengths: Tensor | None,
        *,
        steps: int = 10,
        guidance: float = 0.5,
        sway: float = -1.0,
    ) -> Tensor:
        """Mel spectrograms of rows that do not know of each other: -> [B, M, F], F = T * repeats.

        codes [B, T] int64, cond [B, C], ref_mel [B, Tr, M], noise [B, F, M]; lengths [B] int64 in
        codes, None if all are T. What codes and noise hold past a row's length is not looked at;
        there the spectrogram is 0. With `steps` points in time the network runs 4 * (steps - 1)
        times, on twice the rows if there is guidance. Neither T nor other rows' lengths change a
        row's bits on a CPU as long as there are at least four rows.
        """
        frames = codes.shape[1] * self.config.repeats
        if frames > self.config.max_position_embeddings:
            raise ValueError(f"{frames} frames in a row; the vocoder cannot count that far")
        if lengths is None:
            lengths = torch.full((len(codes),), codes.shape[1], device=codes.device)
        mel = torch.zeros_like(noise)
        if int(lengths.max()):
            blocks = Blocks.of(lengths * self.config.repeats, self.config.block_size)
            real = torch.arange(codes.shape[1], device=codes.device) < lengths[:, None]
            hints = self._hints(codes.where(real, 0), cond, ref_mel, blocks, guidance)
            fixed = self._fixed(hints, blocks, guidance)
            start = blocks.take(noise)
            blocks.put(self._solve(start, fixed, schedule(steps, sway)), mel)
        return mel.transpose(1, 2)

    def _hints(
        self, codes: Tensor, cond: Tensor, ref_mel: Tensor, blocks: Blocks, guidance: float
    ) -> Tensor:
        """Hidden states without what the state contributes: codes [B, T] ... -> [N, S, D].

        The unguided half is told code 0 and nothing but zeros of the speaker: the same for all of
        its frames.
        """
        embed = self.text_embed.codec_embed
        told, speaker = self.input_embed.hints(embed(codes), cond, ref_mel)
        hints = blocks.take(told + speaker[:, None], self.config.repeats)
        if guidance < LEAST_GUIDANCE:
            return hints
        nothing = (torch.zeros_like(x[:1]) for x in (cond, ref_mel))
        told, speaker = self.input_embed.hints(embed(torch.zeros_like(codes[:1, :1])), *nothing)
        return torch.cat([hints, (told + speaker).expand_as(hints)])

    def _fixed(self, hints: Tensor, blocks: Blocks, guidance: float) -> Fixed:
        copies = len(hints) // len(blocks.rows)
        frequency = frequencies(self.config.head_dim, self.config.rope_theta).to(hints.device)
        angles = blocks.frames[..., None] * frequency
        turns = torch.polar(torch.ones_like(angles), angles).repeat(copies, 1, 1)
        kinds = self.config.views
        masks = {kind: blocks.mask(*kind).repeat(copies, 1, 1, 1) for kind in set(kinds)}
        return Fixed(hints, turns, [masks[kind] for kind in kinds], guidance)

    def _solve(self, x: Tensor, fixed: Fixed, times: Tensor) -> Tensor:
        """Follow the flow from noise x [N, S, M] through times [E] by the 3/8 rule (Kutta 1901).

        The last of a step's four points in time is the first of the next one's.
        """
        begins, steps = times[:-1], times.diff()
        thirds = torch.stack([begins, begins + steps * (1 / 3), begins + steps * (2 / 3)], dim=1)
        moments = torch.cat([thirds.flatten(), times[-1:]]).to(x.device)
        tables = list(zip(*self._tables(moments), strict=True))
        for i, h in enumerate(steps.tolist()):
            a, b, c, d = tables[3 * i : 3 * i + 4]
            k1 = self._speed(x, fixed, a)
            k2 = self._speed(x + h * k1 / 3, fixed, b)
            k3 = self._speed(x + h * (k2 - k1 / 3), fixed, c)
            k4 = self._speed(x + h * (k1 - k2 + k3), fixed, d)
            x = x + (k1 + 3 * (k2 + k3) + k4) * (h / 8)
        return x

    def _tables(self, moments: Tensor) -> Iterator[Tensor]:
        """What each layer, and last the output, does at these moments [E]: [E, P, D] each."""
        time = self.time_embed(moments)
        norms = [x.get_submodule("attn_norm") for x in self.transformer_blocks]
        return (modulation(time) for modulation in [*norms, self.norm_out])

    def _speed(self, x: Tensor, fixed: Fixed, tables: Sequence[Tensor]) -> Tensor:
        """Where x [N, S, M] flows at the moment of these tables -> [N, S, M]."""
        *of_layers, (scale, shift) = tables
        copies = fixed.hints.view(-1, *x.shape[:2], self.config.hidden_size)
        h = (copies + self.input_embed.state(x)).flatten(0, 1)
        for layer, table, mask in zip(self.transformer_blocks, of_layers, fixed.masks, strict=True):
            h = layer(h, table, fixed.turns, mask)
        y: Tensor = self.proj_out(_norm(h, scale, shift))
        guided, *free = torch.split(y, len(x))
        return guided + (guided - free[0]) * fixed.guidance if free else guided


def schedule(steps: int, sway: float) -> Tensor:
    """Times from 0 to 1 -> [steps] float32; a negative sway spends more of them early (F5-TTS)."""
    even = torch.linspace(0, 1, steps, device="cpu")
    return even + sway * (torch.cos(math.pi / 2 * even) - 1 + even)
