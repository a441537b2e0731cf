"""BigVGAN (Lee et al. 2023) as Qwen2.5-Omni has it: a mel spectrogram to sound.

HiFi-GAN's upsampling and residual blocks, but with periodic activations (SnakeBeta) that are
computed at twice the rate, between two low-pass filters, so that they do not alias. Parameters keep
the names of the checkpoint below `token2wav.code2wav_bigvgan_model.`.

Signals are [B, T, D], which a CPU filters and convolves fastest, and no padded copy is ever made:
the filters see zeros past both ends of a row, and what its repeated end samples would have
contributed instead, a handful of products, is added afterwards (Karras et al. 2021 for the filters;
the repetition is BigVGAN's). Past a row's end everything is kept zero, so rows of different lengths
can share a batch, and each sounds as it does alone. A vocoder that was not told the lengths would
get the last `reach_frames(config)` frames of the shorter rows wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.errors import UserError
from omnicli.execution.nets.vits import Conv, UpConv

# The low-pass filter of both ways: a sinc that cuts at a quarter of the doubled rate, in a Kaiser
# window whose shape follows from the transition's width (Kaiser 1974; here over 50 dB).
TAPS = 12
CUTOFF = 0.25
TRANSITION = 4 * 0.3
ATTENUATION_DB = 2.285 * (TAPS // 2 - 1) * math.pi * TRANSITION + 7.95
KAISER_BETA = 0.1102 * (ATTENUATION_DB - 8.7)
SIDE = TAPS // 2 - 1  # taps before the middle
ACTIVATION_REACH = SIDE  # samples on either side that an activation depends on

LEAST_DB = -115.0  # is -1 for the network, 0 dB is 1
REFERENCE_DB = 20.0
DB_PER_NEPER = 20 / math.log(10)
NO_ZERO = 1e-9
END_KERNEL = 7  # of the first and the last convolution

# Rows of a batch, and how many frames they have.
Ends = Sequence[tuple[slice, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BigVGANConfig:
    """Sizes of the network, by the names of config.json; defaults are those of transformers."""

    mel_dim: int = 80
    upsample_initial_channel: int = 1536
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    upsample_rates: tuple[int, ...] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (11, 7, 4, 4, 4, 4)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "BigVGANConfig":
        """The config that `token2wav_config.bigvgan_config` of config.json describes."""
        config = cls(**{f.name: _frozen(raw[f.name]) for f in fields(cls) if f.name in raw})
        ups = zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True)
        if any((kernel - rate) % 2 for kernel, rate in ups):
            raise UserError("a vocoder whose frames are no whole number of samples each")
        return config

    @property
    def hop_samples(self) -> int:
        """Samples per frame of the spectrogram."""
        return math.prod(self.upsample_rates)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def reach_frames(c: BigVGANConfig) -> int:
    """Frames on either side that a sample depends on; 34 of the published vocoder."""
    stages = zip(c.upsample_rates, c.upsample_kernel_sizes, strict=True)
    blocks = zip(c.resblock_kernel_sizes, c.resblock_dilation_sizes, strict=True)
    of_blocks = max(
        sum(2 * ACTIVATION_REACH + (kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in blocks
    )
    reach = END_KERNEL // 2 + ACTIVATION_REACH
    for rate, kernel in reversed(list(stages)):
        reach = -(-(reach + of_blocks + (kernel - rate) // 2) // rate)
    return reach + END_KERNEL // 2


@dataclass(frozen=True, slots=True)
class LowPass:
    """The filter, and what the repeated end samples contribute to the samples next to them."""

    taps: Tensor  # [12], sum 1
    up: Tensor  # [5, 1]: outermost sample first
    down: Tensor  # [3, 1]


@lru_cache
def low_pass(device: torch.device) -> LowPass:
    """The filter of all activations."""
    window = torch.kaiser_window(TAPS, periodic=False, beta=KAISER_BETA, device="cpu")
    times = torch.arange(TAPS, device="cpu") - (TAPS - 1) / 2
    taps = torch.sinc(2 * CUTOFF * times) * window
    taps /= taps.sum()
    up = torch.stack([2 * taps[n + SIDE + 2 :: 2].sum() for n in range(SIDE)])
    down = torch.stack([taps[: SIDE - 2 * n].sum() for n in range(SIDE // 2 + 1)])
    return LowPass(taps.to(device), up[:, None].to(device), down[:, None].to(device))


def cut(x: Tensor, ends: Ends, scale: int) -> Tensor:
    """Zeros past the ends of the rows, in place: x [B, F * scale, D]."""
    for rows, end in ends:
        if end * scale < x.shape[1]:
            x[rows, end * scale :] = 0
    return x


def _repeat_ends(y: Tensor, x: Tensor, shares: Tensor, ends: Ends, scales: tuple[int, int]) -> None:
    """Add to filtered y what is due to the repeated first and last samples of x."""
    from_scale, to_scale = scales
    near = shares[: y.shape[1]]
    y[:, : len(near)].addcmul_(x[:, :1], near)
    for rows, end in ends:
        stop, last = end * to_scale, end * from_scale - 1
        near = shares[:stop].flip(0)
        y[rows, stop - len(near) : stop].addcmul_(x[rows, last : last + 1], near)


def as_image(x: Tensor) -> Tensor:
    """[B, T, D] -> [B, D, 1, T], the same memory."""
    return x.transpose(1, 2).unsqueeze(2)


def as_rows(x: Tensor) -> Tensor:
    """[B, D, 1, T] -> [B, T, D], the same memory."""
    return x.squeeze(2).transpose(1, 2)


class Snake(nn.Module):
    """x + sin(a x)^2 / b, with logarithms of a and b per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, scale: int) -> Tensor:
        """[B, F * scale, D] -> [B, F * scale, D].

        Computed frame by frame: a row of D numbers is too short for the loops of a CPU.
        """
        frequency, weight = self.alpha.exp(), 1 / (self.beta.exp() + NO_ZERO)
        flat = x.reshape(-1, scale * x.shape[2])
        y = (flat * frequency.repeat(scale)).sin_()
        y.mul_(y)
        return torch.addcmul(flat, y, weight.repeat(scale), out=y).view(x.shape)


