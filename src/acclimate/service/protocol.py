"""The Open Inference Protocol, version 2: tensors in JSON, or as bytes after a JSON header (the binary extension)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._version import __version__
from .errors import BadInputError
from .model import Served
from .worker import Answer

__all__ = ["HEADER", "VERSION", "Asked", "model_metadata", "read_request", "server_metadata", "write_response"]

HEADER = "Inference-Header-Content-Length"
VERSION = "1"
_TYPES: dict[str, Any] = {"UINT8": np.uint8, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
"""Datatypes of images. Bytes go from 0 to 255, floating point from 0 to 1."""
_OUTPUTS = {
    "probabilities": ("FP32", True),
    "logits": ("FP32", True),
    "label": ("INT64", False),
    "confidence": ("FP32", False),
    "entropy": ("FP32", False),
    "learned": ("INT8", False),
}
"""Names and datatypes of outputs, and whether they have one column per class."""


@dataclass(frozen=True)
class Asked:
    """What a client has asked for."""

    x: Tensor
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, bool] = field(default_factory=dict)
    """Names of outputs, and whether each is sent as bytes."""


def server_metadata() -> dict[str, Any]:
    """Return what `GET /v2` answers."""
    return {"name": "acclimate", "version": __version__, "extensions": ["binary_tensor_data"]}


def model_metadata(served: Served) -> dict[str, Any]:
    """Return what `GET /v2/models/NAME` answers."""
    outputs = [
        {"name": name, "datatype": kind, "shape": [-1, len(served.labels)] if wide else [-1]}
        for name, (kind, wide) in _OUTPUTS.items()
    ]
    return {
        "name": served.name,
        "versions": [VERSION],
        "platform": "acclimate_pytorch",
        "inputs": [{"name": "images", "datatype": "FP32", "shape": served.shape}],
        "outputs": outputs,
    }


def read_request(body: bytes, header: str | None, served: Served) -> Asked:
    """Read an inference request; raise a refusal that says what is wrong."""
    content, rest = _split(body, header)
    inputs = _list(content, "inputs")
    if len(inputs) != 1:
        raise BadInputError(f'expected one input, "images", got {len(inputs)}')
    parameters = _object(content, "parameters")
    x, left = _read_images(inputs[0], rest, served)
    if left:
        raise BadInputError(f"{len(left)} bytes follow the last input: check binary_data_size")
    all_binary = parameters.get("binary_data_output") is True
    outputs = {}
    for each in _list(content, "outputs") if "outputs" in content else []:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str) or name not in _OUTPUTS:
            raise BadInputError(f"there is no output {str(name)[:40]!r}: expected {', '.join(_OUTPUTS)}")
        outputs[name] = _object(each, "parameters").get("binary_data", all_binary) is True
    number = content.get("id")
    if number is not None and not isinstance(number, str):
        raise BadInputError("id must be a string")
    return Asked(x, number, parameters, outputs or dict.fromkeys(_OUTPUTS, all_binary))


def write_response(asked: Asked, answer: Answer, served: Served) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response and its headers."""
    best = answer.probabilities.max(1)
    learned = [-1 if each is None else int(each) for each in answer.learned]
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "probabilities": answer.probabilities.numpy(),
        "logits": answer.logits.numpy(),
        "label": best.indices.numpy(),
        "confidence": best.values.numpy(),
        "entropy": answer.entropy.numpy(),
        "learned": np.array(learned, np.int8),
    }
    outputs: list[dict[str, Any]] = []
    blobs = []
    for name, binary in asked.outputs.items():
        array = np.ascontiguousarray(arrays[name])
        about: dict[str, Any] = {"name": name, "datatype": _OUTPUTS[name][0], "shape": [*array.shape]}
        if binary:
            blobs.append(array.tobytes())
            about["parameters"] = {"binary_data_size": array.nbytes}
        else:
            about["data"] = array.flatten().tolist()
        outputs.append(about)
    content: dict[str, Any] = {"model_name": served.name, "model_version": VERSION, "outputs": outputs}
    if asked.id is not None:
        content["id"] = asked.id
    head = json.dumps(content).encode()
    if not blobs:
        return head, {"Content-Type": "application/json"}
    return b"".join([head, *blobs]), {"Content-Type": "application/octet-stream", HEADER: str(len(head))}


