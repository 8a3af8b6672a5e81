"""Recipes of training on the virtual mesh; on processes they are a check of `distributed/`."""

from __future__ import annotations

from tests import recipes
from tests.captures import shared_captures


def test_recipes_give_what_one_device_gives() -> None:
    with shared_captures():
        recipes.assert_recipes_give_the_same(backend="virtual")
