"""The documents keep their promises: the README's example runs, its matrix is right, links and options exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from k3jax.cli import app
from pallas_kernels import explain
from pallas_kernels.select import GPU_KERNELS, IMPLEMENTATIONS, UNTIMED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RECIPES = ("bf16", "w4a16", "w4a8", "w4a8_fp8")


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "(2, 16, 512) bfloat16 rows of the busiest expert:" in run.stdout


def test_links_and_folders_exist() -> None:
    folders = re.findall(r"`([\w/]+/)`", README.split("## Where things are")[1])
    assert len(folders) >= 6
    for target in folders:
        assert (ROOT / target).is_dir(), target
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def documented_options(document: Path) -> list[tuple[str, str]]:
    """Every (program, option) of its commands: `k3jax compare` or a script, and the options that follow on the line."""
    commands = re.findall(r"(k3jax \w+|scripts/\w+\.py)((?:(?!k3jax |scripts/)[^`#\n]|\\\n)*)", document.read_text())
    return [(program, option) for program, rest in commands for option in re.findall(r"--[a-z][a-z0-9-]*", rest)]


def options_of(program: str) -> set[str]:
    """Those that a command of `k3jax` has, or that a script's source declares."""
    if not program.startswith("scripts/"):
        group: Any = typer.main.get_command(app)
        command = group.commands[program.split()[1]]
        return {name for option in command.params for name in option.opts + option.secondary_opts}
    source = (ROOT / program).read_text()
    arguments = re.findall(r"^    (\w+): Annotated", source, flags=re.MULTILINE)
    return {*re.findall(r'"(--[a-z0-9-]+)', source), *(f"--{name.replace('_', '-')}" for name in arguments)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_the_options_of_documented_commands_exist(document: Path) -> None:
    for program, option in documented_options(document):
        assert option in options_of(program), f"{program} {option}"


def support_matrix() -> list[tuple[str, list[str], list[str]]]:
    """(device, implementations, a cell for each recipe) of each row."""
    matrix = README.split("## What runs where")[1].split("##")[0]
    rows = re.findall(r"^\|([^|]*)\|([^|]*`[^|]*)\|(.*)\|$", matrix, flags=re.MULTILINE)[1:]
    return [
        (device, re.findall(r"`(\w+)`", names), [c.strip() for c in cells.split("|")]) for device, names, cells in rows
    ]


def test_the_support_matrix_names_the_implementations_that_exist() -> None:
    rows = support_matrix()
    assert {name for _, names, _ in rows for name in names} == set(IMPLEMENTATIONS)
    explanation = explain("grouped_matmul", implementation="reference")
    able = {"reference"} | {name for name, why in explanation.others.items() if why.startswith("can run")}
    assert {name for device, names, _ in rows if device.strip() == "CPU" for name in names} <= able


@pytest.mark.parametrize("kernels", GPU_KERNELS)
def test_the_support_matrix_says_no_exactly_where_select_does(kernels: str) -> None:
    cells = {}
    for device, names, row in support_matrix():
        for capability in re.findall(r"\((\d+)\.(\d)\)", device) if kernels in names else ():
            cells[int("".join(capability))] = row
    assert set(cells) & {90}
    for capability, row in cells.items():
        kernels_there = (*GPU_KERNELS[kernels].items(), *UNTIMED.get(kernels, {}).items())
        recipes = [each for known, some in kernels_there if capability in known for each in some]
        for recipe, cell in zip(RECIPES, row, strict=True):
            assert (cell == "no") == (recipe not in recipes), (kernels, capability, recipe)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
