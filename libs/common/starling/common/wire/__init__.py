"""Wire protocol: the messages between services, their encoding and their recorded schema."""
