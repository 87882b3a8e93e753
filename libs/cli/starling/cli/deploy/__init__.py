"""`starling deploy`: install services on machines."""
