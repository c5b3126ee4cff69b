"""Frames and payloads: what travels between actors, and how it becomes bytes."""
