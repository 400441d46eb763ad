"""The command `envfleet`: prints what a launcher would submit, without submitting it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from envfleet.contract.errors import EnvFleetError, MissingExtra
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.kubernetes.api import check_fields
from envfleet.launchers.kubernetes.manifest import fleet_manifest, manifest_yaml
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.slurm.script import head_script, sbatch_script
from envfleet.launchers.slurm.settings import Slurm
from envfleet.launchers.text_settings import forms_of, required_settings, settings_from_text
from envfleet.version import __version__

Launcher = TypeVar("Launcher")

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
    settings = _given(arguments, Slurm)
    if learner is not None:
        return head_script(settings, arguments.num_workers, learner)
    return sbatch_script(settings, _job(arguments))


def _kubernetes_manifest(arguments: argparse.Namespace, _: list[str] | None) -> str:
    settings, job = _given(arguments, Kubernetes), _job(arguments)
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
    for name, form in forms_of(launcher).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            required=name in required_settings(launcher),
            action="append",
            nargs="?" if form.is_switch else None,
            const="true" if form.is_switch else None,
            metavar=form.metavar,
            help=f"{launcher.__name__}({name}=...)",
        )


def _given(arguments: argparse.Namespace, launcher: type[Launcher]) -> Launcher:
    """The launcher with the settings that were named; it knows the defaults of the others."""
    given = {name: getattr(arguments, name) for name in forms_of(launcher)}
    return settings_from_text(launcher, {name: texts for name, texts in given.items() if texts is not None})


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
