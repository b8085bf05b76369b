"""Observability of the server: metrics, timings, the admin interface."""
