"""Writes docs/protocol.md from the docstrings, fields and comments of the cluster's messages.

python docs/generate_protocol.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from envfleet.cluster import sync
from envfleet.cluster.wire import bounded_msgpack, codec, messages
from envfleet.cluster.wire import plain_values as values_wire
from envfleet.cluster.wire import spaces as spaces_wire
from envfleet.cluster.wire.rollouts import row_checks, stacks
from envfleet.contract.pixels import Pixels

PATH = Path(__file__).parent / "protocol.md"
NOTE = "<!-- Written by docs/generate_protocol.py; change the docstrings in src/envfleet/cluster, and run it again. -->"


FRAMES = """
A message is one multipart message of ZeroMQ; one of a worker begins with a frame that holds the name of its process,
16 random bytes that stay the same on all its connections. The next frame, the header, is MessagePack: `[message,
arrays]`, where `message` is a map with its tag under `type`, and `arrays` has `[name, dtype, shape, packed, inline]`
for each array. A small array's bytes are in `inline`; for the others, in turn, there is a frame each, compressed with
zstd if `packed` is true. What is missing at the end is false or nil. Values are little-endian and in C order.
"""

CHECKS = """
Refused as well: a version older than that of the same process's last rollout, seconds that are negative or no number,
failures of other workers' envs, `order_cancelled` for an order that the head has not cancelled. The caller that waits
for an answer that is refused gets WorkerFailed. `join` is refused if the host's name is not of printable ASCII.
"""


def protocol_page() -> str:
    """The whole page."""
    first_line, *rules = _paragraphs(messages)
    parts = [
        "# The protocol between head and worker",
        NOTE,
        f"Version {messages.PROTOCOL_VERSION}. {first_line}",
        *rules,
        "## Worker to head",
        _message_table(get_args(messages.FromWorker)),
        f"Answers to orders: {_names(get_args(messages.Answer))}.",
        "## Head to worker",
        _message_table(get_args(messages.FromHead)),
        f"Orders: {_names(get_args(messages.OrderMessage))}.",
        "## Inside messages",
        *(_struct_section(kind) for kind in _inner_structs()),
        "## Frames",
        *_paragraphs(codec),
        f"{' '.join(FRAMES.split())} Dtypes: {', '.join(f'`{name}`' for name in codec.DTYPES)}.",
        "## Plain values",
        *_paragraphs(values_wire),
        *_paragraphs(bounded_msgpack),
        f"A value has at most {bounded_msgpack.MOST_PARTS:,} parts, and one more for every "
        f"{bounded_msgpack.BYTES_OF_A_PART} of its bytes.",
        "## Spaces",
        *_paragraphs(spaces_wire),
        "## Stacks of frames",
        *_paragraphs(stacks),
        "## What the head checks",
        *_paragraphs(row_checks),
        " ".join(CHECKS.split()),
        "## Limits",
        inspect.getdoc(messages.Limits) or "",
        _limits_table(),
    ]
    return "\n\n".join(parts) + "\n"


def _names(kinds: Iterable[type[msgspec.Struct]]) -> str:
    return ", ".join(f"`{_tag(kind)}`" for kind in kinds)


def _paragraphs(module: Any) -> list[str]:
    return [" ".join(text.split()) for text in (inspect.getdoc(module) or "").split("\n\n")]


def _tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _message_table(kinds: Iterable[type[msgspec.Struct]]) -> str:
    lines = ["| message | meaning | fields |", "| --- | --- | --- |"]
    for kind in kinds:
        fields = "<br>".join(_cell(_field_text(kind, field)) for field in msgspec.structs.fields(kind))
        lines.append(f"| `{_tag(kind)}` | {_cell(inspect.getdoc(kind) or '')} | {fields} |")
    return "\n".join(lines)


def _struct_section(kind: Any) -> str:
    is_dataclass = dataclasses.is_dataclass(kind)
    fields: Any = dataclasses.fields(kind) if is_dataclass else msgspec.structs.fields(kind)
    tag = None if is_dataclass else kind.__struct_config__.tag
    title = f"`{kind.__name__}`" + (f", tagged `{tag}`" if tag else "")
    lines = [f"- {_field_text(kind, field)}" for field in fields]
    text = (inspect.getdoc(kind) or "").partition("\n\nAttributes:")[0]
    return "\n".join([f"**{title}**: {' '.join(text.split())}", "", *lines]).strip()


def _inner_structs() -> list[Any]:
    """Values inside messages, and the synchronisation rules."""
    in_unions = {*get_args(messages.FromWorker), *get_args(messages.FromHead), messages.Limits}
    inner = [kind for kind in vars(messages).values() if _is_struct(kind) and kind not in in_unions]
    rules = get_args(sync.SyncRule) or (sync.SyncRule,)
    return [*(kind for kind in inner if kind not in rules), Pixels, *rules]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))


def _field_text(kind: type, field: Any) -> str:
    """Name and type as they stand in the source, with the comment behind them."""
    source = next(each for each in kind.__mro__ if field.name in vars(each).get("__annotations__", {}))
    line = re.search(rf"^    {field.name}: ([^#\n]+?) *(?:# (.*))?$", inspect.getsource(source), re.MULTILINE)
    assert line is not None, f"{kind.__name__}.{field.name} has no line of its own"
    comment = f": {line.group(2)}" if line.group(2) else ""
    return f"`{field.name}: {line.group(1)}`{comment}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _limits_table() -> str:
    lines = ["| limit | at most |", "| --- | --- |"]
    for field in msgspec.structs.fields(messages.Limits):
        lines.append(f"| `{field.name}` | {field.default:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PATH.write_text(protocol_page())
