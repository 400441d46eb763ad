"""What the examples share of their command lines: each field of a Settings dataclass is a flag."""

import argparse
import dataclasses
import re
from dataclasses import field
from typing import Any, TypeVar

import envfleet

AnySettings = TypeVar("AnySettings")


def setting(default: Any, meaning: str, kind: type | None = None) -> Any:
    """Declare a setting with the help text of its flag. `kind` is the type of its values, where the default is None."""
    return field(default=default, metadata={"help": meaning, "kind": kind or type(default)})


def settings_from_command_line(defaults: AnySettings, doc: str | None) -> AnySettings:
    """Read sys.argv. The first line of `doc` describes the command."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for f in dataclasses.fields(defaults):
        as_flag: dict[str, Any] = {"default": getattr(defaults, f.name), "help": f.metadata["help"]}
        is_switch = f.metadata["kind"] is bool
        as_flag |= {"action": argparse.BooleanOptionalAction} if is_switch else {"type": f.metadata["kind"]}
        parser.add_argument("--" + f.name.replace("_", "-"), **as_flag)
    try:
        return dataclasses.replace(defaults, **vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


def require_steps(total_steps: int) -> None:
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")


def sync_rule(settings: Any, measure_every: int = 1) -> Any:
    """The rule that `settings.sync` names; ValueError if there is none."""
    if not re.fullmatch(r"aps|every_update|every:[1-9]\d*|never", settings.sync):
        raise ValueError(f"sync must be aps, every_update, every:K with K at least 1, or never; got {settings.sync!r}")
    name, _, period = settings.sync.partition(":")
    if name == "aps":
        return envfleet.APS(settings.threshold, settings.max_lag, measure_every=measure_every)
    if name == "every":
        return envfleet.Every(int(period))
    return envfleet.EveryUpdate() if name == "every_update" else envfleet.Never()
