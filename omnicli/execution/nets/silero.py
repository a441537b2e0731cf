"""Silero's voice activity detector at 16 kHz, batched: is there speech, every 32 ms of a track.

The network and its weights are those of https://github.com/snakers4/silero-vad (MIT): a
short-time Fourier transform written as a convolution, four convolutions over its four frames, an
LSTM that walks from window to window, and a sigmoid. The package takes one window after another.
Here everything that knows nothing of time runs over many windows at once, and the LSTM walks over
all tracks side by side. Its state reaches back for half a minute and more, so tracks are not cut
into pieces that start anew: they pass in blocks of some seconds and the state goes with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from omnicli.execution.heap import forget_pages
from omnicli.execution.weights import hollow, load_into
from omnicli.operators.speech_regions import WINDOW_SAMPLES

CONTEXT_SAMPLES = 64  # of the window before, heard again
FFT_SAMPLES = 256
HOP_SAMPLES = FFT_SAMPLES // 2
BINS = FFT_SAMPLES // 2 + 1
WIDTH = 128

BLOCK_WINDOWS = 512  # 16 s: what a track gives at a time
STRETCH_SAMPLES = 2048 * WINDOW_SAMPLES  # about a minute
ROWS = 4  # fewer rows take other kernels, whose last bits differ

LOUD = 0.5  # quieter tracks are raised to this peak before they are heard
MAX_GAIN = 100.0  # 40 dB
CLICK_WINDOWS = 4  # what is loud in fewer windows is a click

State = tuple[Tensor, Tensor]  # the LSTM's, each [1, B, D]


class SileroVad(nn.Module):
    """The detector; keeps no state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * BINS, FFT_SAMPLES, stride=HOP_SAMPLES, bias=False)
        self.conv1 = nn.Conv1d(BINS, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, WIDTH, 3, padding=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.final_conv = nn.Conv1d(WIDTH, 1, 1)

    def encode(self, samples: Tensor) -> Tensor:
        """Context and T windows, [64 + 512 T] -> what each window sounds like, [T, D]."""
        windows = samples.unfold(0, CONTEXT_SAMPLES + WINDOW_SAMPLES, WINDOW_SAMPLES)
        x = F.pad(windows, (0, 0, 0, -len(windows) % ROWS)).unsqueeze(1)
        x = self.stft_conv(F.pad(x, (0, CONTEXT_SAMPLES), "reflect"))
        x = (x[:, :BINS].square() + x[:, BINS:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        return x[: len(windows), :, 0]

    def forward(self, encoded: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
        """Rows of encoded windows, each [T_i, D], and B states -> probabilities [T_i], and states.

        There may be fewer rows than states: the other states are fillers. Padding lies behind a
        row's end, so it reaches only a state that nobody reads again.
        """
        fillers = [encoded[0].new_zeros(1, WIDTH)] * (state[0].shape[1] - len(encoded))
        hidden, state = self.lstm(pad_sequence([*encoded, *fillers]), state)
        logits = F.linear(F.relu(hidden), self.final_conv.weight[..., 0], self.final_conv.bias)
        rows = zip(logits[..., 0].T, encoded, strict=False)
        # Row by row: the last few elements of a tensor pass another sigmoid than the rest, whose
        # last bits differ, so a row must not lie in one tensor with its company.
        return [row[: len(e)].contiguous().sigmoid() for row, e in rows], state


def load_vad(folder: Path, *, device: torch.device | str = "cpu") -> SileroVad:
    """The detector from a folder with `model.safetensors`."""
    with hollow():
        net = SileroVad()
    load_into(net, folder, dtype=torch.float32, device=device, rename=our_name)
    net.lstm.flatten_parameters()  # cuDNN wants them in one piece
    return net


def our_name(name: str) -> str:
    """The checkpoint has an LSTM cell, we have an LSTM of one layer."""
    module, _, weight = name.partition(".")
    return f"lstm.{weight}_l0" if module == "lstm_cell" else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What is done to a track before the detector hears it, and to no one else's copy."""

    offset: float = 0.0  # taken away
    gain: float = 1.0

    @classmethod
    def of(cls, samples: Tensor) -> "Level":
        """For a track [T]: no offset, and loud enough if it was quiet.

        The detector is deaf below -40 dB and slow to wake up below -20 dB, but does not mind
        amplified noise. A click, being short, does not count as loud.
        """
        offset = _mean(samples)
        peaks = window_peaks(samples, offset).topk(min(CLICK_WINDOWS, window_count(samples))).values
        peak = float(peaks[-1]) if len(peaks) else 0.0
        return cls(offset=offset, gain=min(MAX_GAIN, max(1.0, LOUD / peak)) if peak else 1.0)


def window_count(samples: Tensor) -> int:
    """Windows of a track [T]; the last one may be filled up."""
    return -(-len(samples) // WINDOW_SAMPLES)


def window_peaks(samples: Tensor, offset: float) -> Tensor:
    """The loudest sample of every window: [T] -> [ceil(T / 512)]. No copy of the track is made."""
    peaks = [samples.new_zeros(0)]
    for stretch in _stretches(samples):
        whole = len(stretch) // WINDOW_SAMPLES * WINDOW_SAMPLES
        parts = [stretch[:whole].unfold(0, WINDOW_SAMPLES, WINDOW_SAMPLES)] if whole else []
        parts += [stretch[None, whole:]] if len(stretch) > whole else []
        peaks += [torch.maximum(p.amax(1) - offset, offset - p.amin(1)) for p in parts]
    return torch.cat(peaks)


def _mean(samples: Tensor) -> float:
    """The mean of a track [T], 0 of an empty one."""
    total = sum(float(s.sum(dtype=torch.float64)) for s in _stretches(samples))
    return total / len(samples) if len(samples) else 0.0


def _stretches(samples: Tensor) -> Iterator[Tensor]:
    """A track, minute by minute; what was read of a mapped one is let go."""
    for stretch in torch.split(samples, STRETCH_SAMPLES):
        yield stretch
        forget_pages(stretch)


def speech_probabilities(
    net: SileroVad, tracks: Sequence[Tensor], levels: Sequence[Level]
) -> list[Tensor]:
    """Tracks at 16 kHz, each [T], heard at their levels -> probabilities, each [ceil(T / 512)]."""
    counts = [window_count(track) for track in tracks]
    # The longest first: rows that end leave from behind.
    rows = sorted(range(len(tracks)), key=lambda i: -counts[i])
    zeros = net.final_conv.weight.new_zeros(1, _filled(len(tracks)), WIDTH)
    state = (zeros, zeros)
    found: list[list[Tensor]] = [[torch.zeros(0)] for _ in tracks]
    for first in range(0, max(counts, default=0), BLOCK_WINDOWS):
        rows = [i for i in rows if counts[i] > first]
        encoded = [net.encode(_block(net, tracks[i], levels[i], first)) for i in rows]
        h, c = state
        probabilities, state = net(encoded, (_kept(h, len(rows)), _kept(c, len(rows))))
        for i, row in zip(rows, probabilities, strict=True):
            found[i].append(row.cpu())
    return [torch.cat(row) for row in found]


def _filled(rows: int) -> int:
    return rows + -rows % ROWS


def _kept(state: Tensor, rows: int) -> Tensor:
    return state[:, : _filled(rows)].contiguous()


def _block(net: SileroVad, track: Tensor, level: Level, first: int) -> Tensor:
    """Windows `first` and following of a track, with the context before them: [64 + 512 T]."""
    start = first * WINDOW_SAMPLES - CONTEXT_SAMPLES
    end = min(len(track), (first + BLOCK_WINDOWS) * WINDOW_SAMPLES)
    mapped = track[max(0, start) : end]
    samples = (mapped.to(net.final_conv.weight.device) - level.offset) * level.gain
    forget_pages(mapped)
    return F.pad(samples, (max(0, -start), -end % WINDOW_SAMPLES))
