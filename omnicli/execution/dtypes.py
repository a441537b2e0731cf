"""Which device and number format to compute in."""

from collections.abc import Mapping
from typing import Any

import torch

from omnicli.errors import UserError

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(choice: str) -> str:
    """A torch device: "auto" takes a GPU if there is one; an explicit one must be there."""
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cpu":
        return choice
    kind, _, index = choice.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UserError(f"no device named {choice!r}", hint="auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UserError(f"{choice} was asked for, but torch sees no GPU", hint="--device cpu")
    if int(index or "0") >= torch.cuda.device_count():
        raise UserError(f"{choice}: torch sees {torch.cuda.device_count()} GPUs, counted from 0")
    return choice


def dtype_of(choice: str, device: str) -> torch.dtype:
    """A number format: "auto" is bfloat16 where the device computes with it, else float32."""
    if choice != "auto":
        return NAMES[choice]
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; emulated, it is slower than float32."""
    told = getattr(torch.cpu, "get_capabilities", dict)  # older versions of torch do not tell
    flags: Mapping[str, Any] = told()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("arm_bf16"))
