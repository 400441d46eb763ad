"""Native envs that are compiled apart from EnvFleet: a header of the user's, made into a library and loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from envfleet._native import FOLDER, core
from envfleet.contract.errors import UsageError

PathLike = str | os.PathLike[str]

COMPILE_TIMEOUT_S = 300.0
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")

_plugins: dict[str, Path] = {}  # by env id, in the order of loading: the file it came from


def plugin_names() -> list[str]:
    """The envs that load_native() brought."""
    return list(_plugins)


def plugin_file(env_id: str) -> Path:
    """The header or library that an env came from."""
    return _plugins[env_id]


def load_native(path: PathLike, *, flags: Sequence[str] = ()) -> list[str]:
    """Load native envs from a C++ header, which is compiled first, or from a compiled library.

    docs/native_env.md shows what the header must have.

    Args:
        path: The header, or a library (`.so`) that compile_native() made.
        flags: More arguments of the compiler.

    Returns:
        The ids of the envs, which `envfleet.make` knows from now on.

    Raises:
        UsageError: There is no such file or no compiler; the file does not compile, cannot be loaded, or has no env.
    """
    source = Path(path)
    if not source.is_file():
        raise UsageError(f"no file is called {source}; expected a C++ header or a library made by compile_native()")
    with tempfile.TemporaryDirectory() as folder:
        library = source
        if source.suffix != ".so":
            library = Path(folder) / "envs.so"
            compile_native(source, library, flags=flags)
        try:
            names = core.load_plugin(str(library.resolve()))
        except RuntimeError as error:
            raise UsageError(f"{source} cannot be loaded: {error}") from None
    if not names:
        raise UsageError(f"{source} has no environment: add ENVFLEET_ENV(name, Struct) below its struct")
    _plugins.update(dict.fromkeys(names, source.resolve()))
    return names


def compile_native(source: PathLike, library: PathLike, *, flags: Sequence[str] = ()) -> None:
    """Compile a header with native envs to a library that load_native() loads. Needs a C++20 compiler.

    Args:
        source: The header.
        library: The file to write; its name ends in `.so`.
        flags: More arguments of the compiler.

    Raises:
        UsageError: There is no compiler, or the header does not compile.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UsageError("no C++ compiler was found: install one, or name it in the environment variable CXX")
    include = FOLDER / "include"
    random_library = Path(np.__file__).parent / "random" / "lib" / "libnpyrandom.a"
    command = [
        *compiler.split(),
        *_FLAGS,
        f"-DENVFLEET_PLUGIN_ABI={core.PLUGIN_ABI}",
        f"-I{include}",
        f"-I{np.get_include()}",
        *flags,
        *("-x", "c++", "-", "-x", "none", str(random_library), "-o", str(Path(library).resolve())),
    ]
    text = f'#include "{Path(source).resolve()}"\nENVFLEET_PLUGIN();\n'
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except OSError as error:
        raise UsageError(f"the C++ compiler {compiler!r} cannot be run: {error}") from None
    if done.returncode != 0:
        raise UsageError(f"{source} does not compile:\n{done.stderr}")
