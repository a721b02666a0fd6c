"""The README keeps its promises: its example runs, its links and folders exist, its matrix is what `explain` says."""

import re
import subprocess
import sys
from pathlib import Path

from pallas_kernels import explain
from pallas_kernels.select import IMPLEMENTATIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "(2, 16, 512) bfloat16 rows of the busiest expert:" in run.stdout


def test_links_and_folders_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    folders = re.findall(r"`([\w/]+/)`", README.split("## Where things are")[1])
    assert len(links) >= 2
    assert len(folders) >= 6
    for target in links + folders:
        assert (ROOT / target).exists(), target


def test_the_support_matrix_names_the_implementations_that_exist() -> None:
    matrix = README.split("## What runs where")[1].split("##")[0]
    rows = re.findall(r"^\|([^|]*)\|([^|]*)\|(.*)\|$", matrix, flags=re.MULTILINE)
    named = {device.strip(): re.findall(r"`(\w+)`", names) for device, names, _ in rows if "`" in names}
    nowhere = {names.strip(" `") for _, names, cells in rows if set(cells.split("|")) == {" no "}}
    assert {name for names in named.values() for name in names} | {"mosaic"} == set(IMPLEMENTATIONS)
    explanation = explain("grouped_matmul", implementation="reference")
    unfit = {name for name, why in explanation.others.items() if why == "grouped_matmul has no such kernel"}
    assert nowhere == unfit
    able = {"reference"} | {name for name, why in explanation.others.items() if why.startswith("can run")}
    assert set(named["CPU"]) <= able


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
