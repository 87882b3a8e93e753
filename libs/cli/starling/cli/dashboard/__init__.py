"""`starling dashboard`: a web page over the folders and the telemetry of runs, served by a process of its own."""
