"""Adapters that turn a scheduled model into what one framework runs."""
