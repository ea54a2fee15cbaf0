"""Floor ``profiling``: how much of the exchange a run hid, from what was noted of it. Needs no torch."""
