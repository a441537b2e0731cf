"""What every converter returns, and how the small JSON files around a model are read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicli.errors import UserError
from omnicli.models.weights import Weight

WEIGHTS = "model.safetensors"
MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use is about 35 MB

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A model in the one form that the networks read: `files` by name, and `model.safetensors`."""

    files: dict[str, Path | Json]  # a path is copied, anything else written as JSON
    weights: Sequence[Weight] = ()


def json_file(path: Path) -> Json:
    """A JSON object from a file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{path} is far too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing", hint="copy the whole model folder") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}", hint="fetch the file again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object", hint="fetch the file again")
    return found
