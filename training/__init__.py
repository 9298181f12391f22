"""Recipes: how the weights and results that this project ships were made, as plain Python."""
