"""What ranks tell each other during a save or a load, and how a failure on one reaches all."""
