"""`say`: a line in a language that the voice does not speak is not read out in another one."""

import pytest
import torch

from omnicli import models
from omnicli.config import ModelFolder, Task
from omnicli.data import Inputs, Request
from omnicli.execution.families import cascade
from omnicli.execution.stage import Settings


@pytest.fixture(scope="module")
def stages(model_cache):
    found = models.find("voice", None, model_cache)
    settings = Settings(
        task=Task(command="say"),
        folders={"voice": ModelFolder(name=found.name, folder=found.folder, digest=found.digest)},
        device="cpu",
        dtype=torch.float32,
        decode=None,
        claimed_s=None,
    )
    return {spec.name: spec for spec in cascade.load(settings).stages}


@pytest.mark.parametrize(
    ("language", "spoken", "warnings"),
    [
        (None, True, ()),
        ("en", True, ()),
        ("en_GB", True, ()),
        ("EN-us", True, ()),
        ("es", False, ("voice_cannot_speak: es",)),
        ("de-AT", False, ("voice_cannot_speak: de",)),
    ],
)
def test_only_the_voices_language_is_spoken(stages, language, spoken, warnings):
    request = Request(request_id="a", speech_text="Hola, buenos días.", language=language)
    inputs = Inputs()
    answer = stages["answer"].join(request, inputs, ())
    assert (answer.speak, answer.warnings) == (spoken, warnings)
    inputs.put("answer", (answer,))
    assert bool(stages["talk"].split(request, inputs)) is spoken
