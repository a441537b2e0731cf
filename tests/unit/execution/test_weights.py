"""Loading is strict, cheap and keeps what the file says."""

import json
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omnicli.errors import UserError
from omnicli.execution.weights import hollow, load_into, read_shapes, tensor_files

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.bias": torch.tensor([1.0, -1.0]),
    "b.weight": torch.arange(8.0).view(4, 2),
    "b.bias": torch.zeros(4),
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 4)


def _meta(make=Two):
    with hollow():
        return make()


def _sharded(folder, tensors):
    names = list(tensors)
    shards = {"x-00001.safetensors": names[:2], "x-00002.safetensors": names[2:]}
    for file, held in shards.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(params=["single", "sharded"])
def folder(request, tmp_path):
    if request.param == "single":
        save_file(TENSORS, tmp_path / "model.safetensors")
    else:
        _sharded(tmp_path, TENSORS)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_module_on_meta_gets_what_the_file_holds(folder, dtype):
    net = _meta()
    load_into(net, folder, dtype=dtype, device="cpu")
    assert {n: t.dtype for n, t in net.state_dict().items()} == dict.fromkeys(
        TENSORS, dtype or torch.float32
    )
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor.float(), TENSORS[name])
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


def test_integers_keep_their_dtype(tmp_path):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    save_file({"count": torch.tensor([3, 4])}, tmp_path / "model.safetensors")
    net = _meta(Counter)
    load_into(net, tmp_path, dtype=torch.bfloat16, device="cpu")
    assert net.count.tolist() == [3, 4]
    assert net.count.dtype == torch.int64


def test_shapes_are_read_from_the_headers(folder):
    assert read_shapes(folder) == {n: tuple(t.shape) for n, t in TENSORS.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.bias": None}, "lacks a.bias"),
        ({"c": torch.zeros(1)}, "has unexpected c"),
        ({"b.bias": torch.zeros(5)}, "has other shapes for b.bias"),
        ({f"c{i}": torch.zeros(1) for i in range(9)}, "and 5 more"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, change, message):
    held = {n: t for n, t in {**TENSORS, **change}.items() if t is not None}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_into(_meta(), tmp_path, dtype=None, device="cpu")


def test_only_what_is_named_is_ignored(tmp_path):
    save_file({**TENSORS, "dec.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    load_into(_meta(), tmp_path, dtype=None, device="cpu", ignore=("dec.*",))
    with pytest.raises(UserError, match=r"dec\.x"):
        load_into(_meta(), tmp_path, dtype=None, device="cpu", ignore=("decoder.*",))


def test_names_can_be_translated(tmp_path):
    save_file({f"model.{n}": t for n, t in TENSORS.items()}, tmp_path / "x.safetensors")
    net = _meta()
    load_into(
        net,
        [tmp_path / "x.safetensors"],
        dtype=None,
        device="cpu",
        rename=lambda name: name.removeprefix("model."),
    )
    assert torch.equal(net.a.weight, TENSORS["a.weight"])


def test_absent_and_damaged_files_are_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        tensor_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match="damaged"):
        read_shapes(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_shapes([tmp_path / "absent.safetensors"])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="index"):
        tensor_files(tmp_path)


def test_hollow_modules_cost_neither_memory_nor_time():
    """A fresh interpreter: initialising on `meta` imports a lot the first time."""
    code = (
        "import time; from torch import nn; from omnicli.execution.weights import hollow\n"
        "began = time.perf_counter()\n"
        "with hollow(): net = nn.Sequential(nn.Embedding(10**6, 10**5), nn.Linear(10**6, 10**4))\n"
        "assert all(p.is_meta for p in net.parameters()), 'memory'\n"
        "assert time.perf_counter() - began < 0.3, 'time'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_of_the_right_dtype_are_mapped_and_not_read(tmp_path):
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(64, 1024, 1024))

    save_file({"w": torch.zeros(64, 1024, 1024)}, tmp_path / "model.safetensors")  # 256 MiB
    net = _meta(Big)
    began = time.perf_counter()
    load_into(net, tmp_path, dtype=torch.float32, device="cpu")
    assert time.perf_counter() - began < 0.3
