"""Recipe files: a training as a small TOML file."""

from hetsngp.training.recipes.recipe import Recipe, read_recipe, recipe_names

__all__ = ["Recipe", "read_recipe", "recipe_names"]
