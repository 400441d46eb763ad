"""EnvSaver: saves one Python env, and puts it back: by its own get_state(), or as a pickle. Runs where the env runs.

Of an env with get_state() and set_state(state), three things are saved: what get_state() returns; the attributes of the
wrappers around the env that has it, such as TimeLimit's count of steps; the state of the env's random generator, so
that resets repeat, too.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.utils import EzPickle
from gymnasium.wrappers import PassiveEnvChecker

from envfleet.contract.errors import UsageError
from envfleet.contract.pool_config import EnvStates
from envfleet.pool.simulators.ale_states import WHY_NOT_STICKY, ale_clone, is_ale_env, is_sticky, restore_clone

Env = gymnasium.Env[Any, Any]

# Attributes that gymnasium.Wrapper has of its own; they do not change while an env runs.
_OF_ANY_WRAPPER = {"env", "_cached_spec", "_metadata", "_saved_kwargs"}


class Hook(NamedTuple):
    """What saves an env, and all that it wraps."""

    place: int  # among the layers of the env, the outermost first
    get: Callable[[], Any]
    set: Callable[[Any], None]


class EnvSaver:
    """How an env as it is built is saved.

    Attributes:
        name: Of the kind of env; a state fits only envs of the same name.
        keeps_env: Whether restore() puts the env itself into the state; otherwise it returns another one.
    """

    def __init__(self, env: Any, how: EnvStates) -> None:
        """Find out how.

        Args:
            env: With its wrappers.
            how: "own": by its get_state(); "pickle": as a pickle, if it has none.

        Raises:
            UsageError: Its state cannot be saved; the text says what to do.
        """
        self._env: Env = env
        self._layers = _layers_of(env)
        self._hook = _hook_of(self._layers)
        self.keeps_env = self._hook is not None
        inner = self._layers[-1 if self._hook is None else self._hook.place]
        if self._hook is None:
            _require_pickle(inner, self._layers, how)
        self._wrappers = [
            each for each in self._layers if not isinstance(each, PassiveEnvChecker)
        ]  # env 0 alone has it
        del self._wrappers[self._wrappers.index(inner) :]
        around = ", ".join(type(each).__name__ for each in reversed(self._wrappers))
        which = getattr(inner, "state_name", None)  # of envs that are alike in their class only
        kind = _name_of(inner) if which is None else f"{_name_of(inner)} ({which})"
        self.name = kind + (f" in {around}" if around else "") + ("" if self._hook else ", pickled")

    def save(self) -> bytes:
        """The state of the env.

        Raises:
            UsageError: A part of it cannot be pickled.
        """
        if self._hook is None:
            try:
                return bytes(cloudpickle.dumps(self._env, protocol=pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                raise UsageError(
                    f"{self.name}: the env cannot be pickled ({type(error).__name__}: {error}): give it get_state() "
                    "and set_state(state)"
                ) from error
        wrappers = [_state_of_wrapper(each) for each in self._wrappers]
        saved = self._hook.get(), wrappers
        random = _random_state(self._env.unwrapped)
        try:
            return pickle.dumps((random, self._pickled(saved)), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UsageError(
                f"{self._unpicklable(saved)} cannot be pickled: {type(error).__name__}: {error}"
            ) from error

    def restore(self, saved: bytes) -> Env:
        """Put the env back into a state that save() gave, of an env of the same name. May raise anything.

        Returns:
            The env; another one if it was pickled whole. The old one is closed then.
        """
        if self._hook is None:
            other: Env = pickle.loads(saved)
            with contextlib.suppress(Exception):
                self._env.close()
            return other
        random, rest = pickle.loads(saved)
        unwrapped = self._env.unwrapped
        _restore_random(unwrapped, random)  # first: wrappers may have saved that they refer to the generator
        state, wrappers = self._unpickled(rest)
        self._hook.set(state)
        for wrapper, attributes in zip(self._wrappers, wrappers, strict=True):
            _restore_wrapper(wrapper, attributes)
        _restore_random(unwrapped, random)  # last: set_state() may have drawn from it, or reset the env
        for layer in self._layers:
            if isinstance(layer, PassiveEnvChecker):  # it would compare the next step with the reset, which never was
                layer.checked_reset = layer.checked_step = layer.checked_data_reuse = True
        return self._env

    # -- inside --

    def _references(self) -> dict[str, Any]:
        """Objects that are not copied into a state: it says that there is a reference to them."""
        layers = [each for each in self._layers if not isinstance(each, PassiveEnvChecker)]
        known: dict[str, Any] = {f"layer {place}": each for place, each in enumerate(reversed(layers))}
        generator = getattr(self._env.unwrapped, "_np_random", None)
        return known if generator is None else {**known, "np_random": generator}

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._references()).dump(value)
        return file.getvalue()

    def _unpickled(self, blob: bytes) -> Any:
        return _Unpickler(io.BytesIO(blob), self._references()).load()

    def _unpicklable(self, saved: tuple[Any, list[dict[str, Any]]]) -> str:
        """Name the part that cannot be pickled."""
        for wrapper, attributes in zip(self._wrappers, saved[1], strict=True):
            for name, value in attributes.items():
                try:
                    self._pickled(value)
                except Exception:
                    return (
                        f"attribute {name!r} of the wrapper {_name_of(wrapper)} (give the wrapper get_state() and "
                        "set_state(state), or name the attributes that are its state: state_attributes = (...))"
                    )
        return f"what get_state() of {self.name} returned"


def why_not_saved(env: Env, how: EnvStates) -> str | None:
    """Why the state of an env cannot be saved; None: as far as it can be seen, it can."""
    try:
        EnvSaver(env, how)
    except UsageError as error:
        return str(error)
    return None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(each): name for name, each in known.items()}

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, name: str) -> Any:
        return self._known[name]


def _layers_of(env: Env) -> list[Env]:
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _name_of(env: Env) -> str:
    kind = type(env)
    return f"{kind.__module__}.{kind.__qualname__}"


def _hook_of(layers: list[Env]) -> Hook | None:
    """That of the outermost layer that has one."""
    for place, layer in enumerate(layers):
        if all(_has(layer, name) for name in ("get_state", "set_state")):
            hook = Hook(place, layer.get_state, layer.set_state)  # type: ignore[attr-defined]
            if _takes(hook.get, 0) and _takes(hook.set, 1):
                return hook
    inner = layers[-1]
    if is_ale_env(inner) and not is_sticky(inner):
        ale: Any = inner
        return Hook(len(layers) - 1, partial(ale_clone, ale), partial(restore_clone, ale.ale))
    return None


def _has(layer: Env, name: str) -> bool:
    """Not by way of a wrapper that passes all attributes of its env on: it does not save itself."""
    return inspect.getattr_static(layer, name, None) is not None


def _takes(method: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # written in C: nobody can tell
        return True
    return True


def _require_pickle(inner: Env, layers: list[Env], how: EnvStates) -> None:
    """Refuse an env without a hook that is not to be pickled, or cannot be."""
    native = "Native envs can be saved as they are; envfleet.registry() lists them"
    ez_pickle = next((each for each in layers if _is_pickled_by_arguments(each)), None)
    if how == "pickle":
        if ez_pickle is not None:
            raise UsageError(
                f"{_name_of(ez_pickle)} is pickled by its arguments alone (gymnasium.utils.EzPickle), without its "
                f"state: give it get_state() and set_state(state). {native}"
            )
        return
    why = WHY_NOT_STICKY if is_ale_env(inner) else _why_hook_does_not_count(inner)
    pickles = "" if ez_pickle else ", or pass env_states='pickle', which pickles the whole env"
    raise UsageError(
        f"{_name_of(inner)} cannot be saved: {why}. Give it get_state() and set_state(state){pickles}. {native}"
    )


def _is_pickled_by_arguments(layer: Env) -> bool:
    return isinstance(layer, EzPickle) and type(layer).__getstate__ is EzPickle.__getstate__


def _why_hook_does_not_count(env: Env) -> str:
    has = [name for name in ("get_state", "set_state") if _has(env, name)]
    if not has:
        return "it has no get_state() and set_state(state) of its own"
    return (
        f"its {' and '.join(has)} must be a pair: get_state() without arguments, set_state(state) with what it returned"
    )


# -- wrappers --


def _state_of_wrapper(wrapper: Env) -> dict[str, Any]:
    names = getattr(wrapper, "state_attributes", None)
    return {
        name: value
        for name, value in vars(wrapper).items()
        if (_may_be_state(name, value) if names is None else name in names)
    }


def _restore_wrapper(wrapper: Env, attributes: Mapping[str, Any]) -> None:
    for name in _state_of_wrapper(wrapper).keys() - attributes.keys():  # it has come to them later
        delattr(wrapper, name)
    vars(wrapper).update(attributes)


def _may_be_state(name: str, value: Any) -> bool:
    return name not in _OF_ANY_WRAPPER and not isinstance(value, gymnasium.Space)


# -- the random generator --


class _Random(NamedTuple):
    state: Mapping[str, Any]  # as NumPy's bit generators give it
    seed: int | None


def _random_state(env: Env) -> tuple[Any, ...] | None:
    generator = getattr(env, "_np_random", None)
    if not isinstance(generator, np.random.Generator):
        return None
    return tuple(_Random(generator.bit_generator.state, getattr(env, "_np_random_seed", None)))


def _restore_random(env: Env, saved: tuple[Any, ...] | None) -> None:
    generator = getattr(env, "_np_random", None)
    if saved is None:
        if isinstance(generator, np.random.Generator):
            env._np_random = None  # it had none
        return
    state, seed = _Random(*saved)
    kind = getattr(np.random, state["bit_generator"])
    if not isinstance(generator, np.random.Generator) or type(generator.bit_generator) is not kind:
        generator = env._np_random = np.random.Generator(kind())
    generator.bit_generator.state = state
    env._np_random_seed = seed
