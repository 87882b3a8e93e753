"""Decisions of the policy: admission of commands, alarms, phases of a step. Pure: no torch, no clock, no socket."""
