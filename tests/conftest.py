"""Fixtures for every test."""

import grpc.aio
from fakes.postgres import database_url, empty_database_url, postgres, postgres_dir
from hypothesis import settings

settings.register_profile("headway", deadline=None)  # a busy machine is no fault of what is tested
settings.load_profile("headway")

__all__ = ["database_url", "empty_database_url", "postgres", "postgres_dir"]

# Kept for the whole session, as a process of ours keeps it for its life. Else it ends with the last of its objects,
# wherever the garbage collector finds that, and joins a thread which may be waiting for this one.
grpc.aio.init_grpc_aio()
