"""Fixtures for every test."""

from fakes.postgres import database_url, empty_database_url, postgres, postgres_dir

__all__ = ["database_url", "empty_database_url", "postgres", "postgres_dir"]