def _split(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """Return the JSON part of a body, and the bytes after it."""
    length = len(body)
    if header is not None:
        if not re.fullmatch("[0-9]{1,12}", header) or int(header) > length:
            raise BadInputError(f"{HEADER} is {header[:40]!r}: expected at most the {length} bytes of the body")
        length = int(header)
    content = read_json(body[:length])
    return content, body[length:]


def read_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise a refusal for anything else."""
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"the body is not JSON ({str(error)[:100]})") from error
    if not isinstance(content, dict):
        raise BadInputError("expected a JSON object")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_images(given: Any, rest: bytes, served: Served) -> tuple[Tensor, bytes]:
    """Return a batch of images in [0, 1], and the bytes that are left."""
    if not isinstance(given, dict) or given.get("name") != "images":
        raise BadInputError('the input must have the name "images"')
    kind, shape = given.get("datatype"), given.get("shape")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise BadInputError(f"datatype {str(kind)[:40]!r}: expected one of {', '.join(_TYPES)}")
    whole = isinstance(shape, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in shape)
    if not whole or shape is None or not _fits(shape, served.shape):
        raise BadInputError(f"shape {str(shape)[:100]}: expected {served.shape}, where -1 is any number above 0")
    count, size = math.prod(shape), _object(given, "parameters").get("binary_data_size")
    wanted = count * np.dtype(_TYPES[kind]).itemsize
    if size is not None:
        if _number(size) != wanted or len(rest) < wanted:
            raise BadInputError(f"{shape} of {kind} has {wanted} bytes, not {str(min(len(rest), size))[:40]}")
        array = np.frombuffer(rest, np.dtype(_TYPES[kind]).newbyteorder("<"), count).astype(_TYPES[kind])
        rest = rest[wanted:]
    else:
        array = _from_json(given.get("data"), kind, shape)
    x = torch.from_numpy(array.reshape(shape)).float()
    return check_range(x.div_(255) if kind == "UINT8" else x), rest


def check_range(x: Tensor) -> Tensor:
    """Return images if they lie in [0, 1]."""
    low, high = (float(v) for v in x.aminmax())
    if not (low >= -1e-3 and high <= 1 + 1e-3):
        raise BadInputError(f"pixels from {low:g} to {high:g}: expected 0 to 1, or UINT8 from 0 to 255")
    return x


def _fits(shape: list[int], expected: list[int]) -> bool:
    return len(shape) == len(expected) and all(
        0 < n < 2**31 and e in (-1, n) for n, e in zip(shape, expected, strict=True)
    )


def _from_json(data: Any, kind: str, shape: list[int]) -> np.ndarray[Any, Any]:
    if not isinstance(data, list):
        raise BadInputError("the input has no data: give a list of numbers, or binary_data_size and bytes")
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise BadInputError("data is ragged: expected a flat list, or nested ones of the given shape") from error
    if array.dtype.kind not in "iuf":
        raise BadInputError("data has something else than numbers")
    if array.shape not in ((math.prod(shape),), tuple(shape)):
        raise BadInputError(f"data has the shape {[*array.shape]}: expected {shape}, or a flat list of as many numbers")
    if kind == "UINT8" and (array.dtype.kind == "f" or array.min() < 0 or array.max() > 255):
        raise BadInputError("UINT8 data must be whole numbers from 0 to 255")
    with np.errstate(over="ignore"):  # infinity is found where the range is checked
        return array.astype(_TYPES[kind])


def _number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadInputError("binary_data_size must be a whole number")


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(value := content.get(name), list):
        raise BadInputError(f"{name} must be a list")
    return value


def _object(content: Any, name: str) -> dict[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise BadInputError(f"{name} must be an object")
    return value


def as_bool(value: Any, name: str) -> bool:
    """Return a boolean that came as such, or as text."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "1"):
        return True
    if str(value).lower() in ("false", "0"):
        return False
    raise BadInputError(f"{name}={str(value)[:40]!r}: expected true or false")
