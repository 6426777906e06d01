"""Fixtures for every test."""

from fakes.postgres import database_url, empty_database_url, postgres

__all__ = ["database_url", "empty_database_url", "postgres"]
