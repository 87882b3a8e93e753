"""The controller: decides what every replica does next."""
