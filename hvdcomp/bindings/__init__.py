"""What the bindings of all frameworks share."""