class SmoothSnake(nn.Module):
    """The activation at twice the rate, between two low-pass filters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = Snake(width)

    def forward(self, x: Tensor, ends: Ends, scale: int) -> Tensor:
        """[B, F * scale, D] -> [B, F * scale, D], zero past the ends; so has x to be."""
        filter, width = low_pass(x.device), x.shape[2]
        taps = filter.taps.repeat(width, 1, 1, 1)
        stride, padding = (1, 2), (0, SIDE)
        y = as_rows(F.conv_transpose2d(as_image(x), 2 * taps, None, stride, padding, groups=width))
        _repeat_ends(y, x, filter.up, ends, (scale, 2 * scale))
        y = cut(self.act(y, 2 * scale), ends, 2 * scale)
        z = as_rows(F.conv2d(as_image(y), taps, None, stride, padding, groups=width))
        _repeat_ends(z, y, filter.down, ends, (2 * scale, scale))
        return cut(z, ends, scale)


class Block(nn.Module):
    """Residual block: a dilated and a plain convolution per step."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(Conv(width, width, kernel, d) for d in dilations)
        self.convs2 = nn.ModuleList(Conv(width, width, kernel) for _ in dilations)
        self.activations = nn.ModuleList(SmoothSnake(width) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor, ends: Ends, scale: int) -> Tensor:
        """[B, F * scale, D] -> [B, F * scale, D]."""
        acts = iter(self.activations)
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            y = cut(dilated(next(acts)(x, ends, scale)), ends, scale)
            x = cut(plain(next(acts)(y, ends, scale)).add_(x), ends, scale)
        return x


class BigVGAN(nn.Module):
    """Mel spectrograms to samples."""

    def __init__(self, config: BigVGANConfig) -> None:
        super().__init__()
        c = self.config = config
        stages = list(zip(c.upsample_kernel_sizes, c.upsample_rates, strict=True))
        widths = [c.upsample_initial_channel >> i for i in range(len(stages) + 1)]
        self.conv_pre = Conv(c.mel_dim, widths[0], END_KERNEL)
        self.ups = nn.ModuleList(
            nn.ModuleList([UpConv(*sizes, *stage)])
            for sizes, stage in zip(pairwise(widths), stages, strict=True)
        )
        blocks = list(zip(c.resblock_kernel_sizes, c.resblock_dilation_sizes, strict=True))
        self.resblocks = nn.ModuleList(
            Block(width, *block) for width in widths[1:] for block in blocks
        )
        self.activation_post = SmoothSnake(widths[-1])
        self.conv_post = Conv(widths[-1], 1, END_KERNEL, bias=False)

    def ready(self) -> None:
        """To be called once weights are there: keeps them in the order that `Conv` computes in.

        The results are the same without, but every call would reorder all of them.
        """
        for module in self.modules():
            if isinstance(module, Conv | UpConv):
                image = module.weight[:, :, None].contiguous(memory_format=torch.channels_last)
                module.weight = nn.Parameter(image[:, :, 0], requires_grad=False)

    @torch.no_grad()
    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Natural logarithms of amplitudes [B, M, F], frames per row [B] int64 -> [B, samples].

        Without lengths all rows have F frames. Samples past a row's end are 0.
        """
        ends: Ends = [(slice(None), mel.shape[2])]
        if lengths is not None:
            ends = [(slice(i, i + 1), end) for i, end in enumerate(lengths.tolist())]
        scale, blocks = 1, len(self.config.resblock_kernel_sizes)
        x = cut(self.conv_pre(cut(as_decibels(mel.transpose(1, 2)), ends, scale)), ends, scale)
        for i, rate in enumerate(self.config.upsample_rates):
            scale *= rate
            x = cut(self.ups.get_submodule(f"{i}.0")(x), ends, scale)
            parts = self.resblocks[i * blocks : (i + 1) * blocks]
            x = sum(block(x, ends, scale) for block in parts) / blocks
        y = self.conv_post(self.activation_post(x, ends, scale))
        return cut(y.clamp_(-1, 1), ends, scale)[..., 0]


def as_decibels(mel: Tensor) -> Tensor:
    """What the network reads: logarithms of amplitudes in [-1, 1], for decibels in [-115, 0]."""
    decibels = mel * DB_PER_NEPER - REFERENCE_DB
    return (2 * (decibels - LEAST_DB) / -LEAST_DB - 1).clamp_(-1, 1)
