"""The table of what fits is what its script prints."""

from __future__ import annotations

import fits


def test_the_table_is_what_plan_says() -> None:
    page = fits.PAGE.read_text()
    assert page.split(fits.BEGIN)[1].split(fits.END)[0] == fits.table(), (
        "python bench/fits.py --write"
    )
