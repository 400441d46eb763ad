"""The protocol does not change by accident: golden bytes of each message, and the page that describes them.

After a wanted change: raise PROTOCOL_VERSION and run

    python -m tests.cluster.wire.test_messages && python docs/generate_protocol.py
"""

import dataclasses
import enum
import json
import runpy
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest

from envfleet import EnvSpec
from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import PROTOCOL_VERSION, FromHead, FromWorker
from tests.support.scripts import ROOT

GOLDEN = Path(__file__).parent / "golden" / "messages.json"
WHAT_TO_DO = (
    "the protocol has changed: raise PROTOCOL_VERSION in messages.py (once for each release) and run "
    "`python -m tests.cluster.wire.test_messages && python docs/generate_protocol.py`"
)
ARRAYS = {
    "obs": np.arange(6, dtype=np.float32).reshape(2, 3),
    "image": np.zeros((2, 64, 64), np.uint8),
    "none": np.zeros((0, 2), np.int64),
}
ANYTHING = {"any": [1, "two", None]}


def _fields(kind):
    hints = get_type_hints(kind)
    return [(each.name, hints[each.name]) for each in msgspec.structs.fields(kind)]


ONE_ENV = {"factory": None, "render_mode": "rgb_array"}  # it has an id, or a factory; pixels are those of rgb_array


def _example(kind, name=""):
    """A value of this type, always the same; of several types the first that is not None."""
    examples = {int: 3, float: 0.5, str: name, bytes: name.encode(), bool: True, Any: ANYTHING}
    examples[msgspec.Raw] = msgspec.Raw(msgspec.msgpack.encode(ANYTHING))
    if kind in examples:
        return examples[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{key: _example(hint, key) for key, hint in _fields(kind)})
    if dataclasses.is_dataclass(kind):
        values = {key: _example(hint, key) for key, hint in get_type_hints(kind).items()}
        return kind(**(values | (ONE_ENV if kind is EnvSpec else {})))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _example(next(part for part in parameters if part is not type(None)), name)
    if origin is Literal:
        return parameters[-1]
    if origin is list:
        return [_example(parameters[0], name)]
    if origin is tuple:
        return tuple(_example(part, name) for part in parameters if part is not Ellipsis)
    if origin is dict:
        return {"key": _example(parameters[1], name)}
    raise NotImplementedError(f"{name} has type {kind}: teach _example to make one")


MESSAGES = {
    f"{direction} {kind.__struct_config__.tag}": _example(kind)
    for direction, union in (("worker", FromWorker), ("head", FromHead))
    for kind in get_args(union)
}


def _golden():
    """Header bytes as hexadecimal text, by message; `with arrays` has all frames."""
    messages = {name: encode(message)[0].hex() for name, message in MESSAGES.items()}
    step = MESSAGES["head step"]
    with_arrays = [bytes(memoryview(frame).cast("B")).hex() for frame in encode(step, ARRAYS)]
    packed = encode(step, ARRAYS, "zstd")[0].hex()
    return {"protocol": PROTOCOL_VERSION, "messages": messages, "with arrays": with_arrays, "packed header": packed}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_of_a_message_are_the_golden_ones(name):
    golden = json.loads(GOLDEN.read_text())
    assert encode(MESSAGES[name])[0].hex() == golden["messages"].get(name), WHAT_TO_DO


def test_the_golden_file_is_of_this_protocol():
    pytest.importorskip("zstandard")
    golden, now = json.loads(GOLDEN.read_text()), _golden()
    assert golden["protocol"] == PROTOCOL_VERSION, WHAT_TO_DO
    assert list(golden["messages"]) == list(MESSAGES), WHAT_TO_DO
    assert golden["with arrays"] == now["with arrays"] and golden["packed header"] == now["packed header"], WHAT_TO_DO


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_arrives_as_it_was(name):
    union = FromWorker if name.startswith("worker") else FromHead
    assert Decoder(union).decode(encode(MESSAGES[name])) == (MESSAGES[name], {})


def test_no_two_messages_have_the_same_tag():
    kinds = {kind for union in (FromWorker, FromHead) for kind in get_args(union)}  # those about chunks are in both
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_the_page_is_what_the_script_writes():
    page = runpy.run_path(str(ROOT / "docs" / "generate_protocol.py"))["protocol_page"]()
    assert (ROOT / "docs" / "protocol.md").read_text() == page, WHAT_TO_DO


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(_golden(), indent=1) + "\n")
