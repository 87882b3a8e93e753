"""The controller's hands: sockets, clock, files."""
