"""Piper voices: Google's protobuf writes and reads ONNX files here, independently of ours."""

import json

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from omnicli.errors import UserError
from omnicli.models import piper_onnx, protobuf
from omnicli.models.weights import write

INT64, STRING, MESSAGE, BYTES, INT32, FLOAT = 3, 9, 11, 12, 5, 2
ONE, MANY = 1, 3
# The part of onnx.proto that is in use: message -> field -> (number, label, type).
SCHEMA = {
    "Tensor": {
        "dims": (1, MANY, INT64),
        "data_type": (2, ONE, INT32),
        "float_data": (4, MANY, FLOAT),
        "name": (8, ONE, STRING),
        "raw_data": (9, ONE, BYTES),
        "data_location": (14, ONE, INT32),
    },
    "Node": {
        "input": (1, MANY, STRING),
        "output": (2, MANY, STRING),
        "name": (3, ONE, STRING),
        "op_type": (4, ONE, STRING),
    },
    "Graph": {
        "node": (1, MANY, "Node"),
        "name": (2, ONE, STRING),
        "initializer": (5, MANY, "Tensor"),
    },
    "Model": {
        "ir_version": (1, ONE, INT64),
        "producer_name": (2, ONE, STRING),
        "graph": (7, ONE, "Graph"),
    },
}


def messages():
    file = descriptor_pb2.FileDescriptorProto(
        name="onnx_part.proto", package="part", syntax="proto2"
    )
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for name, (number, label, kind) in fields.items():
            field = described.field.add(name=name, number=number, label=label)
            field.type = MESSAGE if isinstance(kind, str) else kind
            field.options.packed = kind == FLOAT  # as onnx.proto says
            if isinstance(kind, str):
                field.type_name = f".part.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = {m: pool.FindMessageTypeByName(f"part.{m}") for m in SCHEMA}
    return {name: message_factory.GetMessageClass(kind) for name, kind in kinds.items()}


PB = messages()
RANDOM = np.random.default_rng(0)


def tensor(name, array, *, raw=True):
    kind = {"float32": 1, "float16": 10, "int64": 7}[str(array.dtype)]
    found = PB["Tensor"](name=name, dims=array.shape, data_type=kind)
    if raw:
        found.raw_data = array.tobytes()
    else:
        found.float_data.extend(array.ravel().tolist())
    return found


def model(constants, nodes, **options):
    found = PB["Model"](ir_version=8, producer_name="test")
    found.graph.initializer.extend(tensor(k, v, **options) for k, v in constants.items())
    for op, name, inputs, outputs in nodes:
        found.graph.node.add(op_type=op, name=name, input=inputs, output=outputs)
    return found


def numbers(*shape):
    return RANDOM.normal(size=shape).astype("f4")


# What an export of Piper looks like, small: names that are kept, and the four kinds that are lost.
CONSTANTS = {
    "sid": numbers(9, 4),
    "enc_p.proj.weight": numbers(8, 4, 1),
    "enc_p.proj.bias": numbers(8),
    "flow.flows.0.pre.weight": numbers(4, 2, 1),
    "flow.flows.0.enc.in_layers.0.bias": numbers(8),
    "onnx::Conv_77": numbers(8, 4, 5),
    "onnx::Conv_78": numbers(3, 4, 1),
    "dp.flows.0.m": numbers(2, 1),
    "/dp/flows.0/Exp_output_0": np.array([[0.5], [2.0]], "f4"),
    "dec.conv_pre.weight": numbers(6, 4, 7),
    "dec.conv_post.weight": numbers(1, 6, 7),
    "/dec/Constant_output_0": np.array(3.0, "f4"),
    "/Reshape_shape": np.array([1, -1]),
}
NODES = [
    ("Gather", "/enc_p/emb/Gather", ["sid", "input"], ["a"]),
    ("Conv", "/enc_p/proj/Conv", ["a", "enc_p.proj.weight", "enc_p.proj.bias"], ["b"]),
    (
        "Conv",
        "/flow/flows.0/enc/in_layers.0/Conv",
        ["b", "onnx::Conv_77", "flow.flows.0.enc.in_layers.0.bias"],
        ["c"],
    ),
    ("Conv", "/dec/cond/Conv", ["c", "onnx::Conv_78"], ["d"]),
    ("Sub", "/dp/flows.0/Sub", ["d", "dp.flows.0.m"], ["e"]),
    ("Mul", "/dp/flows.0/Mul", ["e", "/dp/flows.0/Exp_output_0"], ["f"]),
    ("Gather", "/Gather_5", ["f", "/Reshape_shape"], ["g"]),
]
SMALL = model(CONSTANTS, NODES).SerializeToString()
VOICE_JSON = {"audio": {"sample_rate": 22050}, "inference": {}, "phoneme_id_map": {"a": [1]}}


def named(raw: bytes):
    return piper_onnx.named(piper_onnx.graph(memoryview(raw)))


@pytest.mark.parametrize("raw", [True, False])
def test_every_weight_gets_its_modules_name(raw):
    constants = {k: v for k, v in CONSTANTS.items() if raw or v.dtype == "f4"}
    found = named(model(constants, NODES, raw=raw).SerializeToString())
    lost = {
        "enc_p.emb.weight": CONSTANTS["sid"],
        "flow.flows.0.enc.in_layers.0.weight": CONSTANTS["onnx::Conv_77"],
        "dec.cond.weight": CONSTANTS["onnx::Conv_78"],
        "dp.flows.0.logs": np.array([[np.log(2)], [-np.log(2)]]),
    }
    kept = {k: v for k, v in CONSTANTS.items() if k.startswith(piper_onnx.MODULES)}
    assert set(found) == set(lost) | set(kept)
    for name, array in (kept | lost).items():
        assert np.array_equal(found[name].astype("f4"), array.astype("f4")), name


