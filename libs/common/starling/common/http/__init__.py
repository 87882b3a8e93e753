"""HTTP servers of services: thread, address, and limits on connections. Needs uvicorn."""
