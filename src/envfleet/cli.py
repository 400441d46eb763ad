"""The command `envfleet`: prints what a launcher would submit, without submitting it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envfleet.contract.errors import EnvFleetError, MissingExtra
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.kubernetes.api import check_fields
from envfleet.launchers.kubernetes.manifest import fleet_manifest, manifest_yaml
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.slurm.script import head_script, sbatch_script
from envfleet.launchers.slurm.settings import Slurm
from envfleet.version import __version__

SOME_HEAD = "tcp://HEAD:PORT"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name."""
    own, learner = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    arguments = parser.parse_args(own)
    if learner is not None and not arguments.has_learner:
        parser.error("a command after -- is for slurm-script")
    try:
        sys.stdout.write(arguments.run(arguments, learner))
        sys.stdout.flush()
    except (EnvFleetError, OSError) as error:
        print(f"envfleet: {error}", file=sys.stderr)
        return 2
    return 0


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Our own arguments, and the learner's command after --, whose options we do not parse."""
    if "--" not in argv:
        return argv, None
    place = argv.index("--")
    return argv[:place], argv[place + 1 :] or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="envfleet", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"envfleet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    slurm = commands.add_parser(
        "slurm-script",
        allow_abbrev=False,
        usage="envfleet slurm-script [OPTION ...] [-- COMMAND ...]",
        help="print the sbatch script of Slurm(...)",
        description="Print the script that ClusterEnv(launcher=Slurm(...)) submits. With a COMMAND after --, print "
        "the script of one job in which COMMAND is the learner and starts its workers inside the job.",
    )
    _add_common(slurm)
    _add_settings(slurm, Slurm)
    slurm.set_defaults(run=_slurm_script, has_learner=True)

    kubernetes = commands.add_parser(
        "kubernetes-manifest",
        allow_abbrev=False,
        help="print the YAML of Kubernetes(...)",
        description="Print what ClusterEnv(launcher=Kubernetes(...)) creates; the keys of the run are left out.",
    )
    _add_common(kubernetes)
    _add_settings(kubernetes, Kubernetes)
    kubernetes.set_defaults(run=_kubernetes_manifest, has_learner=False)
    return parser


def _slurm_script(arguments: argparse.Namespace, learner: list[str] | None) -> str:
    settings = Slurm(**_given(arguments, Slurm))
    if learner is not None:
        return head_script(settings, arguments.num_workers, learner)
    return sbatch_script(settings, _job(arguments))


def _kubernetes_manifest(arguments: argparse.Namespace, _: list[str] | None) -> str:
    settings, job = Kubernetes(**_given(arguments, Kubernetes)), _job(arguments)
    try:
        check_fields(fleet_manifest(settings, job, "envfleet", "envfleet"))
    except MissingExtra as error:
        print(f"envfleet: the names of fields were not checked: {error}", file=sys.stderr)
    return manifest_yaml(settings, job)


def _job(arguments: argparse.Namespace) -> WorkerJob:
    return WorkerJob(
        num_workers=arguments.num_workers,
        argv=("-m", "envfleet.cluster.worker", "--head", arguments.head),
        environment={KEYS_VARIABLE: ""},
        run_dir=Path(),
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-workers", type=_positive, default=4, help="number of workers (default: 4)")
    parser.add_argument(
        "--head", default=SOME_HEAD, help="address of the head for the workers; a real run chooses it when it starts"
    )


def _add_settings(parser: argparse.ArgumentParser, launcher: type) -> None:
    """An option for each setting of a launcher: they are declared there, once."""
    hints = typing.get_type_hints(launcher)
    for setting in dataclasses.fields(launcher):
        is_required = setting.default is dataclasses.MISSING and setting.default_factory is dataclasses.MISSING
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            dest=setting.name,
            required=is_required,
            default=None,
            help=f"{launcher.__name__}({setting.name}=...)",
            **_form(hints[setting.name]),
        )


def _given(arguments: argparse.Namespace, launcher: type) -> dict[str, Any]:
    """Settings that were named; the launcher knows the defaults of the others."""
    settings = {}
    for setting in dataclasses.fields(launcher):
        value = getattr(arguments, setting.name)
        if value is not None:
            is_pairs = isinstance(value, list) and value and isinstance(value[0], _Pair)
            settings[setting.name] = {pair.key: pair.value for pair in value} if is_pairs else value
    return settings


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    key: str
    value: str | None


def _form(hint: Any) -> dict[str, Any]:
    """How a setting of this type is written on a command line."""
    # Optional of a Literal or a Mapping is typing's own union, "int | None" is Python's.
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = [each for each in (typing.get_args(hint) if is_union else (hint,)) if each is not type(None)]
    first, origin = kinds[0], typing.get_origin(kinds[0])
    if first is bool:
        return {"action": "store_true"}
    if origin is typing.Literal:
        return {"choices": typing.get_args(first)}
    if origin is Mapping:
        return {"action": "append", "type": _pair, "metavar": "NAME=VALUE"}
    if origin is Sequence:
        is_text = typing.get_args(first) == (str,)
        return {"action": "append", "metavar": "TEXT"} if is_text else {"action": "append", "type": _json_object}
    if kinds in ([int], [float]):
        return {"type": first, "metavar": "N"}
    return {"metavar": "TEXT"}


def _pair(text: str) -> _Pair:
    key, equals, value = text.partition("=")
    return _Pair(key, value if equals else None)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {text}")
    return value


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
