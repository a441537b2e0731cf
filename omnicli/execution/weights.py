"""Checkpoint to module, strictly: every tensor has an owner and every parameter a value.

Modules are built hollow (no memory, no random numbers) and take the mapped tensors as their own, so
loading costs what the conversion to the wanted dtype costs, and nothing if the file holds that
dtype already:

    with hollow():
        net = Network(config)
    load_into(net, folder, dtype=torch.float32, device="cpu")

Names are the module's own, once each: a tied weight is tied by use (`F.linear(x, embed.weight)`),
not by a second name. Buffers that are not in the file must be non-persistent and made afterwards.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omnicli.errors import UserError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 4  # names in an error message


class _NoInit(TorchFunctionMode):
    """`torch.nn.init` does nothing: on `meta` its first call alone imports for over a second."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextmanager
def hollow() -> Iterator[None]:
    """Modules made inside have shapes but neither memory nor values."""
    with torch.device("meta"), _NoInit():
        yield


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules made inside have memory but no values, except for buffers that they compute."""
    with _NoInit():
        yield


def load_into(  # noqa: PLR0913 - each is a fact about a file
    module: nn.Module,
    source: Path | Sequence[Path],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> None:
    """Give the module its tensors from a folder or from safetensors files; it needs no gradients.

    `dtype` None keeps what the file holds; integers keep theirs in any case. Only names that begin
    with `prefix` count, and lose it. `ignore` are patterns (`dec.*`) over names that this module
    has no use for; `rename` turns what is left into the module's names.
    """
    wanted = module.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    for name, tensor in _tensors(source, prefix, ignore):
        ours = rename(name) if rename else name
        # Converted only if wanted: a stranger's tensor must not cost memory before it is refused.
        known = ours in wanted
        found[ours] = _placed(tensor, dtype, device) if known else tensor
    _check(wanted, found, f"{_where(source)} ({prefix}*)" if prefix else _where(source))
    module.load_state_dict(found, strict=True, assign=True)
    module.requires_grad_(False).eval()
    unmade = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not unmade, f"buffers without values: {unmade}"


def read_shapes(source: Path | Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name; reads the headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(source):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def tensor_files(source: Path | Sequence[Path]) -> tuple[Path, ...]:
    """The safetensors files of a folder: one, or the shards that its index names."""
    if not isinstance(source, Path):
        return tuple(source)
    if (source / _SINGLE).is_file():
        return (source / _SINGLE,)
    if not (source / _INDEX).is_file():
        raise UserError(f"no {_SINGLE} in {source}", hint="omni models pull")
    return tuple(source / name for name in sorted(set(_shards(source / _INDEX).values())))


def _shards(index: Path) -> Mapping[str, str]:
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is not an index of safetensors files") from error
    if not isinstance(shards, dict):
        raise UserError(f"{index} is not an index of safetensors files")
    return shards


def _tensors(
    source: Path | Sequence[Path], prefix: str, ignore: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    for path in tensor_files(source):
        with _opened(path) as file:
            for whole in file.keys():  # noqa: SIM118 - not a mapping
                name = whole.removeprefix(prefix)
                skipped = not whole.startswith(prefix) or any(fnmatchcase(name, p) for p in ignore)
                if not skipped:
                    yield name, file.get_tensor(whole)


def read_rows(source: Path, name: str, rows: Sequence[int]) -> Tensor:
    """A few rows of a large table -> [len(rows), D], as the file has them; the rest is not read."""
    for path in tensor_files(source):
        with _opened(path) as file:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                table = file.get_slice(name)
                return torch.stack([table[row] for row in rows])
    raise UserError(f"{source} lacks {name}", hint="is this the model that its config says?")


def weight_bytes(source: Path, prefix: str, dtype: torch.dtype) -> int:
    """What the tensors whose names begin with `prefix` take in that format; reads headers only."""
    shapes = read_shapes(source)
    return sum(
        math.prod(shape) * dtype.itemsize
        for name, shape in shapes.items()
        if name.startswith(prefix)
    )


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}") from error
    except SafetensorError as error:
        hint = "remove the model's folder from the cache and pull it again"
        raise UserError(f"{path} is damaged: {error}", hint=hint) from error


def _placed(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _check(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    problems = (
        ("lacks", wanted.keys() - found.keys()),
        ("has unexpected", found.keys() - wanted.keys()),
        (
            "has other shapes for",
            {n for n in wanted.keys() & found.keys() if wanted[n].shape != found[n].shape},
        ),
    )
    told = [f"{what} {_some(names)}" for what, names in problems if names]
    if told:
        hint = "is this the kind of model that its config says?"
        raise UserError(f"{where} {'; '.join(told)}", hint=hint)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _where(source: Path | Sequence[Path]) -> str:
    return str(source) if isinstance(source, Path) else ", ".join(str(p) for p in source)
