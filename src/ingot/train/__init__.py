"""The only loop, and what keeps it alive. Nothing in here knows a framework."""
