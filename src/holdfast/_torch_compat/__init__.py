"""The door between us and torch's checkpoint package: plugins of either side work with the other."""
