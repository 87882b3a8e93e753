"""The journal: durable records of the controller, group commit, and the start of an incarnation."""
