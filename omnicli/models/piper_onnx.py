"""A Piper voice: ONNX export in, tensors under the names of its PyTorch modules out.

The exporter keeps most names, but not all: a weight-normed convolution's folded weight becomes
`onnx::Conv_123`, the phoneme embedding takes the name of an input that was left out (`sid`), and
the affine flow's `exp(-logs)` is folded into a constant. Those are found by the node that uses
them. Field numbers are from onnx.proto (github.com/onnx/onnx).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from omnicli.errors import UserError
from omnicli.models import protobuf
from omnicli.models.canonical import Canonical, json_file
from omnicli.models.cursor import mapped
from omnicli.models.weights import Array, Weight

MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_INITIALIZER = 1, 5
NODE_INPUT, NODE_OUTPUT, NODE_NAME, NODE_OP = 1, 2, 3, 4
TENSOR_DIMS, TENSOR_TYPE, TENSOR_FLOATS, TENSOR_NAME, TENSOR_RAW, TENSOR_PLACE = 1, 2, 4, 8, 9, 14
ELEMENTS = {1: "<f4", 10: "<f2"}  # TensorProto.DataType FLOAT, FLOAT16

MAX_RANK = 8
TINY = float(np.finfo(np.float32).tiny)

MODULES = ("enc_p.", "dp.", "flow.", "dec.", "emb_g.")
EMBEDDING = "enc_p.emb.weight"
AFFINE_SHIFT, AFFINE_SCALE = "dp.flows.0.m", "dp.flows.0.logs"
NEEDED = (
    EMBEDDING,
    "enc_p.proj.weight",
    "flow.flows.0.pre.weight",
    "dec.conv_pre.weight",
    "dec.conv_post.weight",
)
_WHAT_FITS = "a voice exported by piper_train.export_onnx, such as those of rhasspy/piper-voices"
CONFIG_KEYS = ("audio", "inference", "phoneme_id_map")


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the graph."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """What is needed of a model: its operations and its floating-point constants."""

    nodes: tuple[Node, ...]
    constants: dict[str, Array]


def convert(path: Path) -> Canonical:
    """The canonical form of a voice: `NAME.onnx` with its `NAME.onnx.json` beside it."""
    config = _config(path.with_name(path.name + ".json"))
    tensors = named(graph(mapped(path)))
    missing = [name for name in NEEDED if name not in tensors]
    if missing:
        raise UserError(f"{path} is no Piper voice: it lacks {', '.join(missing)}", hint=_WHAT_FITS)
    weights = tuple(
        Weight(name=name, shape=array.shape, dtype="F32", make=partial(_as_float32, array))
        for name, array in tensors.items()
    )
    return Canonical(files={"config.json": config}, weights=weights)


def _config(path: Path) -> Path:
    if not path.is_file():
        raise UserError(
            f"the voice's settings {path} are missing", hint="put the .onnx.json beside the .onnx"
        )
    config = json_file(path)
    missing = [key for key in CONFIG_KEYS if key not in config]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}",
            hint="take the .onnx.json that belongs to the voice",
        )
    return path


def graph(message: memoryview) -> Graph:
    """Read a model's graph; constants are views of the message."""
    found = next(protobuf.views(message, MODEL_GRAPH), None)
    if found is None:
        raise protobuf.damaged("it holds no graph")
    constants = dict(
        pair for raw in protobuf.views(found, GRAPH_INITIALIZER) for pair in _constant(raw)
    )
    return Graph(tuple(_node(raw) for raw in protobuf.views(found, GRAPH_NODE)), constants)


def _node(raw: memoryview) -> Node:
    texts: dict[int, list[str]] = {NODE_INPUT: [], NODE_OUTPUT: [], NODE_NAME: [], NODE_OP: []}
    for number, value in protobuf.fields(raw):
        if number in texts:
            texts[number].append(protobuf.text(value))
    last = {number: (found or [""])[-1] for number, found in texts.items()}
    return Node(last[NODE_OP], last[NODE_NAME], tuple(texts[NODE_INPUT]), tuple(texts[NODE_OUTPUT]))


