"""Where MuJoCo draws: on a display, or with EGL or OSMesa where there is none; and what to do if it cannot."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_VARIABLE = "MUJOCO_GL"
_WORDS = (_VARIABLE, "OpenGL", "framebuffer", "gladLoadGL")
_PACKAGES = ("OpenGL", "glfw", "mujoco.rendering", "mujoco.egl", "mujoco.osmesa", "mujoco.glfw")
_MOST_DEVICES = 10
_PLATFORM_DEVICE = 0x313F  # EGL_PLATFORM_DEVICE_EXT


@contextmanager
def drawing(env: Any) -> Iterator[None]:
    """Around render() of one of Gymnasium's envs (unwrapped): each draws with a context of its own.

    Gymnasium leaves the one current that was made last, which may be that of another env.
    """
    viewer = _viewer(env)
    if viewer is None:  # to be made
        with _without_display():
            yield
    else:
        viewer.make_context_current()
        yield


def release(env: Any) -> None:
    """Before an env is closed. MuJoCo frees what it drew with when the env is collected, in whatever context is current
    then: the images of another env would be black from there on.
    """
    viewer = _viewer(env)
    if viewer is not None:
        viewer.make_context_current()
        viewer.con.free()


def _viewer(env: Any) -> Any:
    return getattr(getattr(env, "mujoco_renderer", None), "viewer", None)


@contextmanager
def _without_display() -> Iterator[None]:
    """An OpenGL context that MuJoCo makes meanwhile needs no display. `MUJOCO_GL`, where it is set, decides."""
    is_decided = any(os.environ.get(name) for name in (_VARIABLE, "DISPLAY", "WAYLAND_DISPLAY"))
    platform = None if is_decided else _headless_platform()
    if platform is None:
        yield
        return
    os.environ[_VARIABLE] = platform
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def advice(error: Exception) -> str | None:
    """What to do, if `error` says, in one of many ways, that MuJoCo has nothing to draw with; else None."""
    if not any(word in str(error) for word in _WORDS) and not any(_is_drawing(name) for name in _modules_of(error)):
        return None
    return (
        f"MuJoCo cannot draw here ({type(error).__name__}: {error}): set the environment variable MUJOCO_GL to "
        "'egl' or 'osmesa', and install that library (Debian: libegl1, libosmesa6)"
    )


def _modules_of(error: Exception) -> Iterator[str]:
    """Where the error comes from, and what it passed through."""
    yield type(error).__module__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__"))


def _is_drawing(module: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in _PACKAGES)


@cache
def _headless_platform() -> str | None:
    """Looked for without PyOpenGL: that keeps to the first platform it was imported for, working or not."""
    if _has_egl():
        return "egl"
    return "osmesa" if any(_library(f"libOSMesa.so{suffix}") for suffix in ("", ".8", ".6")) else None


def _has_egl() -> bool:
    """Is there a device that EGL can draw on without a display?"""
    egl = _library("libEGL.so.1")
    if egl is None:
        return False
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    egl.eglGetProcAddress.restype = pointer
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    egl.eglTerminate.argtypes = [pointer]
    query, display_of = (egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT"))
    if not query or not display_of:
        return False
    devices, num_devices = (pointer * _MOST_DEVICES)(), integer()
    ctypes.CFUNCTYPE(ctypes.c_uint, integer, pointer, pointer)(query)(
        _MOST_DEVICES, ctypes.addressof(devices), ctypes.addressof(num_devices)
    )
    get_display = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(display_of)
    for device in devices[: num_devices.value]:
        display = get_display(_PLATFORM_DEVICE, device, None)
        if display and egl.eglInitialize(display, None, None):
            egl.eglTerminate(display)
            return True
    return False


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
