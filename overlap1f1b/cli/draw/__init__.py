"""Timelines drawn as text and as pictures."""
