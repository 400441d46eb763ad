"""What the documents show is executed, what they name exists, and what they state is what a script measured."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import envfleet
from envfleet.contract.stats import WorkerStats
from tests.cluster.conftest import quick_workers as quick_workers
from tests.support.scripts import ROOT

pytestmark = pytest.mark.slow
FORKED_WITH = ("torch",)

GUIDES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

# A block of code, and the line before it that says why it is not run, if there is one.
BLOCK = re.compile(r"(?:\*Not run in tests: ([^\n]*)\*\n\n)?^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_CODE = {"text"}  # diagrams, and what a program prints
# Pages that need an engine, a compiler or a second program: a test of their own follows them, block by block.
OWN_TEST = {
    "cleanrl.md",
    "kubernetes.md",
    "laptop_to_cluster.md",
    "manual.md",
    "native_env.md",
    "ray.md",
    "slurm.md",
    "ssh.md",
}
NOT_RUN = {"README.md": 0, "atari.md": 2, "box2d.md": 1, "kubernetes.md": 4, "manual.md": 1, "mujoco.md": 1}
NOT_RUN |= {"envpool.md": 1, "laptop_to_cluster.md": 1, "slurm.md": 3, "ssh.md": 2, "stable_baselines3.md": 2}


def blocks(page):
    """(why it is not run, language, text) of each."""
    return BLOCK.findall(page.read_text())


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in OWN_TEST], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for number, (why_not, language, text) in enumerate(blocks(page)):
        if language == "python" and not why_not:
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", sorted(OWN_TEST))
def test_a_page_that_is_not_run_here_has_its_own_test(page):
    assert any(f'"{page}"' in path.read_text() for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_block_of_code_is_run_or_says_why_it_is_not(page):
    marked = [why_not for why_not, _, _ in blocks(page) if why_not]
    assert len(marked) == NOT_RUN.get(page.name, 0)
    if page.name not in OWN_TEST:
        runs = {"python", *NO_CODE}
        assert [language for why_not, language, _ in blocks(page) if not why_not and language not in runs] == []


def test_the_readme_is_short_and_says_linux_at_once():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert any("Linux" in line for line in lines[:12])


def test_the_index_has_every_page_and_every_decision():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [path for path in ROOT.glob("docs/**/*.md") if path != ROOT / "docs" / "README.md"]
    assert [path.name for path in pages if f"({path.relative_to(ROOT / 'docs')})" not in index] == []


# -- benchmarks --


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(ROOT / "docs" / "generate_benchmarks.py"))


def test_the_benchmark_tables_are_those_of_the_scripts(generator):
    what_to_do = "run docs/generate_benchmarks.py"
    assert (ROOT / "docs" / "benchmarks.md").read_text() == generator["benchmarks_page"](envfleet.__version__), (
        what_to_do
    )
    assert (ROOT / "README.md").read_text() == generator["readme"](), what_to_do


@pytest.mark.parametrize(
    ("measured", "current", "is_old"),
    [("0.6.0", "0.7.0", True), ("0.7.0", "0.7.3", False), ("0.9.1", "0.10.0", True), ("0.9.0", "1.0.0", True)],
)
def test_a_table_of_an_earlier_minor_version_is_marked(generator, measured, current, is_old):
    assert ("Older than" in generator["caption"](measured, "2026-11-16", current)) is is_old


def test_the_readme_has_ten_numbers(generator):
    assert len(generator["figures_table"]().splitlines()) == 2 + 10


# -- names --

SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "native", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cc", ".pyi") and "_native/include" not in path.as_posix()
]
YOURS = {"fleet.py", "train.py", "corridor.h", "my_env.h"}  # files that a page has its reader write
YOURS |= {"ppo_atari.py", "ppo_atari_envpool.py", "ppo_continuous_action.py", "sac_continuous_action.py"}  # CleanRL's
PATH = re.compile(r"(?<![\w./-])[\w][\w./-]*\.(?:py|h|cc)\b(?!/)")


def prose(page):
    """Without code: what a reader writes need not be here. Diagrams count."""
    return BLOCK.sub(lambda found: found[3] if found[2] in NO_CODE else "", page.read_text())


def matches(name):
    return [path for path in SOURCES if f"/{path}".endswith(f"/{name}")]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("it tells of files as they were")
    named = set(PATH.findall(prose(page))) - YOURS
    assert sorted(name for name in named if not matches(name)) == []


def test_the_architecture_names_files_that_cannot_be_mistaken():
    named = set(PATH.findall(prose(ROOT / "ARCHITECTURE.md")))
    assert {name: found for name in named if len(found := matches(name)) > 1} == {}


DESIGNS_WORDS = ["env", "pool", "backend", "slot", "head", "worker", "rollout", "version"]
DESIGNS_WORDS += ["divergence", "pull", "launcher"]


def test_the_glossary_is_short():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Words")[2].partition("##")[0]
    words = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]
    assert words[: len(DESIGNS_WORDS)] == DESIGNS_WORDS
    assert len(words) <= len(DESIGNS_WORDS) + 10


WALKS = runpy.run_path(str(ROOT / "docs" / "walked_files.py"))


@pytest.mark.parametrize(
    ("program", "heading"),
    [("native step", "Walk 1"), ("process step", "Walk 2"), ("rollout", "Walk 3"), ("pull", "Walk 4")],
)
def test_a_walk_names_every_file_that_it_passes(program, heading):
    """Counted by running it, in all processes. Walk 4 goes on where walk 3 is."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walk = text.partition(f"## {heading}")[2].partition("\n## ")[0]
    if heading == "Walk 4":
        walk += text.partition("## Walk 3")[2].partition("\n## ")[0]
    passed = WALKS["walked"](WALKS["PROGRAMS"][program], ROOT / "src")
    assert [path for path in passed if path not in walk] == []


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), f"{document.name}: {target}"


def test_links_to_headings_lead_somewhere():
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", document.read_text()):
            headings = re.findall(r"^#+ (.*)$", (document.parent / target if target else document).read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{document.name}: {target}#{anchor}"


def test_troubleshooting_quotes_what_the_code_says():
    """First column, in backticks; "..." stands for what is filled in."""
    known = "\n".join(text for path in ROOT.glob("src/**/*.py") for text in constants(ast.parse(path.read_text())))
    known += "\n".join((ROOT / "docs" / name).read_text() for name in ("slurm.md", "ray.md", "kubernetes.md"))
    known += "\n".join(map(str, (*envfleet.__all__, *WorkerStats.__annotations__)))
    rows = [line for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if line.startswith("| ")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    unknown = [text for text in quoted if " " in text and not all(part in known for part in text.split(" ... "))]
    assert len(quoted) > 30 and unknown == []


def constants(tree):
    """The texts of a module; of an f-string its fixed parts."""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_version_is_in_the_changelog():
    assert f"## {envfleet.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
