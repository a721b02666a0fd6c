"""The packages' imports: which way they may point, and what a machine without a GPU must not load."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each package may import of this repository: scripts, tests -> k3jax -> sharding -> pallas_kernels.
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"sharding", "pallas_kernels"},
    "k3jax": {"k3jax", "sharding", "pallas_kernels"},
}


def imports(source: str) -> set[str]:
    """The top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that an arrow can be read off them"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_no_import_points_back(package: str) -> None:
    ours = {*ALLOWED, "tests", "scripts"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        wrong = (imports(file.read_text()) & ours) - ALLOWED[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(wrong)}"


def test_a_planted_arrow_is_seen() -> None:
    assert imports("def f():\n    from k3jax.moe import MoE\n") & {"k3jax"}


def test_the_library_shares_nothing_with_its_oracle() -> None:
    files = sorted((ROOT / "k3jax" / "reference").rglob("*.py"))
    assert files
    for file in files:
        source = file.read_text()
        assert not imports(source) & {"jax", "flax", "pallas_kernels", "sharding"}, file.name
        assert not re.search(r"^\s*(from|import) k3jax(?!\.reference\b)", source, flags=re.MULTILINE), file.name


def test_nothing_of_a_gpu_toolchain_is_imported() -> None:
    """Triton and PyTorch are 1 GB and more, and not among the dependencies."""
    ours = "k3jax.loading, k3jax.compare.run, k3jax.inspection, k3jax.bench.run, sharding, pallas_kernels"
    program = f"import sys, {ours}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"triton", "jax_triton", "torch"} & set(run.stdout.split())


def test_help_does_not_wait_for_jax() -> None:
    program = "import sys, k3jax.cli; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"jax", "flax", "numpy"} & set(run.stdout.split())


def test_every_public_name_can_be_imported() -> None:
    import k3jax

    assert dir(k3jax) == k3jax.__all__ == sorted(k3jax.__all__)
    for name in k3jax.__all__:
        assert getattr(k3jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'load_layre'"):
        _ = k3jax.load_layre