def _constant(raw: memoryview) -> Iterator[tuple[str, Array]]:
    """Name and values, if they are floating-point numbers; nothing else is a weight."""
    dims: list[int] = []
    element, place, name = 0, 0, ""
    values = memoryview(b"")
    for number, value in protobuf.fields(raw):
        if number == TENSOR_DIMS:
            dims += protobuf.numbers(value)
        elif number == TENSOR_NAME:
            name = protobuf.text(value)
        elif number in (TENSOR_RAW, TENSOR_FLOATS) and isinstance(value, memoryview):
            values = value
        elif isinstance(value, int):
            element = value if number == TENSOR_TYPE else element
            place = value if number == TENSOR_PLACE else place
    if element in ELEMENTS:
        yield name, _array(name, values, np.dtype(ELEMENTS[element]), dims, place)


def _array(
    name: str, values: memoryview, element: np.dtype[Any], dims: list[int], place: int
) -> Array:
    if place:
        raise UserError(
            f"the weight {name} lies in another file", hint="export the voice as one .onnx file"
        )
    if prod(dims) * element.itemsize != len(values) or len(dims) > MAX_RANK:
        raise protobuf.damaged(f"the weight {name} has {len(values)} bytes for shape {dims}")
    return np.frombuffer(values, element).reshape(dims if len(values) else (0,))


def named(model: Graph) -> dict[str, Array]:
    """All weights under their module names."""
    tensors = {name: array for name, array in model.constants.items() if name.startswith(MODULES)}
    for node in model.nodes:
        for name, array in _by_node(node, model.constants):
            tensors.setdefault(name, array)
    tensors.update(_affine_scale(model))
    return _folded(tensors)


def _by_node(node: Node, constants: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """The weight of a convolution or an embedding, named by its bias or its node's scope."""
    if (
        node.op in ("Conv", "ConvTranspose")
        and len(node.inputs) > 1
        and node.inputs[1] in constants
    ):
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        module = bias.removesuffix(".bias") if bias.startswith(MODULES) else _scope(node)
        yield f"{module}.weight", constants[node.inputs[1]]
    elif node.op == "Gather" and node.inputs and _is_table(constants.get(node.inputs[0])):
        module = _scope(node) or ("enc_p.emb" if node.inputs[0] == "sid" else "")
        yield f"{module}.weight", constants[node.inputs[0]]


def _is_table(array: Array | None) -> bool:
    return array is not None and array.ndim == 2


def _scope(node: Node) -> str:
    """`/enc_p/emb/Gather` → `enc_p.emb`; nothing for exporters that do not name nodes so."""
    return ".".join(node.name.strip("/").split("/")[:-1])


def _affine_scale(model: Graph) -> dict[str, Array]:
    """Undo the folding of `(x - m) * exp(-logs)` in the reversed duration predictor."""
    if AFFINE_SCALE in model.constants:
        return {}
    shifted = {out for node in model.nodes if AFFINE_SHIFT in node.inputs for out in node.outputs}
    for node in model.nodes:
        if node.op == "Mul" and shifted & set(node.inputs):
            for name in set(node.inputs) & set(model.constants):
                scale = model.constants[name].astype(np.float64)
                return {AFFINE_SCALE: -np.log(np.maximum(scale, TINY))}
    return {}


def _folded(tensors: dict[str, Array]) -> dict[str, Array]:
    """Weight norm, where the export left it open: v * g / |v|, the norm over all but axis 0."""
    for name in [name for name in tensors if name.endswith(".weight_v")]:
        v = tensors.pop(name).astype(np.float64)
        g = tensors.pop(name.removesuffix("_v") + "_g", np.empty(0))
        if len(g) != len(v):
            raise protobuf.damaged(f"{name} has no fitting weight_g")
        norm = np.sqrt((v * v).sum(axis=tuple(range(1, v.ndim)), keepdims=True))
        tensors[name.removesuffix("_v")] = v * g.reshape(norm.shape) / np.maximum(norm, TINY)
    return tensors


def _as_float32(array: Array) -> Array:
    return array.astype(np.float32)
