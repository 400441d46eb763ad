"""Run a script that says `import envpool`, unmodified, with EnvFleet's module under that name.

python -m envfleet.compat.run_as_envpool script.py --its arguments
python -m envfleet.compat.run_as_envpool -m package.module --its arguments
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import envfleet.compat.envpool
import envfleet.compat.envpool.python.protocol
import envfleet.compat.envpool.registration
from envfleet.compat.envpool.families import family_modules

_USAGE = "usage: python -m envfleet.compat.run_as_envpool [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def stand_in() -> None:
    """Have `import envpool`, and its submodules that scripts import, mean EnvFleet's modules."""
    package = envfleet.compat.envpool
    sys.modules["envpool"] = package
    sys.modules["envpool.registration"] = package.registration
    sys.modules["envpool.python"] = package.python
    sys.modules["envpool.python.protocol"] = package.python.protocol
    for name, module in family_modules().items():
        sys.modules[f"envpool.{name}"] = module
        if "." not in name:
            setattr(package, name, module)


def main(arguments: list[str]) -> int:
    """Run what the arguments name.

    Args:
        arguments: A script, or "-m" and a module; then its own arguments.

    Returns:
        2 if nothing was named or there is no such script, otherwise 0.
    """
    is_module = arguments[:1] == ["-m"]
    target = arguments[1:] if is_module else arguments
    if not target or (target[0].startswith("-") and not is_module):
        print(_USAGE, file=sys.stderr)
        return 2
    if not is_module and not Path(target[0]).exists():
        print(f"there is no script {target[0]!r}\n{_USAGE}", file=sys.stderr)
        return 2
    stand_in()
    sys.argv = target
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
