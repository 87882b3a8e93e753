"""Pool of workers: tasks are divided into calls, calls are sent to workers, and reports become scores."""
