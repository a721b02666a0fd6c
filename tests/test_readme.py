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
    claimed = {name for _, names, cells in rows if " run " in cells for name in re.findall(r"`(\w+)`", names)}
    refused = {
        name for _, names, cells in rows if set(cells.split("|")) == {" no "} for name in re.findall(r"`(\w+)`", names)
    }
    explanation = explain("grouped_matmul")
    available = {explanation.chosen} | {name for name, why in explanation.others.items() if why.startswith("can run")}
    assert claimed == available
    assert refused == set(IMPLEMENTATIONS) - available


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
