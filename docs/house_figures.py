"""Counts how the house is built: files and lines of each room, homes of rules, arguments, names, docstrings.

    python docs/house_figures.py [CHECKOUT ...] [--walk] [--list]

Reads text only, unless --walk is given: then a rollout runs in each checkout, which needs a compiled core
(`walked_files.py`).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from walked_files import PROGRAMS, walked

# Where a key of an info is made, not where it is read.
HOMES = {
    "infos with masks": (r'f"_\{', r'"_" \+', r"'_' \+"),
    "final_obs": (r'\["final_obs"\](, [^=]*)? = ', r'"final_obs":', r'= "final_obs"'),
    "env_error": (r'\["env_error"\](, [^=]*)? = ', r'"env_error":', r'= "env_error"'),
}
SHORT = 22  # characters: a docstring below says nothing that its name does not


class House:
    """The Python and C++ sources of a checkout."""

    def __init__(self, root: Path) -> None:
        """Read the checkout at `root`."""
        self.package = root / "src" / "envfleet"
        self.python = {
            path.relative_to(self.package).as_posix(): path.read_text() for path in sorted(self.package.rglob("*.py"))
        }
        native = root / "native"
        self.native = {
            path.relative_to(root).as_posix(): path.read_text()
            for path in sorted(native.rglob("*"))
            if path.suffix in (".h", ".cc")
        }
        self.trees = {name: ast.parse(text) for name, text in self.python.items()}

    def rooms(self) -> dict[str, tuple[int, int]]:
        """Files and lines of each folder."""
        files: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for name, text in (*self.python.items(), *self.native.items()):
            room = name.rpartition("/")[0] or "."
            files[room] += not name.endswith("__init__.py")
            lines[room] += text.count("\n")
        return {room: (files[room], lines[room]) for room in sorted(lines)}

    def homes(self, *patterns: str) -> list[str]:
        """Files in which one of the patterns stands, outside the conformance suite."""
        found = re.compile("|".join(patterns))
        every = {**self.python, **self.native}
        return [
            name
            for name, text in every.items()
            if found.search(text) and not name.startswith(("testing/", "native/tests/"))
        ]

    def num_arguments(self, class_name: str) -> int:
        """Of a class's constructor."""
        for node in self._nodes(ast.ClassDef):
            if node.name == class_name:
                (init,) = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                return len(init.args.args) - 1 + len(init.args.kwonlyargs)
        raise ValueError(f"no class is called {class_name}")

    def lines_with(self, word: str) -> tuple[int, int]:
        """Lines of Python on which a word stands, and files."""
        counts = [sum(word in line for line in text.splitlines()) for text in self.python.values()]
        return sum(counts), sum(count > 0 for count in counts)

    def unlike_their_names(self) -> list[str]:
        """Files without a public class or function, or constant, of their own name."""
        return [name for name in self._modules() if not self._has_its_name(name)]

    def num_modules(self) -> int:
        """Files that can have a name of their own."""
        return len(list(self._modules()))

    def num_short_docstrings(self) -> int:
        """Docstrings of fewer than SHORT characters."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [
            ast.get_docstring(node)
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, kinds)
        ]
        return sum(text is not None and len(text) < SHORT for text in texts)

    def _modules(self) -> Iterator[str]:
        return (name for name in self.python if not name.endswith("__init__.py"))

    def _has_its_name(self, name: str) -> bool:
        stem = Path(name).stem.replace("_", "").lower()
        public = [node.name for node in self.trees[name].body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        return any(_alike(stem, each.replace("_", "").lower()) for each in public if not each.startswith("_"))

    def _nodes(self, kind: type[ast.ClassDef]) -> Iterator[ast.ClassDef]:
        return (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kind))


def _alike(stem: str, name: str) -> bool:
    return stem in name or name in stem


def figures(house: House, root: Path, has_walk: bool) -> dict[str, str]:
    """What is compared, as text."""
    unlike = house.unlike_their_names()
    found = {f"homes of {what}": str(len(house.homes(*patterns))) for what, patterns in HOMES.items()}
    found |= {
        "arguments of `ClusterEnv`, without `self`": str(house.num_arguments("ClusterEnv")),
        "lines on which `max_episode_steps` stands": "{} in {} files".format(*house.lines_with("max_episode_steps")),
        "files without a public name like their own": f"{len(unlike)} of {house.num_modules()}",
        f"docstrings under {SHORT} characters": str(house.num_short_docstrings()),
    }
    if has_walk:
        num_walked = sum(name.startswith("cluster/") for name in walked(PROGRAMS["rollout"], root / "src"))
        num_files = sum(name.startswith("cluster/") and "__init__" not in name for name in house.python)
        found["files of `cluster/` that a rollout walks through"] = f"{num_walked} of {num_files}"
    return found


def table(first: str, names: list[str], columns: list[dict[str, str]]) -> str:
    """A line for each key, a column for each checkout."""
    keys = sorted({key for column in columns for key in column}, key=lambda key: key.replace("`", ""))
    lines = [f"| {first} | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    return "\n".join([*lines, *(f"| {key} | {' | '.join(each.get(key, '-') for each in columns)} |" for key in keys)])


def main() -> None:
    """Print the figures of some checkouts, side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(__file__).parent.parent])
    parser.add_argument("--walk", action="store_true", help="also run a rollout and count the files that it passes")
    parser.add_argument("--list", action="store_true", help="name the files that are counted in the last checkout")
    arguments = parser.parse_args()
    roots = [root.resolve() for root in arguments.roots]
    houses = [House(root) for root in roots]
    names = [house.python["version.py"].split('"')[-2] for house in houses]
    print(table("what", names, [figures(*each, arguments.walk) for each in zip(houses, roots, strict=True)]) + "\n")
    rooms = [{f"`{room}`": f"{files}, {lines:,}" for room, (files, lines) in each.rooms().items()} for each in houses]
    print(table("room: files, lines", names, rooms))
    if arguments.list:
        for what, patterns in HOMES.items():
            print(f"{what}: {', '.join(houses[-1].homes(*patterns))}")
        print(f"without a name like their own: {', '.join(houses[-1].unlike_their_names())}")


if __name__ == "__main__":
    main()
