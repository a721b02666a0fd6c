"""docs/parallelism.md says what the model says, about the release's config."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from k3jax.config import K3Config
from k3jax.inspection.memory import dense_memory, model_memory, moe_memory
from k3jax.options import LoadOptions
from sharding import MeshSizes

ROOT = Path(__file__).parent.parent
EXPERT_BYTES = 17_547_264


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "parallelism_tables.py"))


@pytest.fixture(scope="module")
def release() -> K3Config:
    return K3Config.from_pretrained(ROOT / "tests" / "data" / "k3-config.json")


def test_the_tables_of_the_document_are_the_model_s(script: dict[str, Any], release: K3Config) -> None:
    document = (ROOT / "docs" / "parallelism.md").read_text()
    assert script["updated"](document, release) == document, "run scripts/parallelism_tables.py --update"


def test_a_table_that_the_document_lacks_is_noticed(script: dict[str, Any], release: K3Config) -> None:
    document = (ROOT / "docs" / "parallelism.md").read_text()
    assert script["updated"](document.replace("| EP8 | 88.4%", "| EP8 | 88.5%"), release) == document
    with pytest.raises(ValueError, match="has 0 tables called 'memory'"):
        script["updated"](document.replace("<!-- memory -->", ""), release)


def test_memory_of_each_layout(release: K3Config) -> None:
    sizes = MeshSizes(expert=16)
    shared, dense, latent = 3 * 6144 * 7168, 3 * 33792 * 7168, 2 * 3584 * 7168
    split, fp8 = LoadOptions(split_shared=True), LoadOptions(dense_weights="fp8")
    whole = moe_memory(release, sizes, packed=True, tokens="sharded")
    assert whole.routed_experts == 56 * EXPERT_BYTES
    assert whole.shared_experts == 2 * shared
    assert moe_memory(release, sizes, packed=True, tokens="sharded", options=split).shared_experts * 8 == shared
    assert moe_memory(release, sizes, packed=True).shared_experts * 8 == shared
    assert dense_memory(release, sizes, tokens="sharded").dense == 2 * dense
    assert dense_memory(release, sizes, tokens="sharded", options=split).dense * 8 == dense
    assert dense_memory(release, sizes).dense * 4 == dense  # split no further than a node goes
    assert model_memory(release, sizes, packed=True, tokens="sharded").moe == whole
    small = moe_memory(release, sizes, packed=True, tokens="sharded", options=fp8)
    assert small.shared_experts == shared + shared // 128**2 * 4
    assert small.latent == latent + latent // 128**2 * 4 + 3584 * 2
    assert (small.router, small.routed_experts) == (whole.router, whole.routed_experts)
    assert dense_memory(release, sizes, tokens="sharded", options=fp8).dense == dense + dense // 128**2 * 4


def test_a_rack_of_72_is_no_layout_of_896_experts_but_has_some(release: K3Config) -> None:
    with pytest.raises(ValueError, match="896 cannot be split evenly over 72"):
        model_memory(release, MeshSizes(expert=72), packed=True)
    assert MeshSizes(data=3, expert=8, tensor=3).devices == 72
    third = model_memory(release, MeshSizes(data=3, expert=8, tensor=3), packed=True, tokens="sharded").moe
    assert third is not None
    assert third.routed_experts * 3 == 112 * EXPERT_BYTES
