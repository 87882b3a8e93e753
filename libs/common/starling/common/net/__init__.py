"""ZeroMQ sockets for the wire: ROUTER at the controller, DEALER at every replica, CURVE on both."""
