"""The predictions for Blackwell: what they are made of, and that the document says what the script says."""

from pathlib import Path

import numpy as np
import pytest

from k3jax.bench.cases import Case
from scripts.roofline import B200, as_table, predict, predictions

DOCUMENT = (Path(__file__).parents[1] / "docs" / "performance.md").read_text()


def test_the_document_s_table_is_the_script_s() -> None:
    assert as_table(predictions()) in DOCUMENT


def test_few_rows_are_limited_by_the_weights_bytes() -> None:
    found = predict(Case("w13", "w4a8", 128), B200)
    weights = 112 * 6144 * 3584 * (0.5 + 1 / 32)
    rows = 128 * (3584 * (1 + 1 / 32) + 2 * 3072)
    assert found.memory_us == pytest.approx((weights + rows) / 8.0e12 * 1e6)
    assert (found.limit, found.us, found.width) == ("memory", found.memory_us, 16)


def test_many_rows_are_limited_by_the_products_of_whole_tiles() -> None:
    found = predict(Case("w13", "w4a8", 65536), B200)
    tiles = np.ceil(65536 / 112 / 128) * 112
    assert found.products_us == pytest.approx(2 * tiles * 128 * 6144 * 3584 / 4.5e15 * 1e6)
    assert found.limit == "products"


def test_mosaic_s_tiles_are_as_wide_as_their_rows_need() -> None:
    found = predict(Case("w13", "w4a16", 16384), B200, "mosaic")
    assert found.products_us == pytest.approx(2 * 112 * 160 * 6144 * 3584 / 2.25e15 * 1e6)  # 146 or 147 rows a group
    assert (found.limit, found.width) == ("products", 160)


def test_the_default_on_blackwell_is_what_is_predicted_to_be_the_faster() -> None:
    found = [each for each in predictions() if each.recipe == "w4a16"]
    mosaic, triton = ([each for each in found if each.kernels == kernels] for kernels in ("mosaic", "triton"))
    assert mosaic
    assert all(ours.us < theirs.us for ours, theirs in zip(mosaic, triton, strict=True))


@pytest.mark.parametrize("op", ["w13", "w2"])
def test_decoding_costs_instructions_that_reading_mxfp4_does_not(op: str) -> None:
    decoded, read = (predict(Case(op, recipe, 128), B200) for recipe in ("w4a16", "w4a8"))
    assert decoded.issue_us > 1.4 * read.issue_us
    assert decoded.products_us == pytest.approx(2 * read.products_us)
