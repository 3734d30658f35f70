"""Records of saves and loads in the forms that other tools read."""
