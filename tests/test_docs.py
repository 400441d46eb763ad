"""What the documents show is executed, and what they state is what the script measured."""

import re

import pytest

from tests.support.scripts import ROOT

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=range(len(PYTHON_BLOCKS)))
def test_readme_examples_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("script", ["pool", "simulators", "time_shares", "policy_loop", "cluster", "sync"])
def test_the_benchmark_tables_are_the_scripts(script):
    between = re.search(rf"<!-- begin: benchmarks/{script}.py -->\n(.*?)<!-- end", README, re.DOTALL).group(1)
    assert between.strip() == (ROOT / "benchmarks" / "results" / f"{script}.md").read_text().strip()


def test_links_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_version_is_in_the_changelog():
    import envfleet

    assert f"## {envfleet.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
