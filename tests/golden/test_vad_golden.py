"""The speech detector against the silero-vad package, on real speech.

The package's TorchScript model holds newer weights than the safetensors file beside it, which is
the one that is used here. So its code is compared with both sets of weights.
"""

from pathlib import Path

import pytest
import soundfile
import torch
from torchaudio.functional import resample

from omnicli.execution.nets.silero import Level, SileroVad, load_vad, speech_probabilities

AUDIO = Path(__file__).parents[3] / "shared" / "audio"
TOLERANCE = 1e-4
THEIR_NAMES = {
    "stft_conv": "stft.forward_basis_buffer",
    "lstm": "decoder.rnn",
    "final_conv": "decoder.decoder.2",
} | {f"conv{i + 1}": f"encoder.{i}.reparam_conv" for i in range(4)}

pytestmark = [
    pytest.mark.skipif(not AUDIO.is_dir(), reason="no shared recordings"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def their_name(name):
    module, _, weight = name.partition(".")
    theirs = THEIR_NAMES[module]
    return theirs if module == "stft_conv" else f"{theirs}.{weight.removesuffix('_l0')}"


@pytest.fixture(scope="module")
def package():
    """The package's 16 kHz TorchScript model."""
    threads = torch.get_num_threads()
    from silero_vad import load_silero_vad

    torch.set_num_threads(threads)  # the import sets it to one for the whole process
    return load_silero_vad()._model


@pytest.fixture(scope="module")
def recordings():
    found = []
    for path in [*sorted(AUDIO.rglob("*.wav"))[:7], AUDIO / "jfk.flac"]:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
        found.append(resample(torch.from_numpy(samples).mean(1), rate_hz, 16_000))
    return found


def assert_same(net, package, recordings):
    with torch.inference_mode():
        ours = speech_probabilities(net, recordings, [Level()] * len(recordings))
        theirs = [package.audio_forward(samples[None])[0] for samples in recordings]
    assert max(float(row.max()) for row in theirs) > 0.99
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def test_with_the_package_s_weights(package, recordings):
    theirs = package.state_dict()
    net = SileroVad().requires_grad_(False).eval()
    net.load_state_dict({name: theirs[their_name(name)] for name in net.state_dict()})
    assert_same(net, package, recordings)


def test_with_our_weights_in_the_package(model_cache, package, recordings):
    net = load_vad(model_cache / "vad" / "silero-vad")
    before = {name: tensor.clone() for name, tensor in package.state_dict().items()}
    package.load_state_dict({their_name(n): t for n, t in net.state_dict().items()})
    assert_same(net, package, recordings)
    package.load_state_dict(before)
