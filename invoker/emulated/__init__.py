"""Accelerators that are not there: their times from a profile, everything else real."""
