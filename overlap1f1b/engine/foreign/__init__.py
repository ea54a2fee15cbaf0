"""Exchanges that blocks make by themselves, without our Experts."""
