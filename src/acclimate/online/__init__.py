"""Adaptation in use: a guard that watches an adapter, single images, and one state per camera."""
