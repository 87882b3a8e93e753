"""ZeroMQ sockets that speak the wire: ROUTER at the controller, DEALER at every replica, CURVE on both."""
