"""HTTP servers of services: thread, address, and limits on connections. All but `small` need uvicorn."""
