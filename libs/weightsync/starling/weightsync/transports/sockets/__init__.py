"""Sockets: messages over a TCP connection, and the transports whose requests and answers go over one."""
