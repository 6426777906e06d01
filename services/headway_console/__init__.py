"""The operators' view in a browser, served by the scheduler's HTTP port."""
