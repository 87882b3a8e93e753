"""The UCX transport: between processes and machines, over whatever UCX finds."""
