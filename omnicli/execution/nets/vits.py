"""VITS (Kim et al. 2021) as Piper trains it: phoneme ids to latents, latents to sound.

    TextEncoder -> what each phoneme sounds like: mean and spread of its latents
    Durations   -> how many frames it lasts (a normalising flow run backwards)
    Coupling    -> frames drawn from the prior to latents (another one)
    Vocoder     -> latents to samples (HiFi-GAN, Kong et al. 2020), window by window

Names of parameters are Piper's (`enc_p`, `dp`, `flow`, `dec`, `emb_g`), weight norm folded. All
sizes but the few below come from the shapes of the tensors. Masks are [B, T, 1], 1 for real
positions. The flows' `forward` is the way from noise to speech; the other way only training needs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.errors import UserError
from omnicli.execution.weights import hollow, load_into
from omnicli.operators.rational_quadratic_spline import invert_spline
from omnicli.operators.relative_attention import attend_near

Shapes = Mapping[str, tuple[int, ...]]

SPLINE_BINS = 10
SPLINE_BOUND = 5.0
SLOPE = 0.1  # of the vocoder's leaky ReLUs, but for the last, which has torch's own
# Dilations leave no trace in the shapes. Piper trains two kinds of residual block:
# type 2 (one convolution per dilation; x_low, low, medium) and type 1 (two; high).
DILATIONS = {
    (2, (3, 5, 7)): ((1, 2), (2, 6), (3, 12)),
    (1, (3, 7, 11)): ((1, 3, 5),) * 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VitsConfig:
    """Sizes of a voice, read from the shapes of its tensors."""

    symbols: int
    width: int
    latent: int
    filter: int
    heads: int
    layers: int
    kernel: int  # of the text encoder's feed-forward convolutions
    reach: int  # of its relative attention
    duration_width: int
    duration_kernel: int
    duration_layers: int
    couplings: int
    coupling_width: int
    coupling_kernel: int
    coupling_layers: int
    channels: int  # of the vocoder before the first upsampling
    upsample_kernels: tuple[int, ...]
    block_type: int
    block_kernels: tuple[int, ...]
    speakers: int = 0  # 0: one voice without an embedding
    speaker_width: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Upsampling factors: a kernel of Piper's spans two steps."""
        return tuple(k // 2 for k in self.upsample_kernels)

    @property
    def hop_samples(self) -> int:
        """Samples per latent frame."""
        return math.prod(self.strides)

    @property
    def dilations(self) -> tuple[tuple[int, ...], ...]:
        """Dilations of the residual blocks that follow each upsampling."""
        kind = (self.block_type, self.block_kernels)
        if kind not in DILATIONS:
            raise UserError(f"a voice with residual blocks of kind {kind} is not supported")
        return DILATIONS[kind]


def read_config(shapes: Shapes) -> VitsConfig:
    """The sizes that these tensors have."""
    try:
        return _config(shapes)
    except (KeyError, ValueError) as error:
        hint = "Piper voices of any quality are; other VITS models are not"
        raise UserError(f"not a voice that is known here: {error}", hint=hint) from error


def _config(shapes: Shapes) -> VitsConfig:
    layer = "enc_p.encoder.attn_layers.0"
    _, distances, head_width = shapes[f"{layer}.emb_rel_k"]
    symbols, width = shapes["enc_p.emb.weight"]
    filters, _, kernel = shapes["enc_p.encoder.ffn_layers.0.conv_1.weight"]
    duration_width, _, duration_kernel = shapes["dp.convs.convs_sep.0.weight"]
    _, coupling_width, coupling_kernel = shapes["flow.flows.0.enc.in_layers.0.weight"]
    block_type = 1 if "dec.resblocks.0.convs1.0.weight" in shapes else 2
    block = "convs1" if block_type == 1 else "convs"
    ups = _count(shapes, "dec.ups.{}.weight")
    blocks = _count(shapes, f"dec.resblocks.{{}}.{block}.0.weight") // ups
    speakers, speaker_width = shapes.get("emb_g.weight", (0, 0))
    return VitsConfig(
        symbols=symbols,
        width=width,
        latent=shapes["enc_p.proj.weight"][0] // 2,
        filter=filters,
        heads=width // head_width,
        layers=_count(shapes, "enc_p.encoder.attn_layers.{}.emb_rel_k"),
        kernel=kernel,
        reach=distances // 2,
        duration_width=duration_width,
        duration_kernel=duration_kernel,
        duration_layers=_count(shapes, "dp.convs.convs_sep.{}.weight"),
        couplings=_count(shapes, "flow.flows.{}.pre.weight", step=2),
        coupling_width=coupling_width,
        coupling_kernel=coupling_kernel,
        coupling_layers=_count(shapes, "flow.flows.0.enc.in_layers.{}.weight"),
        channels=shapes["dec.conv_pre.weight"][0],
        upsample_kernels=tuple(shapes[f"dec.ups.{i}.weight"][2] for i in range(ups)),
        block_type=block_type,
        block_kernels=tuple(
            shapes[f"dec.resblocks.{i}.{block}.0.weight"][2] for i in range(blocks)
        ),
        speakers=speakers,
        speaker_width=speaker_width,
    )


def _count(shapes: Shapes, pattern: str, step: int = 1) -> int:
    count = 0
    while pattern.format(count * step) in shapes:
        count += 1
    if not count:
        raise ValueError(f"no tensor {pattern.format(0)}")
    return count


class Conv(nn.Conv1d):
    """A convolution over time that keeps the length, on [B, T, D].

    In memory that is the channels-last form of an image of height 1; as such it runs twice as
    fast on a CPU as torch's own form of [B, D, T].
    """

    def __init__(
        self,
        width: int,
        out: int,
        kernel: int = 1,
        dilation: int = 1,
        *,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        same = (kernel - 1) * dilation // 2
        super().__init__(
            width, out, kernel, padding=same, dilation=dilation, groups=groups, bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D']."""
        y = F.conv2d(
            _as_image(x),
            self.weight[:, :, None],
            self.bias,
            padding=(0, *map(int, self.padding)),
            dilation=(1, self._spread(x)),
            groups=self.groups,
        )
        return _as_rows(y)

    def _spread(self, x: Tensor) -> int:
        """The dilation. A kernel of 1 has none, but with 2 torch takes oneDNN on one thread too.

        That is twice as fast as torch's matrix product, and a row's bits do not change with the
        number of rows.
        """
        return 2 if self.kernel_size == (1,) and not x.is_cuda else self.dilation[0]


class UpConv(nn.ConvTranspose1d):
    """A transposed convolution over time: [B, T, D] -> [B, T * stride, D']."""

    def __init__(self, width: int, out: int, kernel: int, stride: int) -> None:
        super().__init__(width, out, kernel, stride, padding=(kernel - stride) // 2)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """[B, T, D] -> [B, T * stride, D']."""
        y = F.conv_transpose2d(
            _as_image(x),
            self.weight[:, :, None],
            self.bias,
            stride=(1, *self.stride),
            padding=(0, *map(int, self.padding)),
        )
        return _as_rows(y)


def _as_image(x: Tensor) -> Tensor:
    """[B, T, D] -> [B, D, 1, T], the same memory."""
    return x.transpose(1, 2).unsqueeze(2)


def _as_rows(x: Tensor) -> Tensor:
    """[B, D, 1, T] -> [B, T, D], the same memory."""
    return x.squeeze(2).transpose(1, 2)


class Norm(nn.Module):
    """Layer norm with Piper's names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return F.layer_norm(x, self.gamma.shape, self.gamma, self.beta)


class Attention(nn.Module):
    """Multi-head self-attention that knows distances up to `reach`."""

    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__()
        self.heads = heads
        near = (1, 2 * reach + 1, width // heads)
        self.emb_rel_k, self.emb_rel_v = (nn.Parameter(torch.zeros(near)) for _ in range(2))
        self.conv_q, self.conv_k, self.conv_v, self.conv_o = (Conv(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = (self._split(conv(x)) for conv in (self.conv_q, self.conv_k, self.conv_v))
        y = attend_near(q, k, v, (self.emb_rel_k, self.emb_rel_v), mask[..., 0].bool())
        out: Tensor = self.conv_o(y.transpose(1, 2).reshape(x.shape))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, D / H]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Two convolutions over the text."""

    def __init__(self, width: int, hidden: int, kernel: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = Conv(width, hidden, kernel), Conv(hidden, width, kernel)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y: Tensor = self.conv_2(self.conv_1(x * mask).relu() * mask)
        return y * mask


class TextLayers(nn.Module):
    """The transformer of the text encoder; norms follow the sums."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        layers = range(c.layers)
        self.attn_layers = nn.ModuleList(Attention(c.width, c.heads, c.reach) for _ in layers)
        self.norm_layers_1 = nn.ModuleList(Norm(c.width) for _ in layers)
        self.ffn_layers = nn.ModuleList(FeedForward(c.width, c.filter, c.kernel) for _ in layers)
        self.norm_layers_2 = nn.ModuleList(Norm(c.width) for _ in layers)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        parts = (self.attn_layers, self.norm_layers_1, self.ffn_layers, self.norm_layers_2)
        x = x * mask
        for attend, norm_1, feed, norm_2 in zip(*parts, strict=True):
            x = norm_1(x + attend(x, mask))
            x = norm_2(x + feed(x, mask))
        return x * mask


class TextEncoder(nn.Module):
    """Phoneme ids to hidden states and to the prior of their latents."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.emb = nn.Embedding(c.symbols, c.width)
        self.encoder = TextLayers(c)
        self.proj = Conv(c.width, 2 * c.latent)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T] int64 -> hidden [B, T, D], means and log spreads [B, T, C]."""
        hidden = self.encoder(self.emb(ids) * math.sqrt(self.emb.embedding_dim), mask)
        means, log_spreads = (self.proj(hidden) * mask).chunk(2, dim=-1)
        return hidden, means, log_spreads


class DilatedStack(nn.Module):
    """Depthwise convolutions whose reach grows by the kernel's size from layer to layer."""

    def __init__(self, width: int, kernel: int, layers: int) -> None:
        super().__init__()
        self.convs_sep = nn.ModuleList(
            Conv(width, width, kernel, kernel**i, groups=width) for i in range(layers)
        )
        self.convs_1x1 = nn.ModuleList(Conv(width, width) for _ in range(layers))
        self.norms_1 = nn.ModuleList(Norm(width) for _ in range(layers))
        self.norms_2 = nn.ModuleList(Norm(width) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        parts = (self.convs_sep, self.norms_1, self.convs_1x1, self.norms_2)
        for spread, norm_1, mix, norm_2 in zip(*parts, strict=True):
            y = F.gelu(norm_1(spread(x * mask)))
            x = x + F.gelu(norm_2(mix(y)))
        return x * mask


class SplineFlow(nn.Module):
    """A step of the duration flow: the text and one channel choose a spline for the other."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(c.duration_width)
        self.pre = Conv(1, c.duration_width)
        self.convs = DilatedStack(c.duration_width, c.duration_kernel, c.duration_layers)
        self.proj = Conv(c.duration_width, 3 * SPLINE_BINS - 1)

    def forward(self, z: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """z [B, T, 2], text [B, T, D] -> [B, T, 2]."""
        fixed, moved = z.chunk(2, dim=-1)
        h = self.proj(self.convs(self.pre(fixed) + text, mask)) * mask
        widths, heights, slopes = h.split([SPLINE_BINS, SPLINE_BINS, SPLINE_BINS - 1], dim=-1)
        moved = invert_spline(
            moved[..., 0], widths * self.scale, heights * self.scale, slopes, SPLINE_BOUND
        )
        return torch.cat([fixed, moved[..., None]], dim=-1) * mask


class Affine(nn.Module):
    """The duration flow's first step: a shift and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.logs = nn.Parameter(torch.zeros(2, 1)), nn.Parameter(torch.zeros(2, 1))

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """[B, T, 2] -> [B, T, 2]."""
        return (z - self.m[:, 0]) * torch.exp(-self.logs[:, 0]) * mask


class Durations(nn.Module):
    """How long each phoneme lasts, drawn from a flow that knows the text."""

    STEPS = ("7", "5", "3")  # Piper's order backwards; step 1 has no effect and is left out

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.pre = Conv(c.width, c.duration_width)
        self.convs = DilatedStack(c.duration_width, c.duration_kernel, c.duration_layers)
        self.proj = Conv(c.duration_width, c.duration_width)
        self.flows = nn.ModuleDict({"0": Affine()} | {i: SplineFlow(c) for i in self.STEPS})
        self.cond = Conv(c.speaker_width, c.duration_width) if c.speakers else None

    def forward(
        self, hidden: Tensor, mask: Tensor, noise: Tensor, speaker: Tensor | None
    ) -> Tensor:
        """hidden [B, T, D], noise [B, T, 2], speaker [B, 1, G] -> log frames [B, T]."""
        x = self.pre(hidden)
        if self.cond is not None:
            x = x + self.cond(speaker)
        text = self.proj(self.convs(x, mask)) * mask
        z = noise * mask
        for name in self.STEPS:
            z = self.flows[name](z.flip(-1), text, mask)
        out: Tensor = self.flows["0"](z.flip(-1), mask)[..., 0]
        return out


class GatedStack(nn.Module):
    """WaveNet's gated convolutions, undilated; of several speakers they know which."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        width, layers = c.coupling_width, c.coupling_layers
        self.in_layers = nn.ModuleList(
            Conv(width, 2 * width, c.coupling_kernel) for _ in range(layers)
        )
        self.res_skip_layers = nn.ModuleList(
            Conv(width, width if i == layers - 1 else 2 * width) for i in range(layers)
        )
        self.cond_layer = Conv(c.speaker_width, 2 * width * layers) if c.speakers else None

    def forward(self, x: Tensor, mask: Tensor, speaker: Tensor | None) -> Tensor:
        """x [B, T, D], speaker [B, 1, G] -> [B, T, D]."""
        width, last = x.shape[-1], len(self.in_layers) - 1
        shifts: Sequence[Tensor] = ()
        if self.cond_layer is not None:
            shifts = self.cond_layer(speaker).chunk(last + 1, dim=-1)
        total = torch.zeros_like(x)
        for i, (look, mix) in enumerate(zip(self.in_layers, self.res_skip_layers, strict=True)):
            value, gate = (look(x) + shifts[i] if shifts else look(x)).chunk(2, dim=-1)
            y = mix(value.tanh() * gate.sigmoid())
            if i < last:
                x = (x + y[..., :width]) * mask
            total = total + y[..., -width:]
        return total * mask


class CouplingStep(nn.Module):
    """One half of the channels shifted by what the other half says."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.pre = Conv(c.latent // 2, c.coupling_width)
        self.enc = GatedStack(c)
        self.post = Conv(c.coupling_width, c.latent // 2)

    def forward(self, z: Tensor, mask: Tensor, speaker: Tensor | None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        fixed, moved = z.chunk(2, dim=-1)
        shift = self.post(self.enc(self.pre(fixed) * mask, mask, speaker))
        return torch.cat([fixed, (moved - shift) * mask], dim=-1)


class Coupling(nn.Module):
    """Frames of the prior to latents."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        # Piper counts the flips between the steps: 0, 2, 4, …
        self.flows = nn.ModuleDict({str(2 * i): CouplingStep(c) for i in range(c.couplings)})

    def forward(self, z: Tensor, mask: Tensor, speaker: Tensor | None) -> Tensor:
        """z [B, T, C], speaker [B, 1, G] -> latents [B, T, C]."""
        for step in reversed(list(self.flows.children())):
            z = step(z.flip(-1), mask, speaker)
        return z


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch [begin, end) of a window that lies on its row; the rest is zero padding."""

    window: int
    begin: int
    end: int

    def after(self, stride: int, crop: int) -> "Span":
        """The same stretch after upsampling and cropping both sides."""
        return Span(self.window, self.begin * stride - crop, self.end * stride - crop)


class Block1(nn.Module):
    """Residual block of the large vocoders: a dilated and a plain convolution per step."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(Conv(width, width, kernel, d) for d in dilations)
        self.convs2 = nn.ModuleList(Conv(width, width, kernel) for _ in dilations)

    def forward(self, x: Tensor, bent: Tensor, spans: Sequence[Span]) -> Tensor:
        """x [B, T, D], bent = `_bend(x, spans)` -> [B, T, D]."""
        for i, (dilated, plain) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            y = dilated(_bend(x, spans) if i else bent)
            x = plain(_bend(y, spans)).add_(x)
        return x


class Block2(nn.Module):
    """Residual block of the small vocoders: one dilated convolution per step."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Conv(width, width, kernel, d) for d in dilations)

    def forward(self, x: Tensor, bent: Tensor, spans: Sequence[Span]) -> Tensor:
        """x [B, T, D], bent = `_bend(x, spans)` -> [B, T, D]."""
        for i, conv in enumerate(self.convs):
            x = conv(_bend(x, spans) if i else bent).add_(x)
        return x


class Vocoder(nn.Module):
    """Latents to samples, for whole rows or for windows of them.

    A window is a chunk with `context_frames` on both sides: as much as can reach into it. After
    each upsampling only what can still reach into the chunk is kept, so the context costs little
    where the rate is high. Where a window hangs over the end of its row, a `Span` says so, and
    every convolution sees zeros there as it does at the end of a whole row.
    """

    POST_KERNEL = PRE_KERNEL = 7

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.strides = c.strides
        self.conv_pre = Conv(c.latent, c.channels, self.PRE_KERNEL)
        widths = [c.channels >> i for i in range(len(c.strides) + 1)]
        self.ups = nn.ModuleList(
            UpConv(a, b, k, s)
            for a, b, k, s in zip(widths, widths[1:], c.upsample_kernels, c.strides, strict=False)
        )
        block = Block1 if c.block_type == 1 else Block2
        self.resblocks = nn.ModuleList(
            block(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(c.block_kernels, c.dilations, strict=True)
        )
        self.conv_post = Conv(widths[-1], 1, self.POST_KERNEL, bias=False)
        self.cond = Conv(c.speaker_width, c.channels) if c.speakers else None
        self.context_frames, self.margins = _margins(c)

    def forward(
        self,
        latents: Tensor,
        speaker: Tensor | None = None,
        context_frames: int = 0,
        spans: Sequence[Span] = (),
    ) -> Tensor:
        """latents [B, T, C], speaker [B, 1, G] -> samples [B, (T - 2 * context) * hop] float32."""
        x = self.conv_pre(latents)
        if self.cond is not None:
            x = x + self.cond(speaker)
        context = context_frames
        for i, stride in enumerate(self.strides):
            x = self.ups[i](_bend(x, spans))
            context, crop = _kept(context * stride, self.margins[i])
            x = x[:, crop : x.shape[1] - crop]
            spans = [s.after(stride, crop) for s in spans]
            x = self._blocks(i, x, spans)
        y: Tensor = self.conv_post(_bend(x, spans, slope=0.01))[..., 0]
        return y[:, context : y.shape[1] - context].float().tanh()

    def _blocks(self, stage: int, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """The mean of the residual blocks after an upsampling: [B, T, D] -> [B, T, D]."""
        each = len(self.resblocks) // len(self.ups)
        bent = _bend(x, spans)
        first, *others = list(self.resblocks.children())[stage * each : (stage + 1) * each]
        total: Tensor = first(x, bent, spans)
        for block in others:
            total += block(x, bent, spans)
        total /= each
        return total


def _kept(context: int, margin: int) -> tuple[int, int]:
    """Samples of context to keep, and to crop on either side."""
    return min(context, margin), max(context - margin, 0)


def _bend(x: Tensor, spans: Sequence[Span], slope: float = SLOPE) -> Tensor:
    """Leaky ReLU [B, T, D], and zeros where a window is outside its row."""
    y = F.leaky_relu(x, slope)
    for span in spans:
        y[span.window, : max(0, span.begin)] = 0
        y[span.window, max(0, span.end) :] = 0
    return y


def _margins(c: VitsConfig) -> tuple[int, tuple[int, ...]]:
    """Frames of context that a window needs, and samples of it to keep after each upsampling."""
    reach_of_blocks = max(
        _reach(kernel, dilations, c.block_type)
        for kernel, dilations in zip(c.block_kernels, c.dilations, strict=True)
    )
    need = Vocoder.POST_KERNEL // 2
    margins = []
    for stride, kernel in reversed(list(zip(c.strides, c.upsample_kernels, strict=True))):
        need += reach_of_blocks
        margins.append(need)
        # Sample o reads the inputs i with 0 <= o + padding - i * stride < kernel.
        padding = (kernel - stride) // 2
        need = max((need + kernel - 1 - padding) // stride, (need + padding - 1) // stride + 1)
    return need + Vocoder.PRE_KERNEL // 2, tuple(reversed(margins))


def _reach(kernel: int, dilations: Sequence[int], block_type: int) -> int:
    plain = len(dilations) if block_type == 1 else 0
    return (kernel - 1) // 2 * (sum(dilations) + plain)


class Talker(nn.Module):
    """Phoneme ids to latents: all of a voice but its vocoder."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.enc_p, self.dp, self.flow = TextEncoder(c), Durations(c), Coupling(c)
        self.emb_g = nn.Embedding(c.speakers, c.speaker_width) if c.speakers else None


class Voice(nn.Module):
    """The vocoder of a voice, and its speakers."""

    def __init__(self, c: VitsConfig) -> None:
        super().__init__()
        self.dec = Vocoder(c)
        self.emb_g = nn.Embedding(c.speakers, c.speaker_width) if c.speakers else None


def speaker_rows(table: nn.Embedding | None, speakers: Sequence[int]) -> Tensor | None:
    """The embeddings [B, 1, G] of a batch's speakers; None for a voice that has but one."""
    if table is None:
        return None
    return table.weight[torch.tensor(speakers, device=table.weight.device)][:, None]


_TALK = ("enc_p.*", "dp.*", "flow.*")
_SOUND = ("dec.*",)
_TRAINING = ("enc_q.*", "dp.post_*", "dp.flows.1.*")


def load_talker(folder: Path, c: VitsConfig, device: torch.device | str) -> Talker:
    """In float32: in bfloat16 the phase of the sound drifts (25 dB against float32)."""
    with hollow():
        net = Talker(c)
    load_into(net, folder, dtype=torch.float32, device=device, ignore=(*_SOUND, *_TRAINING))
    return net


def load_voice(
    folder: Path, c: VitsConfig, dtype: torch.dtype, device: torch.device | str
) -> Voice:
    """The vocoder, in a format of choice."""
    with hollow():
        net = Voice(c)
    load_into(net, folder, dtype=dtype, device=device, ignore=(*_TALK, *_TRAINING))
    return net
