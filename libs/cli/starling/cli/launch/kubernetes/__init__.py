"""The launcher `kubernetes`: a Job for each replica, by kubectl."""
