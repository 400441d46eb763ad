"""The file of a checkpoint: whole or refused, whatever happens to it, and to the process that writes it."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet import CheckpointError
from envfleet.cluster.checkpoint.file import FORMAT, read_file, write_file
from tests.support.scripts import script_environment
from tests.support.waiting import wait_until

ARRAYS = [np.arange(100, dtype=np.uint8), np.zeros(0, np.uint8), np.full(1000, 7, np.uint8)]
CONTENT = {"a": [1, "two", None], "b": {"c": 2.5}}


def written(path, content=CONTENT, arrays=ARRAYS):
    write_file(path, content, arrays)
    return path


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ),
    st.lists(st.binary(max_size=300)),
)
def test_what_is_written_is_read(tmp_path_factory, content, parts):
    path = tmp_path_factory.mktemp("file") / "run.ckpt"
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    write_file(path, content, arrays)
    read, read_arrays = read_file(path)
    assert read == content
    assert [each.tobytes() for each in read_arrays] == parts
    assert all(each.ctypes.data % 16 == 0 for each in read_arrays if each.size)


def test_any_changed_byte_is_noticed(tmp_path):
    path = written(tmp_path / "run.ckpt")
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_file(path)
    path.write_bytes(whole)
    assert read_file(path)[0] == CONTENT


def test_any_cut_is_noticed(tmp_path):
    path = written(tmp_path / "run.ckpt")
    whole = path.read_bytes()
    for size in [*range(0, 80), *range(80, len(whole), 13), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"damaged or cut off|no checkpoint of EnvFleet"):
            read_file(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="damaged"):
        read_file(path)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path):
    path = written(tmp_path / "run.ckpt")
    data = bytearray(path.read_bytes())
    data[8] = FORMAT + 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}; .* up to {FORMAT}: install"):
        read_file(path)


def test_no_file_and_no_checkpoint_are_said_in_words(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none\.ckpt: save\(\) makes one"):
        read_file(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*directory"):
        read_file(tmp_path)
    (tmp_path / "text").write_text("something else that is long enough to have a hash of its own at the end")
    with pytest.raises(CheckpointError, match="no checkpoint of EnvFleet"):
        read_file(tmp_path / "text")


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = written(tmp_path / "run.ckpt")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("envfleet.cluster.checkpoint.file.os.fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*stays as it was"):
        written(path, content={"new": True})
    monkeypatch.undo()
    assert read_file(path)[0] == CONTENT
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_folders_are_made_and_names_may_have_any_letters(tmp_path):
    path = written(tmp_path / "new" / "folder" / "run [1]*.ckpt")
    written(path, content={"again": True})
    assert read_file(path)[0] == {"again": True}
    assert os.listdir(path.parent) == [path.name]


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    path = written(tmp_path / "run.ckpt")
    left = tmp_path / ".run.ckpt.99999999-0.unfinished"
    left.write_bytes(b"half")
    other = tmp_path / ".another.ckpt.99999999-0.unfinished"
    other.write_bytes(b"of another checkpoint")
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl,time; f=open({str(tmp_path / '.run.ckpt.1-0.unfinished')!r},'wb');"
         "fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == b"locked\n"
        written(path)
        assert not left.exists() and other.exists() and (tmp_path / ".run.ckpt.1-0.unfinished").exists()
    finally:
        holder.kill()
        holder.communicate()
    written(path)
    assert sorted(os.listdir(tmp_path)) == [other.name, "run.ckpt"]


WRITER = """
import sys, numpy as np
from envfleet.cluster.checkpoint.file import write_file
number = int(sys.argv[2])
while True:
    number += 1
    write_file(sys.argv[1], number, [np.full(3_000_000, number % 251, np.uint8)])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_while_a_file_is_written_leaves_a_whole_one(tmp_path):
    path, draw, last, num_left = tmp_path / "run.ckpt", random.Random(0), 0, 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(last)], stdout=subprocess.PIPE, env=script_environment()
        )
        writer.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        told = [int(line) for line in writer.communicate()[0].splitlines()]
        num_left += len(list(tmp_path.glob(".*unfinished")))
        number, (array,) = read_file(path)
        assert number in (max(told, default=last + 1), max(told, default=last + 1) + 1)
        assert (array == number % 251).all()
        last = number
    assert num_left, "no kill met a file that was being written"
    written(path)
    wait_until(
        lambda: os.listdir(tmp_path) == ["run.ckpt"], lambda: f"only the checkpoint is left: {os.listdir(tmp_path)}"
    )
