"""Data: corruptions made on the fly, and the demo's digits."""
