"""``overlap1f1b plan``: schedules drawn, simulated, compared and searched, without torch."""
