"""Inspection: what a person asks of a finished plan: as text, why, what differs."""
