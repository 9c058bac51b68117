"""Policies ``scout`` and ``scoutattention``: selection, query prediction, recall, calibration and profiles."""
