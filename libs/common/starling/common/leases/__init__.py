"""Leases as a replica sees them: those of its work, and the membership lease that lets it keep shared devices."""
