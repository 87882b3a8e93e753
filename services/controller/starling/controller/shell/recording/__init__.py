"""Recordings of the events of the controller's core: format, recorder and replay."""
