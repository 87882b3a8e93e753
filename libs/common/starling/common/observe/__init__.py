"""What a process shows of itself: logs, title, exit."""
