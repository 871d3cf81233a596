"""Adapters: one file per runtime, which imports it only when asked to run."""
