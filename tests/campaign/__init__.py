"""Random trainings against a plain loop: `python -m tests.campaign --help`."""
