"""The environment of a worker process: its format, and that no other file spells the names of its variables."""

import re
from pathlib import Path

import pytest

import envfleet
from envfleet.contract import worker_environment
from envfleet.contract.worker_environment import cpu_counts, cpu_list, cpus_in, module_path, spawner_child_variable

SOURCES = Path(envfleet.__file__).parent
MACROS = r"ENV\b|PLUGIN\b|PLUGIN_ABI\b"  # of C++: no variables
NAMES = re.compile(rf"ENVFLEET_(?!{MACROS})\w*|\w+_NUM_THREADS|\"PYTHON[A-Z]+\"")


def test_no_other_file_spells_the_name_of_a_variable():
    files = [path for path in SOURCES.rglob("*.py") if path != Path(worker_environment.__file__)]
    assert len(files) > 100
    found = {str(path.relative_to(SOURCES)): NAMES.findall(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_list_of_cpus_is_read_as_it_was_written():
    assert cpu_list((0, 1, 5)) == "0,1,5"
    assert cpus_in(cpu_list((0, 1, 5))) == {0, 1, 5}
    with pytest.raises(ValueError):
        cpus_in("0,first")


def test_a_count_of_cpus_holds_for_the_worker_and_its_libraries():
    assert cpu_counts(3) == {
        "ENVFLEET_NUM_CPUS": "3",
        "OMP_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
    }


def test_folders_of_modules_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert module_path(["", "sub", "/lib"]) == f"{tmp_path}:{tmp_path}/sub:/lib"


def test_each_spawner_has_its_own_variable_for_the_number_of_a_child():
    assert spawner_child_variable("0a") == "ENVFLEET_SPAWNER_0a"
