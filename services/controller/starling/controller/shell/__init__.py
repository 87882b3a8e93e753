"""Shell of the controller: the process around the core, with its socket, clock, journal and files."""
