"""What the examples share of their command lines: each field of a Settings dataclass is a flag."""

import argparse
import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import envfleet

AnySettings = TypeVar("AnySettings")


def setting(default: Any, meaning: str, kind: type | None = None) -> Any:
    """Declare a setting with the help text of its flag. `kind` is the type of its values, where the default is None.

    With an empty tuple as default the flag may be repeated, and the setting is the tuple of its texts.
    """
    return field(default=default, metadata={"help": meaning, "kind": kind or type(default)})


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a training runs, and how it outlives its process: the same for all examples with a cluster."""

    launcher: str = setting("local", "where workers run: local, slurm, ray, kubernetes, ssh or manual")
    launcher_setting: tuple[str, ...] = setting(
        (), "of the launcher, such as partition=cpu or hosts=node1; may be repeated"
    )
    device: str = setting("cpu", "where the learner's networks are, as torch calls it: cpu, cuda, cuda:1")
    checkpoint: str | None = setting(None, "save to this file now and then, at the end, and when told to stop", str)
    checkpoint_every_s: float = setting(60.0, "seconds between two saves")
    resume: str | None = setting(None, "go on from this file; auto: from --checkpoint, if it is there", str)

    def __post_init__(self) -> None:
        if self.resume == "auto" and self.checkpoint is None:
            raise ValueError("--resume auto goes on from --checkpoint, which is missing")
        if not self.checkpoint_every_s >= 0:
            raise ValueError(f"checkpoint_every_s must be at least 0, got {self.checkpoint_every_s}")
        envfleet.launcher_of(self.launcher, self.launcher_setting)

    @property
    def where(self) -> dict[str, Any]:
        """What ClusterEnv is told of this: the launcher, and the checkpoint to go on from."""
        return {"launcher": envfleet.launcher_of(self.launcher, self.launcher_setting), "resume": self.resume_path}

    @property
    def resume_path(self) -> str | None:
        if self.resume == "auto":
            assert self.checkpoint is not None
            return self.checkpoint if Path(self.checkpoint).exists() else None
        if self.resume is None and self.checkpoint is not None and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            # It would begin anew at each time limit, and never end.
            raise SystemExit("this Slurm job was requeued, and would begin anew: say --resume auto")
        return self.resume


@dataclass(frozen=True, kw_only=True)
class VectorSettings(RunSettings):
    """The same for examples whose learner steps vector envs itself: those of a pool, or of the workers of a cluster."""

    num_workers: int = setting(0, "workers of a cluster, started by --launcher; 0: a pool in this process")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers == 0 and (self.launcher != "local" or self.launcher_setting):
            raise ValueError("--launcher starts workers: say --num-workers as well")

    def make_envs(self, env_id: str, num_envs: int, **options: Any) -> Any:
        """A pool, or a cluster that shares the envs out to its workers: the only lines that differ."""
        if self.num_workers == 0:
            return envfleet.make(env_id, num_envs, **options)
        if num_envs % self.num_workers:
            raise SystemExit(f"--num-workers {self.num_workers} cannot share out {num_envs} envs equally")
        launcher = envfleet.launcher_of(self.launcher, self.launcher_setting)
        return envfleet.ClusterEnv(env_id, self.num_workers, num_envs // self.num_workers, launcher=launcher, **options)


def settings_from_command_line(defaults: AnySettings, doc: str | None) -> AnySettings:
    """Read sys.argv. The first line of `doc` describes the command."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for f in dataclasses.fields(defaults):
        as_flag: dict[str, Any] = {"default": getattr(defaults, f.name), "help": f.metadata["help"]}
        if f.metadata["kind"] is bool:
            as_flag["action"] = argparse.BooleanOptionalAction
        elif f.metadata["kind"] is tuple:
            as_flag |= {"action": "append", "default": list(as_flag["default"]), "metavar": "NAME=VALUE"}
        else:
            as_flag["type"] = f.metadata["kind"]
        parser.add_argument("--" + f.name.replace("_", "-"), **as_flag)
    given = vars(parser.parse_args())
    try:
        return dataclasses.replace(
            defaults, **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        )
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