def test_an_export_without_scopes_is_named_by_biases():
    nodes = [(op, f"{op}_{i}", inputs, out) for i, (op, _, inputs, out) in enumerate(NODES)]
    found = named(model(CONSTANTS, nodes).SerializeToString())
    assert np.array_equal(found["enc_p.emb.weight"], CONSTANTS["sid"])
    assert np.array_equal(found["flow.flows.0.enc.in_layers.0.weight"], CONSTANTS["onnx::Conv_77"])


def test_open_weight_norm_is_folded():
    v, g = numbers(6, 4, 3), numbers(6, 1, 1)
    found = named(model({"dec.ups.0.weight_v": v, "dec.ups.0.weight_g": g}, []).SerializeToString())
    assert set(found) == {"dec.ups.0.weight"}
    expected = np.stack([v[i] * g[i] / np.linalg.norm(v[i]) for i in range(6)])
    np.testing.assert_allclose(found["dec.ups.0.weight"], expected, rtol=1e-6)


def test_half_precision_becomes_float32(tmp_path):
    constants = {k: v.astype("f2") if v.dtype == "f4" else v for k, v in CONSTANTS.items()}
    path = tmp_path / "voice.onnx"
    path.write_bytes(model(constants, NODES).SerializeToString())
    path.with_name("voice.onnx.json").write_text(json.dumps(VOICE_JSON))
    canonical = piper_onnx.convert(path)
    write(tmp_path / "model.safetensors", canonical.weights, lambda _: None)
    found = load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in found.values()} == {np.dtype("f4")}
    np.testing.assert_allclose(found["enc_p.emb.weight"], CONSTANTS["sid"], atol=4e-3)


def test_what_is_no_voice_is_refused(tmp_path):
    path = tmp_path / "voice.onnx"
    path.write_bytes(SMALL)
    with pytest.raises(UserError, match=r"voice\.onnx\.json are missing"):
        piper_onnx.convert(path)
    path.with_name("voice.onnx.json").write_text(json.dumps({"audio": {}}))
    with pytest.raises(UserError, match="lacks inference, phoneme_id_map"):
        piper_onnx.convert(path)
    path.with_name("voice.onnx.json").write_text(json.dumps(VOICE_JSON))
    path.write_bytes(model({"conv.weight": numbers(2, 2)}, []).SerializeToString())
    with pytest.raises(UserError, match=r"no Piper voice: it lacks enc_p\.emb\.weight"):
        piper_onnx.convert(path)
    elsewhere = model(CONSTANTS, NODES)
    elsewhere.graph.initializer[0].data_location = 1
    path.write_bytes(elsewhere.SerializeToString())
    with pytest.raises(UserError, match="lies in another file"):
        piper_onnx.convert(path)


@given(st.integers(0, 2**64 - 1))
def test_numbers_of_the_wire_format(value):
    node = PB["Tensor"](dims=[value - 2**64 if value >= 2**63 else value])
    (field,) = protobuf.fields(memoryview(node.SerializeToString()))
    assert field == (1, value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_model(raw):
    refused_or_read(raw)


@settings(max_examples=300)
@given(st.integers(0, len(SMALL) - 1), st.binary(max_size=8), st.booleans())
def test_damaged_files_never_do_worse_than_an_error(at, new, cut):
    refused_or_read(SMALL[:at] + new + (b"" if cut else SMALL[at + len(new) :]))


def refused_or_read(raw: bytes) -> None:
    try:
        found = named(raw)
    except UserError as error:
        assert error.hint
    else:
        assert sum(array.nbytes for array in found.values()) <= 4 * len(SMALL) + len(raw)


def test_the_embedded_voice_has_the_files_own_values(model_cache, voice_onnx):
    """Every floating-point tensor of the original is there, under its own name or its module's."""
    folder = model_cache / "voice" / "en_US-joe-medium"
    found = load_file(folder / "model.safetensors")
    theirs = PB["Model"].FromString(voice_onnx.read_bytes()).graph
    arrays = {
        t.name: np.frombuffer(t.raw_data, "f4").reshape(list(t.dims))
        for t in theirs.initializer
        if t.data_type == 1
    }
    kept = {name for name in arrays if name.startswith(piper_onnx.MODULES)}
    nameless = [node for node in theirs.node if any(i.startswith("onnx::Conv") for i in node.input)]
    convs = {
        ".".join(node.name.split("/")[1:-1]) + ".weight": node.input[1]
        for node in nameless
        if node.op_type == "Conv"
    }
    assert len(convs) == 32
    others = {"enc_p.emb.weight": "sid"}
    assert set(found) == kept | set(convs) | set(others) | {"dp.flows.0.logs"}
    for name in kept:
        assert np.array_equal(found[name], arrays[name]), name
    for name, source in (convs | others).items():
        assert np.array_equal(found[name], arrays[source]), name
    scale = arrays["/dp/flows.0/Exp_output_0"]
    np.testing.assert_allclose(np.exp(-found["dp.flows.0.logs"]), scale, rtol=2e-7)
