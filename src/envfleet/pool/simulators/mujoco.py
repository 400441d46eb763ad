"""The native envs on MuJoCo: their library, which is loaded only for them, and their twins in Gymnasium."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from envfleet._native import FOLDER, core
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.pool.native.twins import NotNative, Twin
from envfleet.pool.simulators.mujoco_gl import advice, drawing, release

logger = logging.getLogger("envfleet.pool")

_LIBRARY = "libenvfleet_mujoco-*.so"  # * is the version of MuJoCo that it was compiled with

# Arguments of Gymnasium's MujocoEnv that only its renderer uses.
_FOR_RENDERING = {"width", "height", "camera_id", "camera_name", "max_geom", "visual_options"}

# What the state of a native env holds, after all that mj_setState() takes: as `Computed` in envs/mujoco/simulation.h.
_COMPUTED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos"),
    *("cam_xmat", "light_xpos", "light_xdir", "subtree_com", "cinert", "cvel", "cfrc_ext", "qfrc_actuator"),
    *("qfrc_constraint", "ten_length", "ten_velocity"),
)


def is_available() -> bool:
    """Can native envs on MuJoCo be made here?"""
    try:
        return importlib.metadata.version("mujoco") == library_version()
    except importlib.metadata.PackageNotFoundError:
        return False


def load() -> None:
    """Make the native envs on MuJoCo known, or say why not: MissingExtra, or NotNative if Python envs can do it."""
    try:
        mujoco: Any = importlib.import_module("mujoco")
        importlib.import_module("gymnasium.envs.mujoco")
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingExtra(f"environments on MuJoCo need 'envfleet[mujoco]': pip install it ({error})") from None
    except Exception as error:
        if (text := advice(error)) is not None:
            raise UsageError(text) from error
        raise
    compiled_for, found = library_version(), mujoco.mj_versionString()
    if compiled_for is None:
        raise NotNative("this build of EnvFleet has no native environments on MuJoCo: it was made without mujoco-core")
    if found != compiled_for:
        raise NotNative(
            f"the native environments on MuJoCo are compiled for version {compiled_for}, but {found} is installed: "
            f"pip install mujoco=={compiled_for}",
            is_surprise=True,
        )
    try:
        _library()
    except (OSError, RuntimeError) as error:
        raise NotNative(f"the native environments on MuJoCo cannot be loaded: {error}", is_surprise=True) from None


@contextmanager
def no_log_file() -> Iterator[None]:
    """Keep MuJoCo from writing MUJOCO_LOG.TXT into the working directory."""
    switch = _library().envfleet_mujoco_log_to_file
    before = switch(False)
    try:
        yield
    finally:
        switch(before)


def _library_path() -> Path | None:
    return next(iter(sorted(FOLDER.glob(_LIBRARY))), None)


def library_version() -> str | None:
    """The MuJoCo that the native envs are compiled for; None: there are none."""
    path = _library_path()
    return None if path is None else path.stem.partition("-")[2]


@cache
def _library() -> ctypes.CDLL:
    """Once MuJoCo's own library is in this process."""
    path = str(_library_path())
    core.load_plugin(path)
    library = ctypes.CDLL(path)
    library.envfleet_mujoco_log_to_file.argtypes = [ctypes.c_bool]
    library.envfleet_mujoco_log_to_file.restype = ctypes.c_bool
    library.envfleet_mujoco_report_to.restype = None
    library.envfleet_mujoco_report_to(_REPORT)
    # A thread that warns when Python has ended must not call it.
    atexit.register(library.envfleet_mujoco_report_to, None)
    return library


def _report(text: bytes, is_about_model: bool) -> None:
    """MuJoCo warns. What it has to say of Gymnasium's models is not for those who use them."""
    logger.log(logging.INFO if is_about_model else logging.WARNING, "MuJoCo: %s", text.decode(errors="replace"))


_REPORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_bool)(_report)

# -- the twins --


def _native_kwargs(version: int, xml_file: str, has_xml_file: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Gymnasium's constructor as the native env takes them."""
    load()
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path

    native = {name: value for name, value in kwargs.items() if name not in _FOR_RENDERING}
    if version >= 5:
        native.pop("default_camera_config", None)
    for name, value in native.items():
        if isinstance(value, np.generic):  # arithmetic of Python's numbers with float32 stays float32; NumPy's does not
            raise NotNative(f"{name} must be a number of Python's, not of NumPy's")
    if has_xml_file:
        xml_file = native.pop("xml_file", xml_file)
        if not isinstance(xml_file, str):
            raise NotNative(f"xml_file must be a path as a str; got {xml_file!r}")
    try:
        native["model_path"] = expand_model_path(xml_file)
    except OSError as error:
        raise NotNative(str(error)) from None
    return native


def _give_state(env: Any, state: bytes) -> None:
    """Let Gymnasium's env show the state of a native one."""
    mujoco: Any = importlib.import_module("mujoco")
    numbers = np.frombuffer(state, np.float64)
    model, data = env.model, env.data
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    size = mujoco.mj_stateSize(model, kind)
    mujoco.mj_setState(model, data, numbers[:size], kind)
    mujoco.mj_forward(model, data)
    # After a step MuJoCo still shows where things were before its last frame; forward() has moved them on.
    for name in _COMPUTED:
        array = getattr(data, name)
        array[...] = numbers[size : size + array.size].reshape(array.shape)
        size += array.size


def _twin(name: str, module: str, version: int, xml_file: str, has_xml_file: bool = True) -> Twin:
    return Twin(
        native=f"mujoco/{name}-v{version}",
        entry_point=f"gymnasium.envs.mujoco.{module}_v{version}:{name}Env",
        give_state=_give_state,
        is_available=is_available,
        native_kwargs=partial(_native_kwargs, version, xml_file, has_xml_file),
        while_building=no_log_file,
        while_drawing=drawing,
        before_closing=release,
        advice=advice,
    )


_MODULES = {
    "Ant": "ant",
    "HalfCheetah": "half_cheetah",
    "Hopper": "hopper",
    "Walker2d": "walker2d",
    "Humanoid": "humanoid",
    "HumanoidStandup": "humanoidstandup",
    "Swimmer": "swimmer",
    "Reacher": "reacher",
    "Pusher": "pusher",
    "InvertedPendulum": "inverted_pendulum",
    "InvertedDoublePendulum": "inverted_double_pendulum",
}
_NEW_FILES = ("walker2d", "pusher")  # v5 has its own model

MUJOCO_TWINS: tuple[Twin, ...] = (
    *(
        _twin(name, file, 5, f"{file}_v5.xml" if file in _NEW_FILES else f"{file}.xml")
        for name, file in _MODULES.items()
    ),
    # Gymnasium's Pusher-v4 refuses MuJoCo from version 3.
    *(
        _twin(name, file, 4, f"{file}.xml", has_xml_file=name == "Ant")
        for name, file in _MODULES.items()
        if name != "Pusher"
    ),
)
