"""The policy process: connection to the controller, saving, publication."""
