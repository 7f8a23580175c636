"""Schedules for families of models, one file a family; the core only."""
