"""`starling prepare`: the folder of a run whose services are started one by one."""
