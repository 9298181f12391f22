"""The adapter: predict, learn, remember."""
