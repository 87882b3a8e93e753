"""The controller's decisions: pure state machines, coupled by `machine.py`."""
