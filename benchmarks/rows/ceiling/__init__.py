"""A plain C++ loop over the native CartPole's structs: what is left for an engine and its Python to lose."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.rows import Window
from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running

SOURCE = Path(__file__).with_name("ceiling.cc")
NATIVE = Path(__file__).parents[3] / "native"
FLAGS = ("-O3", "-DNDEBUG", "-std=c++20", "-ffp-contract=off")  # as in CMakeLists.txt: the same code, to the bit
EXIT_TIMEOUT_S = 5.0


def compile_ceiling(path: Path) -> None:
    """Compile with the headers that the installed engine was compiled with, and with the repository's CartPole."""
    from envfleet._native import FOLDER

    includes = (FOLDER / "include", NATIVE, np.get_include())
    library = Path(np.__file__).parent / "random" / "lib" / "libnpyrandom.a"
    command = [os.environ.get("CXX", "c++"), *FLAGS, *(f"-I{include}" for include in includes)]
    compiled = subprocess.run([*command, SOURCE, library, "-o", path], capture_output=True, text=True)
    if compiled.returncode:
        raise RuntimeError(f"cannot compile {SOURCE.name}: {compiled.stderr}")


def _build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    """It makes its own actions: random ones, in a cycle as long as everybody's."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "ceiling"
        compile_ceiling(program)
        child = subprocess.Popen(
            [program, str(len(env_fns))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run_window(window_s: float) -> Window:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{window_s}\n")
        answer = child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the C++ loop ended with status {child.wait(EXIT_TIMEOUT_S)}")
        num_steps, duration_s = answer.split()
        return Window(int(num_steps), float(duration_s))

    def close() -> None:
        child.communicate(timeout=EXIT_TIMEOUT_S)

    return Running(run_window, close)


CPP_LOOP = Contender("plain C++ loop, 1 thread", "envfleet", "envfleet", _build)
