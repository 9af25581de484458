"""The ways in: each turns its user's words into one Config and says where outputs go. A door never trains."""
