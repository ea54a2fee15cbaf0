"""Schedules as pure functions of their sizes, each with its picture.

:func:`~overlap1f1b.schedule.build_schedule` checks sizes and combinations; the functions that it calls do not.
"""
